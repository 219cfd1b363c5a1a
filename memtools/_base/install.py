"""How to build this copy again: what messages about the extension modules tell people to run."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def rebuild_command(package: Path = PACKAGE) -> str:
    """The command that builds the extension modules for the torch that is installed now."""
    # The tree that this copy runs from, when it is an editable install; else the user knows where.
    source = package.parent
    # pip brings setuptools for the build, which a fresh environment lacks; setup.py finds this
    # environment's torch all the same.
    pip = "python -m pip install --no-deps"
    if (source / "setup.py").is_file():
        return f"{pip} -e {source}"
    return f"{pip} --force-reinstall --no-cache-dir . (in memtools' source tree)"

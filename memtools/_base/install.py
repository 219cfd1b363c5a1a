"""The command that messages about memtools._core name."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def rebuild_command(package: Path = PACKAGE) -> str:
    """The command that builds memtools again, memtools._core with it."""
    source = package.parent  # the source tree, where this is an editable install
    # With build isolation: a fresh environment lacks setuptools, and setup.py finds its torch.
    pip = "python -m pip install --no-deps"
    if (source / "setup.py").is_file():
        return f"{pip} -e {source}"
    return f"{pip} --force-reinstall --no-cache-dir . (in memtools' source tree)"

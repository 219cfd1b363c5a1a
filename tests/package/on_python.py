"""`make test-pythons`: build the wheel for another Python, and run the tests that need no torch.

    python -m tests.package.on_python INTERPRETER [words for pytest]

Without words, all tests that are not marked slow; with the word `tests`, the slow ones as well. The
environment is kept in build/python-X.Y; the wheel is built anew from the source distribution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.package.wheels import PROJECT, pip, source_of, wheel_for

# Of the source tree, of the machine's own compiler, of pages in a browser, or of a GPU.
ELSEWHERE = (
    *("meta/test_types.py", "meta/test_layering.py"),
    *("docs", "package", "pages", "gpu"),
)


def prepare(interpreter: str, folder: Path) -> tuple[Path, Path]:
    """An environment in the folder with the wheel and what the tests need. Returns its Python, and
    the unpacked source distribution, in which the package is the wheel's."""
    python = folder / "env/bin/python"
    if not python.is_file():
        subprocess.run([interpreter, "-m", "venv", "--without-pip", folder / "env"], check=True)
    pip(python, "install", "--group", "pythons", cwd=PROJECT)
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    source = source_of(made)
    wheel = wheel_for(python, source, made / "wheel")
    pip(python, "install", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=folder)
    # Programs that a test starts there import what lies there.
    shutil.rmtree(source / "memtools")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(source)
    # The library that stands in for CUDA's is the one that was made for the checkout.
    shutil.rmtree(source / "build", ignore_errors=True)
    (source / "build/c").mkdir(parents=True)
    shutil.copy(PROJECT / "build/c/libfakecudart.so", source / "build/c")
    (source / ".venv").symlink_to(PROJECT / ".venv")
    print(f"{wheel.name}: built and installed", flush=True)
    return python, source


def main(interpreter: str, *words: str) -> int:
    version = subprocess.run(
        [interpreter, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    folder = PROJECT / f"build/python-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    python, source = prepare(interpreter, folder)
    done = subprocess.run(
        [
            *(python, "-P", "-m", "pytest", "-q", "--import-mode=importlib"),
            *("-p", "tests.package.without_libraries", "-p", "no:cacheprovider"),
            *("-o", "addopts=--strict-markers", "--tb=short", "-rfE"),
            *(f"--ignore=tests/{name}" for name in ELSEWHERE),
            *(words or ("-m", "not slow", "tests")),
        ],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

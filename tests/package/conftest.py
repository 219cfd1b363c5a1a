"""One source distribution and one wheel of it, for all tests of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.sdist import unpacked
from tests.package.environments import QUICK, Environment, run

PROJECT = Path(__file__).resolve().parents[2]


def tracked() -> list[str]:
    """The files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [name for name in listed.split("\0") if name and (PROJECT / name).is_file()]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, made where nothing of an earlier build lies."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, folder / "source" / name)
    made = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", made, cwd=folder / "source")
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def built(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution unpacked, and a wheel that was built in it, without torch."""
    folder = tmp_path_factory.mktemp("built")
    tree = unpacked(sdist, folder / "unpacked")
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel"]
    run(*command, "--no-build-isolation", "--no-deps", ".", "-w", folder, cwd=tree, **QUICK)
    (wheel,) = folder.glob("*.whl")
    return tree, wheel


@pytest.fixture(scope="session")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[1]


@pytest.fixture
def source(built: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the unpacked source distribution with what was compiled in it."""
    shutil.copytree(built[0], tmp_path / "source", symlinks=True)
    return tmp_path / "source"


@pytest.fixture
def fresh(wheel: Path, tmp_path: Path) -> Callable[[str], Environment]:
    """fresh(name): an environment with the wheel alone."""

    def make(name: str) -> Environment:
        (tmp_path / name).mkdir()
        return Environment(tmp_path / name, wheel)

    return make


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A folder for PATH with a g++ that writes what it is asked for, and reads nothing. It has the
    name as well by which this Python was compiled, as x86_64-linux-gnu-g++ on Debian."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    for name in {"g++", Path(sysconfig.get_config_var("CXX").split()[0]).name}:
        (folder / name).write_text(
            "#!/bin/sh\n"
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
            'echo made >"$out"\n'
            'case $out in *.o) echo "$out: csrc/torch/torch_shim.cpp" >"${out%.o}.d";; esac\n'
        )
        (folder / name).chmod(0o755)
    return str(folder)

"""Every way to install works, with torch there or not; the build never imports or fetches it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parent.parent
CHECK = """
import memtools, sys
from memtools import _build_info, _core
assert _core.__version__ == memtools.__version__
assert _build_info.TORCH_VERSION is None
assert "torch" not in sys.modules
print(memtools.GateHistory(), memtools.__file__)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The files that git knows, in a folder of their own; nothing that an earlier build left."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (PROJECT / name).is_file():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, tmp_path / "source" / name)
    return tmp_path / "source"


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with setuptools and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "-q", "setuptools>=68", "wheel", cwd=folder)
    return folder / "bin/python"


@pytest.mark.parametrize(
    "how",
    [["."], [".", "--no-build-isolation"], ["-e", "."], ["-e", ".", "--no-build-isolation"]],
    ids=" ".join,
)
def test_installs_without_torch_and_never_imports_one(how, source, bare, tmp_path):
    # Whoever imports torch during the build finds this instead.
    (tmp_path / "poison/torch").mkdir(parents=True)
    (tmp_path / "poison/torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    pip = [bare, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # Optimised once: that takes the compiler three times as long, and is not what differs here.
    quick = {} if how == ["."] else {"MEMTOOLS_DEBUG": "1"}
    run(*pip, *how, cwd=source, PYTHONPATH=str(tmp_path / "poison"), **quick)
    try:
        shown = run(bare, "-W", "error", "-c", CHECK, cwd=tmp_path)
        assert shown.startswith("GateHistory(0 of 1000 entries")
        assert (str(source) in shown) == ("-e" in how)
        report = run(bare.with_name("memtools"), "doctor", cwd=tmp_path)
        assert "gate history, CPU   no" in report
        assert "\ntorch" not in run(bare, "-m", "pip", "list", cwd=tmp_path)
    finally:
        run(bare, "-m", "pip", "uninstall", "-q", "-y", "memtools", cwd=tmp_path)


def test_an_isolated_wheel_finds_the_environments_torch(source, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    run(*pip, ".", "-w", tmp_path / "wheels", cwd=source, MEMTOOLS_DEBUG="1")  # it takes less time
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read("memtools/_build_info.py").decode()
    assert f"{torch.__version__!r}" in info
    for name in ("_core.", "_torch."):
        assert [n for n in names if n.startswith(f"memtools/{name}") and n.endswith(".so")]
    for name in ("_core.pyi", "py.typed", "cli/doctor.py"):
        assert f"memtools/{name}" in names
    assert not [name for name in names if name.startswith(("tests", "csrc", "examples"))]


def test_a_named_torch_or_toolkit_that_is_not_there_is_an_error(source, bare, tmp_path):
    for name in ("MEMTOOLS_TORCH_DIR", "MEMTOOLS_CUDA_HOME"):
        done = subprocess.run(
            [bare, "setup.py", "--version"],
            cwd=source,
            capture_output=True,
            text=True,
            env={**os.environ, name: str(tmp_path / "nowhere")},
        )
        assert done.returncode != 0
        assert f"{name}={tmp_path}/nowhere holds no include/" in done.stderr

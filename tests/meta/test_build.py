"""Every way to install works, with torch there or not; the build never imports or fetches it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]
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
    run(folder / "bin/pip", "install", "-q", "setuptools>=77", "wheel", cwd=folder)
    return folder / "bin/python"


@pytest.mark.slow
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


@pytest.mark.slow
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


def unpacked(archive: Path) -> Path:
    """A source distribution, unpacked beside it."""
    with tarfile.open(archive) as files:
        files.extractall(archive.parent / "unpacked", filter="data")
    (folder,) = (archive.parent / "unpacked").iterdir()
    return folder


@pytest.mark.slow
def test_a_wheel_is_built_from_the_source_distribution(source, tmp_path):
    backend = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
    run(sys.executable, "-c", backend.format("sdist", str(tmp_path)), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    folder = unpacked(archive)
    shown = set(run("git", "ls-files", cwd=PROJECT).splitlines())
    missing = [
        name
        for name in shown
        if not name.startswith((".", "benchmarks/results")) and not (folder / name).is_file()
    ]
    assert not missing
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    quick = {"MEMTOOLS_DEBUG": "1", "MEMTOOLS_TORCH_DIR": ""}
    run(*pip, "--no-build-isolation", ".", "-w", tmp_path / "wheels", cwd=folder, **quick)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "memtools/cli/boot/sitecustomize.py" in names
    licenses = [name.partition(".dist-info/licenses/")[2] for name in names]
    assert {"LICENSE", "csrc/third_party/dlpack/LICENSE"} <= set(licenses)
    assert "License-Expression: Apache-2.0" in text
    assert "Apache License" not in text.partition("\n\n")[0]


def make_torch(folder: Path, version: str, commit: str) -> Path:
    """A torch to build for, whose headers and libraries are the real one's."""
    folder.mkdir()
    real = Path(torch.__file__).parent
    for name in ("include", "lib"):
        (folder / name).symlink_to(real / name)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ngit_version = '{commit}'\n")
    return folder


@pytest.mark.slow
def test_a_build_compiles_what_has_changed_and_no_more(source, tmp_path):
    first = make_torch(tmp_path / "first", "2.12.1", "a" * 40)
    second = make_torch(tmp_path / "second", "2.13.0", "b" * 40)

    def build(torch_dir: Path | str) -> set[str]:
        """The names of the object files that were made."""
        before = dates("temp.*/**/*.o")
        settings = {"MEMTOOLS_DEBUG": "1", "MEMTOOLS_TORCH_DIR": str(torch_dir)}
        run(sys.executable, "setup.py", "-q", "build", cwd=source, **settings)
        after = dates("temp.*/**/*.o")
        return {path.name for path in after if after[path] != before.get(path)}

    def dates(pattern: str) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in source.glob(f"build/{pattern}")}

    def built(name: str) -> list[int]:
        return list(dates(f"lib.*/memtools/{name}.*.so").values())

    assert {"module.o", "torch_shim.o"} < build(first)
    core, shim = built("_core"), built("_torch")
    assert build(first) == set()
    assert (built("_core"), built("_torch")) == (core, shim)
    build(second)  # another torch
    assert built("_core") == core
    assert built("_torch") not in (shim, [])
    (source / "csrc/core/kv/lease.c").touch()
    assert build("") == {"lease.o"}
    assert built("_core") != core
    assert built("_torch") == []
    (source / "csrc/core/kv/lease.h").touch()
    some = build("")
    assert "lease.o" in some
    assert len(some) < 50  # of more than a hundred


def failure(*command: str | Path, cwd: Path, **environ: str) -> str:
    """What a command that must fail wrote."""
    env = {**os.environ, **environ}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
def test_a_machine_that_cannot_build_it_is_told_so_in_one_sentence(source, tmp_path):
    settings = {"MEMTOOLS_TORCH_DIR": "", "CC": str(tmp_path / "gcc")}
    said = failure(sys.executable, "setup.py", "-q", "build_ext", cwd=source, **settings)
    assert said.strip().splitlines()[-1].startswith("memtools is compiled when it is installed and")
    elsewhere = "import runpy, sys, setuptools.command.build_ext; sys.platform = 'darwin'; "
    elsewhere += "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')"
    said = failure(sys.executable, "-c", elsewhere, cwd=source)
    assert said.startswith("memtools runs on Linux only, and this is darwin")


@pytest.mark.slow
def test_a_warning_ends_the_build_only_where_that_is_asked_for(source):
    (source / "csrc/core/warning.c").write_text("static int unused;\n")
    settings = {"MEMTOOLS_TORCH_DIR": "", "MEMTOOLS_DEBUG": "1", "MEMTOOLS_WERROR": ""}
    run(sys.executable, "setup.py", "-q", "build_ext", cwd=source, **settings)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    settings["MEMTOOLS_WERROR"] = "1"
    said = failure(*build, cwd=source, **settings)
    assert "-Werror=unused-variable" in said


@pytest.mark.slow
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

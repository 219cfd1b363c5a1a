"""Every way to install works, with torch there or not; the build never imports or fetches it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from tests.package.conftest import tracked
from tests.package.environments import QUICK, failure, pip, run

CHECK = """
import memtools, sys
from memtools import _build_info, _core
assert _core.__version__ == memtools.__version__
assert _build_info.TORCH_VERSION is None
assert "torch" not in sys.modules
print(memtools.GateHistory(), memtools.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["."], ["-e", "."]], ids=" ".join)
def test_installs_without_torch_and_never_imports_one(how, source, tmp_path):
    # Whoever imports torch during the build finds this instead.
    (tmp_path / "poison/torch").mkdir(parents=True)
    (tmp_path / "poison/torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    venv.create(tmp_path / "bare")
    bare = tmp_path / "bare/bin/python"
    # An editable install keeps its objects in a folder of its own; they would be the same.
    (objects,) = source.glob("build/temp.*")
    shutil.copytree(objects, source / f"build/editable-{sys.implementation.cache_tag}")
    pip(bare, "install", *how, cwd=source, PYTHONPATH=str(tmp_path / "poison"), **QUICK)
    shown = run(bare, "-W", "error", "-c", CHECK, cwd=tmp_path)
    assert shown.startswith("GateHistory(0 of 1000 entries")
    assert (str(source) in shown) == ("-e" in how)
    assert "gate history (CPU)   no" in run(bare.with_name("memtools"), "doctor", cwd=tmp_path)
    assert [*tmp_path.glob("bare/lib/python*/site-packages/torch*")] == []


@pytest.mark.slow
def test_an_isolated_wheel_finds_the_environments_torch(source, stand_in, tmp_path):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "."]
    settings = {name: value for name, value in QUICK.items() if name != "MEMTOOLS_TORCH_DIR"}
    path = f"{stand_in}:{os.environ['PATH']}"
    run(*command, "--no-deps", "-w", tmp_path / "wheels", cwd=source, PATH=path, **settings)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read("memtools/_build_info.py").decode()
        (shim,) = (name for name in names if name.startswith("memtools/_torch."))
        assert archive.read(shim) == b"made\n"
    assert f"{torch.__version__!r}" in info


@pytest.mark.slow
def test_the_source_distribution_holds_all_files_that_git_knows(sdist):
    with tarfile.open(sdist) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    wanted = {name for name in tracked() if not name.startswith((".", "benchmarks/results"))}
    assert wanted - held == set()


@pytest.mark.slow
def test_what_the_wheel_of_the_source_distribution_holds(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    for name in (
        "_core.pyi",
        "py.typed",
        "_cli/boot/sitecustomize.py",
        "_cli/summary.py",
        "_cli/rescues.json",
    ):
        assert f"memtools/{name}" in names
    for name in ("csrc/torch/torch_shim.cpp", "csrc/third_party/dlpack/dlpack.h"):
        assert f"memtools/{name}" in names  # of which memtools build-shim makes the shim
    (library,) = (name for name in names if name.endswith(".so"))
    assert library.startswith("memtools/_core.")
    folders = {name.partition("/")[0] for name in names}
    assert folders - {"memtools", *(name for name in folders if ".dist-info" in name)} == set()
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
def test_a_build_compiles_what_has_changed_and_no_more(source, stand_in, tmp_path):
    first = make_torch(tmp_path / "first", "2.12.1", "a" * 40)
    second = make_torch(tmp_path / "second", "2.13.0", "b" * 40)
    path = f"{stand_in}:{os.environ['PATH']}"

    said = ""

    def build(torch_dir: Path | str) -> set[str]:
        """The names of the object files that were made."""
        nonlocal said
        before = dates("temp.*/**/*.o")
        settings = QUICK | {"MEMTOOLS_TORCH_DIR": str(torch_dir), "PATH": path}
        said = run(sys.executable, "setup.py", "build", cwd=source, **settings)
        after = dates("temp.*/**/*.o")
        return {path.name for path in after if after[path] != before.get(path)}

    def dates(pattern: str) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in source.glob(f"build/{pattern}")}

    def built(name: str) -> list[int]:
        return list(dates(f"lib.*/memtools/{name}.*.so").values())

    assert len(dates("temp.*/**/*.o")) > 100
    assert build(first) == {"torch_shim.o"}
    assert "\ncompiling 1 C++ file on 1 core\n" in said
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
    (source / "csrc/core/kv/kv.h").touch()
    some = build("")
    assert "lease.o" in some
    assert len(some) < 50  # of more than a hundred
    told = re.search(r"^compiling (\d+) C files on (\d+) cores?$", said, re.M)
    assert told is not None
    assert len(some) <= int(told[1]) < 50  # names of files occur in several folders
    assert int(told[2]) == min(int(told[1]), len(os.sched_getaffinity(0)))


@pytest.mark.slow
def test_a_machine_that_cannot_build_it_is_told_so_in_one_sentence(source, tmp_path):
    settings = QUICK | {"CC": str(tmp_path / "gcc")}
    said = failure(sys.executable, "setup.py", "-q", "build_ext", cwd=source, **settings)
    assert said.strip().splitlines()[-1].startswith("memtools is compiled when it is installed and")
    elsewhere = "import runpy, sys, setuptools.command.build_ext; {}; "
    elsewhere += "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')"
    other = elsewhere.format("sys.platform = 'darwin'")
    said = failure(sys.executable, "-c", other, cwd=source)
    assert said.startswith("memtools runs on Linux only, and this is darwin")
    threads = elsewhere.format("sys.abiflags = 't'")
    said = failure(sys.executable, "-c", threads, cwd=source)
    version = "{}.{}t".format(*sys.version_info)
    assert said.startswith(f"memtools does not run on free-threaded Python, and this is {version}:")
    assert said.count("\n") == 1


def test_free_threaded_python_is_refused_at_import_too():
    code = "import sys; sys.abiflags = 't'; import memtools"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: memtools does not run on free-threaded Python: its C code relies on the "
        "global interpreter lock; use the standard build of Python"
    )


@pytest.mark.slow
def test_a_named_torch_or_toolkit_that_is_not_there_is_an_error(source, tmp_path):
    for name in ("MEMTOOLS_TORCH_DIR", "MEMTOOLS_CUDA_HOME"):
        settings = {name: str(tmp_path / "nowhere")}
        said = failure(sys.executable, "setup.py", "--version", cwd=source, **settings)
        assert f"{name}={tmp_path}/nowhere holds no include/" in said

"""`memtools build-shim`: what it says where it cannot build, and which file is whose."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtools import _build_info
from memtools import _cli as cli
from memtools._base import shim
from memtools._base import torch as bridge
from memtools._cli import build_shim

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOT_BUILT = SimpleNamespace(TORCH_VERSION=None, TORCH_GIT_VERSION=None)


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder of a torch that has headers; no shim is built for it."""
    folder = tmp_path / "torch"
    (folder / "include/ATen").mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '2.99.0'\ngit_version = '{COMMIT}'\n")
    monkeypatch.setattr(build_shim, "find_package", lambda name: folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder that shims are written to and found in."""
    folder = tmp_path / "place"
    monkeypatch.setattr(shim, "folders", lambda: [folder])
    return folder


def compiler(folder: Path, script: str) -> str:
    """The path of a program that stands in for a compiler."""
    path = folder / "made-up-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def said(capsys: Capture) -> str:
    """What a `memtools build-shim` that must fail says: one sentence in one line."""
    assert cli.main(["build-shim"]) == 1
    *above, line = capsys.readouterr().err.splitlines()
    assert above == []
    assert line.startswith("memtools build-shim: ")
    return line.removeprefix("memtools build-shim: ")


def test_without_torch_it_says_how_to_install_it(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(build_shim, "find_package", lambda name: None)
    line = said(capsys)
    assert line.startswith("torch is not installed in /")
    assert line.endswith("run python -m pip install 'torch>=2.11'")


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("2.10.1+cpu", "memtools needs torch >= 2.11, found 2.10.1+cpu; upgrade torch"),
        ("nightly", "{torch}/version.py names no version; install torch again"),
    ],
)
def test_a_torch_that_memtools_cannot_use_is_named(
    version: str, sentence: str, torch: Path, capsys: Capture
) -> None:
    (torch / "version.py").write_text(f"__version__ = '{version}'\n")
    assert said(capsys) == sentence.format(torch=torch)


def test_a_torch_without_headers_is_told(torch: Path, place: Path, capsys: Capture) -> None:
    (torch / "include/ATen").rmdir()
    assert said(capsys).startswith("torch 2.99.0 came without its C++ headers: there is no /")


def test_without_a_compiler_it_says_what_to_install(
    torch: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("PATH", str(torch))
    monkeypatch.delenv("CXX", raising=False)
    assert said(capsys) == (
        "there is no C++ compiler (c++, g++, clang++); install one (Debian: apt-get install g++), "
        "or name yours in CXX"
    )
    monkeypatch.setenv("CXX", "other-c++ -m64")
    assert said(capsys) == "the C++ compiler that CXX names, 'other-c++ -m64', does not exist"
    assert not place.exists()


def test_without_the_headers_of_python_it_says_what_to_install(
    torch: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(torch / "no"))
    assert said(capsys) == (
        f"Python's C headers are missing: there is no {torch}/no/Python.h; install them "
        "(Debian: apt-get install python3-dev)"
    )


def test_without_its_sources_it_says_so(torch: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(shim, "PACKAGE", torch / "memtools")
    assert said(capsys) == (
        f"the sources of the shim are missing in {torch}/memtools; install memtools again"
    )


def test_where_nothing_can_be_written_it_names_the_places(
    torch: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    nowhere = [torch / "version.py/a", torch / "version.py/b"]  # below a file
    monkeypatch.setattr(shim, "folders", lambda: nowhere)
    monkeypatch.setenv("CXX", compiler(torch, "exit 0"))
    assert said(capsys).startswith(
        f"the shim can be written neither to {nowhere[0]} nor to {nowhere[1]}; make one of them"
    )


@pytest.mark.parametrize("script", ["echo 'x.h:1: error: no such thing' >&2; exit 1", "exit 0"])
def test_a_compiler_that_fails_leaves_nothing_behind(
    script: str, torch: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", compiler(torch, script))
    assert cli.main(["build-shim"]) == 1
    *above, line = capsys.readouterr().err.splitlines()
    assert above == (["x.h:1: error: no such thing"] if "exit 1" in script else [])
    assert "/made-up-c++ cannot compile the shim for torch 2.99.0" in line
    assert list(place.iterdir()) == []


def test_the_command_names_the_sources_the_headers_and_the_libraries(
    torch: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    script = f'for a in "$@"; do echo "$a" >>{torch}/arguments; done; exit 1'
    monkeypatch.setenv("CXX", f"{compiler(torch, script)} -m64")
    assert cli.main(["build-shim"]) == 1
    arguments = (torch / "arguments").read_text().splitlines()
    assert {"-m64", "-std=c++20", "-fopenmp", f"-L{torch}/lib", "-lc10", "-shared"} < {*arguments}
    (source,) = (argument for argument in arguments if argument.endswith(".cpp"))
    assert Path(source).is_file()
    assert capsys.readouterr().out.startswith("Compiling the shim for torch 2.99.0 with /")


def test_a_shim_that_fits_is_not_built_again(
    torch: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", "no-compiler-is-asked-for")
    place.mkdir()
    path = place / shim.file_name("2.99.0", COMMIT)
    path.touch()
    assert cli.main(["build-shim"]) == 0
    assert capsys.readouterr().out == f"The shim for torch 2.99.0 is there: {path}\n"
    assert cli.main(["build-shim", "--force"]) == 1  # for want of the compiler


def test_a_file_is_for_one_memtools_one_torch_and_one_python(place: Path) -> None:
    assert list(shim.built(NOT_BUILT)) == []
    place.mkdir()
    name = shim.file_name("2.13.0+cpu", COMMIT)
    assert name == f"_torch-{shim.__version__}-2.13.0+cpu-0123456789ab{shim.SUFFIX}"
    (place / name).touch()
    (place / name.replace(shim.SUFFIX, ".cpython-399-x86_64-linux-gnu.so")).touch()
    (place / name.replace(shim.__version__, "9.9.9")).touch()
    (found,) = shim.built(NOT_BUILT)
    assert found == shim.Shim(place / name, "2.13.0+cpu", "0123456789ab")
    assert found.fits("2.13.0+cpu", COMMIT)
    assert not found.fits("2.13.0", COMMIT)
    assert not found.fits("2.13.0+cpu", f"1{COMMIT}")
    assert not found.fits("2.13.0+cpu", None)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A shim in the user's cache for a torch that has none beside the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_build_info, "TORCH_VERSION", None)
    folder = shim.folders()[1]
    folder.mkdir(parents=True, mode=0o755)
    path = folder / shim.file_name("2.98.0", COMMIT)
    path.touch(0o755)
    return path


OTHERS_MAY_WRITE = "other users may write to {0} (mode {1:04o}); run chmod go-w {0}"


def test_a_shim_that_others_may_have_written_is_not_loaded_and_says_why(
    kept: Path, monkeypatch: Patch
) -> None:
    """The warning has the file, the reason and what to run, once; doctor has the same reason."""
    for one in (kept, kept.parent, kept.parent.parent):
        mode = one.stat().st_mode & 0o7777 | 0o002
        one.chmod(mode)
        why = f"memtools._torch is not loaded from {kept}: {OTHERS_MAY_WRITE.format(one, mode)}"
        with pytest.warns(RuntimeWarning) as caught:
            assert bridge._load_shim("2.98.0", COMMIT) == (None, why)
        assert [str(one.message) for one in caught] == [
            f"{why}; memtools works without it, a little slower; run memtools build-shim"
        ]
        assert shim.may_be_loaded([*shim.built(_build_info)], "2.98.0", COMMIT)  # doctor: broken
        # For another torch it is as if it were not there: nothing that it says is repeated.
        reason = "memtools._torch has not been built for torch 2.97.0"
        assert bridge._load_shim("2.97.0", COMMIT) == (None, reason)
        one.chmod(mode & ~0o002)
    (found,) = shim.built(_build_info)
    assert (found.path, found.refused) == (kept, "")
    if os.geteuid() == 0:  # whose files all users load
        os.chown(kept.parent, 65534, -1)
    owner = kept.parent.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    (found,) = shim.built(_build_info)
    assert found.refused.endswith(f"{kept.parent} belongs to another user (uid {owner}); remove it")


def test_it_writes_nowhere_where_others_may_write_and_takes_that_right_from_what_it_makes(
    torch: Path, kept: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """With a umask of 0, as some containers have it."""
    script = 'while [ "$1" != -o ]; do shift; done; umask 0; echo >"$2"'
    monkeypatch.setenv("CXX", compiler(torch, script))
    monkeypatch.setattr(build_shim, "why_not_loaded", lambda: "")
    monkeypatch.setattr(shim, "folders", lambda: [kept.parent])
    kept.parent.chmod(0o777)
    assert said(capsys) == (
        f"a shim in {kept.parent} would not be loaded: "
        f"{OTHERS_MAY_WRITE.format(kept.parent, 0o777)}"
    )
    new = kept.parents[1] / "a/b"
    monkeypatch.setattr(shim, "folders", lambda: [new])
    before = os.umask(0)
    try:
        assert cli.main(["build-shim"]) == 0
    finally:
        os.umask(before)
    (found,) = shim.built(NOT_BUILT)
    assert (found.path.parent, found.refused) == (new, "")


def test_a_torch_of_no_known_commit_has_a_shim_of_its_own(place: Path) -> None:
    place.mkdir()
    (place / shim.file_name("2.13.0a0", None)).touch()
    (found,) = shim.built(NOT_BUILT)
    assert found.fits("2.13.0a0", None)
    assert not found.fits("2.13.0a0", COMMIT)


def test_the_shim_that_came_with_memtools_is_the_first(place: Path) -> None:
    place.mkdir()
    (place / shim.file_name(_build_info.TORCH_VERSION or "", COMMIT)).touch()
    first, second = shim.built(_build_info)
    assert first.path == shim.PACKAGE / f"_torch{shim.SUFFIX}"
    assert first.fits(str(_build_info.TORCH_VERSION), _build_info.TORCH_GIT_VERSION)
    assert second.path.parent == place


def test_the_folder_in_the_users_cache_is_of_this_installation(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package, cache = shim.folders()
    assert package == shim.PACKAGE
    assert cache.parent == tmp_path / "memtools"
    monkeypatch.setattr(shim, "PACKAGE", tmp_path)
    assert shim.folders()[1] != cache
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard tells to pass over
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shim.folders()[1].parent == tmp_path / ".cache/memtools"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert shim.folders() == [tmp_path]

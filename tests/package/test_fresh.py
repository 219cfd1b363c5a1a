"""memtools in fresh environments: without a compiler, without torch, with another torch."""

from __future__ import annotations

import os

import pytest

from tests.package.conftest import PROJECT

pytestmark = pytest.mark.slow

COMMIT = "c" * 40
USE = """
import warnings
import torch
from memtools import GateHistory
from memtools._base import torch as bridge

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    history = GateHistory()
    history.append(torch.rand(4, 8))
print(len(history), torch.__version__, bridge.shim_status()[0])
for warning in caught:
    print(warning.message)
"""
# To compile the shim takes a minute: the preprocessor alone reads its source and all headers, and
# what setup.py has compiled by the same flags is what the compiler makes.
HAND_OUT = 'while [ "$1" != -o ]; do shift; done\ncp {} "$2"\n'
NO_COMPILER = (
    "memtools build-shim: there is no C++ compiler (c++, g++, clang++); "
    "install one (Debian: apt-get install g++), or name yours in CXX\n"
)


def test_without_torch_and_without_a_compiler(fresh):
    env = fresh("bare")
    done = env.run("python", "-W", "error", "-c", "import memtools; print(memtools.GateHistory())")
    assert done.stdout.startswith("GateHistory(0 of 1000 entries"), done.stderr
    done = env.run("memtools", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gate history (CPU)   no" in done.stdout
    done = env.run("memtools", "build-shim")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"memtools build-shim: torch is not installed in {env.python.parents[1]}; "
        "install torch 2.11 or later: run python -m pip install 'torch>=2.11'\n"
    )
    program = "import memtools\nmemtools.GateHistory().append(object())\n"
    said = env.run("python", "-c", program).stderr.splitlines()[-1]
    assert said.startswith("ImportError: memtools needs torch >= 2.11 to read tensors: No module")


def test_the_shim_is_built_by_its_command_alone_and_goes_with_the_package(fresh):
    env = fresh("torch")
    env.add_torch("2.13.0+mine", COMMIT)
    packages = env.packages
    # Without the shim all works, and nobody is warned of what he has not asked for.
    done = env.run("python", "-c", USE)
    assert done.stdout == "1 2.13.0+mine False\n", done.stderr
    report = env.run("memtools", "doctor")
    assert (report.returncode, report.stderr) == (0, "")
    assert "to compile it again           memtools build-shim\n" in report.stdout
    assert "(memtools._torch has not been built for torch 2.13.0+mine)" in report.stdout
    assert env.run("memtools", "build-shim").stderr == NO_COMPILER
    assert [*packages.glob("memtools/_torch*")] == []

    path = f"{env.environ['PATH']}:{os.environ['PATH']}"
    compiler = env.folder / "c++"
    made = next(PROJECT.glob("memtools/_torch.*.so"))
    compiler.write_text(f'#!/bin/sh\nc++ -E "$@" || exit 1\n{HAND_OUT.format(made)}')
    compiler.chmod(0o755)
    done = env.run("memtools", "build-shim", CXX=str(compiler), PATH=path)
    assert done.returncode == 0, done.stderr
    (first,) = packages.glob("memtools/_torch*")
    assert "-2.13.0+mine-cccccccccccc." in first.name
    assert done.stdout.splitlines()[1].startswith(f"Wrote {first} (")
    assert env.run("python", "-c", USE).stdout == "1 2.13.0+mine True\n"
    done = env.run("memtools", "build-shim")
    assert done.stdout == f"The shim for torch 2.13.0+mine is there: {first}\n"
    report = env.run("memtools", "doctor")
    assert "part compiled against torch   yes\n" in report.stdout
    assert "its torch version             2.13.0+mine\n" in report.stdout

    # torch is upgraded: the shim is left alone, and each message names the command.
    env.upgrade_torch("2.13.1", COMMIT)
    done = env.run("python", "-c", USE)
    assert done.stdout == (
        "1 2.13.1 False\nmemtools._torch was built for torch 2.13.0+mine, this is 2.13.1; "
        "memtools works without it, a little slower; run memtools build-shim\n"
    )
    report = env.run("memtools", "doctor")
    assert (report.returncode, report.stderr) == (
        1,
        "memtools doctor: the part compiled against torch is not loaded: memtools._torch was built "
        "for torch 2.13.0+mine, this is 2.13.1; run memtools build-shim\n",
    )
    assert [*packages.glob("memtools/_torch*")] == [first]

    # What a compiler makes that does not load is removed again.
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho >"$2"\n')
    done = env.run("memtools", "build-shim", CXX=str(compiler), PATH=path)
    assert done.stderr.startswith("memtools build-shim: the shim was compiled and removed again: ")
    assert "memtools._torch does not load: " in done.stderr
    assert [*packages.glob("memtools/_torch*")] == [first]

    compiler.write_text(f"#!/bin/sh\n{HAND_OUT.format(made)}")
    done = env.run("memtools", "build-shim", CXX=str(compiler), PATH=path)
    assert done.returncode == 0, done.stderr
    assert env.run("python", "-c", USE).stdout == "1 2.13.1 True\n"
    assert len([*packages.glob("memtools/_torch*")]) == 2

    removed = env.uninstall("memtools")
    assert removed.returncode == 0, removed.stderr
    assert not (packages / "memtools").exists()

"""The same growth, kept by whom it may be, in programs of other shapes, is found as the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtools._leak.finding import is_call
from tests.conftest import ROOT
from tests.kit.long import LONG
from tests.monitor import grown
from tests.monitor.grown import KEEPERS, Program

pytestmark = pytest.mark.slow
Found = dict[str, Any]
BOUNDED = [name for name, (make, _) in KEEPERS.items() if make().drop]


def found_in(
    program: Program, module: str = "tests.monitor.grown", path: Path = ROOT
) -> list[Found]:
    """What the monitor of a program found, which is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(asdict(program)), cwd=path, text=True,
        capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[Found] = json.loads(done.stdout)
    return found


def right(program: Program, found: list[Found]) -> Found:
    """The finding that names the keeper; its rate is that of all findings that do."""
    texts = [one["text"] for one in found]
    named = [one for one in found if re.search(KEEPERS[program.keeper][1], one["text"])]
    assert named, f"{program}: {texts}"
    assert is_call(named[0]["grade"]), f"{program}: {texts}"
    rate = sum(one["rate_bytes"] for one in named)
    assert rate == pytest.approx(program.rate, rel=0.25), f"{program}: {texts}"
    return named[0]


def same(one: Found, other: Found, faster: float = 1.0) -> None:
    """Two findings are of the same growth; the other is `faster`."""
    assert (one["kind"], one["holder"]) == (other["kind"], other["holder"])
    assert other["rate_bytes"] == pytest.approx(faster * one["rate_bytes"], rel=0.2)
    left = [end / faster for end in one["steps_left"]]
    assert other["steps_left"] == pytest.approx(left, rel=0.3)


@pytest.mark.parametrize("keeper", list(KEEPERS))
def test_growth_is_found_whoever_keeps_it(keeper: str) -> None:
    program = Program(keeper)
    right(program, found_in(program))


@pytest.mark.parametrize("keeper", ["zipfile.ZipFile", "queue.Queue", "sqlite3"])
def test_what_has_become_full_is_not_called(keeper: str) -> None:
    found = found_in(Program(keeper, bound=80, steps=320))
    assert not [one["text"] for one in found if is_call(one["grade"])]


METAMORPHIC = ["logging.handlers.MemoryHandler", "C code"]


@pytest.mark.parametrize("keeper", METAMORPHIC)
def test_the_same_growth_is_found_as_the_same(keeper: str, tmp_path: Path) -> None:
    program = Program(keeper, entries=2)
    one = right(program, found_in(program))
    same(one, right(twice := replace(program, entries=4), found_in(twice)), faster=2)
    same(one, right(rare := replace(program, entries=6, every=3), found_in(rare)))
    same(one, right(threaded := replace(program, threaded=True), found_in(threaded)))
    quarter = replace(program, limit_mib=program.limit_mib // 4)
    other = right(quarter, found_in(quarter))
    assert other["rate_bytes"] == pytest.approx(one["rate_bytes"], rel=0.2)
    assert other["steps_left"] == pytest.approx([end / 4 for end in one["steps_left"]], rel=0.3)
    package = tmp_path / "lib" / "python3" / "site-packages" / "trainers"
    package.mkdir(parents=True)
    shutil.copy(grown.__file__, package / "grown.py")
    same(one, right(program, found_in(program, "trainers.grown", package.parent)))


def test_the_same_growth_is_found_as_the_same_in_a_worker() -> None:
    """A worker knows the holders of Python objects alone."""
    program = Program(METAMORPHIC[0], entries=2, worker=True)
    one = right(program, found_in(program))
    assert one["process"] == "worker 0"
    here = replace(program, worker=False)
    same(right(here, found_in(here)), one)


PROGRAMS = st.builds(
    Program,
    st.sampled_from(list(KEEPERS)),
    size=st.integers(16_000, 60_000),
    entries=st.integers(1, 4),
    every=st.integers(1, 3),
    steps=st.integers(256, 512),
    threaded=st.booleans(),
)


@pytest.mark.skipif(not LONG, reason="make fuzz")
@settings(max_examples=150, deadline=None)
@given(PROGRAMS)
def test_growth_is_found_in_any_program(program: Program) -> None:
    right(program, found_in(program))


@pytest.mark.skipif(not LONG, reason="make fuzz")
@settings(max_examples=60, deadline=None)
@given(PROGRAMS, st.sampled_from(BOUNDED), st.floats(0.1, 0.3))
def test_no_program_that_fills_a_bound_is_called(
    program: Program, keeper: str, full_at: float
) -> None:
    bound = int(program.steps * full_at / program.every * program.entries)
    found = found_in(replace(program, keeper=keeper, bound=bound))
    assert not [one["text"] for one in found if is_call(one["grade"])]

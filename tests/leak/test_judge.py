"""One judge: the monitor, assert_flat and a record find the same in one series."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memtools
from memtools import LeakFinding, _core
from memtools._census.arrays import Owner
from memtools._census.holders import Holder
from memtools._leak.advice import advice_for
from memtools._leak.judge import (
    C_HEAP,
    GRAPH,
    PYTHON,
    THRESHOLDS,
    Block,
    Children,
    Evidence,
    Part,
    findings_of,
    held_of,
)  # fmt: skip
from memtools._monitor.signals import Signal
from memtools._record import kinds
from memtools._record.figures import figures_of
from memtools.testing import _growth as growth
from tests.monitor.program import KIB, MIB, Clock, Program, clock, holder

__all__ = ["clock"]
pytestmark = pytest.mark.usefixtures("frozen")
STEPS = 320
HIDDEN = "autograd graph in train.hidden"
Size = Callable[[int], int]  # bytes of the heap after so many steps


def by_monitor(clock: Clock, size: Size, held: Sequence[Holder]) -> list[LeakFinding]:
    program = Program(clock)
    program.held = list(held)
    for step in range(1, STEPS + 1):
        program.sizes["heap"] = size(step)
        program.run(1)
    return [one.without_forecast() for one in program.watch.findings()]


class Census:
    """The census of a test, whose holders are given."""

    cut, reached_bytes, held = False, 0, list[Holder]()

    def __init__(self, *_: object, **__: object) -> None: ...
    def look(self, step: int) -> None: ...
    def holders(self) -> Sequence[Holder]:
        return self.held


def by_assert_flat(monkeypatch: pytest.MonkeyPatch, size: Size, held: Sequence[Holder]) -> str:
    sizes = {"heap": size(0), "python": 20 * MIB, "tensors": 0}
    sizes |= dict.fromkeys(("rss", "idle", "VmData"), 200 * MIB)
    signals = [Signal(name, lambda name=name: sizes[name]) for name in sizes]  # type: ignore[misc]
    monkeypatch.setattr(growth, "signals_of", lambda *_: signals)
    monkeypatch.setattr(growth, "GrowthCensus", Census)
    monkeypatch.setattr(Census, "held", list(held))
    test = growth.GrowthTest(1024, "1 KiB", steps=STEPS)
    for step in range(1, STEPS + 1):
        sizes["heap"] = size(step)
        test.step()
    test.close()
    return test.end()


def by_record(path: Path, size: Size) -> tuple[LeakFinding, ...]:
    columns = [("step", ""), ("rss", "B"), ("heap_used", "B")]
    with _core.RecordWriter(path, columns) as writer:
        writer.event("start", kinds.payload("start", kinds.Start("run", tests_leaks=False)))
        for step in range(1, STEPS + 1):
            writer.append(10**15 + step * 10**7, [step, 100 * MIB + size(step), size(step)])
    return figures_of(memtools.read_record(path)).verdict.findings


def grows(rate: int) -> Size:
    return lambda step: 100 * MIB + rate * step


@pytest.mark.parametrize(
    ("size", "held", "line", "rate"),
    [
        (grows(16 * KIB), [holder(15 * KIB)], "list Trainer.losses +16.0 KiB/step", 16),
        # An exact growth tells more than what objects are taken to weigh.
        (grows(16 * KIB), [holder(21 * KIB)], "list Trainer.losses +16.0 KiB/step", 16),
        (grows(16 * KIB), [holder(26 * KIB)], "list Trainer.losses +18.7 KiB/step", 16),
        (grows(16 * KIB), [holder(15 * KIB, containers=3)],
         "(2 new tensors a step, in 3 of them)", 16),
        (grows(16 * KIB), [holder(15 * KIB, view_bytes=8 * KIB)],
         "(2 new tensors a step, each a view that keeps 8.0 KiB)", 16),
        (grows(200 * KIB), [holder(3 * KIB, kind=GRAPH, path=HIDDEN)],
         f"{HIDDEN} +200.0 KiB/step", 200),
        (grows(36 * KIB), [holder(2 * KIB)],
         "the C heap, whose holder is not known +36.0 KiB/step", 36),
        (grows(30 * KIB), [holder(20 * KIB), holder(10 * KIB, path="dict a.seen", kind="dict")],
         "dict a.seen +10.0 KiB/step", 30),
        (grows(16 * KIB), [holder(16 * KIB, path="deque Replay.items", length=4, capacity=99)],
         "deque Replay.items +16.0 KiB/step (4 of at most 99, 792.0 KiB when full)", 16),
    ],
    ids=["named", "weighs more", "weighs much more", "several", "views", "graph", "C heap", "two",
         "fills"],
)  # fmt: skip
def test_all_find_the_same_in_one_series(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    size: Size, held: list[Holder], line: str, rate: int,
) -> None:  # fmt: skip
    found = by_monitor(clock, size, held)
    lines = [one.line() for one in found]
    assert any(line in one for one in lines), lines
    text = by_assert_flat(monkeypatch, size, held)
    assert [one for one in lines if one not in text] == [], text
    assert [one.advice for one in found if one.advice not in text] == []
    (recorded,) = by_record(tmp_path / "run.mem", size)  # which knows nobody's name
    assert (recorded.part, recorded.rate_bytes) == ("use", pytest.approx(rate * KIB, rel=0.03))


def test_nothing_below_the_least_rate_is_found() -> None:
    for rate, count in ((0.5, 0), (2.0, 1)):
        part = Part("device", rate * THRESHOLDS.least_rate, grade="growing")
        assert len(findings_of(Evidence(Part("heap", 0.0), {"device": part}))) == count


@pytest.mark.parametrize(
    ("own", "growth", "error", "held"),
    [
        (100, 100, 0, 100),
        (100, 119, 0, 119),  # what malloc adds
        (100, 130, 0, 110),
        (100, 140, 0, 100),  # the rest is of something else
        (100, 500, 0, 100),
        (100, 70, 0, 70),  # what several of them share
        (100, 33, 0, 100),
        (100, 110, 11, 105),  # known to a tenth
        (100, 110, 50, 100),
        (100, 110, math.inf, 110),
        (0, 110, 0, 0),
        (100, 0, 0, 100),
    ],
)
def test_holders_get_what_their_own_figures_nearly_explain(
    own: float, growth: float, error: float, held: float
) -> None:
    assert held_of(own, growth, error) == pytest.approx(held, abs=1)


@pytest.mark.parametrize(("is_shared", "least"), [(False, 1.0), (True, THRESHOLDS.least_c_heap)])
def test_slow_growth_without_a_holder_is_that_of_caches_where_threads_share_the_steps(
    is_shared: bool, least: float
) -> None:
    for times, is_reported in [(0.9, False), (1.1, True)]:
        use = Part("heap", times * least * THRESHOLDS.least_rate, 0.0, "growing")
        seen = Evidence(use, looks=6, is_shared=is_shared)
        assert bool(findings_of(seen)) == is_reported


@pytest.mark.parametrize("error", [0.0, 0.01, 0.1, math.inf])  # infinite: not known
@pytest.mark.parametrize("unheld", [C_HEAP, ""])
def test_the_sum_is_the_pace_of_what_is_in_use_whatever_share_is_held(
    error: float, unheld: str
) -> None:
    """Swept from none to three times of what is in use: nothing jumps, and nothing is slower."""
    own, before = 64 * KIB, None
    for percent in range(900, 34, -1):
        use = own * percent / 100
        part = Part("heap", use, error * use, "growing")
        seen = Evidence(part, holders=[holder(own)], looks=6, unheld=unheld, c_heap_bytes=use)
        found = {one.holder: one.rate_bytes for one in findings_of(seen)}
        certain = THRESHOLDS.certain_errors * error * use
        not_said = max(certain, THRESHOLDS.least_c_heap * THRESHOLDS.least_rate)
        assert sum(found.values()) >= 0.999 * use - not_said, percent
        held = found.get("list Trainer.losses", own)
        if before is not None:
            assert abs(held - before) <= 0.025 * own, percent
        before = held


def handles(**more: Any) -> Holder:
    """A dict that gains one handle of a library every two steps, 1 KiB a step for Python."""
    given = {"path": "dict Episodes.handles", "kind": "dict", "what": "h5.Dataset objects"}
    given |= {"new_objects": 50, "extension": "h5.DatasetID", "only_gained": True}
    return holder(KIB, **(given | more))


def of_c_memory(*held: Holder, use: float = 100 * KIB) -> list[tuple[str, float, str, str]]:
    part = Part("heap", use, 0.0, "growing")
    seen = Evidence(part, holders=held, looks=6, unheld=C_HEAP, c_heap_bytes=use)
    return [(f.holder or f.kind, f.rate_bytes, f.what, f.grade) for f in findings_of(seen)]


def test_memory_in_c_belongs_to_the_container_of_the_objects_that_it_comes_with() -> None:
    each = "1 new h5.Dataset object every 2 steps, and 198.0 KiB of C memory with each"
    found = ("dict Episodes.handles", pytest.approx(100 * KIB), each, "growing")
    assert of_c_memory(handles()) == [found]
    # Beside another container that gains it is less certain, and what that holds is its own.
    name, rate, what, _ = of_c_memory(handles(), holder(40 * KIB))[0]
    assert (name, rate) == ("dict Episodes.handles", pytest.approx(60 * KIB))
    assert what.endswith("and probably 118.0 KiB of C memory with each")
    # Without such memory it is too small to be named.
    small = handles(new_bytes=50 * KIB)
    assert [name for name, *_ in of_c_memory(small, use=3 * KIB)] == [""]
    assert [name for name, *_ in of_c_memory(small, use=5 * KIB)] == ["dict Episodes.handles"]


@pytest.mark.parametrize(
    "held",
    [
        [handles(extension="")],
        [handles(only_gained=False)],
        [handles(capacity=99, length=4)],
        [handles(), handles(path="list Episodes.files")],
    ],
    ids=["of Python", "not always longer", "bounded", "two"],
)
def test_memory_in_c_that_may_be_of_any_code_is_the_c_heaps(held: list[Holder]) -> None:
    found = {name: what for name, _, what, _ in of_c_memory(*held)}
    which = "perhaps kept by dict Episodes.handles or list Episodes.files"
    assert found["C heap"] == (which if len(held) > 1 else "")
    assert not any("of C memory" in what for what in found.values())


def table(**more: Any) -> Holder:
    """A table of rows in C that becomes longer by 32 rows a step, of bytes that are not known."""
    given: dict[str, Any] = {"path": "Scores.table", "kind": "variable", "what": "items"}
    given |= {"new_objects": 3200, "extension": "PyDataFrame", "only_gained": True}
    return holder(0, **(given | more))


def test_memory_in_c_is_probably_of_the_one_object_that_becomes_longer() -> None:
    (name, rate, what, grade), *others = of_c_memory(table(), use=64 * KIB)
    assert (name, rate, grade, others) == ("Scores.table", 64 * KIB, "growing", [])
    assert what == "32 new items a step, and probably 2.0 KiB of C memory with each"
    assert [name for name, *_ in of_c_memory(table(), holder(64 * KIB), use=64 * KIB)] == [
        "list Trainer.losses"  # It explains the growth.
    ]
    (name, _, what, _), *others = of_c_memory(table(), table(path="Scores.rows"))
    assert (name, what, others) == ("C heap", "perhaps kept by Scores.table or Scores.rows", [])
    (name, *_), *others = of_c_memory(table(), handles())
    assert (name, others) == ("dict Episodes.handles", []), "whose objects a walk sees"


def test_python_objects_that_c_code_keeps_are_probably_of_the_object_that_becomes_longer() -> None:
    part = Part("python", 64.0 * KIB, 0.0, "suspect")
    seen = Evidence(part, holders=[table(new_objects=200)], looks=6, unheld=PYTHON,
                    new_objects="2 new Resource objects a step, which C code keeps")  # fmt: skip
    (found,) = findings_of(seen)
    assert (found.holder, found.grade, found.cause) == ("Scores.table", "suspect", "extension")
    assert found.what == "2 new items a step, and probably 32.0 KiB of Python objects with each"
    assert advice_for(found).startswith("remove what is no longer used, keep only the newest part")
    (found,) = findings_of(replace(seen, holders=[table(), table(path="Scores.rows")]))
    assert found.kind == "Python objects"
    assert found.what.endswith(", perhaps kept by Scores.table or Scores.rows")


@pytest.mark.parametrize(
    ("tested", "grade", "of_others"),
    [("quiet", "suspect", "suspect"), ("suspect", "growing", "growing"),
     ("growing", "growing", "likely"), ("likely", "growing", "likely"), ("leak", "leak", "leak")],
)  # fmt: skip
def test_what_may_be_a_buffer_that_fills_is_growing_until_it_has_outlived_that(
    tested: str, grade: str, of_others: str
) -> None:
    part = Part("heap", 16.0 * KIB, 0.0, tested)
    for known, words, expected in (
        ({"may_fill": True}, "a leak or a buffer that still fills", grade),
        ({"kept_until": "f() returns"}, "a leak or kept until f() returns", grade),
        ({}, "a leak or", of_others),
    ):
        kept = holder(16 * KIB, only_gained=True, **known)
        (found,) = findings_of(Evidence(part, holders=[kept], looks=6))
        assert found.grade == expected
        assert (words in found.what) is (bool(known) and tested != "leak")


@pytest.mark.parametrize(("in_use", "said"), [(None, 1), (4 * KIB, 1), (KIB, 0)])
def test_children_of_which_nothing_more_is_in_use_do_not_leak(
    in_use: float | None, said: int
) -> None:
    """It is growth that has stopped, or freed memory that malloc keeps. None: not known."""
    part = Part("children", 5.0 * KIB, grade="growing")
    seen = Evidence(Part("heap", 0.0), children=Children(part, 2, in_use_bytes=in_use))
    assert len(findings_of(seen)) == said


def test_only_the_judge_makes_findings() -> None:
    """A record's reader makes those again that a run has written."""
    made = re.compile(r"(?<!class )\bLeakFinding\((?!Event)")
    package = Path(memtools.__file__).parent
    files = [path for path in package.rglob("*.py") if made.search(path.read_text())]
    assert sorted(str(path.relative_to(package)) for path in files) == [
        "_leak/judge.py", "_record/verdict.py",
    ]  # fmt: skip


def block(size: int, resident: int, rate: int, signal: str = "resident", name: str = "") -> Block:
    owner = Owner(name or "Replay.states", "max_size 9")
    return Block(size * MIB, resident * MIB, 0, owner, signal, rate * KIB, since_step=16)


FOUR = [
    block(300, 10, 50, name="A.x"), block(200, 10, 50, name="A.y"),
    block(100, 9, 9, name="A.z"), block(90, 9, 9, name="A.w"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fills", "shm", "limit", "lines"),
    [
        ([block(300, 10, 50)], 0, 900,
         ["fills: Replay.states +50.0 KiB/step (max_size 9: 300.0 MiB when full, 10.0 MiB written "
          "at step 64; then 490.0 MiB of 900.0 MiB are in use)"]),
        (FOUR, 0, 400,
         ["fills: A.x and A.y and 2 more +118.0 KiB/step (max_size 9: 690.0 MiB when full, 38.0 "
          "MiB written at step 64; then 852.0 MiB are in use, and 400.0 MiB are allowed)"]),
        # A fill is not the growth of its part of memory, and hides none beside it.
        ([block(300, 10, 50, "shm")], 51, None,
         ["fills: Replay.states +50.0 KiB/step (max_size 9: 300.0 MiB when full, 10.0 MiB written "
          "at step 64)"]),
        ([block(300, 10, 50, "shm")], 90, None,
         ["growing: shared memory of this job +40.0 KiB/step",
          "fills: Replay.states +50.0 KiB/step (max_size 9: 300.0 MiB when full, 10.0 MiB written "
          "at step 64)"]),
    ],
    ids=["fits", "several", "of shared memory", "beside a leak"],
)  # fmt: skip
def test_blocks_that_fill_are_one_finding_with_their_size(
    fills: list[Block], shm: int, limit: int | None, lines: list[str]
) -> None:
    beside = {"shm": Part("shm", shm * KIB, grade="growing")}
    used = None if limit is None else (200 * MIB, limit * MIB)
    found = findings_of(Evidence(Part("heap", 0.0), beside, step=64, fills=fills, used=used))
    assert [str(one) for one in found] == lines
    assert [one.cause == "too large" for one in found] == [limit == 400] * len(found)

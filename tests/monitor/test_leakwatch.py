"""The leak test of a monitor: when it looks, what it makes of that, and what it says."""

from __future__ import annotations

import gc
import logging
import random
import re
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from memtools import LeakFinding, MemoryMonitor, read_record
from memtools._census.holders import Holder
from memtools._leak.finding import RANK, is_call
from memtools._leak.ledger import Ledger
from memtools._monitor import children as child_processes
from memtools._monitor import leakwatch
from memtools._monitor.leakwatch import LeakWatch
from memtools._monitor.signals import _Crest, python_bytes
from memtools._monitor.walks import Depth
from memtools._record.figures import figures_of
from memtools._record.verdict import verdict_of
from tests.kit.fakedevice import TOTAL, FakeCuda, cuda
from tests.monitor.program import GIB, KIB, LOOKS, MIB, Clock, Program, clock, holder

__all__ = ["clock", "cuda"]

# --- readings ---


def test_readings_between_looks_take_half_a_percent_of_the_time(clock: Clock) -> None:
    program = Program(clock, step_ns=100_000)
    program.cost_ns = 200_000
    program.run(600)
    for _ in range(2):
        begin, before = clock.ns, len(program.reads)
        program.run(20_000)
        share = (len(program.reads) - before) * program.cost_ns / (clock.ns - begin)
        assert 0.003 < share <= 0.007
        program.cost_ns, before = 10**9, len(program.reads)
        while len(program.reads) == before:  # another program interrupts it: that is no measure
            program.run(1)
        program.cost_ns = 200_000
    program.run(50_000, heap=4 * KIB)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(4 * KIB, rel=0.01), "by what lies between two readings"


def test_blocks_of_python_weigh_what_they_have() -> None:
    """A float has 24 bytes, of which a block of the interpreter's has 32."""
    before = python_bytes()
    numbers = [float(i) for i in range(50_000)]
    assert python_bytes() - before == pytest.approx(32 * len(numbers), rel=0.02)


# --- when it looks ---


def test_looks_are_a_matter_of_steps_alone(clock: Clock) -> None:
    for step_ns in (10**4, 10**6, 10**9):
        program = Program(clock, step_ns=step_ns)
        program.run(600, heap=4 * KIB)
        assert program.looks == LOOKS
        assert program.census.at == LOOKS


def test_fewer_looks_are_taken_where_all_that_grows_is_named(clock: Clock) -> None:
    """The time that they take is the user's, and a check sees new growth as well."""
    program = Program(clock, device=8 * GIB)
    program.held = [holder(16 * KIB, only_gained=True)]
    program.run(1100, heap=16 * KIB)
    assert program.census.at == [16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]
    (found,) = program.watch.findings()
    assert (found.grade, found.rate_bytes) == ("likely", pytest.approx(16 * KIB, rel=0.01))
    program.run(500, heap=16 * KIB, device=64 * KIB)
    assert "device" in {one.signal for one in program.watch.findings()}
    assert 1536 in program.looks, "no longer all that grows is named"


def test_the_heap_is_walked_once_where_nothing_grows(clock: Clock) -> None:
    program = Program(clock)
    program.run(600)
    assert (program.census.at, program.said, program.events.told) == ([16], [], [])
    program.run(600, heap=2 * KIB)
    assert len(program.census.at) > 1


def test_growth_that_is_large_is_looked_at_at_once(clock: Clock) -> None:
    program = Program(clock, limit=8 * GIB)
    program.run(40, heap=100 * MIB)
    assert program.looks[:3] == [5, 9, 13]
    assert program.said[0].first_step is not None
    assert program.said[0].first_step <= 24


def test_large_growth_that_begins_late_is_looked_at_more_densely(clock: Clock) -> None:
    program = Program(clock)
    program.run(1000)
    program.run(150, heap=4 * MIB)
    late = [step for step in program.looks if step > 1000]
    assert late[:3] == [1024, 1032, 1040]
    assert len(late) >= 7
    assert [one.grade for one in program.said][:1] == ["suspect"]
    assert program.said[0].first_step is not None
    assert program.said[0].first_step <= 1000 + 128
    assert not any(one.over for one in program.said)


@pytest.mark.slow
def test_walks_are_bounded_in_time(clock: Clock) -> None:
    program = Program(clock, step_ns=10**7)

    def slow() -> None:
        clock.ns += 400_000_000

    program.census_looks = slow
    program.held = [holder(4 * KIB)]
    program.run(600, heap=4 * KIB)
    assert program.census.at == LOOKS[:3], "1.2 s"
    assert program.looks == LOOKS
    assert [one.holder for one in program.watch.findings()] == ["list Trainer.losses"]
    program.run(12_000, heap=4 * KIB)
    assert program.census.at[3:] == pytest.approx([881, 4840], abs=9), "0.4 s in 40 s, while needed"
    (found,) = program.watch.findings()
    assert (found.holder, found.rate_bytes) == (
        "list Trainer.losses",
        pytest.approx(4 * KIB, rel=0.01),
    )


# --- who holds it ---


def test_a_leak_is_named_with_rate_time_left_and_advice(clock: Clock) -> None:
    program = Program(clock, limit=GIB)
    program.held = [holder(15 * KIB, only_gained=True)]
    program.run(70, heap=16 * KIB)
    step, first = program.events.told[0]
    assert (step, first.holder, first.signal) == (32, "list Trainer.losses", "heap")
    assert first.rate_bytes == pytest.approx(16 * KIB, rel=0.01), "what it takes with malloc"
    assert "2 new tensors a step" in first.what
    assert first.steps_left is not None
    truth = (GIB - program.total() + 38 * 16 * KIB) / (16 * KIB)
    assert first.steps_left[0] <= truth <= first.steps_left[1] <= 4 * first.steps_left[0]
    assert first.advice == "clear it after use, or use deque(maxlen=...)"
    (now,) = program.watch.findings()
    assert now.grade in ("growing", "likely")
    assert now.first_step == 32
    grades = [one.grade for one in program.said]
    assert grades == sorted(set(grades), key=RANK.__getitem__), "once for each, upwards"
    assert grades[-1] == now.grade


GRAPH = "autograd graph in train.hidden"
OF_LIST, DEQUE = "list Trainer.losses", "deque Replay.items"


@pytest.mark.parametrize(
    ("grows", "held", "found"),
    [
        ([(600, {})], [], {}),
        # A holder gets what its part of memory grows by, which includes what malloc adds.
        ([(70, {"heap": 16})], [holder(15 * KIB)], {OF_LIST: 16}),
        ([(70, {"heap": 100})], [holder(20 * KIB)], {OF_LIST: 20, "C heap": 80}),
        ([(70, {"device": 64, "heap": 1})], [holder(66 * KIB)], {OF_LIST: 64}),
        ([(70, {"device": 64})], [], {"device": 64}),
        # A graph takes what nothing else explains, a small part is not the leak.
        ([(70, {"heap": 200})], [holder(3 * KIB, kind="autograd graph", path=GRAPH)], {GRAPH: 200}),
        ([(70, {"heap": 36})], [holder(2 * KIB)], {"C heap": 36}),
        # Where Python's own blocks grow it is not C code's.
        ([(70, {"python": 36})], [holder(2 * KIB)], {"Python objects": 36}),
        ([(70, {"python": 20, "heap": 16})], [], {"Python objects": 36}),
        ([(70, {"python": 12, "heap": 24})], [], {"C heap": 36}),
        ([(70, {"heap": 10})],
         [holder(size * KIB, path=f"m.history['{name}']", kind="variable")
          for name, size in (("prediction", 8), ("loss", 2))],
         {"m.history (2 that grow in it)": 10}),
        # What ends by itself is told apart from what does not.
        ([(400, {"heap": 16})], [holder(16 * KIB, capacity=100, length=40, path=DEQUE)],
         {DEQUE: 16}),
        ([(200, {"heap": 32})],
         [holder(16 * KIB, capacity=100, length=40, path=DEQUE), holder(15 * KIB)],
         {OF_LIST: 16, DEQUE: 16}),
        ([(100, {"heap": 16}), (64, {})], [holder(16 * KIB)], {}),
        # The warm-up of a run is not in the rate of a holder.
        ([(50, {"heap": 132}), (78, {"heap": 32})], [holder(32 * KIB)], {OF_LIST: 32}),
        ([(50, {"heap": 132}), (206, {"heap": 32})], [holder(32 * KIB)], {OF_LIST: 32}),
        # Small blocks of C code pin what is freed around them: resident memory grows faster. What
        # grows many times as fast is no cost of theirs, nor is what grows now and then.
        ([(130, {"heap": 200, "rss": 1200})], [], {"C heap": 1200}),
        ([(130, {"heap": 200, "rss": 200})], [], {"C heap": 200}),
        ([(130, {"heap": 200, "rss": 2400})], [], {"C heap": 200}),
        ([(1, {"heap": 200, "rss": 51200}), (40, {"heap": 200})] * 10, [], {"C heap": 200}),
    ],
)  # fmt: skip
def test_what_a_program_does_is_found(
    clock: Clock,
    grows: list[tuple[int, dict[str, int]]],
    held: list[Holder],
    found: dict[str, int],
) -> None:
    """Steps with what they add, in KiB each, and who gains; then what stands, in KiB a step."""
    program = Program(clock, device=1024 * GIB)
    program.held = held
    for steps, added in grows:
        program.run(steps, **{part: size * KIB for part, size in added.items()})
    standing = program.watch.findings()
    rates = {one.holder or one.kind or one.signal: one.rate_bytes / KIB for one in standing}
    assert rates == pytest.approx(found, rel=0.02)


def test_a_container_with_a_bound_fills_and_is_never_a_leak(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(16 * KIB, capacity=100, length=40, path="deque Replay.items")]
    program.run(400, heap=16 * KIB)
    assert {one.grade for one in program.watch.findings()} == {"fills"}
    assert program.said == [], "it is written and not said"
    (first, *_) = [one for _, one in program.events.told]
    assert first.what.startswith("40 of at most 100, ")
    assert {one.kind for one in program.watch.verdicts()} <= {"early", "quiet", "fills"}


def warms_up(program: Program, held: Holder) -> LeakFinding:
    """Some 36 KiB a step that a library's caches fill with, unevenly, and a holder of a small part.
    Returns what is said of what nobody holds."""
    program.held = [held]
    for steps, rate in ((16, 36), (8, 12), (8, 60), (16, 20), (16, 52)):
        program.run(steps, heap=rate * KIB)
    (found,) = [one for one in program.watch.findings() if not one.holder]
    return found


def test_who_takes_a_small_part_is_named_beside_what_nobody_holds(clock: Clock) -> None:
    program = Program(clock)
    found = warms_up(program, holder(3 * KIB, only_gained=True))
    assert (found.grade, found.kind) == ("suspect", "")
    assert found.what == "including list Trainer.losses: +3.0 KiB/step"
    assert any(f"KiB/step ({found.what})" in line for line in program.lines())


@pytest.mark.parametrize(
    "held",
    [
        holder(3 * KIB, only_gained=True, capacity=4000, length=40),
        holder(3 * KIB, only_gained=False),
        holder(KIB // 2, only_gained=True),
    ],
    ids=["bounded", "lost at a look", "tiny"],
)
def test_who_has_not_only_gained_is_not_named_beside_it(held: Holder, clock: Clock) -> None:
    assert warms_up(Program(clock), held).what == ""


def test_who_gains_at_each_look_is_a_leak_however_much_the_rest_grows(clock: Clock) -> None:
    program = Program(clock)
    warms_up(program, holder(3 * KIB, only_gained=True, rises=3))
    assert not any(one.holder for one in program.watch.findings())
    warms_up(program, holder(3 * KIB, only_gained=True, rises=4))
    for steps, rate in ((64, 30), (64, 3), (64, 3)):
        program.run(steps, heap=rate * KIB)
    (found,) = program.watch.findings()
    assert is_call(found.grade)
    assert found.holder == "list Trainer.losses"
    assert found.rate_bytes == pytest.approx(3 * KIB)


def test_a_holder_is_told_by_its_own_figures_where_memory_varies(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(3 * KIB, only_gained=True, rises=3)]
    noise = random.Random(0)
    for _ in range(300):
        before = program.sizes["heap"]
        program.sizes["heap"] += noise.randint(0, 4000) * KIB
        program.run(1)
        program.sizes["heap"] = before + 3 * KIB
    (found,) = [one for one in program.watch.findings() if one.holder]
    assert is_call(found.grade)
    assert found.rate_bytes == pytest.approx(3 * KIB)
    assert not any(one.over for one in program.said if one.holder)
    program.held = []  # it has been cleared
    for _ in range(200):
        program.run(1)
    assert not any(one.holder for one in program.watch.findings())


def test_what_no_object_holds_is_the_c_heap_after_four_intervals(clock: Clock) -> None:
    program = Program(clock)
    program.run(60, heap=36 * KIB)
    assert all(one.kind == "" for one in program.said)
    program.run(10, heap=36 * KIB)
    (found,) = program.watch.findings()
    assert (found.kind, found.holder) == ("C heap", "")
    assert found.rate_bytes == pytest.approx(36 * KIB, rel=0.01)
    assert "a buffer may fill" not in str(found)
    told = [(one.kind, one.over) for _, one in program.events.told]
    assert told in ([("C heap", False)], [("", False), ("", True), ("C heap", False)])
    assert all(not one.over for one in program.said), "another explanation is no end"


def test_a_slope_that_holders_explain_is_preferred(clock: Clock) -> None:
    """A warm-up that fades has no bend; growth in lumps has noise enough to hide one."""
    program = Program(clock)
    program.held = [holder(32 * KIB)]
    for step in range(1, 65):
        program.run(1, heap=32 * KIB + 200 * KIB * max(0, 50 - step) // 50)
    found = {one.holder: one for one in program.watch.findings()}["list Trainer.losses"]
    assert found.rate_bytes == pytest.approx(32 * KIB, rel=0.2)


def test_a_leak_that_becomes_twice_as_fast_is_told_so_soon(clock: Clock) -> None:
    program = Program(clock, limit=8 * GIB)

    def looks() -> None:
        """A census knows the average of all its looks."""
        steps = max(1, program.step - 16)
        gained = (32 * steps + 32 * max(0, program.step - 200)) * KIB
        program.held = [
            replace(holder(0), steps=steps, since_step=16, new_bytes=gained, new_objects=steps)
        ]

    program.census_looks = looks
    program.run(200, heap=32 * KIB)
    program.run(57, heap=64 * KIB)
    (found,) = program.watch.findings()
    assert found.holder == "list Trainer.losses"
    assert found.rate_bytes == pytest.approx(64 * KIB, rel=0.1)
    assert found.steps_left is not None
    truth = (8 * GIB - program.total()) / (64 * KIB)
    assert found.steps_left[0] <= truth <= found.steps_left[1]


def test_a_leak_that_begins_late_is_told_with_its_rate_and_named_soon(clock: Clock) -> None:
    program = Program(clock, limit=8 * GIB)
    program.run(200)
    program.run(57, heap=32 * KIB)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(32 * KIB, rel=0.2)
    assert found.since_step == pytest.approx(200, abs=16)
    program.held = [holder(32 * KIB, since_step=200)]
    program.run(20, heap=32 * KIB)
    (found,) = program.watch.findings()
    assert found.holder == "list Trainer.losses"


def test_a_second_holder_of_a_run_that_grows_is_looked_for_soon(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(32 * KIB)]
    program.run(400, heap=32 * KIB)
    before = len(program.census.at)
    program.run(60, heap=64 * KIB)
    assert len(program.census.at) >= before + 2, program.census.at


def with_slow_walks(clock: Clock, seconds: float, **more: Any) -> Program:
    """A program whose heap is so large that a walk takes so many seconds."""
    program = Program(clock, **more)
    program.census_looks = lambda: setattr(clock, "ns", clock.ns + int(seconds * 1e9))
    program.held = [holder(139 * KIB)]
    return program


def test_growth_is_reported_while_a_walk_has_to_wait(clock: Clock) -> None:
    """Three walks of 0.6 s take 0.3 s more than any run has: 1 % of 30 s."""
    program = with_slow_walks(clock, 0.6, step_ns=10**7)
    program.run(200, heap=139 * KIB)
    assert len(program.census.at) == 2
    (found,) = program.watch.findings()
    assert (found.holder, found.rate_bytes) == ("", pytest.approx(139 * KIB, rel=0.02))
    due = re.search(r"at about step ([\d,]+): a walk of this heap takes 0.6 s", found.what)
    assert due is not None, found.what
    assert int(due[1].replace(",", "")) == pytest.approx(3000, rel=0.1)
    assert "Leak test: quiet" not in program.watch.lines(200)
    program.run(3000, heap=139 * KIB)
    assert program.census.at[2] == pytest.approx(3000, rel=0.1), "as soon as there is time"
    (found,) = program.watch.findings()
    assert (found.holder, found.over) == ("list Trainer.losses", False)
    assert found.rate_bytes == pytest.approx(139 * KIB, rel=0.02)


def test_what_walks_may_take_grows_from_the_first_step_on(clock: Clock) -> None:
    program = with_slow_walks(clock, 1.2, step_ns=2 * 10**9)
    program.run(200, heap=139 * KIB)
    assert program.census.at[2:] == pytest.approx([105, 165], abs=5)


@pytest.mark.parametrize(
    ("whole_ms", "explained", "walks"),
    [
        (149, False, "wwwwwwww"),
        (200, True, "wwwqqqqq"),
        (200, False, "wwwQwwww"),  # the first quick one has lost what whole ones have found
        (380, True, "wqqqqqqq"),
        (380, False, "wqqqwwww"),  # quick ones have found nothing in three looks
    ],
)
def test_walks_of_a_large_heap_are_quick_as_long_as_they_explain_its_growth(
    whole_ms: int, explained: bool, walks: str
) -> None:
    depth, made = Depth(), ""
    for i in range(len(walks)):
        is_quick = depth.is_quick
        counts = depth.walked(
            10**7 if is_quick else whole_ms * 10**6,
            explained=explained or not is_quick,
            was_explained=i >= 3 and "q" not in made,
        )
        made += ("q" if counts else "Q") if is_quick else "w"
    assert made == walks


def test_what_a_quick_walk_has_lost_stays_named_until_a_whole_one(clock: Clock) -> None:
    """What lies deep in a heap whose walk takes 0.2 s: a quick walk does not see it."""
    program = Program(clock, step_ns=10**8)
    deep = [holder(139 * KIB, path="list of each user")]

    def look() -> None:
        is_quick = program.census.quick[-1]
        clock.ns += 10**7 if is_quick else 2 * 10**8
        program.held = [] if is_quick else deep

    program.census_looks = look
    program.run(600, heap=139 * KIB)
    assert program.census.quick[:6] == [False, False, False, True, False, False]
    assert [one.holder for one in program.said] == ["list of each user"] * len(program.said)
    (found,) = program.watch.findings()
    assert (found.holder, found.over) == ("list of each user", False)


def test_what_whole_walks_have_called_the_c_heap_stays_so_after_quick_ones(clock: Clock) -> None:
    """From step 80 on a walk takes 0.2 s: the quick ones leave parts of the heap out."""
    program = Program(clock, step_ns=10**9)

    def look() -> None:
        program.census.cut = program.census.quick[-1]
        clock.ns += 2 * 10**8 if program.step > 80 and not program.census.cut else 10**7

    program.census_looks = look
    for _ in range(6):
        program.run(100, heap=36 * KIB)
    assert True in program.census.quick
    (found,) = program.watch.findings()
    assert (found.kind, found.grade, found.over) == ("C heap", "growing", False)
    assert all(not one.over for one in program.said)


def test_one_walk_that_another_program_slows_makes_no_quick_one(clock: Clock) -> None:
    program = Program(clock)
    program.census_looks = lambda: setattr(
        clock, "ns", clock.ns + (3 * 10**8 if len(program.census.at) == 4 else 5 * 10**7)
    )
    program.run(200, heap=36 * KIB)
    assert not any(program.census.quick)


def test_quick_walks_follow_a_leak_that_becomes_faster(clock: Clock) -> None:
    """Whole walks of 0.6 s would be used up at step 24."""
    program = Program(clock)
    program.census_looks = lambda: setattr(
        clock, "ns", clock.ns + (2 * 10**7 if program.census.quick[-1] else 6 * 10**8)
    )
    program.held = [holder(16 * KIB)]
    program.run(128, heap=16 * KIB)
    program.held = [holder(64 * KIB)]
    program.run(72, heap=64 * KIB)
    (found,) = program.watch.findings()
    assert (found.holder, found.rate_bytes) == ("list Trainer.losses", pytest.approx(64 * KIB, 0.1))
    assert program.census.quick[0] is False
    assert all(program.census.quick[1:])


@pytest.mark.parametrize("grow", [{}, {"heap": 300}, {"rss": 64 * KIB}])
def test_what_does_not_grow_in_use_is_not_reported_for_want_of_a_walk(
    clock: Clock, grow: dict[str, int]
) -> None:
    program = with_slow_walks(clock, 9.0)
    program.run(600, **grow)
    assert [one for one in program.watch.findings() if one.part == "use"] == []


def test_a_look_that_was_cut_says_so_and_knows_nothing_of_the_c_heap(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(clock)
    program.census.cut = True
    program.run(200, heap=36 * KIB)
    assert {one.kind for one in program.watch.findings()} == {""}
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 1, caplog.text


def cut_but_for_one(program: Program) -> None:
    """The looks before are cut, and the one whole look has nothing to be compared with."""
    program.census_looks = lambda: setattr(program.census, "cut", len(program.census.at) < 8)
    while program.census.looks < 8:
        program.run(1, heap=36 * KIB)
    assert not program.census.cut


def each_longer(program: Program) -> None:
    """Each sample of a list gets its image: all that is reached grows, and no container does."""
    for _ in range(200):
        program.run(1, heap=36 * KIB)
        program.census.reached_bytes += 30 * KIB


def slower_and_slower(program: Program) -> None:
    for step in range(1, 200):
        program.run(1, heap=400 * KIB // step)


@pytest.mark.parametrize("grow", [cut_but_for_one, each_longer, slower_and_slower])
def test_what_objects_may_hold_is_not_called_the_c_heap(
    clock: Clock, grow: Callable[[Program], None]
) -> None:
    program = Program(clock)
    grow(program)
    assert {one.kind for one in program.watch.findings()} <= {""}
    assert all(one.kind != "C heap" for _, one in program.events.told)


def test_a_profiler_that_runs_is_said(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakwatch, "profiler_runs", lambda: True)
    program = Program(clock)
    program.run(70, heap=MIB)
    assert "a torch profiler is running" in str(program.watch.findings()[0])


def test_a_call_of_the_c_heap_that_slows_down_is_withdrawn_aloud(clock: Clock) -> None:
    program = Program(clock)
    program.run(130, heap=200 * KIB)
    (found,) = program.watch.findings()
    assert (found.kind, is_call(found.grade)) == ("C heap", True)
    program.run(400, heap=40 * KIB)
    over = [one for one in program.said if one.over]
    assert [one.kind for one in over] == ["C heap"], program.lines()
    at = program.said.index(over[0])
    assert [(one.kind, is_call(one.grade)) for one in program.said[at + 1 :]] == [("", False)]


def test_cycles_that_wait_are_told_apart(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kept = Program(clock), 0

    def collect() -> int:
        program.sizes["heap"] = 100 * MIB
        return kept

    program.run(17, heap=36 * KIB)
    monkeypatch.setattr(gc, "collect", collect)
    program.run(60, heap=36 * KIB)
    assert all(one.kind != "C heap" for _, one in program.events.told)
    assert "cycles" in [one.kind for _, one in program.events.told]
    assert all(one.grade in ("fills", "suspect") for _, one in program.events.told)
    (found,) = program.watch.findings()  # what a look has collected hides nothing
    assert (found.kind, found.rate_bytes) == ("cycles", pytest.approx(36 * KIB, rel=0.01))


@pytest.mark.parametrize("collects", [False, True])
def test_cycles_that_nobody_collects_are_a_leak(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """Where the program has turned the collector off; unless it collects itself, now and then."""
    program, collections = Program(clock), 0

    def collect() -> None:
        nonlocal collections
        collections += 1
        program.sizes["heap"] = 100 * MIB

    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "get_stats", lambda: [{"collections": collections}])
    program.run(17, heap=36 * KIB)
    monkeypatch.setattr(gc, "collect", collect)
    program.run(30, heap=36 * KIB)
    if collects:
        collections += 1
    program.run(90, heap=36 * KIB)
    (found,) = program.watch.findings()
    assert (found.kind, found.rate_bytes) == ("cycles", pytest.approx(36 * KIB, rel=0.01))
    if collects:
        assert found.grade == "fills"
    else:
        assert is_call(found.grade)
        assert "cycles that wait for the garbage collector" in str(found)
        assert "(the garbage collector is off" in str(found)


def test_garbage_of_the_start_does_not_hide_a_leak(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(clock)

    def collect() -> int:
        if program.step == 16:
            program.sizes["heap"] -= 3 * MIB
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    program.held = [holder(2 * KIB)]
    program.run(70, heap=2 * KIB)
    assert program.signals[0].read() == 100 * MIB + 70 * 2 * KIB, "the books"
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(2 * KIB, rel=0.01)


def test_python_collects_nothing_unseen_while_the_census_looks(clock: Clock) -> None:
    """What an automatic collection frees in it would count as if it were there, and so be taken for
    growth of the C heap."""
    program, on = Program(clock), list[bool]()

    def looks() -> None:
        on.append(gc.isenabled())
        if len(on) == 3:
            raise MemoryError("none left")

    program.census_looks = looks
    with pytest.warns(RuntimeWarning, match="no longer looking for holders"):
        program.run(70, heap=16 * KIB)
    assert (on, gc.isenabled()) == ([False] * 3, True)


def test_what_a_census_takes_itself_is_no_growth(clock: Clock) -> None:
    program = Program(clock)

    def takes() -> None:
        program.sizes["heap"] += 5 * MIB

    program.census_looks = takes
    program.held = [holder(16 * KIB)]
    program.run(70, heap=16 * KIB)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(16 * KIB, rel=0.01)


@pytest.mark.parametrize(("limit", "is_said"), [(16 * GIB, False), (GIB // 2, True)])
def test_a_suspect_is_said_if_it_reaches_the_limit_within_a_million_steps(
    clock: Clock, limit: int, is_said: bool
) -> None:
    program = Program(clock, limit=limit)
    program.run(200, heap=2 * KIB)
    (found,) = program.watch.findings()
    assert (found.grade, found.cause) == ("suspect", "" if is_said else "little")
    assert bool(program.said) == is_said
    assert ("suspect" in " ".join(program.watch.lines(200))) == is_said
    assert found.key in [one.key for _, one in program.events.told], "the record has it"


def test_a_suspect_that_becomes_faster_is_said(clock: Clock) -> None:
    program = Program(clock, limit=16 * GIB)
    program.run(128, heap=2 * KIB)
    assert program.said == []
    program.run(300, heap=64 * KIB)
    assert program.said[0].rate_bytes > 20 * KIB


def test_without_a_census_nobody_is_said_to_hold_nothing(clock: Clock) -> None:
    program = Program(clock, census=False)
    program.run(200, heap=36 * KIB)
    assert {(one.kind, one.holder) for one in program.watch.findings()} <= {("", "")}


def test_a_census_that_fails_is_off_and_the_signals_go_on(clock: Clock) -> None:
    program = Program(clock)

    def fail() -> None:
        raise MemoryError("none left")

    program.census_looks = fail
    with pytest.warns(RuntimeWarning, match="no longer looking for holders: MemoryError: none"):
        program.run(200, heap=36 * KIB)
    assert program.census.looks == 1
    assert all(one.kind != "C heap" for _, one in program.events.told)


def test_who_was_named_stays_named_where_a_later_look_fails(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(36 * KIB)]

    def fail() -> None:
        if program.census.looks >= 5:  # memory is nearly out
            raise MemoryError

    program.census_looks = fail
    program.run(200, heap=36 * KIB)  # says nothing: who takes memory is known
    (found,) = program.watch.findings()
    assert (found.holder, found.over) == ("list Trainer.losses", False)
    assert not any(one.over for _, one in program.events.told)
    program.run(200)  # the growth has ended, and with it the finding
    assert program.watch.findings() == ()


def test_a_signal_that_is_not_known_is_left_out(clock: Clock) -> None:
    program = Program(clock)
    program.sizes |= dict.fromkeys(("heap", "python"))  # type: ignore[arg-type]
    program.run(0)
    program.read = lambda name: None  # type: ignore[method-assign]
    program.total = lambda: 0  # type: ignore[method-assign]
    program.run(200)
    assert program.watch.findings() == ()
    assert program.watch.lines(program.step) == []


# --- what is declared ---


def test_declared_growth_fills(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(16 * KIB)]
    program.watch.expect_growth("replay", bytes=64 * MIB)
    program.run(100, heap=16 * KIB)
    (found,) = program.watch.findings()
    assert (found.grade, program.said) == ("fills", [])
    assert "declared as replay" in found.what


def test_growth_beyond_what_was_declared_is_said(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(16 * KIB)]
    program.watch.expect_growth("replay", bytes=512 * KIB)
    program.watch.expect_growth("other", rate=100, until=20)
    program.run(100, heap=16 * KIB)
    (found,) = program.watch.findings()
    assert found.grade in ("suspect", "growing", "likely")


# --- what has ended ---


def test_what_is_collected_now_and_then_is_no_end_of_growth(clock: Clock) -> None:
    """Garbage of 300 steps goes at once, more than what is kept takes in the steps around it."""
    program = Program(clock)
    program.held = [holder(16 * KIB)]
    for _ in range(12):
        program.run(299, heap=22 * KIB)
        program.run(1, heap=22 * KIB - 300 * 6 * KIB)
    assert not any(one.over for one in program.said if one.holder), program.texts
    found, *_ = program.watch.findings()
    assert found.holder == program.held[0].path


def test_a_container_that_is_cleared_has_ended_to_grow(clock: Clock) -> None:
    """By what is in use, before a walk finds it shorter."""
    program = Program(clock)
    program.held = [holder(16 * KIB)]
    program.run(320, heap=16 * KIB)
    looks = program.census.looks
    program.sizes["heap"] -= 320 * 16 * KIB
    program.run(24, heap=16 * KIB)
    assert program.census.looks == looks
    assert program.watch.findings() == ()


def test_growth_that_has_ended_is_withdrawn_within_64_steps(clock: Clock) -> None:
    for grows in (100, 300):
        program = Program(clock)
        program.held = [holder(16 * KIB)]
        program.run(grows, heap=16 * KIB)
        assert len(program.watch.findings()) == 1
        program.run(64)
        assert program.watch.findings() == ()
        assert program.said[-1].over
        assert str(program.said[-1]).startswith("no longer: ")
        assert program.events.told[-1][1].over


def test_growth_in_lumps_stands_between_them(clock: Clock) -> None:
    program = Program(clock)
    for _ in range(16):
        program.run(24)
        program.run(1, heap=MIB)
        if program.step >= 75:
            program.held = [holder(40 * KIB)]
        if program.step >= 100:
            assert len(program.watch.findings()) == 1, program.step
    assert program.watch.findings()[0].rate_bytes == pytest.approx(MIB / 25, rel=0.2)


def test_other_names_of_a_later_leak_are_said(clock: Clock) -> None:
    program = Program(clock)
    program.held = [holder(16 * KIB)]
    program.run(70, heap=16 * KIB)
    program.held = [holder(16 * KIB), holder(16 * KIB, path="dict Trainer.seen", kind="dict")]
    program.run(130, heap=32 * KIB)
    assert {one.holder for one in program.said} == {"list Trainer.losses", "dict Trainer.seen"}
    said = [(one.holder, one.grade) for one in program.said]
    assert len(said) == len(set(said)), "once for each holder and grade"


# --- devices, children, shared memory ---


def test_multiprocessings_own_processes_are_not_counted() -> None:
    """They come with the first loader by spawn or forkserver, and stay."""
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    assert tracker in child_processes._helpers()


class Looking:
    """Workers that have found out what grows in one of them."""

    def __init__(self, *found: LeakFinding) -> None:
        self.found, self.names = found, dict[int, str]()
        self.used: Callable[[], dict[str, int]] = dict
        self.has_looked = False

    def in_use(self) -> dict[str, int]:
        return self.used()

    def findings(self, step: int, grade: str) -> tuple[LeakFinding, ...]:
        return self.found

    def looking(self) -> bool:
        return False

    def have_looked(self) -> bool:
        return self.has_looked

    def ask(self) -> None: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("of_looks", [-64 * KIB, 256 * KIB])
def test_the_rate_of_a_worker_is_what_it_has_measured_itself(clock: Clock, of_looks: int) -> None:
    """The memory of children has in it what workers take for their looks, and give back: by its
    pace what they hold would seem to grow at another rate between two looks."""
    own = LeakFinding("suspect", "children", rate_bytes=32.0 * KIB, kind="dict",
                      holder="dict Frames.seen", process="worker 0")  # fmt: skip
    program = Program(clock, workers=Looking(own))
    program.run(128, children=128 * KIB + of_looks)
    rates = set[float]()
    for _ in range(500):
        program.run(1, children=128 * KIB)
        rates.update(one.rate_bytes for one in program.watch.findings() if one.holder)
    assert rates == {own.rate_bytes}


def test_what_two_workers_hold_is_reported_once(clock: Clock) -> None:
    one = LeakFinding("growing", "children", rate_bytes=32.0 * KIB, kind="dict",
                      holder="dict Frames.seen", process="worker 0")  # fmt: skip
    program = Program(clock, workers=Looking(one))
    program.run(32, children=64 * KIB)
    program.watch._children._workers.found += (replace(one, process="worker 1"),)  # type: ignore[union-attr,attr-defined]
    program.run(200, children=64 * KIB)
    (found,) = [one for one in program.watch.findings() if one.holder]
    assert (found.process, found.rate_bytes) == ("2 workers", 64.0 * KIB)
    assert len([one for one in program.said if one.holder]) == 1


@pytest.mark.parametrize("has_looked", [False, True])
def test_the_peak_of_a_workers_look_is_not_one_of_the_steps(clock: Clock, has_looked: bool) -> None:
    program = Program(clock, workers=(workers := Looking()), limit=GIB, resident=True)
    crest, bounds, peaks = _Crest(), program.watch._limits, [0]
    bounds.above = lambda: crest.above(program.total(), peaks[-1])  # type: ignore[method-assign]
    bounds.leave_out = lambda: crest.leave_out(peaks[-1])  # type: ignore[method-assign]
    for step in range(200):
        workers.has_looked = has_looked and step in range(96, 112)
        peaks.append(max(peaks[-1], program.total() + (64 * MIB if step == 100 else 0)))
        program.run(1, children=64 * KIB, resident=64 * KIB)
    above = program.watch._sensor.points.newest("above")
    assert above is not None
    assert above == 0 if has_looked else above > 50 * MIB


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_worker_whose_bytes_in_use_stay_does_not_leak(clock: Clock, goes_on: bool) -> None:
    """It is full at step 120, by the worker's newest report it still grows, and its private memory
    goes on growing: malloc keeps what is freed."""
    kept = LeakFinding("growing", "children", rate_bytes=64.0 * KIB, kind="dict",
                       holder="dict Pictures.decoded", process="worker 0")  # fmt: skip
    workers = Looking(kept)
    program = Program(clock, workers=workers)
    workers.used = lambda: {"worker 0": 64 * KIB * min(program.step, 9999 if goes_on else 120)}
    program.run(120, children=64 * KIB)
    assert [one.holder for one in program.watch.findings()] == [kept.holder]
    stands = set[str]()
    for step in range(121, 1500):
        program.run(1, children=20 * KIB)
        if step > 200:
            stands.update(one.subject for one in program.watch.findings())
    assert stands == ({kept.subject} if goes_on else set())


def test_a_name_that_changes_in_passing_is_the_same_finding(clock: Clock) -> None:
    """By which entry one gets at what grows."""
    names = "dict train.history['a']", "dict train.history (2 that grow in it)"
    program = Program(clock)
    for name in names:
        program.held = [holder(16 * KIB, path=name)]
        program.run(60, heap=16 * KIB)
    (found,) = program.watch.findings()
    assert (found.holder, found.first_step) == (names[1], 32)


# --- what is said ---


def test_callbacks_that_raise_are_reported_once_and_training_goes_on(clock: Clock) -> None:
    program, heard = Program(clock), list[LeakFinding]()

    def fail(finding: LeakFinding) -> None:
        raise OSError("no wire")

    program.listeners.add(fail)
    program.listeners.add(heard.append)
    program.held = [holder(16 * KIB)]
    with pytest.warns(RuntimeWarning, match="fail.*waits for leaks, failed with OSError: no wire"):
        program.run(40, heap=16 * KIB)
    program.run(100, heap=16 * KIB)  # a second warning would be an error
    assert [one.grade for one in heard] == [one.grade for one in program.said]


def test_a_callback_may_remove_itself_and_others_and_add_another(clock: Clock) -> None:
    program, heard = Program(clock), list[str]()

    def first(finding: LeakFinding) -> None:
        heard.append(f"first {finding.grade}")
        for handle in (*handles, *handles):
            handle.remove()
        program.listeners.add(lambda finding: heard.append(f"added {finding.grade}"))

    handles = [
        program.listeners.add(first),
        program.listeners.add(lambda _: heard.append("second")),
    ]
    assert "on_leak" in repr(handles[0])
    program.held = [holder(16 * KIB)]
    program.run(100, heap=16 * KIB)
    before, *after = [one.grade for one in program.said]
    assert after
    assert heard == [f"first {before}", *(f"added {grade}" for grade in after)]


def test_a_logger_that_fails_is_no_fault_of_training(clock: Clock) -> None:

    def fail(_: LeakFinding) -> None:
        raise OSError("broken pipe")

    program = Program(clock, says=fail)
    program.held = [holder(16 * KIB)]
    with pytest.warns(RuntimeWarning, match="a finding could not be reported: broken pipe"):
        program.run(100, heap=16 * KIB)


def test_the_record_gets_the_newest_figures_at_the_end(clock: Clock) -> None:
    program = Program(clock, limit=GIB)
    program.held = [holder(16 * KIB)]
    program.run(190, heap=16 * KIB)
    before = len(program.said)
    program.watch.close()
    last = program.events.told[-1][1]
    assert len(program.said) == before
    assert last.steps_left is not None
    truth = (GIB - program.total()) / (16 * KIB)
    assert last.steps_left[0] <= truth <= last.steps_left[1]


def test_steps_that_become_longer_are_followed_where_the_heap_is_not_walked(clock: Clock) -> None:
    program, gained = Program(clock, limit=GIB, resident=True), 0
    program.watch._limits.admit_look = lambda: program.step < 300  # type: ignore[method-assign]
    for step in range(1, 601):
        gained += KIB * step
        since = {"since_step": 1, "steps": max(1, step - 1), "new_bytes": gained}
        program.held = [holder(0, **since)]
        program.run(1, heap=KIB * step, resident=KIB * step)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(600 * KIB, rel=0.1)
    room = GIB - program.total()
    truth = next(n for n in range(10**4) if KIB * (600 * n + n * n / 2) >= room)
    assert found.steps_left is not None
    assert found.steps_left[0] <= truth <= found.steps_left[1] <= 2 * found.steps_left[0]


def test_it_is_too_early_to_say(clock: Clock) -> None:
    program = Program(clock)
    assert program.watch.lines(program.step) == []
    program.run(12)
    assert program.watch.lines(program.step) == ["Leak test: too early to say: 12 of 16 steps"]
    program.run(12)
    assert program.watch.lines(program.step)[-1] == "Leak test: too early to say: 24 of 32 steps"
    program.run(8)
    assert program.watch.lines(program.step)[-1] == "Leak test: quiet"
    program.run(180)
    assert program.watch.lines(program.step) == [
        "Growth per 1,000 steps: +0 B in use in this process",
        "Leak test: quiet",
    ]
    program.run(200, heap=2 * KIB)
    assert program.watch.lines(program.step)[0].startswith("Growth per 1,000 steps: +1")


# --- in the monitor ---


def test_a_leak_test_that_fails_is_off_and_training_goes_on(monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(LeakWatch, "look", fail)
    with MemoryMonitor(device="cpu") as m:
        with pytest.warns(RuntimeWarning, match="leak test is off from now on: MemoryError: none"):
            m.step()
        m._last.due = 0  # type: ignore[union-attr]
        m.step()
        assert (m.step_count, m.findings()) == (2, ())
        last = m.summary().splitlines()[-1]
        assert last == "The leak test is off since step 1: MemoryError: none left"


def test_declared_growth_reaches_the_detector() -> None:
    m = MemoryMonitor(device="cpu")
    with pytest.raises(ValueError, match="declares nothing"):
        m.expect_growth("replay")
    m.expect_growth("replay", bytes="1 GiB", until=5)
    for _ in range(2):
        with m:
            m.expect_growth("cache", rate=100, signal="heap")
            for i in range(6):
                m.expect_growth(f"n{i}", rate=1)
            with pytest.raises(ValueError, match="8"):
                m.expect_growth("the ninth", rate=1)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> LeakFinding:
    """What every look of a monitor finds."""
    one = LeakFinding("likely", "heap", rate_bytes=GIB, holder="list a.b", kind="list",
                      since_step=1)  # fmt: skip
    monkeypatch.setattr(leakwatch, "findings_of", lambda seen: [one])
    monkeypatch.setattr(Ledger, "end", lambda *_: [])
    return one


def test_events_in_a_real_record(tmp_path: Path, found: LeakFinding) -> None:
    with MemoryMonitor(tmp_path / "run.mem", device="cpu", census=False, limit="99 GiB") as m:
        m.step(17)
        assert m.findings()[0].holder == "list a.b"
        assert m.check_memory_leak(15)
        assert not m.check_memory_leak(17)
        assert m.metrics()["memory/leak_bytes_per_step"] == GIB
        assert m.metrics()["memory/steps_left"] > 1
    events = [e for e in read_record(tmp_path / "run.mem").events if e.kind == "finding"]
    assert [e.step for e in events] == [17, 17]
    assert events[0].text.startswith("likely: list a.b +1.00 GiB/step, limit in ")


def test_what_was_found_before_steps_were_something_else_is_taken_back(
    tmp_path: Path, found: LeakFinding
) -> None:
    with MemoryMonitor(tmp_path / "run.mem", device="cpu", census=False) as m:
        m.step(17)
        m._restart_leak_test()
        assert m.findings() == ()
        m.step(7)
    record = read_record(tmp_path / "run.mem")
    told = [e.text for e in record.events if e.kind == "finding"]
    assert told[-1].startswith("no longer: likely: list a.b")
    verdict = verdict_of(figures_of(record))
    assert (verdict.findings, verdict.short) == ((), "too early to say: 7 of 16 steps")


def test_a_finding_is_logged_once_for_each_grade_and_holder(
    found: LeakFinding, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memtools"), MemoryMonitor(device="cpu") as m:
        for _ in range(34):
            m.step()
    lines = [r for r in caplog.records if "list a.b" in r.getMessage()]
    assert [(r.name, r.levelname) for r in lines] == [("memtools", "WARNING")]


def test_a_callback_of_on_leak_may_call_back_in_and_stop(
    tmp_path: Path, found: LeakFinding
) -> None:
    m = MemoryMonitor(tmp_path / "run.mem", device="cpu", census=False)
    heard = list[object]()

    def hear(finding: LeakFinding) -> None:
        m.step()
        heard.append((finding.grade, m.findings()[0].holder, m.summary().count("list a.b")))
        m.stop()

    m.on_leak(hear)
    m.on_leak(lambda: heard.append("the next one, without an argument"))
    with m:
        for _ in range(40):
            m.step()
        assert not m.running
        assert (m.step_count, m.findings()[0].holder) == (17, "list a.b")
    assert heard == [("likely", "list a.b", 1), "the next one, without an argument"]
    record = read_record(tmp_path / "run.mem")
    assert [e.kind for e in record.events if e.kind in ("finding", "end")][-1] == "end"
    assert record.events[-1].text == "exit: stop()"


def test_on_leak_refuses_what_it_cannot_call_and_monitors_without_the_test() -> None:
    with pytest.raises(TypeError, match="on_leak"):
        MemoryMonitor().on_leak(5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="leaks=False"):
        MemoryMonitor(leaks=False).on_leak(print)


@pytest.mark.parametrize("every", [20, "20 steps"])
@pytest.mark.parametrize("leaks", [True, False])
def test_summaries_are_printed(
    every: int | str, leaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with MemoryMonitor(device="cpu", print_every=every, leaks=leaks, census=False) as m:
        for _ in range(59):
            m.step()
    assert capsys.readouterr().err.count("Memory Usage:") == 2


def test_summaries_are_printed_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from memtools._base.every import parse_every
    from memtools._monitor import reporter

    now = [10**9]
    monkeypatch.setattr(reporter.time, "monotonic_ns", lambda: now[0])
    printer = reporter.Printer(parse_every("30 s"))
    assert [printer.is_due(step) for step in (1, 1000)] == [False, False]
    now[0] += 30 * 10**9
    assert [printer.is_due(step) for step in (1001, 1002)] == [True, False]


@pytest.mark.parametrize(("rate", "by"), [(100 * MIB, 24), (6 * MIB, 64)])
def test_a_made_up_device_is_said_in_time(cuda: FakeCuda, rate: int, by: int) -> None:
    with MemoryMonitor(device="cuda:0", limit="64 GiB") as m:
        for _ in range(by):
            cuda.allocate(0, rate)
            m.step()
        (first, *_) = m.findings()
    assert first.signal == "device"
    assert first.rate_bytes == pytest.approx(rate, rel=0.2)
    assert first.steps_left is not None
    truth = (TOTAL - by * rate) / rate
    assert first.steps_left[0] <= truth <= first.steps_left[1] <= 4 * first.steps_left[0]


def test_a_monitor_may_be_started_anew_in_its_callback(found: LeakFinding) -> None:
    m, heard = MemoryMonitor(device="cpu", census=False), list[int]()

    def begin_anew(_: LeakFinding) -> None:
        heard.append(m.step_count)
        if len(heard) < 3:
            m.stop()
            m.start()

    handle = m.on_leak(begin_anew)
    with m:
        for _ in range(60):
            m.step()
        assert m.running
        assert heard == [16, 16, 16], "of each run the first word"
        assert m.step_count == 60 - 32
    handle.remove()


def test_what_a_callback_ends_the_program_with_goes_through(found: LeakFinding) -> None:
    """An interrupt is the user's, and no fault of a callback."""
    m = MemoryMonitor(device="cpu", census=False)

    def interrupt(_: LeakFinding) -> None:
        raise KeyboardInterrupt

    m.on_leak(interrupt)
    m.start()
    m.step(15)
    with pytest.raises(KeyboardInterrupt):
        m.step()
    assert m.step_count == 16
    m.step()
    m.stop()


# --- the last look ---


@pytest.mark.parametrize("steps", [28, 30, 31])
@pytest.mark.parametrize("step_ns", [5 * 10**6, 200 * 10**6])
@pytest.mark.parametrize("rate", [MIB, 32 * KIB])
def test_the_end_of_a_run_has_a_last_look(
    clock: Clock, rate: int, step_ns: int, steps: int
) -> None:
    """Growth that the looks at steps 16 and 24 could not tell is told at the end."""
    program = Program(clock, step_ns=step_ns, limit=1024 * GIB, tensors=True)
    program.held = [holder(rate)]
    program.run(steps, heap=rate, tensors=rate)
    assert program.said == []
    program.watch.close()
    (found,) = program.said
    assert (found.grade, found.holder) == ("suspect", "list Trainer.losses")
    assert found.rate_bytes == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("steps", [17, 20, 24, 31, 40, 90])
def test_a_run_without_growth_has_no_last_look(clock: Clock, steps: int) -> None:
    """Also where the program has taken memory after its last step."""
    program = Program(clock, step_ns=10**8, limit=1024 * GIB, tensors=True)
    program.held = [holder(16 * KIB)]
    program.run(steps)
    looks = program.census.looks
    program.sizes["heap"] += 100 * MIB
    program.watch.close()
    assert (program.said, program.census.looks) == ([], looks)


def test_the_last_look_takes_the_bytes_of_the_newest_step(clock: Clock) -> None:
    """What the program frees or takes after its loop is no growth of its steps."""
    program = Program(clock, step_ns=10**8, limit=1024 * GIB, tensors=True)
    program.held = [holder(MIB)]
    program.run(30, heap=MIB, tensors=MIB)
    program.sizes["heap"] += 500 * MIB
    program.watch.close()
    (found,) = program.said
    assert found.rate_bytes == pytest.approx(MIB, rel=0.1)


@pytest.mark.parametrize("steps", [17, 20, 23])
def test_two_looks_name_nobody(clock: Clock, steps: int) -> None:
    program = Program(clock, limit=1024 * GIB, tensors=True)
    program.run(steps, heap=MIB, tensors=MIB)
    program.watch.close()
    assert program.said == []


# --- when the holder gets known ---


def test_growth_whose_holder_gets_known_is_not_said_to_have_ended(clock: Clock) -> None:
    """`no longer: growing: child process 7` before the name of the same reads as an all-clear. The
    record and callbacks learn that the first finding is over."""
    workers = Looking()
    program, over = Program(clock, workers=workers), list[LeakFinding]()
    program.listeners.add(lambda finding: over.append(finding) if finding.over else None)
    program.run(130, children=MIB)
    assert [one.kind for one in program.watch.findings()] == ["children"]
    assert is_call(program.watch.findings()[0].grade)
    named = LeakFinding("likely", "children", rate_bytes=MIB, holder="deque Queue._buffer",
                        kind="deque", process="worker ForkProcess-1")  # fmt: skip
    workers.found = (named,)
    program.run(100, children=MIB)
    assert [one.holder for one in program.watch.findings()] == ["deque Queue._buffer"]
    assert not any(line.startswith("no longer") for line in program.texts)
    assert program.texts[-1].startswith("likely: worker ForkProcess-1: deque Queue._buffer")
    assert [one.kind for one in over] == ["children"]
    assert [one.kind for _, one in program.events.told if one.over] == ["children"]


# --- Ctrl-C ---


def _functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_interrupt_within_a_look_is_shown_where_the_program_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with MemoryMonitor() as m:
        monkeypatch.setattr(m._live.watch, "_walk", interrupted)  # type: ignore[union-attr]
        # The frame of the innermost function is one of memtools', as in a walk.
        path = leakwatch.__file__
        code = interrupted.__code__.replace(co_filename=path)
        monkeypatch.setattr(interrupted, "__code__", code)
        for _ in range(15):
            m.step()
        with pytest.raises(KeyboardInterrupt) as found:
            m.step()
        assert _functions(found.value)[1:] == ["step"]
        monkeypatch.undo()
        m.step()
        assert m.step_count == 17


def test_an_interrupt_within_a_callback_keeps_its_frames() -> None:
    def called(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def loop(m: MemoryMonitor) -> None:
        while True:
            m.step()

    with MemoryMonitor() as m:
        m.on_pressure(1e-9, called)
        with pytest.raises(KeyboardInterrupt) as found:
            loop(m)
        assert _functions(found.value)[-1] == "called"

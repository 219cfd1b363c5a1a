"""How fast a program without steps goes on, and how its lines are found: by a clock of a test."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memtools._monitor import progress as pace
from memtools._monitor import tracewindow, tracing
from memtools._monitor.progress import Progress
from tests.monitor.test_tracing import HERE as _OTHER
from tests.monitor.test_tracing import FakeBlocks, finding
from tests.monitor.traced import Traced

KIB, MIB = 2**10, 2**20
TICK_NS = 200_000_000
HERE = _OTHER.replace("test_tracing", "test_progress")


@pytest.fixture(autouse=True)
def _affordable_and_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ns = itertools.count(0, 10**6)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(ns))
    yield
    is_on, left = tracemalloc.is_tracing(), list(tracewindow._open)
    for window in left:
        window.end()
    tracemalloc.stop()
    assert not is_on
    assert left == []


class Machine:
    """What a Progress reads."""

    def __init__(self) -> None:
        self.ns = self.cpu_ns = self.blocks = self.tables = 0
        self.heap = 100 * MIB
        self.progress = Progress(
            0.2, lambda: self.blocks, lambda: self.tables, lambda: (self.ns, self.cpu_ns)
        )

    def ticks(self, n: int, kept: int, cpu: float, noise: Callable[[], int] = lambda: 0) -> None:
        """So many ticks, in which it keeps so many bytes and takes that part of a processor."""
        for _ in range(n):
            self.ns += TICK_NS
            self.cpu_ns += int(cpu * TICK_NS)
            self.heap += kept
            self.progress.read(self.heap + noise())


# --- before it is traced ---


def test_what_it_keeps_in_a_tick_and_what_that_wavers_by() -> None:
    machine, chance = Machine(), random.Random(3)
    assert (machine.progress.rate, machine.progress.least_ticks) == (0.0, None)
    machine.ticks(pace.LEAST_READINGS - 1, 100 * KIB, 0.1)
    assert not machine.progress.is_known
    machine.ticks(1, 100 * KIB, 0.1)
    assert machine.progress.is_known
    assert machine.progress.rate == pytest.approx(100 * KIB)
    assert machine.progress.noise == pytest.approx(0, abs=1)
    assert machine.progress.least_ticks == pace.LEAST_TICKS
    machine.ticks(40, 100 * KIB, 0.1, lambda: chance.randrange(-300 * KIB, 300 * KIB))
    assert machine.progress.is_full
    assert machine.progress.noise == pytest.approx(300 * KIB / 3**0.5, rel=0.2)
    assert machine.progress.rate == pytest.approx(100 * KIB, rel=0.2)
    assert 10 < (machine.progress.least_ticks or 0) < 18, "8 times the noise"


def test_python_s_blocks_count_and_tracemalloc_s_tables_do_not() -> None:
    machine = Machine()
    for _ in range(20):
        machine.blocks += 1000
        machine.tables += 10_000
        machine.ticks(1, 17_500, 0.1)
    assert machine.progress.rate == pytest.approx(64_000)


def test_growth_that_is_lost_in_noise_is_not_traced_where_no_time_is_left() -> None:
    """Nobody could tell how much slower the program gets."""
    for cpu, ticks in ((0.1, pace.MOST_TICKS), (1.0, None)):
        machine, chance = Machine(), random.Random(3)
        machine.ticks(40, 10 * KIB, cpu, lambda: chance.randrange(MIB))  # noqa: B023
        assert machine.progress.least_ticks == ticks
    shrinks = Machine()
    shrinks.ticks(20, -KIB, 0.1)
    assert shrinks.progress.least_ticks is None


def test_how_long_a_window_is() -> None:
    machine = Machine()
    machine.ticks(20, 100 * KIB, 0.1)
    progress = machine.progress
    assert progress.ticks(longest=False) == pace.USUAL_TICKS
    assert progress.ticks(longest=True) == pace.MOST_TICKS
    assert progress.probe == pace.LEAST_PROBE
    assert progress.affordable(15, 5, 0) == 15
    assert progress.affordable(15, 5, pace.MOST_TABLES // 4) == 14
    assert progress.affordable(15, 5, pace.MOST_TABLES // 2) == 6
    assert progress.affordable(15, 5, pace.MOST_TABLES) is None


# --- while it is traced ---


def slower(machine: Machine, *ticks: tuple[int, int, float]) -> float | None:
    machine.progress.begin()
    for n, kept, cpu in ticks:
        machine.ticks(n, kept, cpu)
    return machine.progress.slower


@pytest.mark.parametrize(
    ("plain", "traced", "times"),
    [
        ((100 * KIB, 0.10), (100 * KIB, 0.30), 3.0),  # it waits, and has more to do beside
        ((100 * KIB, 1.00), (25 * KIB, 1.00), 4.0),  # it computes all the time, and gets less done
        ((100 * KIB, 0.50), (50 * KIB, 1.00), 4.0),  # it had time left, and has none
        ((100 * KIB, 1.00), (0, 1.00), 20.0),  # nothing is seen to go on
        ((100 * KIB, 0.50), (50 * KIB, 0.25), 1.0),  # other programs have taken the processor
        ((100 * KIB, 0.00), (100 * KIB, 0.004), 1.0),  # next to nothing
        ((100 * KIB, 1.00), (200 * KIB, 0.90), 1.0),  # it goes faster
    ],
)
def test_how_much_slower_it_gets_is_told_by_processor_time_for_what_it_keeps(
    plain: tuple[int, float], traced: tuple[int, float], times: float
) -> None:
    machine = Machine()
    machine.ticks(20, *plain)
    assert slower(machine, (1, 10 * MIB, 1.0), (5, *traced)) == pytest.approx(times, rel=0.01), (
        "without the first tick"
    )
    assert machine.progress.is_certain


def test_it_is_not_known_before_what_it_keeps_stands_out_of_the_noise() -> None:
    machine = Machine()
    machine.ticks(20, 20 * KIB, 1.0)
    assert slower(machine, (1, 0, 1.0)) is None
    machine.ticks(3, 2 * KIB, 1.0)
    assert machine.progress.slower is None, "60 KiB of what tracing itself may take"
    machine.ticks(1, 2 * KIB, 1.0)
    assert machine.progress.slower == pytest.approx(10.0)
    assert not machine.progress.is_certain
    machine.ticks(4, 2 * KIB, 1.0)
    assert machine.progress.is_certain


def test_a_program_that_has_time_left_goes_on_as_before() -> None:
    machine, chance = Machine(), random.Random(3)
    machine.ticks(40, 10 * KIB, 0.1, lambda: chance.randrange(MIB))
    assert slower(machine, (1, 0, 0.2), (3, 10 * KIB, 0.2)) == pytest.approx(2.0)
    assert machine.progress.slowed == 1.0
    assert machine.progress.is_certain


# --- the lines ---


class Told:
    """A program whose ticks are traced."""

    def __init__(self, blocks: FakeBlocks | None = None, reports: Any = None) -> None:
        self.machine = Machine()
        self.traced = Traced(blocks, reports=reports, progress=self.machine.progress)
        self.tracing, self.events = self.traced.tracing, self.traced.events
        self.standing = [finding(100.0 * KIB)]
        self.kept: list[Any] = []
        self.n = 40
        self.cpu = 0.1

    def keep(self, size: int) -> None:
        self.kept.append(bytearray(size))  # the line that keep_line() tells

    def ticks(self, n: int, tick: Callable[[], object] | None = None, kept: int = 100 * KIB) -> int:
        """Returns in how many ticks it was traced."""
        traced = 0
        for _ in range(n):
            self.n += 1
            if tick is None:
                self.keep(kept)
            else:
                tick()
            self.machine.ns += TICK_NS
            self.machine.cpu_ns += int(self.cpu * TICK_NS)
            self.machine.heap += kept
            traced += tracemalloc.is_tracing()
            tables = int(pace.TABLES * self.machine.tables)  # they are a part of the heap
            self.tracing.ticked(self.machine.heap + tables, 1000)
            self.traced.turn(self.n, self.standing)
        return traced

    @property
    def made_at(self) -> str:
        return self.standing[0].made_at


KEEP_LINE = Told.keep.__code__.co_firstlineno + 1
ALL = pace.LEAST_PROBE + 1 + pace.USUAL_TICKS


def test_the_line_of_what_each_tick_keeps_is_known_after_four_seconds() -> None:
    told = Told()
    assert told.ticks(pace.LEAST_READINGS) == 0
    assert tracemalloc.is_tracing()
    assert told.ticks(100) == ALL
    assert told.made_at == f"{HERE}:{KEEP_LINE} in keep"
    (event,) = told.events
    assert (event["steps"], event["sources"], event["found"], event["why"]) == (
        pace.USUAL_TICKS + 1, ("tracemalloc",), 1, ""
    )  # fmt: skip
    assert event["seconds"] >= 0


def test_what_lives_at_one_moment_and_not_at_the_next_is_no_line() -> None:
    """Although there is more of it half-way than at first, and more at last."""
    told, scratch, n = Told(), list[Any](), 0
    half, last = ALL - pace.USUAL_TICKS + 8, ALL

    def tick() -> None:
        nonlocal n
        told.keep(100 * KIB)
        n += tracemalloc.is_tracing()
        scratch[:] = [bytearray(100 * KIB) for _ in range({half: 10, last: 20}.get(n, 0))]

    told.ticks(60, tick)
    assert n == last
    assert told.made_at == f"{HERE}:{KEEP_LINE} in keep"


def test_where_more_lines_grow_than_memory_does_none_is_said() -> None:
    """One of them is a cache whose oldest entries go, and were made before."""
    told, cache = Told(), list[Any]()

    def tick() -> None:
        told.keep(100 * KIB)
        cache.append(bytearray(100 * KIB))

    told.ticks(200, tick)
    assert told.made_at == ""
    assert [event["found"] for event in told.events] == [0, 0, 0]
    assert [event["steps"] for event in told.events] == [pace.USUAL_TICKS + 1, 51, 51]


def test_a_program_that_is_slowed_has_its_line_all_the_same() -> None:
    told = Told()
    told.cpu = 1.0
    told.ticks(pace.LEAST_READINGS)
    told.ticks(60, kept=40 * KIB)
    assert told.made_at == f"{HERE}:{KEEP_LINE} in keep"


@pytest.mark.parametrize(("cpu", "ticks"), [(1.2, 3), (0.75, 5)])
def test_a_program_that_tracing_makes_too_slow_is_left_alone(cpu: float, ticks: int) -> None:
    """By one frame 7 times as slow is too slow in the end, and ten times is at once."""
    told = Told()
    told.ticks(pace.LEAST_READINGS)
    told.cpu = cpu
    assert told.ticks(100) == ticks
    (event,) = told.events
    assert (event["steps"], event["why"]) == (0, tracing.SLOWS)
    assert told.made_at == ""


def test_where_nobody_can_tell_how_slow_it_gets_it_is_not_traced() -> None:
    told, chance = Told(), random.Random(3)
    told.cpu = 1.0
    base = told.machine.heap
    for n in range(200):
        told.machine.heap = base + n * KIB + chance.randrange(MIB)
        assert told.ticks(1, kept=0) == 0
    assert told.events == [{"why": tracing.UNKNOWN}]


@pytest.mark.parametrize(
    ("a_tick", "ticks", "steps"), [(600, 10, 5), (250, 17, 12), (700, 5, 0), (2000, 3, 0)]
)
def test_a_window_is_so_short_that_its_blocks_can_be_listed(
    a_tick: int, ticks: int, steps: int
) -> None:
    told, at = Told(), 0

    def tick() -> None:
        nonlocal at
        told.keep(100 * KIB)
        at = at + 1 if tracemalloc.is_tracing() else 0
        told.machine.tables = a_tick * KIB * (at if at <= 5 else at - 5)

    assert told.ticks(100, tick) == ticks
    (event,) = told.events
    assert event["steps"] == steps
    assert event["why"] == ("" if steps else tracing.TOO_MANY)
    assert bool(told.made_at) == bool(steps)


def test_torch_s_blocks_are_traced_on_where_tracemalloc_is_not_borne() -> None:
    blocks = FakeBlocks()
    told = Told(blocks)
    told.ticks(pace.LEAST_READINGS)
    told.cpu = 2.0

    def tick() -> None:
        blocks.make(47, 100 * KIB)

    assert told.ticks(60, tick) == 3
    assert told.made_at == "train.py:47 in step"
    assert (told.events[0]["sources"], told.events[0]["why"]) == (
        (tracewindow.TORCH,),
        tracing.SLOWS,
    )


def test_torch_s_blocks_are_found_beside_the_programs_own_tracemalloc() -> None:
    blocks = FakeBlocks()
    told = Told(blocks)
    tracemalloc.start(2)
    told.ticks(60)  # which keeps what torch does not know
    told.ticks(120, lambda: blocks.make(47, 100 * KIB))
    assert told.made_at == "train.py:47 in step"
    assert [event["found"] for event in told.events] == [0, 1]
    assert told.events[1]["why"] == tracewindow.PROGRAMS_OWN
    assert tracemalloc.get_traceback_limit() == 2
    tracemalloc.stop()


def test_a_mode_of_torch_would_be_on_for_another_thread() -> None:
    modes = []
    reports = SimpleNamespace(
        blocks=FakeBlocks(),
        reason="no shim",
        join=lambda: False,
        dispatched=lambda: modes.append(1),
    )
    told = Told(reports=reports)
    told.ticks(60)
    assert modes == []
    assert told.made_at == f"{HERE}:{KEEP_LINE} in keep"
    assert told.events[0]["why"] == "no shim"


def test_an_interruption_leaves_nothing_and_a_window_may_follow() -> None:
    told = Told()
    told.ticks(pace.LEAST_READINGS + 3)
    assert tracemalloc.is_tracing()
    told.tracing.interrupt()
    assert not tracemalloc.is_tracing()
    assert not told.tracing.is_open
    assert told.events[0]["why"] == tracing.CUT
    assert told.ticks(100) == pace.LEAST_PROBE + 1 + pace.MOST_TICKS
    assert told.made_at == f"{HERE}:{KEEP_LINE} in keep"


def test_what_takes_long_to_read_is_not_read_at_each_tick() -> None:
    told = Told()
    assert told.tracing.wants(50, told.standing)
    told.tracing.ticked(MIB, 11_000_000)
    assert told.events == [{"why": tracing.TOO_SLOW_TO_READ}]
    assert not told.tracing.wants(51, told.standing)

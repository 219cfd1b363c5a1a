"""The leak test of a monitor: even readings, grades and events, and the census on suspicion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memtools import GateHistory, LeakDetector, LeakVerdict, MemoryMonitor, read_record
from memtools._census.census import TypeGrowth
from memtools._census.holders import Holder
from memtools.monitor import leakwatch
from memtools.monitor.leakwatch import FillVerdict, LeakWatch, Signal, Suspicion, suspects
from memtools.monitor.log import Log
from memtools.record import kinds

MIB, GIB = 2**20, 2**30


class Clock:
    """Time that passes by steps and readings alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr("memtools.monitor.leakwatch.time.monotonic_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Events:
    """A RecordWriter that keeps what it is told."""

    path, closed = "run.mem", False

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def event(self, kind: str, body: str | bytes, **_: object) -> None:
        self.told.append((kind, body if isinstance(body, str) else kinds.read(kind, body)[1]))


class Bounds:
    """Limits that are what a test says."""

    def __init__(self, host: int | None) -> None:
        self._host = host

    def host(self) -> int | None:
        return self._host

    def device(self) -> int | None:
        return None


class Program:
    """A series that depends on the step, read at a cost that does too."""

    def __init__(self, clock: Clock, step_ns: int = 10**6) -> None:
        self.clock, self.step_ns = clock, step_ns
        self.step, self.size, self.cost_ns, self.reads = 0, 100 * MIB, 1000, 0
        self.own = 0
        self.events = Events()
        self.log = Log(self.events, lambda: self.step)  # type: ignore[arg-type]
        self.due = 0

    def read(self) -> int:
        self.reads += 1
        self.clock.ns += self.cost_ns
        return self.size + self.own

    def watch(self, suspicion: Suspicion | None = None, limit: int | None = None) -> LeakWatch:
        signals = [Signal("heap", self.read, 200)]
        return LeakWatch(signals, Bounds(limit), self.log, suspicion)  # type: ignore[arg-type]

    def run(self, watch: LeakWatch, steps: int, grow: int = 0) -> None:
        """As step() of the monitor does it."""
        for _ in range(steps):
            self.step += 1
            self.size += grow
            self.clock.ns += self.step_ns
            if self.clock.ns >= self.due:
                self.due = watch.look(self.step)


# --- readings ---


def fed(unit: int, *readings: tuple[int, int | None]) -> list[tuple[int, int | None]]:
    values = iter(value for _, value in readings)
    signal = Signal("heap", lambda: next(values), 1)
    signal.unit = unit
    return [pair for step, _ in readings for pair in signal.feed(step)]


def test_units_between_two_readings_lie_on_the_line() -> None:
    assert fed(2, (2, 0), (6, 40), (7, 99), (8, 100)) == [(2, 0), (4, 20), (6, 40), (8, 100)]
    assert fed(1, (1, 5), (4, None), (6, 8)) == [
        (1, 5), (2, None), (3, None), (4, None), (5, 8), (6, 8)
    ]  # fmt: skip


def test_the_unit_is_a_sixteenth_of_what_lies_between_readings(clock: Clock) -> None:
    program = Program(clock, step_ns=1000)
    program.cost_ns = 1600  # rests for 320 steps
    watch = program.watch()
    program.run(watch, 2000)
    assert watch._signals[0].unit == 32
    slow = Program(clock, step_ns=10**9)
    watch = slow.watch()
    slow.run(watch, 100)
    assert watch._signals[0].unit == 1
    assert slow.reads == 99, "each step"


def test_readings_take_half_a_percent_of_the_time(clock: Clock) -> None:
    program = Program(clock, step_ns=100_000)
    program.cost_ns = 200_000
    watch = program.watch()
    program.run(watch, 200)
    begin, before = clock.ns, program.reads
    program.run(watch, 20_000)
    share = (program.reads - before) * program.cost_ns / (clock.ns - begin)
    assert 0.003 < share <= 0.005


def test_what_a_reading_costs_does_not_bend_the_line(clock: Clock) -> None:
    """Readings become a hundred times rarer, as with a heap that gets holes."""
    program = Program(clock)
    watch = program.watch()
    for _ in range(16):
        program.run(watch, 250, grow=16384)
        program.cost_ns = int(program.cost_ns * 1.4)
    verdict = watch.verdict()
    assert (verdict.kind, verdict.signal) == ("leak", "heap")
    assert verdict.rate_bytes_per_step == pytest.approx(16384, rel=0.01)
    assert verdict.shape == pytest.approx(1, abs=0.1)


# --- grades and events ---


def test_a_leak_from_growing_to_leak_and_back(clock: Clock) -> None:
    program = Program(clock)
    watch = program.watch(limit=GIB)
    program.run(watch, 4000, grow=16384)
    assert watch.kind == "leak"
    kinds = [text.partition(":")[0] for kind, text in program.events.told if kind == "leak"]
    assert kinds == ["likely", "leak"]
    assert "leak: +16.0 KiB/step in heap since step" in program.events.told[-1][1]
    assert "limit in" in str(watch.verdict())
    program.run(watch, 40_000)
    assert watch.kind == "quiet"
    assert program.events.told[-1][1].startswith("no longer: growing: ")


def test_a_flat_program_says_nothing(clock: Clock) -> None:
    program = Program(clock)
    watch = program.watch(Suspicion())
    program.run(watch, 5000)
    assert (watch.kind, program.events.told, watch.suspicion.looks) == ("quiet", [], 0)  # type: ignore[union-attr]


def test_a_forecast_that_presses_is_an_event_once(clock: Clock) -> None:
    program = Program(clock, step_ns=10**7)
    watch = program.watch(limit=130 * MIB)
    program.run(watch, 1880, grow=16384)
    texts = [text for kind, text in program.events.told if kind == "pressure"]
    assert len(texts) == 1
    assert texts[0].startswith("forecast: limit in ")
    left = watch.forecast()
    assert left is not None
    assert left.lo <= (130 * MIB - program.size) / 16384 <= left.hi


def test_steps_that_do_not_rise_are_not_read_twice(clock: Clock) -> None:
    program = Program(clock)
    watch = program.watch()
    program.run(watch, 100)
    before = program.reads
    clock.ns += 10**12
    watch.look(program.step)
    assert program.reads == before


# --- suspicion ---


class Kept:
    """What a test program keeps, for the census to find."""

    def __init__(self) -> None:
        self.history: list[torch.Tensor] = []


def census_run(program: Program, kept: Kept, steps: int = 1200) -> LeakWatch:
    watch = program.watch(Suspicion())
    for _ in range(steps):
        kept.history.append(torch.ones(64, 64))
        program.run(watch, 1, grow=16384)
    return watch


@pytest.mark.slow
def test_growth_is_looked_for_and_its_holder_named(clock: Clock) -> None:
    program, kept = Program(clock), Kept()
    watch = census_run(program, kept)
    assert watch.suspicion is not None
    assert watch.suspicion.looks >= 2
    line = "+16.0 KiB/step: 1 new [64, 64] float32 tensor a step, held by list Kept.history"
    assert str(watch.holders()[0]) == line
    assert ("holder", line) in program.events.told
    assert program.events.told[0][1].startswith("growing: +16.0 KiB/step in heap")
    assert [text for kind, text in program.events.told if kind == "holder"].count(line) == 1


@pytest.mark.slow
def test_what_a_census_takes_itself_is_no_growth(clock: Clock, monkeypatch: Any) -> None:
    program, kept = Program(clock), Kept()
    real = Suspicion.look

    def look(self: Suspicion, step: int, verdict: LeakVerdict) -> list[Holder]:
        program.own += 5 * MIB
        return real(self, step, verdict)

    monkeypatch.setattr(Suspicion, "look", look)
    watch = census_run(program, kept)
    assert program.own >= 10 * MIB
    assert watch.detector._last()["heap"][1] == program.size
    assert watch.verdict().rate_bytes_per_step == pytest.approx(16384, rel=0.001)


@pytest.mark.slow
def test_looks_become_rarer_and_are_bounded_in_time(clock: Clock) -> None:
    suspicion = Suspicion()
    verdict = LeakVerdict("growing", 16384.0, "low", signal="heap")
    at = []
    for step in range(0, 5000, 10):
        if suspicion.due(step, clock.ns):
            at.append(step)
            suspicion.look(step, verdict)
    assert at == [0, 100, 300, 700, 1500, 3100]
    suspicion._spent = leakwatch.GRACE_NS + 10**9
    assert not suspicion.due(10**6, clock.ns)
    assert suspicion.due(10**6, clock.ns + 101 * 10**9)


@pytest.mark.slow
def test_a_second_look_that_a_short_run_had_no_time_for(clock: Clock) -> None:
    program, kept = Program(clock), Kept()
    watch = census_run(program, kept, steps=330)
    assert (watch.suspicion.looks, watch.holders()) == (1, ())  # type: ignore[union-attr]
    watch.last_look(program.step)
    assert "list Kept.history" in str(watch.holders()[0])
    watch.last_look(program.step)
    assert watch.suspicion.looks == 2  # type: ignore[union-attr]


def holder(new: int, length: int | None, capacity: int | None) -> Holder:
    return Holder("deque(maxlen=100) Replay.items", "deque", length, capacity, new, new * 1000)


def told_apart(monkeypatch: pytest.MonkeyPatch, *found: Holder) -> Suspicion:
    suspicion = Suspicion()
    verdict = LeakVerdict("leak", 1000.0, "high", signal="heap", since_step=1)
    monkeypatch.setattr(leakwatch, "suspects", lambda *_: list(found))
    suspicion.look(0, verdict)
    suspicion.look(10, verdict)
    return suspicion


@pytest.mark.slow
def test_a_buffer_that_fills_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    leak = LeakVerdict("leak", 1000.0, "high", signal="heap", since_step=1)
    suspicion = told_apart(monkeypatch, holder(10, 40, 100))
    fill = suspicion.fill(leak)
    assert fill is not None
    text = "deque(maxlen=100) Replay.items with 40 of at most 100, 97.7 KiB when full"
    assert (fill.text, fill.remaining_bytes) == (text, 60_000)
    watch = Program(Clock(monkeypatch)).watch(suspicion)
    monkeypatch.setattr(LeakDetector, "verdict", lambda self: leak)
    told = watch.verdict()
    assert isinstance(told, FillVerdict)
    assert (told.kind, told.confidence, told.filling) == ("growing", "low", text)
    assert str(told) == (
        f"growing: +1000 B/step in heap since step 1, but no leak: a buffer fills, {text}"
    )


@pytest.mark.slow
def test_growth_beyond_the_buffer_stays_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    suspicion = told_apart(monkeypatch, holder(10, 40, 100))
    assert suspicion.fill(LeakVerdict("leak", 2000.0, "high", signal="heap")) is None
    assert suspicion.fill(LeakVerdict("leak", 1000.0, "high", signal="children")) is None
    assert suspicion.fill(LeakVerdict("quiet", 0.0, "none")) is None
    unbounded = told_apart(monkeypatch, holder(10, 40, None))
    assert unbounded.fill(LeakVerdict("leak", 1000.0, "high", signal="heap")) is None


@pytest.mark.slow
def test_a_gate_history_that_fills_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    other, history = GateHistory(max_bytes="2 MiB"), GateHistory(max_bytes="1 MiB")
    other.append(torch.rand(64, 16))
    suspicion = Suspicion()
    verdict = LeakVerdict("fragmentation", 4096.0, "none", signal="rss", since_step=1)
    suspicion.look(0, verdict)
    for _ in range(20):
        history.append(torch.rand(64, 16))
    suspicion.look(20, verdict)
    fill = suspicion.fill(verdict)
    assert fill is not None
    assert fill.text.startswith("GateHistory with ")
    assert fill.text.endswith(" of at most 1.0 MiB")
    assert fill.remaining_bytes == history.max_bytes - history.arena_bytes


class Types:
    """A Growth in which only lists grew; each question is noted."""

    def __init__(self, count: int) -> None:
        from memtools._census.census import TypeGrowth

        self.groups, self.types = (), (TypeGrowth("list", count),)

    def holders(self, of: Any, *, steps: int) -> Iterator[Holder]:
        yield Holder(f"holder of {of.type}", "list", 1, None, of.count, 0)


def test_what_could_not_be_the_leak_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtools.monitor.leakwatch.largest_graph", lambda: None)
    verdict = LeakVerdict("growing", 500.0, "low", signal="python")
    few, many = Types(20), Types(100)
    assert suspects(few, verdict, 100) == []  # type: ignore[arg-type]
    assert [h.path for h in suspects(many, verdict, 100)] == ["holder of list"]  # type: ignore[arg-type]
    workers = LeakVerdict("growing", 500.0, "low", signal="children")
    assert suspects(many, workers, 100) == []  # type: ignore[arg-type]


class Found:
    """A growth whose holders are known beforehand."""

    types = [TypeGrowth("list", 100)]
    groups: list[Any] = []

    def __init__(self, *holders: Holder) -> None:
        self._holders = holders

    def holders(self, of: Any, *, steps: int) -> tuple[Holder, ...]:
        return self._holders


def held(path: str, kind: str, new: int, length: int | None = None) -> Holder:
    return Holder(path, kind, length, None, new, 0, steps=100)


def test_who_has_a_name_in_the_program_comes_before_c_code(monkeypatch: Any) -> None:
    monkeypatch.setattr("memtools.monitor.leakwatch.largest_graph", lambda: None)
    verdict = LeakVerdict("growing", 500.0, "low", signal="python")
    by_c = held("C code (64 references nobody on the Python heap holds)", "C code", 900)
    losses = held("list module attribute __main__.losses", "list", 90, 90)
    found = suspects(Found(by_c, losses), verdict, 100)  # type: ignore[arg-type]
    assert [h.path for h in found] == [losses.path, by_c.path]


def test_the_variable_of_this_step_is_no_holder(monkeypatch: Any) -> None:
    monkeypatch.setattr("memtools.monitor.leakwatch.largest_graph", lambda: None)
    verdict = LeakVerdict("growing", 500.0, "low", signal="python")
    loss, chain = held("local 'loss' of train()", "variable", 1), held("local 'n'", "variable", 50)
    found = suspects(Found(loss, chain), verdict, 100)  # type: ignore[arg-type]
    assert found == [chain]


@pytest.mark.slow
def test_a_graph_is_named_when_a_second_look_finds_it_larger() -> None:
    verdict = LeakVerdict("growing", 500.0, "low", signal="heap")
    total = torch.ones(1, requires_grad=True)
    for _ in range(500):
        total = total + 1
    suspicion = Suspicion()
    suspicion.look(0, verdict)
    suspicion.look(100, verdict)
    assert all(h.kind != "autograd graph" for h in suspicion.holders)
    for _ in range(100):
        total = total + 1
    suspicion.look(200, verdict)
    assert [h.kind for h in suspicion.holders if "total" in h.path] == ["autograd graph"]


@pytest.mark.parametrize(
    ("grow", "step_ns"), [(210, 5 * 10**6), (600, 4 * 10**6), (1000, 20 * 10**6)]
)
def test_little_growth_that_nobody_is_known_to_hold_is_not_said(
    clock: Clock, grow: int, step_ns: int
) -> None:
    program = Program(clock, step_ns)
    watch = program.watch()
    program.run(watch, 6000, grow=grow)
    assert watch.verdict().kind == "leak"
    assert program.events.told == []
    assert not watch.matters(watch.verdict())
    program.run(watch, 3000, grow=10 * grow)
    assert [kind for kind, _ in program.events.told] == ["leak"]


@pytest.mark.parametrize(("grow", "step_ns"), [(900, 10**6), (300, 10**6), (60, 2 * 10**5)])
def test_growth_that_is_little_a_step_and_much_a_second_is_said(
    clock: Clock, grow: int, step_ns: int
) -> None:
    program = Program(clock, step_ns)
    watch = program.watch()
    program.run(watch, 12_000, grow=grow)
    assert watch.matters(watch.verdict())
    assert [kind for kind, _ in program.events.told][:1] == ["leak"]


@pytest.mark.slow
def test_little_growth_of_a_container_is_said_with_its_time_left(clock: Clock) -> None:
    program, kept = Program(clock), Kept()
    watch = program.watch(Suspicion(), limit=GIB)
    for step in range(1400):
        if step % 32 == 0:
            kept.history.append(torch.ones(64, 64))
        program.run(watch, 1, grow=512)
    leak, holder = program.events.told[:2]
    assert leak[1].startswith("growing: +512 B/step in heap since step ")
    assert "limit in " in leak[1]
    assert (holder[0], "list Kept.history" in holder[1]) == ("holder", True)


@pytest.mark.slow
def test_to_declare_a_buffer_is_said_of_containers_to_who_has_the_monitor(clock: Clock) -> None:
    program, kept = Program(clock), Kept()
    watch = census_run(program, kept, steps=700)
    assert "declare it: expect_growth(" in str(watch.verdict())
    watch.declares = False  # as under `memtools run`
    assert "expect_growth" not in str(watch.verdict())
    other = Program(clock)
    nobody = other.watch()
    other.run(nobody, 700, grow=16384)
    assert str(nobody.verdict()).startswith("growing: +16.0 KiB/step")
    assert "expect_growth" not in str(nobody.verdict())


# --- in the monitor ---


def test_a_leak_test_that_fails_is_off_and_training_goes_on(monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(LeakWatch, "look", fail)
    with MemoryMonitor(device="cpu") as m:
        with pytest.warns(RuntimeWarning, match="leak test is off from here on: MemoryError: none"):
            m.step()
        m._last.due = 0  # type: ignore[union-attr]
        m.step()
        assert (m.step_count, m.leaks().kind) == (2, "quiet")


def test_declared_growth_reaches_the_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    m = MemoryMonitor(device="cpu")
    with pytest.raises(ValueError, match="declares nothing"):
        m.expect_growth("replay")
    m.expect_growth("replay", bytes="1 GiB", until=5)
    for _ in range(2):
        with m:
            m.expect_growth("cache", rate=100, signal="heap")
            detector = m._watch().detector  # type: ignore[union-attr]
            for i in range(6):
                detector.expect_growth(f"n{i}", rate=1)
            with pytest.raises(ValueError, match="8"):
                detector.expect_growth("the ninth", rate=1)


def test_events_in_a_real_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = LeakVerdict("leak", 4096.0, "high", signal="heap", since_step=3)
    monkeypatch.setattr(LeakDetector, "kind", "leak")
    monkeypatch.setattr(LeakDetector, "verdict", lambda self: verdict)
    with MemoryMonitor(tmp_path / "run.mem", device="cpu", census=False) as m:
        m.step(4)
    events = read_record(tmp_path / "run.mem").events
    assert [(e.kind, e.text, e.step) for e in events][1] == ("leak", str(verdict), 4)

"""The leak test of programs that make no steps, or too few: by time."""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memtools._leak.judge import Block
from memtools._monitor import bytime, leakwatch
from memtools._monitor.bytime import (
    PAUSE,
    PAUSE_OF_STEPS,
    QUIET,
    START,
    START_OF_TORCH,
    TICK,
    ByTime,
)
from memtools._record import kinds
from tests.cli.runs import run, write
from tests.monitor.program import GIB, KIB, MIB, Clock, Program, clock, holder

__all__ = ["clock"]
NS = 1_000_000_000


class Watch:
    """A LeakWatch that notes what is done to it."""

    due_step, due_ns = 0, 0

    def __init__(self, seconds: float, only_children: bool) -> None:
        assert seconds == TICK
        self.only_children, self.done = only_children, list[object]()
        self.is_quiet = False

    def look(self, step: int) -> None:
        self.done.append(step)

    def end_quiet(self) -> None:
        self.done.append("speak")

    def interrupt(self) -> None:
        self.done.append("interrupt")

    def leave(self) -> None:
        self.done.append("leave")

    def withdraw(self) -> None:
        self.done.append("withdraw")

    def close(self) -> None:
        self.done.append("close")

    def findings(self) -> tuple[object, ...]:
        return (self,)


class Run:
    """A ByTime, called as its thread would."""

    def __init__(self) -> None:
        self.steps, self.made, self.complaints = 0, list[Watch](), list[str]()
        self.by_time = ByTime(lambda: self.steps, self._make, lambda _, text: self._say(text))
        self.begun = self.by_time._begun_ns

    def _make(self, seconds: float, only_children: bool) -> Any:
        self.made.append(Watch(seconds, only_children))
        return self.made[-1]

    def _say(self, text: str) -> None:
        self.complaints.append(text)

    def at(self, seconds: float) -> bool:
        return self.by_time.tick(self.begun + int(seconds * NS))


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("without_torch")
def test_it_looks_by_time_and_says_nothing_at_first() -> None:
    run = Run()
    assert run.at(START - 0.1)
    assert run.made == []
    for n in range(QUIET + 2):
        assert run.at(START + n * TICK + 0.01)
    (watch,) = run.made
    assert watch.done[:4] == [0, 1, 2, 3]
    assert watch.done.index("speak") == QUIET + 1, "behind the look"
    assert watch.is_quiet
    assert run.by_time.findings() == ()
    watch.is_quiet = False
    assert len(run.by_time.findings()) == 1


@pytest.mark.usefixtures("without_torch")
def test_a_program_that_imports_is_still_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine took half a minute for imports, and their growth was reported."""
    run = Run()
    for n in range(2 * QUIET):
        if n < QUIET and n % 8 == 0:
            monkeypatch.setitem(sys.modules, f"lib{n}", ModuleType(f"lib{n}"))
        run.at(START + n * TICK + 0.01)
    *starting, last = run.made
    assert len(starting) == QUIET // 8 - 1
    assert all("speak" not in watch.done for watch in starting)
    assert "speak" in last.done


@pytest.mark.usefixtures("without_torch")
def test_the_first_steps_leave_the_children_and_the_sixteenth_nothing() -> None:
    run = Run()
    for n in range(4):
        run.at(START + n)
    run.steps = 1
    for n in range(4, 8):
        assert run.at(START + n)
    run.steps = 16
    assert not run.at(START + 8)
    everything, children = run.made
    assert (everything.only_children, children.only_children) == (False, True)
    assert everything.done[-1] == children.done[-1] == "withdraw"
    assert children.done[0] == 0
    assert run.by_time.findings() == ()


@pytest.mark.usefixtures("without_torch")
def test_a_program_whose_steps_have_ended_is_looked_at_until_the_next_one() -> None:
    run = Run()
    for n in range(16, 100):
        run.steps = n
        assert not run.at(n)
    for n in range(99, 99 + int(PAUSE)):
        assert not run.at(n), "it may evaluate"
    assert run.made == []
    for n in range(4):
        assert run.at(99 + PAUSE + n * TICK)
    (watch,) = run.made
    assert not watch.only_children
    assert watch.done == [0, 1, 2, 3]
    run.steps = 100
    assert not run.at(101 + PAUSE)
    assert watch.done[-1] == "withdraw"
    assert run.by_time.findings() == ()
    assert run.at(102 + 2 * PAUSE), "it pauses again"
    assert len(run.made) == 2


@pytest.mark.usefixtures("without_torch")
def test_long_steps_are_not_a_pause() -> None:
    run = Run()
    for n in range(16, 100):
        run.steps = n
        assert not run.at(2 * PAUSE * n)
    newest = 2 * PAUSE * 99
    assert not run.at(newest + 8 * 2 * PAUSE)
    assert run.at(newest + PAUSE_OF_STEPS * 2 * PAUSE)


def test_a_program_with_torch_gets_time_to_make_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("torch", None)
    spec._initializing = True  # type: ignore[attr-defined]
    torch: Any = ModuleType("torch")
    torch.__spec__, torch.Tensor = spec, object
    monkeypatch.setitem(sys.modules, "torch", torch)
    run = Run()
    for seconds in (START, START_OF_TORCH - 1, START_OF_TORCH + 1):
        assert run.at(seconds)
    assert run.made == [], "it is still being imported"
    spec._initializing = False  # type: ignore[attr-defined]
    assert run.at(START_OF_TORCH + 2)
    assert len(run.made) == 1


@pytest.mark.usefixtures("without_torch")
def test_a_program_that_begins_to_import_torch_is_not_slowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    assert run.at(START)
    torch: Any = ModuleType("torch")
    torch.__spec__, torch.Tensor = ModuleSpec("torch", None), object
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert run.at(START + 1)
    assert run.made[0].done == [0, "withdraw"]
    assert run.at(START_OF_TORCH + 1)
    assert run.made[1].done == [0], "it begins anew"


@pytest.mark.usefixtures("without_torch")
def test_a_look_for_which_the_end_does_not_wait_leaves_nothing_behind() -> None:
    run = Run()
    run.at(START)

    def look(step: int) -> None:
        run.by_time._is_over = True

    run.made[0].look = look  # type: ignore[method-assign]
    run.by_time._begun_ns -= 10 * NS
    run.by_time._sleeps.acquire()
    thread = threading.Thread(target=run.by_time._run)
    thread.start()
    while not run.by_time._is_over:
        pass
    run.by_time._sleeps.release()
    thread.join()
    assert run.made[0].done == [0, "leave"]


@pytest.mark.usefixtures("without_torch")
def test_the_thread_ends_with_the_run_and_a_failure_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    run.by_time.start()
    run.by_time.close()
    run.by_time.close()
    run = Run()
    run.at(START)
    run.by_time._sleeps.acquire()
    run.by_time.close()
    assert run.made[0].done == [0, "close"]
    run = Run()

    def fail(_: int) -> bool:
        raise MemoryError("none left")

    monkeypatch.setattr(bytime, "TICK", 0.0)
    monkeypatch.setattr(run.by_time, "tick", fail)
    run.by_time._sleeps.acquire()
    # On a thread of its own, whose signals it blocks: all children of this one would inherit that.
    thread = threading.Thread(target=run.by_time._run)
    thread.start()
    thread.join()
    assert run.complaints == ["the leak test by time is off from now on: MemoryError: none left"]


# --- what a LeakWatch makes of it ---


def by_time(clock: Clock, **more: Any) -> Program:
    program = Program(clock, step_ns=int(TICK * NS), seconds=TICK, **more)
    program.watch.is_quiet = True
    return program


def test_it_is_told_by_the_second(clock: Clock) -> None:
    program = by_time(clock, limit=GIB)
    program.held = [holder(32 * KIB)]
    program.run(70, heap=32 * KIB)
    assert (program.said, program.events.told) == ([], [])
    program.watch.end_quiet()
    (said,) = program.said
    assert said.rate_bytes == pytest.approx(160 * KIB, rel=0.01)
    assert (said.per, said.first_step, said.steps_left) == ("s", None, None)
    assert said.what == "10 new tensors a second"
    assert said.seconds_left is not None
    truth = (GIB - program.total()) / (160 * KIB)
    assert said.seconds_left[0] <= truth <= said.seconds_left[1]
    assert str(said).startswith("growing: list Trainer.losses +160.0 KiB/s (10 new tensors a ")
    program.run(64)
    assert program.said[-1].over
    program.watch.close()
    assert isinstance(program.events.told[-1][1], kinds.Finding)


def test_growth_that_has_stopped_before_it_was_said_is_not_said(clock: Clock) -> None:
    program = by_time(clock)
    program.held = [holder(320 * KIB)]
    program.run(50, heap=320 * KIB)
    program.run(30)
    program.watch.end_quiet()
    program.watch.close()
    assert (program.said, program.events.told) == ([], [])


def test_a_short_run_has_it_in_the_record_alone(clock: Clock) -> None:
    program = by_time(clock)
    program.held = [holder(320 * KIB)]
    program.run(50, heap=320 * KIB)
    program.watch.close()
    assert program.said == []
    assert [one.holder for _, one in program.events.told] == ["list Trainer.losses"]
    program = by_time(clock)
    program.held = [holder(320 * KIB)]
    program.run(40, heap=320 * KIB)
    program.watch.close()
    assert program.events.told == [], "it may be the program's start"


def test_no_garbage_is_collected_on_a_thread_of_ours(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    program = by_time(clock)
    program.run(100, heap=36 * KIB)
    program.watch.end_quiet()
    assert collected == []
    assert [(one.grade, one.kind) for one in program.said] == [("suspect", "")]


def test_containers_that_are_longer_by_chance_are_no_finding(clock: Clock) -> None:
    """At any point of a program some container is longer than at the points before."""
    program, chance = by_time(clock), random.Random(7)
    program.held = [holder(300 * KIB)]
    for _ in range(300):
        program.sizes["heap"] = 100 * MIB + chance.randrange(20 * MIB)
        program.run(1)
        program.watch.end_quiet()
    assert program.said == []


def test_growth_in_noise_is_told_with_its_rate(clock: Clock) -> None:
    program, chance = by_time(clock), random.Random(7)
    program.held = [holder(400 * KIB)]
    for n in range(1, 301):
        program.sizes["heap"] = 100 * MIB + n * 400 * KIB + chance.randrange(4 * MIB)
        program.run(1)
        if n >= QUIET:
            program.watch.end_quiet()
    assert not any(one.over for one in program.said)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(2000 * KIB, rel=0.1)
    program.sizes["heap"] = 100 * MIB  # the program ends, and lets go of all
    program.run(8)
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(2000 * KIB, rel=0.1)


@pytest.mark.parametrize(("with_it", "kind"), [("VmData", "outside malloc"), ("", "first writes")])
def test_resident_growth_that_is_not_in_use_is_told_by_the_second(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, with_it: str, kind: str
) -> None:
    """Which array fills is not looked for on another thread than the program's."""
    monkeypatch.setattr(leakwatch, "block_that_fills", lambda least: Block(2 * GIB, least))
    monkeypatch.setattr(leakwatch, "owners_of", lambda ranges: pytest.fail("is looked for"))
    program = Program(clock, seconds=TICK, step_ns=200 * 10**6, limit=8 * GIB, resident=True)
    noise = random.Random(3)
    for _ in range(600):
        off = noise.randrange(4 * MIB)
        grow = {"rss": 64 * KIB + off, "resident": 64 * KIB + off}
        if with_it == "VmData":
            grow["VmData"] = 64 * KIB
        program.run(1, **grow)
        for name in ("rss", "resident"):
            program.sizes[name] -= off
    (found,) = program.watch.findings()
    assert (found.kind, found.per) == (kind, "s")
    assert found.rate_bytes == pytest.approx(5 * 64 * KIB, rel=0.1)
    assert " step" not in found.what


def test_what_grew_until_the_first_step_is_taken_back(clock: Clock) -> None:
    program = by_time(clock)
    program.held = [holder(320 * KIB)]
    program.run(70, heap=320 * KIB)
    program.watch.end_quiet()
    program.watch.withdraw()
    assert [(one.holder, one.over) for one in program.said] == [
        ("list Trainer.losses", False), ("list Trainer.losses", True)
    ]  # fmt: skip
    program.watch.look(500)


# --- under memtools run ---

COLLECTS = """
    import time

    class Crawler:
        def __init__(self):
            self.pages = {}

    def collect(crawler, seconds):
        begin, n = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            while n < 50 * (time.monotonic() - begin):
                crawler.pages[n] = bytearray(20480)
                n += 1
            time.sleep(0.02)

    collect(Crawler(), 17)
"""
STARTS = """
    import multiprocessing, time

    def keep(seconds):
        kept, begin = [], time.monotonic()
        while time.monotonic() - begin < seconds:
            kept.append(bytearray(102400))
            time.sleep(0.05)

    child = multiprocessing.Process(target=keep, args=(24,), name="Keeper")
    child.start()
    child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "who", "least", "at_first", "most"),
    [
        (COLLECTS, "dict Crawler.pages", 800, 1250, 1250),
        # At first what the fork copies of its parent's pages counts, too.
        (STARTS, "child process .* (Keeper)", 1000, 3200, 2400),
    ],
)
def test_a_script_without_steps_is_told_what_grows(
    text: str, who: str, least: int, at_first: int, most: int, tmp_path: Path
) -> None:
    write(tmp_path, text)
    found = run(tmp_path, "--limit", "8 GiB", "train.py")
    lines = found.stderr.decode().splitlines()
    end = next(i for i, line in enumerate(lines) if "; peak" in line)
    pattern = re.escape(who).replace(r"\.\*", ".*") + r" +\+([\d.]+) ([KM])iB/s"
    at_once, last = lines[:end], lines[end:]
    for part in (at_once, last):
        (said, *_) = [one for one in (re.search(pattern, line) for line in part) if one]
        rate = float(said[1]) * (1024 if said[2] == "M" else 1)
        assert least <= rate <= (at_first if part is at_once else most)
    assert any("growing  " in line or "likely  " in line for line in lines[end:])
    assert any("  limit in " in line for line in lines[end:])

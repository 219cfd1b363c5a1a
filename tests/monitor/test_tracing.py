"""Where it was made: programs whose line is known, and what a window leaves behind: nothing."""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtools import LeakFinding, read_record
from memtools._leak.finding import Key
from memtools._leak.ledger import Ledger
from memtools._leak.series import Points
from memtools._monitor import heaplines, places, tracewindow, tracing
from memtools._monitor.log import Log
from memtools._monitor.places import Place, Site
from memtools._monitor.reporter import Listeners, Reporter
from memtools._monitor.tracewindow import TraceWindow
from memtools._monitor.tracing import Tracing
from tests.monitor.program import LOOKS, Clock, Program, clock, holder
from tests.monitor.traced import MS, STEADY, Traced, line_of

__all__ = ["clock"]
KIB, MIB = 2**10, 2**20
HERE = os.path.relpath(__file__)


@pytest.fixture(autouse=True)
def _looks_are_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor of any speed: what is done at a boundary takes a millisecond."""
    ns = itertools.count(0, 10**6)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(ns))


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    start = tracemalloc.start
    yield
    is_on = tracemalloc.is_tracing()
    tracemalloc.stop()
    assert not is_on
    assert tracemalloc.start is start
    assert not tracewindow._open


class Loop:
    """Steps of a program, each of which keeps something."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.joined = np.zeros(8 * KIB, np.uint8)
        self.scratch: Any = None

    def keep(self, size: int) -> None:
        self.kept.append(bytearray(size))  # the line that keep_line() tells

    def grow(self, size: int) -> None:
        self.joined = np.concatenate((self.joined, np.zeros(size, np.uint8)))

    def use(self, size: int) -> None:
        self.scratch = bytearray(size)


def traced(step: Callable[[], object], steps: int = 2) -> TraceWindow:
    """A window over a loop, once it is over."""
    window, n = TraceWindow(steps, None), 0
    assert window.begin(n)
    while window.is_open:
        step()
        n += 1
        window.turn(n)
    assert n == steps + 2, "one to probe, and one before what lives is noted"
    return window


# --- windows ---


def test_what_each_step_keeps_is_found_at_the_line_that_makes_it() -> None:
    loop = Loop()

    def step() -> None:
        loop.use(300 * KIB)
        loop.keep(100 * KIB)

    even, grown, _ = traced(step).sites()
    assert even[0].place == Place(__file__, line_of(Loop.keep))
    assert even[0].rate == pytest.approx(100 * KIB, rel=0.01)
    assert all(site.place.line != line_of(Loop.use) for site in grown), "it cancels"
    assert places.name_of(even[0].place) == f"{HERE}:{line_of(Loop.keep)} in keep"


def test_a_buffer_that_is_made_anew_counts_by_what_it_has_become_longer() -> None:
    loop = Loop()
    for _ in range(50):
        loop.grow(10 * KIB)
    even, _, _ = traced(lambda: loop.grow(10 * KIB)).sites()
    assert even[0].place.line == line_of(Loop.grow)
    assert even[0].rate == pytest.approx(10 * KIB, rel=0.05)


def test_what_another_thread_makes_is_found() -> None:
    loop = Loop()

    def step() -> None:
        thread = threading.Thread(target=loop.keep, args=(100 * KIB,))
        thread.start()
        thread.join()

    even, _, _ = traced(step).sites()
    assert even[0].place.line == line_of(Loop.keep)


@pytest.mark.parametrize("beside", [0, 300])
def test_a_buffer_that_is_made_larger_in_place_counts_from_when_it_is_seen(beside: int) -> None:
    held, n, kept = bytearray(1 << 20), 0, list[bytes]()

    def step() -> None:
        nonlocal n
        n += 1
        held.extend(bytes(len(held) // 8 * (n % 4 == 0))) or kept.append(bytes(beside))  # type: ignore[func-returns-value]

    place = Place(__file__, step.__code__.co_firstlineno + 3)
    _, grown, late = traced(step, 16).sites()
    rates = [{site.place: site.rate for site in sites}.get(place, 0.0) for sites in (grown, late)]
    assert rates[0] > 90 * KIB
    assert 30 * KIB < rates[1] < 60 * KIB


def test_what_grows_in_one_half_alone_is_not_even() -> None:
    loop, n = Loop(), iter(range(9))
    even, grown, _ = traced(lambda: loop.keep(100 * KIB if next(n) == 2 else 0)).sites()
    line = line_of(Loop.keep)
    assert all(site.place.line != line or site.rate < KIB for site in even)
    assert grown[0].place.line == line


def test_garbage_is_not_what_stays_where_it_is_collected() -> None:
    import gc

    loop, n = Loop(), 0

    def step() -> None:
        cycle: list[Any] = [bytearray(200 * KIB)]
        cycle.append(cycle)
        loop.keep(100 * KIB)

    gc.disable()
    try:
        window = TraceWindow(2, None)
        window.begin(0)
        while window.is_open:
            step()
            n += 1
            window.turn(n, lambda: (gc.collect(), None)[1])
    finally:
        gc.enable()
    assert [site.place.line for site in window.sites()[0][:1]] == [line_of(Loop.keep)]


# --- whose tracemalloc it is ---


def test_what_the_program_starts_inside_a_window_is_the_programs() -> None:
    window = TraceWindow(2, None)
    window.begin(0)
    tracemalloc.start(2)
    try:
        assert window.turn(1), "nothing is left to trace"
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traceback_limit() == 2
        assert window.why == tracewindow.STOPPED
        assert window.sites() == ([], [], [])
    finally:
        tracemalloc.stop()


def test_what_the_program_stops_is_not_stopped_twice() -> None:
    window = TraceWindow(2, None)
    window.begin(0)
    assert not window.turn(1)
    tracemalloc.stop()
    assert [window.turn(step) for step in (2, 3, 4)] == [False, False, True]
    assert window.sites() == ([], [], [])
    assert window.why == tracewindow.STOPPED


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forks of a process with threads warn")
def test_a_forked_child_traces_nothing() -> None:
    window = TraceWindow(2, None)
    window.begin(0)
    child = os.fork()
    if child == 0:
        os._exit(int(tracemalloc.is_tracing() or bool(tracewindow._open)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tracemalloc.is_tracing()
    window.end()


def test_a_step_that_does_not_end_is_not_traced_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracewindow, "LONGEST_S", 0.01)
    window = TraceWindow(2, None)
    ended = threading.Event()
    end = window.end

    def ends() -> None:
        end()
        ended.set()

    monkeypatch.setattr(window, "end", ends)  # before the thread begins, which may be quick
    window.begin(0)
    assert ended.wait(120)
    assert not tracemalloc.is_tracing()
    assert window.turn(1)
    assert "took more than" in window.why


def test_the_time_of_a_window_is_that_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps it has: after one of them the thread waits for as long again."""
    asked: list[float] = []
    window = TraceWindow(2, None)

    class Over:
        def acquire(self, timeout: float) -> bool:
            asked.append(timeout)
            window.turned = 100.0 + 50.0 * len(asked)  # a step has ended, meanwhile
            return len(asked) == 3

    monkeypatch.setattr(time, "monotonic", lambda: 110.0 + 50.0 * len(asked))
    window.wait(Over())  # type: ignore[arg-type]
    assert asked == [60.0, 50.0, 50.0]
    assert window.why == ""


# --- torch's blocks ---


class FakeBlocks:
    """torch's reports: blocks that a test makes, by the line that it says."""

    def __init__(self) -> None:
        self.is_on = True
        self.traces = False
        self.generation = 0
        self.living: list[tuple[int, int, int]] = []  # generation, site, bytes

    def trace(self, on: bool) -> None:
        self.traces = on

    def turn(self) -> int:
        self.generation += 1
        return self.generation

    def make(self, site: int, size: int) -> None:
        self.living.append((self.generation, site if self.traces else 0, size))

    def sites(self, first: int, last: int) -> list[tuple[int, int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for born, site, size in self.living:
            if site and first <= born <= last:
                total, blocks = found.get(site, (0, 0))
                found[site] = total + size, blocks + 1
        return sorted(((s, b, n) for s, (b, n) in found.items()), key=lambda row: -row[1])

    def site_of(self, address: int, /) -> int | None:
        return None

    def frames(self, site: int) -> tuple[tuple[str, int, str], ...]:
        return ((torch_file(), 12, "forward"), (os.path.abspath("train.py"), site, "step"))


def torch_file() -> str:
    return f"{sysconfig.get_path('purelib')}/torch/nn/modules/linear.py"


def test_blocks_of_torch_are_found_by_their_site_and_told_by_the_users_line() -> None:
    blocks = FakeBlocks()
    window = TraceWindow(2, blocks)
    window.begin(0)
    assert window.sources == (tracewindow.TRACEMALLOC, tracewindow.TORCH)
    step = 0
    while window.is_open:
        blocks.living = [one for one in blocks.living if one[1] != 51]  # a step's own
        blocks.make(47, 100 * KIB)
        blocks.make(51, 900 * KIB)
        step += 1
        window.turn(step)
    assert not blocks.traces
    (site,) = [one for one in window.sites()[0] if one.place.file.endswith("/train.py")]
    assert site.place.line == 47
    assert site.rate == 100 * KIB + tracewindow.OF_A_BLOCK
    assert places.name_of(site.place) == "train.py:47 in step"


def test_a_line_that_makes_blocks_of_both_kinds_is_one() -> None:
    blocks, loop = FakeBlocks(), Loop()
    place = Place(__file__, line_of(Loop.keep), "keep")
    blocks.frames = lambda site: (place,)  # type: ignore[method-assign]
    window, step = TraceWindow(2, blocks), 0
    window.begin(0)
    while window.is_open:
        loop.keep(100 * KIB)
        blocks.make(1, 50 * KIB)
        step += 1
        window.turn(step)
    even = window.sites()[0]
    assert even[0].place == place
    assert even[0].rate == pytest.approx(150 * KIB, rel=0.02)
    assert [site.place.line for site in even].count(place.line) == 1


# --- which line of a stack, and its name ---


def frame(file: str, line: int = 1, function: str | None = "f") -> Place:
    return Place(file, line, function)


def test_the_innermost_line_of_the_users_code_is_named() -> None:
    library, standard = frame(torch_file()), frame(threading.__file__)
    user, outer = frame("/home/me/data.py", 2), frame("/home/me/train.py", 3)
    assert places.place_of([library, standard, user, outer]) == user
    assert places.place_of([standard, library, standard]) == library
    assert places.place_of([standard, frame("<string>")]) == standard
    assert places.place_of([frame("<string>")]) == frame("<string>")
    assert places.place_of([frame("/tmp/torchinductor_me/ab/cab.py"), user]) == user
    assert places.place_of([frame("/usr/lib/python3/dist-packages/x.py"), user]) == user
    assert places.place_of([]) is None


def test_what_memtools_makes_for_itself_is_nobodys() -> None:
    mine, user = frame(tracewindow.__file__), frame("/home/me/train.py")
    assert places.place_of([mine, user]) is None
    assert places.place_of([frame(threading.__file__), mine, user]) is None
    assert places.place_of([frame(tracemalloc.__file__)]) is None, "one frame shows no more"


def test_a_place_is_named_by_the_path_from_here_and_its_function(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("a = 1\nclass A:\n    def f(self):\n        def g():\n            return 1\n"
                      "        return g\n")  # fmt: skip
    named = [places.name_of(Place(str(source), line)) for line in (1, 2, 4, 5, 6)]
    assert named == [f"{source}:1", f"{source}:2", f"{source}:4 in g", f"{source}:5 in g",
                     f"{source}:6 in f"]  # fmt: skip
    assert places.name_of(Place(os.path.abspath("a/b.py"), 3, "f")) == "a/b.py:3 in f"
    assert places.name_of(Place("/no/such/file.py", 3)) == "/no/such/file.py:3"
    assert places.name_of(Place("/no/such/../file.py", 3)) == "/no/file.py:3"
    assert places.name_of(Place("<string>", 3, "<module>")) == "<string>:3"
    assert places.name_of(Place("/a\x1b[31m.py", 3, "f")) == "/a\\x1b[31m.py:3 in f"


# --- which places explain which findings ---


def finding(rate: float, holder: str = "list A.b", **more: Any) -> LeakFinding:
    return LeakFinding("growing", "heap", rate_bytes=rate, holder=holder, kind="list", **more)


def sites(*rates: float) -> list[Site]:
    return [Site(Place("/home/me/train.py", n, "f"), rate) for n, rate in enumerate(rates, 1)]


def lines(found: dict[Key, tuple[Place, ...]]) -> dict[str, list[int]]:
    return {key[1]: [place.line for place in places] for key, places in found.items()}


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((100.0,), [1]),
        ((60.0, 30.0, 9.0), [1, 2]),
        ((85.0, 10.0), [1]),  # the second makes less than a fifth
        ((40.0,), None),  # less than half of it
        ((160.0,), None),  # something else
        ((160.0, 70.0), [2]),
        ((149.0,), [1]),
        ((100.0, 60.0), [1]),
        ((100.0, 95.0), None),  # It may be either.
        ((), None),
    ],
)
def test_one_finding_gets_the_largest_lines_that_make_its_rate(
    rates: tuple[float, ...], said: list[int] | None
) -> None:
    found = lines(places.places_of([finding(100.0)], sites(*rates)))
    assert found.get("list A.b") == said


@pytest.mark.parametrize(("rate", "told"), [(24.0, {}), (30.0, {"list A.b": [1]})])
def test_the_nodes_of_a_graph_are_not_seen(rate: float, told: dict[str, list[int]]) -> None:
    """The tensors that they keep are."""
    graph = replace(finding(100.0), kind="autograd graph")
    assert lines(places.places_of([graph], sites(rate))) == told
    assert places.places_of([finding(100.0)], sites(rate)) == {}


def test_several_findings_get_the_lines_of_their_rates_or_none() -> None:
    a, b = finding(100.0, "list A.a"), finding(10.0, "list A.b")
    assert lines(places.places_of([a, b], sites(100.0, 10.0))) == {
        "list A.a": [1], "list A.b": [2]
    }  # fmt: skip
    alike = finding(90.0, "list A.c")
    assert places.places_of([a, alike], sites(100.0, 90.0)) == {}, "nobody knows which"
    assert lines(places.places_of([b, a], sites(60.0, 40.0))) == {"list A.a": [1, 2]}
    assert places.places_of([finding(0.0)], sites(100.0)) == {}


@pytest.mark.parametrize(
    ("rises", "steps"),
    [
        ([100] * 40, tracing.LONGER),
        ([0] * 40, tracing.LONGER),
        (([0] * 9 + [1000]) * 4, 22),
        (([0] * 19 + [1000]) * 2, 44),
        ([0] * 30 + [1000] + [0] * 9, tracing.ONE_LUMP),
        ([0, 1000, *[0] * 9, 1125, *[0] * 10, 1265, *[0] * 6], 30),  # a buffer: larger, rarer
        ([0, 1000, *[0] * 9, 4000, *[0] * 20], tracing.MOST_OF_LUMPS),
        (([0, 0, 1000]) * 13, tracing.LEAST_OF_LUMPS),
        (([100] * 9 + [400]) * 4, tracing.LONGER),  # the lumps do not carry it
    ],
)
def test_where_growth_comes_in_lumps_the_window_has_two_of_them(
    rises: list[int], steps: int
) -> None:
    readings = [10**9]
    for rise in rises:
        readings.append(readings[-1] + rise)
    assert tracing.steps_for(readings) == steps


# --- when ---


def test_a_finding_gets_its_line_once() -> None:
    told, loop = Traced(), Loop()
    standing = [finding(100.0 * KIB)]
    assert told.run(range(32, 80), standing, lambda: loop.keep(100 * KIB)) == [34]
    assert standing[0].made_at == f"{HERE}:{line_of(Loop.keep)} in keep"
    (event,) = told.events
    assert (event["steps"], event["sources"], event["found"], event["why"]) == (
        3, ("tracemalloc",), 1, ""
    )  # fmt: skip
    assert event["ms"] > 0


def test_what_is_not_explained_is_traced_longer_and_then_left() -> None:
    told, loop = Traced(), Loop()
    standing = [finding(100.0 * KIB)]
    opened = told.run(range(32, 300), standing, lambda: loop.keep(10 * KIB))
    assert len(opened) == tracing.ATTEMPTS
    assert [event["steps"] for event in told.events] == [3, 9, 9, 9]
    assert [event["found"] for event in told.events] == [0, 0, 0, 0]
    assert [event["sources"] for event in told.events][2:] == [("tracemalloc",), ("heap lines",)]
    assert standing[0].made_at == ""
    assert not told.tracing.wants(400, standing)


def test_the_line_of_one_is_not_said_of_another() -> None:
    told, loop = Traced(), Loop()
    standing = [finding(100.0 * KIB)]
    told.run(range(32, 40), standing, lambda: loop.keep(100 * KIB))
    standing.append(finding(90.0 * KIB, "list A.c"))
    told.run(range(40, 48), standing, lambda: loop.keep(100 * KIB))
    assert standing[1].made_at == ""


@pytest.mark.parametrize(
    "other",
    [
        finding(KIB, process="worker 2"),
        LeakFinding("fills", "heap", rate_bytes=KIB, holder="deque A.b"),
        LeakFinding("growing", "shm", rate_bytes=KIB, kind="shared memory"),
        LeakFinding("growing", "rss", rate_bytes=KIB, kind="mapped files"),
        LeakFinding("suspect", "heap", rate_bytes=KIB, first_step=30),
        finding(KIB, made_at="train.py:3"),
    ],
)
def test_nothing_is_traced_for_what_no_line_of_this_process_makes(other: LeakFinding) -> None:
    assert not Traced().tracing.wants(32, [other])


def test_where_it_is_turned_off_the_record_says_so_once() -> None:
    told = Traced(why_not="it is turned off")
    assert told.events == []
    for step in range(32, 40):
        assert not told.tracing.wants(step, [finding(KIB)])
    assert told.events == [{"why": "it is turned off"}]


def test_beside_the_programs_own_tracemalloc_the_record_says_why_nothing_is_known() -> None:
    tracemalloc.start()
    try:
        told = Traced()
        assert told.run(range(32, 60), [finding(KIB)], lambda: None) == [34]
        assert told.events == [{"why": tracewindow.PROGRAMS_OWN}]
    finally:
        tracemalloc.stop()


def test_two_monitors_trace_one_after_the_other() -> None:
    first, second = Traced(), Traced()
    for told in (first, second):
        told.takes_plain_steps()
        assert told.tracing.wants(32, [finding(KIB)])
    first.tracing.begin(32)
    assert not second.tracing.is_due(32)
    first.tracing.close()
    assert second.tracing.is_due(33)


@pytest.mark.parametrize(
    ("slower", "frames"), [(1.0, 16), (2.1, 16), (2.2, 4), (2.5, 4), (2.6, 1), (7.0, 1), (7.1, 0)]
)
def test_the_slower_a_program_gets_the_fewer_frames_are_kept(slower: float, frames: int) -> None:
    window = TraceWindow(2, None)
    window.begin(0)
    assert tracemalloc.get_traceback_limit() == 1
    assert window.turn(1, slower=slower) == (frames == 0)
    if frames:
        assert tracemalloc.get_traceback_limit() == frames
        assert window.is_open
    else:
        assert not tracemalloc.is_tracing()
        assert window.why == "tracemalloc would make a step take more than 10 times as long"
    window.end()


def test_what_one_frame_makes_too_slow_is_not_traced_and_the_record_says_so() -> None:
    told, loop = Traced(took=lambda step: (10 * MS, (10 if step < 35 else 120) * MS)), Loop()
    standing = [finding(100.0 * KIB)]
    told.run(range(32, 40), standing, lambda: loop.keep(100 * KIB))
    assert standing[0].made_at == ""
    assert [(event["steps"], event["why"]) for event in told.events] == [(0, tracewindow.TOO_SLOW)]


def test_work_of_other_programs_does_not_make_tracing_slow() -> None:
    """A step that had to wait for a processor is not slower by what it has waited."""
    told, loop = Traced(took=lambda step: ((10 if step < 35 else 120) * MS, 10 * MS)), Loop()
    standing = [finding(100.0 * KIB)]
    told.run(range(32, 40), standing, lambda: loop.keep(100 * KIB))
    assert standing[0].made_at == f"{HERE}:{line_of(Loop.keep)} in keep"


def test_how_long_a_plain_step_takes_is_known_before_a_window_is_opened() -> None:
    told = Traced()
    assert told.tracing.wants(32, [finding(KIB)])
    for ns in (100 * MS, MS, 10 * MS):  # one of them has collected garbage, or is noise
        assert not told.tracing.is_due(32)
        told.tracing.step_took(ns, ns)
    assert told.tracing.is_due(35)


def test_with_one_frame_generated_code_is_not_named() -> None:
    """It makes objects of memtools as well, and one frame does not show who calls it."""
    window, kept, n = TraceWindow(2, None), list[Place](), 0
    window.begin(n)
    while window.is_open:
        kept += [Place("a.py", i, str(i)) for i in range(1000)]
        n += 1
        window.turn(n, slower=3.0)
    _, grown, _ = window.sites()
    assert grown
    assert not [site for site in grown if site.place.file.startswith("<")]


@pytest.mark.parametrize("slower", [1.0, 2.3])
def test_of_a_stack_that_is_cut_short_no_library_is_named(slower: float) -> None:
    window, kept, n = TraceWindow(2, None), list[Any](), 0
    window.begin(n)
    while window.is_open:
        kept.append(copy.deepcopy([[[[[1.0] * 100] * 2] for _ in range(100)]]))
        n += 1
        window.turn(n, slower=slower)
    _, grown, _ = window.sites()
    assert all(site.place.file == __file__ or site.rate < KIB for site in grown)
    assert (grown[0].rate > 50 * KIB) == (slower == 1.0)


def test_tracemalloc_is_turned_off_inside_of_a_first_step_that_takes_too_long() -> None:
    """So that this step, too, takes less than ten times as long as a plain one."""
    blocks = FakeBlocks()
    window = TraceWindow(2, blocks, probe_s=0.001)
    window.begin(0)
    until = time.monotonic() + 10
    while tracemalloc.is_tracing() and time.monotonic() < until:
        pass  # the step of a program that does not let go of the GIL
    assert not tracemalloc.is_tracing()
    assert not window.turn(1, slower=2.0), "torch's reports go on"
    assert (window.sources, window.why) == ((tracewindow.TORCH,), tracewindow.TOO_SLOW)
    assert not window.slows
    window.end()


def test_a_first_step_that_is_over_in_time_is_traced_on() -> None:
    answers = iter((False, True))  # it is not over in time, but at the next look

    class Over:
        def acquire(self, timeout: float) -> bool:
            return next(answers)

    # The window's own thread, which begin() starts, waits longer than the test takes.
    window = TraceWindow(2, None, probe_s=tracewindow.LONGEST_S / 2)
    window.begin(0)
    window.turn(1)
    window.wait(Over())  # type: ignore[arg-type]
    assert window.is_open
    assert tracemalloc.is_tracing()
    window.end()


# --- what is said ---


def test_a_finding_is_shown_again_when_its_line_becomes_known() -> None:
    said: list[str] = []
    reporter = Reporter(Log(None, lambda: 0), Listeners(), lambda one: said.append(one.made_at))
    ledger, points = Ledger(), Points()
    (new,), _ = ledger.look(32, [finding(100.0)], {}, points)
    reporter.report(new)
    ledger.update([finding(100.0, first_step=32, made_at="train.py:3 in f")])
    for _ in range(3):
        reporter.report(ledger.findings()[0])
    assert said == ["", "train.py:3 in f"]
    ledger.look(48, [finding(110.0)], {}, points)
    assert ledger.findings()[0].made_at == "train.py:3 in f"
    assert ledger.findings()[0].rate_bytes == 110.0


def test_looks_wait_while_tracemalloc_is_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens at the first word, ends at a step of its own, and no reading has it in it."""
    # The time of a step is made up; what a reading of the heap takes after many tests is not.
    monkeypatch.setattr(heaplines, "SLOWEST", 10**9)
    monkeypatch.setattr(tracing, "SLOWEST_PROBE", 10**6)
    events = list[dict[str, Any]]()
    traces = Tracing(write=lambda fields: events.append(dict(fields)))
    program = Program(clock, tracing=traces)
    program.held = [holder(16 * KIB)]
    on: list[int] = []
    for _ in range(240):
        program.run(1, heap=16 * KIB)
        on += [program.step] if tracemalloc.is_tracing() else []
    assert on[:5] == [35, 36, 37, 38, on[4]], "the first word is said at 32; three steps are plain"
    assert on[4] > 35 + tracing.READ_STEPS
    looks = program.looks
    assert looks[:5] == LOOKS[:5]
    assert len(looks) == sum(step <= 240 for step in LOOKS), "late is not never"
    assert not set(looks) & set(on)
    assert program.watch.due_step > 241, "no longer called at each step"
    assert [event["steps"] for event in events] == [3, 9, 9, 9]


@pytest.mark.parametrize(
    ("jump", "counted"), [(0, 0), (100 * KIB, 0), (MIB, MIB - 128 * KIB), (-50 * KIB, -50 * KIB)]
)
def test_what_tracing_leaves_in_memory_is_no_growth_of_the_program(
    clock: Clock, jump: int, counted: int
) -> None:
    """A window leaves lines of blocks, and stacks that tracemalloc does not free."""
    program = Program(clock, tracing=Tracing(write=lambda fields: None))
    program.held = [holder(16 * KIB)]
    heap = next(signal for signal in program.signals if signal.name == "heap")
    while not tracemalloc.is_tracing():
        program.run(1, heap=16 * KIB)
        assert program.step < 64
    before, begun = heap.read(), program.step
    program.sizes["heap"] += jump
    while tracemalloc.is_tracing():
        program.run(1, heap=16 * KIB)
    after = heap.read()
    assert before is not None
    assert after is not None
    grown = after - before - (program.step - begun) * 16 * KIB
    assert grown == pytest.approx(counted, abs=KIB)
    program.watch.leave()


def test_where_little_memory_is_left_nothing_is_traced(clock: Clock) -> None:
    """What tracing takes must not be what ends the program, which needs no more than before."""
    events = list[dict[str, Any]]()
    traces = Tracing(write=lambda fields: events.append(dict(fields)))
    program = Program(clock, limit=Program(clock).total() + 31 * MIB, tracing=traces)
    program.held = [holder(16 * KIB)]
    for _ in range(80):
        program.run(1, heap=16 * KIB)
        assert not tracemalloc.is_tracing()
    (event,) = events
    assert re.fullmatch(
        r"at least 32\.0 MiB of memory must be left at the highest point of a step to trace it, "
        r"and 30\.\d MiB are",
        event["why"],
    )


KEEPS = """
import steady, memtools, sys, tracemalloc
kept = []
def make():
    return bytearray(100 << 10)
told = []
with memtools.MemoryMonitor("run.mem", device="cpu"{options}) as monitor:
    monitor.on_leak(told.append)
    for _ in range(64):
        kept.append(make())
        monitor.step()
    (found,) = monitor.findings()
print(found.made_at or None, sum(bool(one.made_at) for one in told) > 0, tracemalloc.is_tracing())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "key", "made"),
    [("", "", "train.py:5 in make"), (", trace=False", "", None), ("", "0", None)],
)
def test_a_monitor_says_the_line_unless_it_is_turned_off(
    options: str, key: str, made: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(KEEPS.format(options=options))
    (tmp_path / "steady.py").write_text(STEADY)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "MEMTOOLS_TRACE": key},
    )  # fmt: skip
    assert done.stdout == f"{made} {made is not None} False\n", done.stderr
    told = read_record(tmp_path / "run.mem").events
    said = [event for event in told if event.kind == "finding"]
    assert all("list train.kept" in event.text for event in said), "what tracing takes is no growth"
    events = [event for event in told if event.kind == "trace"]
    assert len(events) == 1
    if made is None:
        says = "its line is unknown: nothing was traced, because it is turned off"
        assert events[0].text == says
    else:
        assert events[0].text.startswith("3 steps traced by tracemalloc in ")
        assert events[0].text.endswith(" ms: the line of 1 finding")


GRAPH = """
import torch
from memtools import MemoryMonitor
torch.set_num_threads(1)
scale, total = torch.ones((), requires_grad=True), 0.0

def loss():
    return (scale * 2.0).sin().exp()

with MemoryMonitor(device="cpu") as monitor:
    for _ in range(96):
        total = total + loss()
        monitor.step()
    print([(one.kind, one.made_at) for one in monitor.findings()])
"""


@pytest.mark.slow
def test_a_graph_of_numbers_has_the_line_that_makes_its_nodes(tmp_path: Path) -> None:
    """Most of it is nodes, which nobody reports; a few bytes that they keep are blocks of torch."""
    (tmp_path / "train.py").write_text(GRAPH)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout == "[('autograd graph', 'train.py:8 in loss')]\n", done.stderr

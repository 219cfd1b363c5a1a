"""Lines of the C heap: which line takes what stays, whose trace function it is, and what is left
behind: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from memtools import LeakFinding, read_record
from memtools._monitor import heaplines, tracewindow, tracing
from memtools._monitor.heaplines import HeapLines, staying
from memtools._monitor.places import Place, Site
from memtools._monitor.tracewindow import TraceWindow
from tests.kit.ownprocess import in_own_process
from tests.monitor.traced import MS, STEADY, Traced, line_of

KIB, MIB = 2**10, 2**20


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    """And where the tests themselves are traced, they are not for these."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    after = sys.gettrace()
    sys.settrace(before)
    assert after is None
    assert not tracewindow._open
    assert all(frame.f_trace is None for frame in stack() if not before)


def stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Heap:
    """A made-up C heap, of which torch has a part."""

    def __init__(self) -> None:
        self.in_use = 10 * MIB
        self.of_torch = 0
        self.asked = 0

    def take(self, size: int) -> None:
        """As C code does it: nothing of it has a line."""
        take(self, size)

    def read(self) -> int:
        self.asked += 1
        return self.in_use

    def lines(self, step_ns: float = 1000 * MS) -> HeapLines:
        return HeapLines(step_ns, lambda: self.of_torch, self.read)


#: not the user's code, as its file is not
_C_CODE: dict[str, Any] = {"sys": sys, "time": time, "until": 0.0}
exec(
    compile(
        "def take(heap, size):\n    heap.in_use += size\n"
        "def tensor(heap, size):\n    heap.in_use += size\n    heap.of_torch += size\n"
        "def is_over():\n    return sys.gettrace() is None or time.monotonic() > until\n"
        "def spin():\n    while not is_over():\n        pass\n"
        "def call(function, *args):\n    return function(*args)\n",
        "/usr/lib/python3/dist-packages/library.py", "exec",
    ), _C_CODE
)  # fmt: skip
take: Callable[[Heap, int], None] = _C_CODE["take"]
tensor: Callable[[Heap, int], None] = _C_CODE["tensor"]
spin: Callable[[], None] = _C_CODE["spin"]
call: Callable[..., Any] = _C_CODE["call"]


def traced(heap: Heap, step: Callable[[], object], steps: int = 8) -> TraceWindow:
    """A window over a loop, once it is over."""
    window, n = TraceWindow(steps, None, heap=heap.lines()), 0
    assert window.begin(n), window.why
    assert window.slows, "no look beside it"
    while window.is_open:
        step()
        n += 1
        window.turn(n)
    assert n == steps + 2, "one to probe, and one before what lives is noted"
    assert window.sources == (heaplines.HEAP_LINES,)
    return window


def found(window: TraceWindow) -> dict[int, float]:
    """By line, what is even."""
    even, _, late = window.sites()
    assert late == []
    assert all(site.place.file == __file__ for site in even)
    return {site.place.line: site.rate for site in even}


# --- which line ---


def decode(heap: Heap, size: int) -> None:
    take(heap, size)  # the line of decode


def test_what_stays_is_of_the_line_that_takes_it() -> None:
    heap = Heap()

    def step() -> None:
        decode(heap, 64 * KIB)

    window = traced(heap, step)
    assert found(window) == {line_of(decode): 64 * KIB}, "and not of who has called it"
    assert window.net == 64 * KIB


def test_what_a_library_takes_is_of_the_innermost_line_of_the_user() -> None:
    heap = Heap()

    def callback() -> None:
        take(heap, 3 * KIB)

    def step() -> None:
        call(call, take, heap, 64 * KIB)
        call(callback)

    assert found(traced(heap, step)) == {line_of(step): 64 * KIB, line_of(callback): 3 * KIB}


def test_what_a_library_takes_after_a_call_of_the_users_is_of_who_has_called_it() -> None:
    heap = Heap()

    def inner() -> None:
        take(heap, KIB)

    def between() -> None:
        inner()
        take(heap, 5 * KIB)

    between.__code__ = between.__code__.replace(co_filename="/x/site-packages/between.py")

    def step() -> None:
        between()

    assert found(traced(heap, step)) == {line_of(inner): KIB, line_of(step): 5 * KIB}


def test_a_function_that_runs_already_is_traced_too() -> None:
    heap, n = Heap(), 0
    window = TraceWindow(8, None, heap=heap.lines())
    assert window.begin(0)
    here = sys._getframe().f_lineno
    while window.is_open:
        take(heap, 7 * KIB)
        n += 1
        window.turn(n)
    assert found(window) == {here + 2: 7 * KIB}


def test_generators_and_exceptions_lead_back_to_the_line_that_runs() -> None:
    heap = Heap()

    def produce() -> Iterator[int]:
        for n in range(3):
            take(heap, KIB)
            yield n

    def fail() -> None:
        raise KeyError

    def step() -> None:
        for n in produce():
            take(heap, 2 * KIB * (n >= 0))
        try:
            fail()
        except KeyError:
            take(heap, 10 * KIB)

    lines = {line_of(produce, 2): 3 * KIB, line_of(step, 2): 6 * KIB, line_of(step, 6): 10 * KIB}
    assert found(traced(heap, step)) == lines


def test_tensors_of_torch_are_left_out() -> None:
    heap = Heap()

    def step() -> None:
        tensor(heap, MIB)
        decode(heap, 9 * KIB)

    assert found(traced(heap, step)) == {line_of(decode): 9 * KIB}


def test_what_memtools_does_at_the_end_of_a_step_is_of_no_line() -> None:
    heap, n = Heap(), 0
    window = TraceWindow(8, None, heap=heap.lines())
    window.begin(0)
    while window.is_open:
        decode(heap, KIB)
        n += 1
        window.turn(n, lambda: decode(heap, -5 * MIB))  # a finalizer of the user's
    assert found(window) == {line_of(decode): KIB}


# --- lines that free ---


def sites(*rates: float) -> list[Site]:
    return [Site(Place("/home/me/train.py", n, "f"), rate) for n, rate in enumerate(rates, 1)]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((64.0,), [1]),
        ((40.0, 24.0), [1, 2]),
        ((24.0, 40.0), [2, 1]),
        ((200.0, -200.0, 64.0), [3]),  # one allocates, one frees
        ((64.0, -64.0, 64.0), []),  # which of both is freed is not known
        ((200.0, -200.0, 40.0, 24.0), [3, 4]),
        ((30.0, 50.0, 20.0, 64.0, -100.0), [4]),  # a model's nodes
        ((30.0, 50.0, 20.0, 40.0, 24.0, -100.0), []),  # nobody is all that stays
        ((63.5, 50.0, 64.0, -113.5), []),  # two are
        ((100.0, 64.0, -110.0), []),  # its nodes or what is kept of the other
        ((70.0, -6.0), [1]),  # a little is freed elsewhere: that is what an average has
        ((70.0, 5.0, -6.0), [1]),  # all of the second may be
        ((-64.0,), []),
        ((), []),
    ],
)
def test_lines_are_said_where_the_numbers_leave_no_choice(
    rates: tuple[float, ...], said: list[int]
) -> None:
    scaled = sites(*(rate * KIB for rate in rates))
    assert [site.place.line for site in staying(scaled)] == said


def test_how_much_what_stays_varies_tells_how_close_a_line_has_to_be() -> None:
    some = sites(30.0 * KIB, 50.0 * KIB, 20.0 * KIB, 60.0 * KIB, -96.0 * KIB)
    lines = {
        error: [site.place.line for site in staying(some, error * KIB)]
        for error in (0.0, 2.0, 5.0, 11.0)
    }
    assert lines == {0.0: [], 2.0: [4], 5.0: [], 11.0: []}


def test_a_line_that_makes_tensors_makes_nodes_of_a_graph_as_well() -> None:
    """Their number of bytes may be that of what stays by chance."""
    some = sites(30.0 * KIB, 63.0 * KIB, 64.0 * KIB, -93.0 * KIB)
    assert staying(some) == []
    lines = {("/home/me/train.py", 1), ("/home/me/train.py", 2)}
    assert [site.place.line for site in staying(some, 0.0, lines)] == [3]
    assert staying(some, 0.0, {*lines, ("/home/me/train.py", 3)}) == []
    assert staying(sites(30.0 * KIB, 64.0 * KIB, -30.5 * KIB), 0.0, None) != [], "nodes cancel"
    assert staying(sites(30.0 * KIB, 64.0 * KIB, -40.0 * KIB)) == []
    known = sites(30.0 * KIB, 9.0 * KIB, 64.0 * KIB, -39.0 * KIB)
    assert [site.place.line for site in staying(known)] == [3]
    assert staying(known, 0.0, None) == [], "nobody tells which lines make tensors"


@pytest.mark.parametrize(
    ("case", "is_said"),
    [("none", True), ("made there", False), ("no torch", True), ("torch does not tell", False)],
)
def test_a_line_is_not_said_where_nodes_of_its_tensors_may_have_its_number(
    case: str, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap, tensors = Heap(), MIB * (case == "made there")
    if "torch" in case:
        used = None if case == "no torch" else SimpleNamespace()
        monkeypatch.setattr(heaplines.bridge, "loaded", lambda: used)
        monkeypatch.setattr(heaplines.bridge, "profiler_runs", lambda: False)
        monkeypatch.setattr(heap, "lines", lambda: HeapLines(1000 * MS, None, heap.read))

    def step() -> None:
        take(heap, 30 * KIB)
        take(heap, 9 * KIB)
        take(heap, 64 * KIB), tensor(heap, tensors)
        take(heap, -39 * KIB)

    assert found(traced(heap, step)) == ({line_of(step, 3): 64 * KIB} if is_said else {})


def test_where_no_code_of_the_users_runs_no_line_is_said() -> None:
    nobody = Site(Place("", 0), 64.0 * KIB)
    assert staying([nobody]) == []
    assert staying([nobody, *sites(30.0 * KIB, -30.0 * KIB)]) == []


def test_of_a_little_that_is_freed_elsewhere_nobody_knows_whose_it_was() -> None:
    heap = Heap()

    def step() -> None:
        decode(heap, 64 * KIB)
        take(heap, 9 * KIB)
        take(heap, -12 * KIB)

    assert found(traced(heap, step)) == {line_of(decode): 52 * KIB}


def test_what_grows_once_is_not_even() -> None:
    heap, n = Heap(), iter(range(10))

    def step() -> None:
        decode(heap, 512 * KIB * (next(n) == 4))

    even, grown, _ = traced(heap, step).sites()
    assert even == grown == [], "and its error is as large as what stays"


# --- whose trace function it is ---


def test_a_tool_that_monitors_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = SimpleNamespace(get_tool=lambda n: "coverage" if n == 1 else None)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)
    assert Heap().lines().begin() == heaplines.MONITORED


def test_a_profiler_of_torch_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaplines.bridge, "profiler_runs", lambda: True)
    assert Heap().lines().begin() == heaplines.PROFILED


def on_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_lines_are_those_of_the_thread_that_makes_the_steps() -> None:
    heap, found = Heap(), dict[Place, float]()

    def work() -> None:
        lines = heap.lines()
        assert (lines.begin(), lines.go_on(1.0)) == ("", "")
        heap.take(1000)
        lines.turn()
        found.update(lines.living(False) or {})
        lines.end()
        assert sys.gettrace() is None

    on_a_thread(work)
    assert list(found.values()) == [1000.0]


def test_steps_that_end_on_several_threads_have_no_lines() -> None:
    lines = Heap().lines()
    on_a_thread(lines.begin)
    lines.turn()
    assert (lines.living(False), lines.stopped) == (None, heaplines.OTHER_THREAD)


def test_a_thread_that_has_ended_is_not_asked_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(clock: int) -> int:
        raise OSError("no such thread")

    lines = Heap().lines()
    on_a_thread(lines.begin)
    with monkeypatch.context() as patched:
        patched.setattr(heaplines.time, "clock_gettime_ns", ended)
        lines.give_up()
    assert lines.stopped == heaplines.OTHER_THREAD


def test_a_malloc_that_does_not_tell_is_not_asked() -> None:
    assert HeapLines(MS, None, lambda: None).begin() == heaplines.UNKNOWN
    assert HeapLines(MS, lambda: None, lambda: 1).begin() == heaplines.UNKNOWN


def test_what_the_program_sets_inside_of_a_window_is_the_programs() -> None:
    heap, seen = Heap(), list[str]()

    def own(frame: FrameType, event: str, arg: object) -> None:
        seen.append(frame.f_code.co_name)

    window = TraceWindow(2, None, heap=heap.lines())
    window.begin(0)
    window.turn(1)
    sys.settrace(own)
    decode(heap, KIB)
    left = [frame for frame in stack() if frame.f_trace is not None]
    try:
        assert left == [], "ours is gone as soon as it hears of that"
        assert window.turn(2) is False
        assert sys.gettrace() is own
        assert window.turn(3) is False
        assert window.turn(4)
        assert sys.gettrace() is own
    finally:
        sys.settrace(None)
    assert window.why == heaplines.TAKEN
    assert window.sites() == ([], [], [])
    assert "decode" in seen


def test_what_the_program_turns_off_is_off() -> None:
    heap = Heap()
    window = TraceWindow(2, None, heap=heap.lines())
    window.begin(0)
    sys.settrace(None)
    assert window.turn(1)
    assert window.why == heaplines.TAKEN


def test_a_generator_that_outlives_the_window_has_nothing_of_it() -> None:
    heap = Heap()

    def produce() -> Iterator[int]:
        yield 1
        yield 2

    lines = heap.lines()
    assert lines.begin() == ""
    generator = produce()
    next(generator)
    lines.end()
    assert sys.gettrace() is None
    asked, seen = heap.asked, list[str]()

    def own(frame: FrameType, event: str, arg: object) -> Any:
        seen.append(event)
        return own

    sys.settrace(own)
    next(generator)
    sys.settrace(None)
    assert heap.asked == asked
    assert "call" in seen, "the program's own hears of it"


# --- what a window may cost, and that it ends ---


def test_where_one_reading_takes_long_nothing_is_traced() -> None:
    def slow() -> int:
        until = time.perf_counter_ns() + 5 * MS
        while time.perf_counter_ns() < until:
            pass
        return 0

    why = HeapLines(MS, None, slow).begin()
    assert why.startswith(f"{heaplines.TOO_SLOW}: one reading takes ")
    assert HeapLines(1000 * MS, None, slow).begin() == ""
    sys.settrace(None)
    for frame in stack():
        frame.f_trace = None


def test_a_step_of_too_many_lines_is_not_traced_to_its_end() -> None:
    heap = Heap()
    window = TraceWindow(2, None, heap=heap.lines(step_ns=MS))
    window.begin(0)
    before = heap.asked
    for _ in range(10_000):
        pass
    assert heap.asked - before < 10 * MS / heaplines.EVENT_NS
    assert sys.gettrace() is None, "off inside of the step"
    assert window.turn(1)
    assert window.why == heaplines.TOO_SLOW


def test_a_first_step_that_takes_too_long_is_not_traced_to_its_end() -> None:
    heap = Heap()
    window = TraceWindow(2, None, heap=heap.lines(step_ns=MS // 10), probe_s=0.2)
    window.begin(0)
    _C_CODE["until"] = time.monotonic() + 10
    spin()  # has no lines, which would be counted
    assert sys.gettrace() is None
    assert window.turn(1)
    assert window.why == heaplines.TOO_SLOW


def test_a_first_step_that_waits_is_traced_on() -> None:
    """As where other programs have the processor: it is not slow by its lines."""
    lines = Heap().lines()
    assert lines.begin() == ""
    lines.give_up()
    assert lines.go_on(1.0) == ""
    lines.end()


def test_a_program_that_gets_too_slow_is_not_traced_on() -> None:
    window = TraceWindow(2, None, heap=Heap().lines())
    window.begin(0)
    assert window.turn(1, slower=10.1)
    assert window.why == heaplines.TOO_SLOW
    assert sys.gettrace() is None


def test_a_window_that_ends_on_another_thread_is_over_at_the_next_line() -> None:
    heap = Heap()
    window = TraceWindow(2, None, heap=heap.lines())
    window.begin(0)
    thread = threading.Thread(target=window.end)
    thread.start()
    thread.join()
    asked = heap.asked
    assert sys.gettrace() is None
    assert all(frame.f_trace is None for frame in stack())
    assert heap.asked == asked


def test_an_error_of_a_reading_is_not_raised_in_the_program() -> None:
    heap = Heap()
    window = TraceWindow(2, None, heap=heap.lines())
    window.begin(0)

    def fails() -> int:
        raise MemoryError

    window._heap._heap = fails  # type: ignore[union-attr]
    decode(heap, KIB)
    assert sys.gettrace() is None
    assert window.turn(1)
    assert window.why == heaplines.UNKNOWN


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forks of a process with threads warn")
def test_a_forked_child_hears_of_nothing() -> None:
    window = TraceWindow(2, None, heap=Heap().lines())
    window.begin(0)
    child = os.fork()
    if child == 0:
        is_on = sys.gettrace() is not None or any(frame.f_trace for frame in stack())
        os._exit(int(is_on))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.gettrace() is not None
    window.end()


# --- when ---


def finding(rate: float, kind: str = "C heap") -> LeakFinding:
    holder = "" if kind == "C heap" else "list A.b"
    return LeakFinding("growing", "heap", rate_bytes=rate, kind=kind, holder=holder)


def over(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Tracing over a made-up heap."""
    told = Traced(took=lambda step: (100 * MS, 100 * MS))
    monkeypatch.setattr(told.tracing, "_heap_lines", heap.lines)
    return told


def test_what_no_object_holds_gets_its_line_in_the_second_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = Heap()
    told, standing = over(heap, monkeypatch), [finding(64.0 * KIB)]
    opened = told.run(range(32, 120), standing, lambda: decode(heap, 64 * KIB))
    assert opened == [34, 34 + 4 + tracing.APART]
    assert standing[0].made_at.endswith(f"test_heap_lines.py:{line_of(decode)} in decode")
    assert [event["sources"] for event in told.events] == [("tracemalloc",), ("heap lines",)]
    assert [event["steps"] for event in told.events] == [3, tracing.LONGER + 1]


def test_what_objects_hold_gets_its_line_in_the_last_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = Heap()
    told, standing = over(heap, monkeypatch), [finding(64.0 * KIB, "list")]
    told.run(range(32, 300), standing, lambda: decode(heap, 64 * KIB))
    assert standing[0].made_at.endswith(f"test_heap_lines.py:{line_of(decode)} in decode")
    sources = [event["sources"] for event in told.events]
    assert sources == [("tracemalloc",)] * 3 + [("heap lines",)]


@pytest.mark.parametrize(("rate", "beside"), [(40, 0), (130, 0), (30, 24)])
def test_growth_that_is_not_the_findings_says_nothing_of_it(
    rate: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap = Heap()
    told, standing = over(heap, monkeypatch), [finding(float(rate * KIB))]

    def step() -> None:
        decode(heap, 64 * KIB)
        take(heap, beside * KIB)  # is about as much as the finding's

    told.run(range(32, 66), standing, step)
    assert told.events[-1]["sources"] == ("heap lines",)
    assert standing[0].made_at == ""


def test_beside_the_programs_own_trace_function_the_other_sources_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = Heap()
    told, standing = over(heap, monkeypatch), [finding(64.0 * KIB)]
    own = lambda *args: None  # noqa: E731
    sys.settrace(own)
    try:
        told.run(range(32, 300), standing, lambda: decode(heap, 64 * KIB))
        assert sys.gettrace() is own
    finally:
        sys.settrace(None)
    told_why = [event["why"] for event in told.events]
    assert told_why == ["", heaplines.TRACED, ""], "said once"
    assert standing[0].made_at == ""


def test_a_new_finding_does_not_take_the_window_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap = Heap()
    told, standing = over(heap, monkeypatch), [finding(64.0 * KIB)]
    told.run(range(32, 50), standing, lambda: decode(heap, 64 * KIB))
    again = over(heap, monkeypatch)
    again.tracing._attempts[standing[0].key] = 1
    standing.append(finding(10.0 * KIB, "list"))
    again.run(range(50, 90), standing, lambda: decode(heap, 64 * KIB))
    assert [event["sources"] for event in again.events] == [("tracemalloc",), ("heap lines",)]
    assert standing[0].made_at != ""
    assert standing[1].made_at == ""


# --- whole programs ---

LIBRARY = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.strdup.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.strdup.argtypes = [ctypes.c_size_t], [ctypes.c_char_p]
libc.free.argtypes = [ctypes.c_void_p]
class Codec:
    def decode(self, size):
        return self._read(size)
    def _read(self, size):
        return libc.malloc(size)
"""
TRAIN = """
import steady, ctypes, sys, torch
sys.path.append("site-packages")
from codec import Codec, libc
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(net.parameters())
def train(what):
    loss = net(torch.ones(8, 16)).square().mean()
    what()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DEEP = """
codec = Codec()
def mask():
    return codec.decode(64 << 10)
for _ in range(110):
    train(mask)
"""
FREED = """
def take():
    return libc.malloc(200 << 10)
def leak():
    for _ in range(40):
        libc.strdup(b"x" * 1000)
def give(address):
    libc.free(address)
def three():
    address = take()
    leak()
    give(address)
for _ in range(110):
    train(three)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "made"),
    [(DEEP, "train.py:17 in mask"), (FREED, "train.py:19 in leak")],
    ids=["deep", "freed"],
)
def test_a_program_whose_c_code_keeps_memory_is_told_the_line(
    code: str, made: str, tmp_path: Path
) -> None:
    ends = "assert sys.gettrace() is sys._getframe().f_trace is None\n"
    (tmp_path / "train.py").write_text(TRAIN + code + ends)
    (tmp_path / "steady.py").write_text(STEADY)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "codec.py").write_text(LIBRARY)
    done = subprocess.run(
        [sys.executable, "-m", "memtools", "run", "-o", "run.mem", "train.py"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = read_record(tmp_path / "run.mem").events
    last = [event for event in events if event.kind == "finding"][-1]
    assert "the C heap, whose holder is not known +" in last.text
    traces = [event.text for event in events if event.kind == "trace"]
    assert f"made at {made}" in last.text, traces
    assert "traced by heap lines in " in traces[-1]


INSIDE = f"""{STEADY}
import ctypes, logging, sys, tracemalloc
from memtools import MemoryMonitor
from memtools._monitor import tracewindow
logging.getLogger("memtools").addHandler(logging.NullHandler())
malloc = ctypes.CDLL(None).malloc

def until(is_traced, monitor):
    for _ in range(300):
        malloc(100 << 10)
        monitor.step()
        if is_traced():
            return
    raise AssertionError

def is_clean():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_trace is not None:
            return False
        frame = frame.f_back
    return sys.gettrace() is None and not tracemalloc.is_tracing() and not tracewindow._open

for is_traced in (tracemalloc.is_tracing, lambda: sys.gettrace() is not None):
    monitor = MemoryMonitor(device="cpu")
    try:
        with monitor:
            until(is_traced, monitor)
            1 / 0
    except ZeroDivisionError:
        print(is_clean())
    monitor.start()
    until(is_traced, monitor)
    monitor.stop()
    print(is_clean())
"""


@pytest.mark.slow
def test_an_exception_or_a_stop_inside_of_a_window_leaves_nothing() -> None:
    assert in_own_process(INSIDE) == "True\n" * 4

"""The inside of `memtools run train.py`: starts the monitor before the program, ends it after.

    cli/boot/sitecustomize.py ──► begin(options) ──► the program ──► atexit, last of all: summary

Nothing here may change what the program does. Steps are those of torch's optimizers, counted by a
hook that torch offers for it and that is set when the program imports torch; an unchanged program
gets its leak test and guard there, at the end of an optimizer's step on its own thread.
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memtools import _core
from memtools._base import process
from memtools._base.size import format_bytes
from memtools.errors import MemtoolsError
from memtools.monitor.ending import ending, interrupt, keep_interrupt, watch
from memtools.monitor.log import ranked, refusal
from memtools.record.kinds import End, payload

if TYPE_CHECKING:
    from memtools import MemoryMonitor

OPTIMIZER = "torch.optim.optimizer"
A_CODE = 987654321  # that no process ends with: another takes its place
A_CODE_BYTES = str(A_CODE).encode()
RESERVE = 16 << 20  # bytes
PATIENCE = 16  # steps of another optimizer after which the first is taken to be out of use
IN_A_PROCESS = """
import sys
root, path, as_json, how, ended_ns = sys.argv[1:]
sys.path.insert(0, root)
from memtools.record.kinds import read
from memtools.record.record import read_record, with_end
from memtools.record.summary import write_summary
record, end = read_record(path), read("end", how.encode())[0]
write_summary(with_end(record, end, int(ended_ns)) if end else record, as_json == "1")
"""
REST = 200  # times as long as a safe point took
LONGEST_REST_NS = 100_000_000  # a census may take a second: 200 of them would hide a run's growth

_Made = TypeVar("_Made")


class StepCounter:
    """Counts the steps of one optimizer; with several in turn, those of the first one alone.

    A generator and a discriminator that step in turn make one step of training, and so do the
    optimizers of any number of layers. When the optimizer that counts is gone, or silent while
    another steps more than 16 times, that one takes its place.

    Each step is counted when it ends. Where steps are short, not each is a safe point: what the
    monitor does there (0.1 ms for the readings of the leak test) is then 0.5 % of the time. A
    watermark that was passed makes one at once.
    """

    # torch.compile leaves calls of it to Python.
    _torchdynamo_disable = True

    def __init__(self, monitor: MemoryMonitor) -> None:
        self._monitor = monitor
        self._first: int | None = None
        self._others: dict[int, int] = {}  # their steps since the last of the first
        self._beside: dict[int, int] = {}  # their steps between the last two of the first
        self._alive: dict[int, object] = {}  # weak references: an id is used again after a death
        self._due = 0

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        steps = self._counted(self._known(optimizer))
        if steps and (self._monitor._count(steps) or time.monotonic_ns() >= self._due):
            self._safe_point()

    def _known(self, optimizer: object) -> int:
        who = id(optimizer)
        if who not in self._alive:
            self._alive[who] = weakref.ref(optimizer, lambda _: self._forget(who))
        return who

    def _forget(self, who: int) -> None:
        self._alive.pop(who, None)
        self._others.pop(who, None)
        self._beside.pop(who, None)
        if who == self._first:
            self._first = None

    def _counted(self, who: int) -> int:
        """How many steps of training this one is: none where it is another's than the first one's.
        One that takes the place of the first makes up for what it did alone."""
        if who == self._first:
            self._beside, self._others = self._others, {}
            return 1
        made = self._others[who] = self._others.get(who, 0) + 1
        if self._first is not None and made <= PATIENCE:
            return 0
        alone = made - self._beside.get(who, 0)
        self._first, self._beside, self._others = who, {}, {}
        return max(alone, 0)

    def _safe_point(self) -> None:
        """Raises HostMemoryPressure where a guard wants it."""
        begun = time.monotonic_ns()
        try:
            self._monitor.step(0)
        finally:
            now = time.monotonic_ns()
            self._due = now + min(REST * (now - begun), LONGEST_REST_NS)


class _Imported:
    """Hears of the import of torch's optimizers, once; before and after it nothing is different."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != OPTIMIZER:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, self._counter)
                    spec.loader = loader
                return spec
        return None


class _Loader:
    def __init__(self, inner: Any, counter: StepCounter) -> None:
        self._inner = inner
        self._counter = counter

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        # An older torch has no such hook: its steps are then not counted.
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._counter)


def count_steps(monitor: MemoryMonitor) -> None:
    """Tells the monitor of the steps of the first optimizer that the program steps."""
    sys.meta_path.insert(0, _Imported(StepCounter(monitor)))


def _stop(reason: str) -> NoReturn:
    """End the process before the program has begun. SystemExit would be reported as a fault of the
    module site."""
    os.write(2, f"memtools run: {reason}\n".encode(errors="backslashreplace"))
    os._exit(1)


def log_name(log: str | None) -> str:
    """The path that was asked for, else run.mem; with the rank in it on ranks of one job."""
    return ranked(log or "run.mem")


def announce(text: str) -> None:
    """A line of memtools on the standard error."""
    _write(f"memtools: {text}\n".encode(errors="backslashreplace"))


def announce_nothing(text: str) -> None:
    """What `--quiet` announces by."""


def opened(make: Callable[[], _Made]) -> _Made:
    """What `make` makes, with its record. Raises MemtoolsError if there can be no record."""
    try:
        return make()
    except OSError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        path = str(error.filename)
        why = refusal(error.__cause__, path)
        raise MemtoolsError(f"the record {path} cannot be made: {why}") from error


def check_limit(limit: int | None) -> None:
    """MemtoolsError for a limit that the interpreter alone has passed already."""
    used = _core.Probe().read().rss
    if limit is not None and used is not None and limit < used:
        raise MemtoolsError(
            f"the limit of {format_bytes(limit)} is below the {format_bytes(used)} that Python "
            "takes before the program begins; give a larger one"
        )


def _started(options: dict[str, Any]) -> MemoryMonitor:
    from memtools import MemoryMonitor

    def start() -> MemoryMonitor:
        monitor = MemoryMonitor(
            log_name(options["log"]),
            options["interval_ms"],
            limit=options["limit"],
            name="memtools run",
        )
        quiet = options["quiet"]
        monitor._settings = replace(
            monitor._settings,
            announce=announce_nothing if quiet else announce,
            sums_up=not quiet,
            declares=False,
        )
        monitor.start()
        return monitor

    check_limit(options["limit"])
    return opened(start)


# --- the end --------------------------------------------------------------------------------------


def _end(monitor: MemoryMonitor, options: dict[str, Any], pid: int) -> None:
    """End the run and write its summary, as the last of all atexit functions. The exit code is
    known later, to exit() alone, which chooses among the texts that are prepared here; an end by
    Ctrl-C does not come there."""
    if os.getpid() != pid:  # a forked child that ends as Python programs do
        return
    _core._stop_waiting()
    _reserve.clear()
    path = str(monitor.record_path)
    how = interrupt()
    monitor._end(how, last_look=True)
    if options["quiet"]:
        return
    run = monitor._last
    assert run is not None
    ended_ns = run.ended_ns or time.monotonic_ns()
    try:
        if how is not None:
            _write(_summary(path, options, how, ended_ns))
            keep_interrupt()
        else:
            _core._write_at_exit(*_texts(path, options, ended_ns))
    except Exception:  # out of memory, for one; or the file is gone
        _write_elsewhere(path, options, how or ending.failed, ended_ns)


def _write_elsewhere(path: str, options: dict[str, Any], how: End | None, ended_ns: int) -> None:
    """A program that has used up a limit of its process (RLIMIT_AS, RLIMIT_DATA) leaves no memory
    for a summary: a process of its own, which has room under the same limit, writes it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    try:
        end = "" if how is None else payload(End.KIND, how).decode()
        facts = [root, path, str(int(options["json"])), end, str(ended_ns)]
        words = [sys.executable, "-I", "-S", "-c", IN_A_PROCESS, *facts]
        child = os.posix_spawn(sys.executable, words, {})
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return
    except Exception:  # no memory for that either: one line is ready
        pass
    _write(f"memtools: Wrote {path}\n".encode(errors="backslashreplace"))


def _texts(path: str, options: dict[str, Any], ended_ns: int) -> tuple[bytes, bytes, bytes, bytes]:
    """The summaries for exit code 0, for code 1 where it is known what ends the program, and what
    stands before and after the number of any other code."""
    failed = ending.failed
    text = _summary(path, options, End(code=A_CODE), ended_ns)
    before, found, after = text.rpartition(A_CODE_BYTES)
    known = _summary(path, options, failed or End(code=0), ended_ns)
    return (b"" if failed else known), (known if failed else b""), before, after if found else b""


def _summary(path: str, options: dict[str, Any], how: End | None, ended_ns: int) -> bytes:
    """The summary of the record; `how` the program ended and when are None where the record tells
    that."""
    from memtools.record.record import read_record, with_end
    from memtools.record.summary import summary_text

    record = read_record(path)
    if how is not None:
        record = with_end(record, how, ended_ns)
    text = summary_text(record, options["json"])
    return text.replace("\0", "\\0").encode(errors="backslashreplace")


def _write(text: bytes) -> None:
    """Write to file descriptor 2, past whatever the program made of sys.stderr. One that is closed,
    or whose reader has gone, is no error."""
    with contextlib.suppress(OSError):
        os.write(2, text)


def _say_end_by_signal(monitor: MemoryMonitor, options: dict[str, Any]) -> None:
    """On a thread of its own, of which the program sees nothing: waits for SIGTERM or SIGHUP, and
    says what the run was like if Python lets it within 0.2 s. Then the process ends by the signal,
    which the record tells already."""
    number = _core._wait_for_signal()
    if number == 0:
        return
    _reserve.clear()
    with contextlib.suppress(Exception):
        _write(_summary(str(monitor.record_path), options, None, 0))
    os.kill(os.getpid(), number)


_running: list[MemoryMonitor] = []


def record_path() -> str | None:
    """The path of the record that `memtools run` has written for this process since it began."""
    path = _running[0].record_path if _running else None
    return None if path is None else os.fspath(path)


#: room for the summary of a program that ends because it has none
_reserve: list[mmap.mmap] = []


def begin(options: dict[str, Any]) -> None:
    """Start the monitor with the options of `memtools run`; sitecustomize.py calls it."""
    try:
        monitor = _started(options)
        if options["guard"] is not None:
            monitor.guard(options["guard"], action="raise")
            if monitor._live is not None:  # a record tells of a guard that got no step to act in
                monitor._live.log.event("guard_set", {"fraction": options["guard"]})
    except Exception as error:
        _stop(" ".join(str(error).split()) or type(error).__name__)
    _running.append(monitor)
    count_steps(monitor)
    watch(whole_program=True)
    with contextlib.suppress(OSError):  # not touched, it takes addresses and no memory
        _reserve.append(mmap.mmap(-1, RESERVE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    ending.on_uncaught.append(_reserve.clear)
    if not options["quiet"] and _core._expect_signal():
        _thread.start_new_thread(_say_end_by_signal, (monitor, options))
    # Registered first, so called last: after the program's own, and after its threads have ended.
    process.at_exit(_end, monitor, options, os.getpid())

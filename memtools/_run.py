"""The inside of `memtools run train.py`: starts the monitor before the program, ends it after.

    cli/boot/sitecustomize.py ──► begin(options) ──► the program ──► atexit, last of all: summary

Nothing here may change what the program does. Steps are those of torch's optimizers, counted by a
hook that torch offers for it and that is set when the program imports torch; an unchanged program
gets its leak test and guard there, at the end of an optimizer's step on its own thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memtools import _core
from memtools._monitor_log import ranked, refusal
from memtools._monitor_run import exception_words
from memtools._size import format_bytes
from memtools.errors import MemtoolsError

if TYPE_CHECKING:
    from memtools import MemoryMonitor

OPTIMIZER = "torch.optim.optimizer"
PATIENCE = 16  # steps of other optimizers after which the first is taken to be out of use
IN_A_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from memtools._runsummary import Summary, write_summary
write_summary(Summary.of_record(sys.argv[2]), sys.argv[3] == "1")
"""
REST = 200  # times as long as a safe point took
LONGEST_REST_NS = 100_000_000  # a census may take a second: 200 of them would hide a run's growth

_Made = TypeVar("_Made")


class StepCounter:
    """Counts the steps of one optimizer; with several in turn, those of the first one alone.

    A generator and a discriminator that step in turn make one step of training. When the optimizer
    that counts is gone, or silent while others step 16 times, the next takes its place.

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
        if who == self._first:
            self._first = None

    def _counted(self, who: int) -> int:
        """How many steps this one is: none of another's, those not counted so far when it is seen
        that another has taken the place of the first."""
        others = self._others
        if who != self._first:
            others[who] = others.get(who, 0) + 1
            if self._first is not None and sum(others.values()) <= PATIENCE:
                return 0
            self._first = next(iter(others))
        steps = others.get(self._first, 1)
        others.clear()
        return steps

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
    """Before the program has begun. SystemExit would be reported as a fault of site."""
    os.write(2, f"memtools run: {reason}\n".encode(errors="backslashreplace"))
    os._exit(1)


def log_name(log: str | None) -> str:
    """The path that was asked for, else run.mem; with the rank in it on ranks of one job."""
    return ranked(log or "run.mem")


def opened(make: Callable[[], _Made], quiet: bool) -> _Made:
    """What `make` makes, with its record. What it says of that record's name goes to stderr in
    lines of memtools. Raises MemtoolsError if there can be no record."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            made = make()
        except OSError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            path = str(error.filename)
            why = refusal(error.__cause__, path)
            raise MemtoolsError(f"the record {path} cannot be made: {why}") from error
    if not quiet:
        for warning in said:
            os.write(2, f"memtools: {warning.message}\n".encode(errors="backslashreplace"))
    return made


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
        monitor._declares = False
        monitor.start()
        return monitor

    check_limit(options["limit"])
    return opened(start, options["quiet"])


def _ending() -> str | None:
    """The exception that the interpreter has printed, in words. Without one, nobody knows yet by
    what code the process ends: SystemExit has gone from sight."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if error is None else exception_words(error)


def _end(monitor: MemoryMonitor, options: dict[str, Any], pid: int) -> None:
    if os.getpid() != pid:  # a forked child that ends as Python programs do
        return
    path = str(monitor.record_path)
    monitor._end(_ending(), last_look=True)
    if not options["quiet"]:
        _summarize(path, options["json"])


def _summarize(path: str, as_json: bool) -> None:
    """The last lines. A program that has used up a limit of its process (RLIMIT_AS, RLIMIT_DATA)
    leaves no memory for them: a process of its own, which has room under the same limit, has."""
    try:
        from memtools._runsummary import Summary, write_summary

        write_summary(Summary.of_record(path), as_json)
    except Exception:  # of any import, too, which says it in words of its own
        try:
            root = os.path.dirname(os.path.dirname(__file__))
            words = [sys.executable, "-I", "-S", "-c", IN_A_PROCESS, root, path, str(int(as_json))]
            os.waitpid(os.posix_spawn(sys.executable, words, {}), 0)
        except Exception:
            os.write(2, b"memtools: no memory is left for a summary: memtools explain has it\n")


_running: list[MemoryMonitor] = []


def record_path() -> str | None:
    """Of the record that `memtools run` has written for this process since it began."""
    path = _running[0].record_path if _running else None
    return None if path is None else os.fspath(path)


def _note_guard(monitor: MemoryMonitor, fraction: float) -> None:
    """So that a record tells of a guard that could not act, for want of steps."""
    if monitor._live is not None:
        monitor._live.log.event("guard_set", f"{fraction:g} of the limit, at the end of a step")


def begin(options: dict[str, Any]) -> None:
    """Called by sitecustomize.py with what `memtools run` was told."""
    try:
        monitor = _started(options)
        if options["guard"] is not None:
            monitor.guard(options["guard"], action="raise")
            _note_guard(monitor, options["guard"])
    except Exception as error:
        _stop(" ".join(str(error).split()) or type(error).__name__)
    _running.append(monitor)
    count_steps(monitor)
    # Registered first, so called last: after the program's own, and after its threads have ended.
    atexit.register(_end, monitor, options, os.getpid())

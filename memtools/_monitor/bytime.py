"""The leak test of a program that makes no steps: by time.

    memtools run ──► ByTime: a thread that wakes five times a second
                        │  no step so far          a LeakWatch over all; a step is 0.2 s
                        │  fewer than 16 steps     a LeakWatch over the child processes alone
                        │  16 steps                nothing: the LeakWatch of steps looks
                        │  no step for a minute    a LeakWatch over all, until the next step
                        └──► findings with bytes a second, and seconds until the limit

A script that collects data, or serves requests, has no point that comes again and again. Its memory
is read at any moment, so more of what is read is noise, which the leak test and the census filter
as they do for steps. The end of a program's start is not known either: nothing is reported before
it has grown for 13 s without importing a module, or 40 s if torch is imported, because such a
program is about to make steps. What grew until the first of them is taken back. A program that has
made steps and makes no more, for a minute and for 20 times as long as a step has taken, goes on
with other work: it serves, or evaluates.

No callback of the program runs on this thread, no finalizer, and no handler of the logger.
"""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Callable

from memtools._base import process
from memtools._base import torch as bridge
from memtools._leak.finding import LeakFinding
from memtools._monitor.leakwatch import FIRST_LOOK, LeakWatch

TICK = 0.2  # A step is so many seconds.
#: A program is not looked at in its first so many seconds; in the second number, if it uses torch.
START, START_OF_TORCH = 1.0, 27.0
QUIET = 64  # Nothing is reported in the first so many ticks.
#: Steps have ended, or pause, if there was none for so many seconds, and so many times as long as
#: one has taken.
PAUSE, PAUSE_OF_STEPS = 60.0, 20
TICK_OF_STEPS = 2.0  # While there are steps the thread wakes every so many seconds.


class ByTime:
    """Looks while the program makes no steps, until `close`.

    Args:
        steps: returns how many steps were made so far.
        make: makes a LeakWatch, given the seconds of its steps and whether it is to look at child
            processes alone. Called on the thread, as all of it but `close` and `findings`.
        complain: reports a failure, by a key and a text.
    """

    def __init__(
        self,
        steps: Callable[[], int],
        make: Callable[[float, bool], LeakWatch],
        complain: Callable[[str, str], None],
    ) -> None:
        self._steps, self._make, self._complain = steps, make, complain
        self._watch: LeakWatch | None = None
        self._is_of_children = False
        self._begun_ns = time.monotonic_ns()
        #: how many steps there were so far, and when the first and the newest were noticed
        self._known, self._first_ns, self._newest_ns = 0, 0, 0
        self._looks_since_ns = 0
        self._modules = len(sys.modules)
        self._is_over = False
        self._busy, self._sleeps = _thread.allocate_lock(), _thread.allocate_lock()

    def start(self) -> None:
        """Begin. Raises RuntimeError if the system gives no thread."""
        self._sleeps.acquire()
        process.start_thread(self._run)

    def findings(self) -> tuple[LeakFinding, ...]:
        """The findings that were reported, and stand."""
        watch = self._watch
        return () if watch is None or watch.is_quiet else watch.findings()

    def close(self) -> None:
        """The run ends: the record gets what stands. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        self._sleeps.release()
        # Wait for a look that goes on, but not for one that waits for this call.
        if self._watch is not None and self._busy.acquire(timeout=2.0):
            self._watch.close()

    def _run(self) -> None:
        pause = TICK
        while not self._sleeps.acquire(timeout=pause):
            with self._busy:
                if self._is_over:
                    return
                try:
                    pause = TICK if self.tick(time.monotonic_ns()) else TICK_OF_STEPS
                    if self._is_over and self._watch is not None:
                        self._watch.leave()  # the end has not waited for this look
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    self._complain("leaks", f"the leak test by time is off from now on: {why}")
                    return

    def tick(self, now_ns: int) -> bool:
        """Look if that is due. Returns False if there is nothing to do while there are steps."""
        steps = self._steps()
        if steps >= FIRST_LOOK and not self._pauses(steps, now_ns):
            self._withdraw()
            return False
        is_of_children = 0 < steps < FIRST_LOOK
        if is_of_children != self._is_of_children:
            self._withdraw()
            self._is_of_children = is_of_children
        if self._imports() and self._watch is not None and self._watch.is_quiet:
            self._withdraw()  # the program is still starting
        start = START_OF_TORCH if "torch" in sys.modules else START
        if now_ns - self._begun_ns < 1e9 * start or _imports_torch():
            if self._watch is not None:
                self._watch.interrupt()  # torch is imported, so steps may begin soon
            return True
        if self._watch is None:
            self._looks_since_ns = now_ns
            self._watch = self._make(TICK, self._is_of_children)
            self._watch.is_quiet = True
        ticks = int((now_ns - self._looks_since_ns) / (1e9 * TICK))
        if ticks >= self._watch.due_step or now_ns >= self._watch.due_ns > 0:
            self._watch.look(ticks)
            self._modules = len(sys.modules)  # a look imports some of memtools
        if ticks >= QUIET:
            self._watch.end_quiet()
        return True

    def _imports(self) -> bool:
        """Whether modules were imported since the last tick."""
        before, self._modules = self._modules, len(sys.modules)
        return self._modules > before

    def _pauses(self, steps: int, now_ns: int) -> bool:
        """Whether there was no step for so long that the program does something else."""
        if steps != self._known:
            self._first_ns = self._first_ns or now_ns
            self._known, self._newest_ns = steps, now_ns
        step_ns = (self._newest_ns - self._first_ns) / steps
        return now_ns - self._newest_ns >= max(1e9 * PAUSE, PAUSE_OF_STEPS * step_ns)

    def _withdraw(self) -> None:
        if self._watch is not None:
            self._watch.withdraw()
            self._watch = None


def _imports_torch() -> bool:
    """Whether the program is importing torch now: it cannot be used yet."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return "torch" in sys.modules and (
        bool(getattr(spec, "_initializing", False)) or bridge.loaded() is None
    )

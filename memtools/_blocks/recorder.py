"""PeakRecorder: records some steps of a run, to find what lived at their peak.

        step 2            step 3                  4 . . . . . . . 1,000
    ──────────────┤ begin ─────────── end ├──────────────────────┤ . . . .
                    marks              marks, contents ──► PeakContents ──► the record

It records step 3, each 1,000th step, and a step after a new peak. Other steps cost nothing. The
recording ends with its step, with the run, in a forked child, and when the step takes too long.
The two steps after the highest peak are traced, to find what makes it smaller (tracedsteps.py).
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import process
from memtools._base import torch as bridge
from memtools._base.peak import PeakContents, TracedPeak
from memtools._base.trainers import running_trainer
from memtools._blocks.peak import INPUT, Marked, Spot, contents_of
from memtools._blocks.tensors import Storage, Tensors, inputs_of
from memtools._blocks.tracedsteps import TracedSteps

if TYPE_CHECKING:
    from memtools._blocks.reports import HostBlocks

FIRST = 3  # The first step that is recorded: by then an optimizer has its state.
EVERY = 1000  # Each such step is recorded.
RETRY = 16  # Steps until the next try, if torch is not loaded yet or something else records.
NEWER_SHARE, NEWER = 0.02, 1 << 20  # A new peak is higher by this share and by so many bytes.
APART, MOST = 16, 8  # Recordings of new peaks are so many steps apart, and so many in a run.
TRACES = 2  # So many times in a run two steps are traced.
LONGEST_S = 60.0  # A recording is given up after so many seconds,
TIMES = 5.0  # or, if that is longer, after so many times the step before.


class PeakRecorder:
    """Records steps of a run. The main thread calls `step_ended` and `step_begins` at the end of a
    step; any thread may call `close`. None of them raises an exception.

    Args:
        reports: the reports of torch's host allocator.
        write: called with what lived at the peak of a recorded step, or with a mapping that says
            why nothing is recorded.
        spot: returns the place of the program for frames, the innermost first.
        complain: called with one sentence if something fails; nothing is recorded after it.
        tensors: the tensors of the program.
        room: returns how many bytes are left until the nearest limit at the highest point of a
            step, which is so many bytes higher than its end; None without a limit.
    """

    def __init__(
        self,
        reports: HostBlocks,
        write: Callable[[object], None],
        spot: Callable[[Iterable[tuple[str, int, str]]], Spot],
        complain: Callable[[str], None],
        tensors: Tensors | None = None,
        room: Callable[[int], int | None] = lambda step_bytes: None,
    ) -> None:
        #: the step at whose end `step_ended` has to be called next
        self.due_step = FIRST - 1
        #: the contents of the highest peak
        self.highest: PeakContents | None = None
        self.tensors = tensors or Tensors()
        self._reports, self._write, self._spot, self._complain = reports, write, spot, complain
        self._room = room
        self._next, self._step = FIRST, 0
        self._of = ""  # the phase whose steps these are; "" for the run's
        #: outside of it: the newest step, the next that is recorded, the peak that is to be traced
        self._outer: tuple[int, int, PeakContents | None] = 0, 0, None
        self._recording: Recording | None = None
        self._is_closed = False
        self._seen_bytes = 0  # the highest that torch's reports knew when a step was recorded
        self._newer, self._newest = 0, 0  # recordings of new peaks, and the last of them
        self._is_newer = False  # whether the recording that runs is for a new peak
        self._traced: TracedSteps | None = None
        #: the peak after which two steps are to be traced, and that after which they are
        self._wanted: PeakContents | None = None
        self._traced_of: PeakContents | None = None
        self._traces = 0
        self._ended, self._took = time.monotonic(), 0.0  # the newest step, on the monotonic clock

    def begin_anew(self, step: int) -> None:
        """Count steps from here on, because another phase of the program begins."""
        if self._is_closed:
            return
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        self._end_trace()
        self._step, self._next, self.due_step = step, step + FIRST, step + FIRST - 1
        self._ended = time.monotonic()

    def enter(self, phase: str) -> None:
        """Steps are those of a phase from here on, until `leave`."""
        due = self._next if self._recording is None else self._step + 1
        if self._traced is not None:  # once more, from the run's next step on
            self._traces -= 1
        wanted = self._wanted if self._traced is None else self._traced_of
        self._outer = self._step, due, wanted
        self._of, self._newest, self._wanted = phase, 0, None
        self.begin_anew(0)

    def leave(self) -> None:
        """Steps are those of the run again."""
        step, due, self._wanted = self._outer
        self._of, self._newest = "", step
        self.begin_anew(step)
        if not self._is_closed:
            self._next, self.due_step = due, due - 1

    @property
    def is_open(self) -> bool:
        return self._recording is not None

    def step_ended(self, step: int) -> None:
        """End the recording of a step, if there is one."""
        if step <= self._step:
            return
        now = time.monotonic()
        self._took, self._ended = (now - self._ended) / (step - self._step), now
        self._step = step
        recording, self._recording = self._recording, None
        if recording is None:
            if self._traced is not None:
                with self._guarded(None):
                    self._keep_traced(self._traced.step_ended())
            return
        with self._guarded(recording):
            found = recording.end(step, self._spot)
            if found is not None:
                self._keep(replace(found, of=self._of, trainer=running_trainer(sys._getframe(1))))
            self._seen_bytes = max(self._seen_bytes, self._reports.blocks.peak)

    def step_begins(self, step: int, *, is_free: bool = True) -> None:
        """Begin to record, if the step that begins is due.

        Args:
            step: the number of the step that has ended.
            is_free: False if something else runs that must not be disturbed.
        """
        if self._is_closed or self._recording is not None or step < self._step:
            return
        if self._traced is not None:
            self.due_step = step + 1
            return
        is_due = step + 1 >= self._next
        self._is_newer = not is_due and self._is_a_new_peak(step)
        if is_due or self._is_newer:
            with self._guarded(None):
                self._begin(step, is_free=is_free)
        is_open = self._recording is not None
        wanted = self._wanted
        if wanted is not None and not is_open and is_free and not self._is_closed:
            with self._guarded(None):
                self._begin_trace(wanted)
        self.due_step = step + 1 if is_open or self._traced is not None else self._next - 1

    def _is_a_new_peak(self, step: int) -> bool:
        if self._seen_bytes == 0 or self._newer >= MOST or step < self._newest + APART:
            return False
        more = self._reports.blocks.peak - self._seen_bytes
        return bool(more >= max(NEWER, NEWER_SHARE * self._seen_bytes))

    def _begin(self, step: int, *, is_free: bool) -> None:
        reports = self._reports
        if not reports.join() or not is_free or _open:
            self._next = step + 1 + RETRY
            if reports.reason:
                self._is_closed, self._next = True, 1 << 62
                self._write({"why": reports.reason})
            return
        self._next = max(self._next, (step + 1) // EVERY * EVERY + EVERY)
        if self._is_newer:
            self._newer, self._newest = self._newer + 1, step
        recording = Recording(reports.blocks, self.tensors)
        self._recording = recording
        try:
            recording.begin(max(LONGEST_S, TIMES * self._took))
        finally:
            # It has failed, or another thread has closed it.
            if self._is_closed or not recording.is_on:
                self._recording = None
                recording.close()

    def _keep(self, found: PeakContents) -> None:
        """Write the contents, unless they are of a new peak that has not come again. Only the
        highest peak gets the layers over its step: they are most of the bytes of an event."""
        if self.highest is None or found.peak_bytes > self.highest.peak_bytes:
            self._write(found)
            self.highest = found
            self._wanted = found if found.backward and self._traces < TRACES else None
        elif not self._is_newer:
            self._write(replace(found, layers=(), spans=()))

    # --- what makes it smaller ---

    def _begin_trace(self, of: PeakContents) -> None:
        """Trace the two steps that begin now, after this peak."""
        self._wanted, self._traced_of, self._traces = None, of, self._traces + 1
        traced = TracedSteps(self._reports.blocks, self._room(of.peak_bytes - of.base_bytes))
        why = traced.why_not()
        if why:
            self._keep_traced(TracedPeak(why=why))
            return
        self._traced = traced
        try:
            traced.begin(TIMES * self._took)
        finally:
            if self._is_closed:  # by another thread
                self._end_trace()

    def _keep_traced(self, found: TracedPeak | None) -> None:
        """Write what the two steps after the highest peak have shown."""
        if found is None:  # one of them goes on
            return
        self._end_trace()
        peak = self._traced_of
        if peak is not None and (found.held or found.changes or found.why):
            known = replace(peak, traced=found._replace(step=self._step))
            if self.highest is peak:
                self.highest = known
            self._write(known)

    def _end_trace(self) -> None:
        traced, self._traced = self._traced, None
        if traced is not None:
            traced.close()

    @contextlib.contextmanager
    def _guarded(self, recording: Recording | None) -> Any:
        """A failure ends this recording and all later ones. An interrupt propagates."""
        try:
            yield
        except Exception as error:
            is_closed = self._is_closed  # Another thread has closed it, which made this fail.
            self.close()
            why = f"{type(error).__name__}: {error}"
            if not is_closed:
                self._complain(f"no longer recording the contents of the peak: {why}")
        except BaseException:
            self.close()
            raise
        finally:
            if recording is not None:
                recording.close()

    def close(self) -> None:
        """End the recording, and record nothing more. May be called twice."""
        self._is_closed, self._next, self.due_step = True, 1 << 62, 1 << 62
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        self._wanted = None
        self._end_trace()


class Recording:
    """The recording of one step, from `begin` to `end`.

    Args:
        blocks: the blocks of torch's host allocator.
        tensors: the tensors of the program.
    """

    def __init__(self, blocks: _core.Blocks, tensors: Tensors) -> None:
        self._blocks, self._tensors = blocks, tensors
        self._marked: dict[tuple[int, int], Marked] = {}  # by address and category
        self._called: set[int] = set()  # ids of modules that were called
        self._ns = 0  # the time that memtools took
        self._is_on = self._watches = self._is_late = False
        self._over = _thread.allocate_lock()

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin(self, longest_s: float) -> None:
        """Begin. The recording is given up after `longest_s` seconds."""
        begun = time.thread_time_ns()
        process.at_fork(_in_child)
        self._tensors.find()
        _open.add(self)
        self._blocks.record(True)
        self._is_on = True
        self._mark()
        self._watches = _watch_calls(self._call_ended)
        self._over.acquire()
        process.start_thread(_end_in_time, self, self._over, longest_s)
        self._ns = time.thread_time_ns() - begun

    def _mark(self) -> None:
        for category, found in self._tensors.held():
            self._add(category, found)

    def _add(self, category: int, found: Sequence[tuple[Storage, Marked]]) -> None:
        if found and self._is_on:
            self._blocks.mark([storage for storage, _ in found], category)
            for (address, _), one in found:
                self._marked.setdefault((address, category), one)

    def _call_ended(self, call: tuple[Any, ...]) -> None:
        """Mark the inputs of an outermost module whose call has ended. Without gradients the
        results of earlier calls look like inputs, so only the first call counts."""
        try:
            is_first = id(call[0]) not in self._called
            self._called.add(id(call[0]))
            if not is_first and not bridge.loaded().is_grad_enabled():
                return
            found = inputs_of(call[1:])
            known = [one for one in found if self._blocks.site_of(one[0][0]) is not None]
            self._add(INPUT, known)
        except Exception:  # A tensor class of the program failed; the program must go on.
            self._stop_watching()

    def end(
        self, step: int, spot: Callable[[Iterable[tuple[str, int, str]]], Spot]
    ) -> PeakContents | None:
        """End, and return what lived at the peak; None if the step was given up."""
        if self._is_late or not self._is_on or not self._blocks.is_on:
            self.close()
            return None
        begun = time.thread_time_ns()
        self._mark()
        self._off()
        found = self._blocks.contents()
        if found is None or found.events == 0:  # A step without tensors has no peak.
            return None
        self._ns += time.thread_time_ns() - begun
        return contents_of(
            found,
            self._marked.values(),
            lambda site: spot(self._blocks.frames(site)),
            step,
            self._ns / 1e6,
            library=frozenset(vars(bridge.loaded().nn)) if bridge.loaded() else (),
        )

    def close(self) -> None:
        """Turn everything off. May be called twice, and on another thread."""
        self._off()
        self._tensors.forget()

    def give_up(self) -> None:
        """End a recording that takes too long."""
        self._is_late = True
        self.close()

    def _off(self) -> None:
        is_on, self._is_on = self._is_on, False
        _open.discard(self)
        self._stop_watching()
        if is_on and self._blocks.is_on:  # Not in a forked child.
            self._blocks.record(False)
        with contextlib.suppress(RuntimeError):
            self._over.release()

    def _stop_watching(self) -> None:
        watches, self._watches = self._watches, False
        if watches:
            _core._watch_calls(None, None, 0, True)


_open: set[Recording] = set()  # The recording of this process: all monitors share one.


def _watch_calls(called: Callable[[tuple[Any, ...]], None]) -> bool:
    """Call `called` with the arguments of outermost modules. Returns whether that is possible."""
    module = getattr(getattr(bridge.loaded(), "nn", None), "Module", None)
    call = vars(module).get("__call__") if isinstance(module, type) else None
    if call is None:
        return False
    main = threading.main_thread().ident or 0
    try:
        return _core._watch_calls(call, called, main, True)
    except TypeError:  # The program has replaced the method.
        return False


def _in_child() -> None:
    """Record nothing in a forked child."""
    for recording in list(_open):
        recording._off()
    _open.clear()


def _end_in_time(recording: Recording, over: _thread.LockType, longest_s: float) -> None:
    """Give up a step that does not end. It runs on a thread of its own."""
    if not over.acquire(timeout=longest_s):
        recording.give_up()

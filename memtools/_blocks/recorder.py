"""PeakRecorder: which steps of a run are recorded, to tell what lived at their peak.

        step 2            step 3                  4 . . . . . . . 1,000
    ──────────────┤ begin ─────────── end ├──────────────────────┤ . . . .
                    marks              marks, contents ──► PeakContents ──► the record

Step 3, each 1,000th, and one after a new peak was seen. Nothing is asked in any other step. What is
on during a recorded step is off at its end, when the run ends, in a forked child, and where a step
takes too long.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from memtools import _core
from memtools._base import process
from memtools._base import torch as bridge
from memtools._base.peak import PeakContents
from memtools._blocks.peak import INPUT, ContentsLike, Marked, Spot, contents_of
from memtools._blocks.tensors import Storage, Tensors, inputs_of

FIRST = 3  # step that is recorded first: by then an optimizer has its state
EVERY = 1000  # steps
RETRY = 16  # steps, where torch is not there yet or something else is on
NEWER_SHARE, NEWER = 0.02, 1 << 20  # a peak that is higher by both of them is a new one
APART, MOST = 16, 8  # steps between two that are recorded for a new peak, and how many in a run
LONGEST_S, TIMES = 60.0, 5.0  # seconds that a recorded step may take, or so many of the one before


class BlocksLike(Protocol):
    """What a recorder needs of memtools._core.Blocks."""

    @property
    def is_on(self) -> bool: ...
    @property
    def peak(self) -> int: ...
    def record(self, on: bool, /) -> None: ...
    def mark(self, blocks: Sequence[Storage], category: int, /) -> int: ...
    def contents(self) -> ContentsLike | None: ...
    def frames(self, site: int, /) -> tuple[tuple[str, int, str], ...]: ...
    def site_of(self, address: int, /) -> int | None: ...


class ReportsLike(Protocol):
    """What a recorder needs of memtools._blocks.reports.HostBlocks."""

    @property
    def blocks(self) -> Any: ...
    @property
    def reason(self) -> str: ...
    def join(self) -> bool: ...


class PeakRecorder:
    """Records steps of a run. `step_ended` and `step_begins` are for the main thread, at the end of
    a step; `close` for any. None of them raises an exception.

    Args:
        reports: of torch's host allocator.
        write: gets what lived at the peak of a recorded step, or, as a mapping, why nothing is
            recorded.
        spot: where the frames of a site are, the innermost first.
        complain: gets one sentence where something has failed; nothing is recorded after it.
        tensors: of the program.
    """

    def __init__(
        self,
        reports: ReportsLike,
        write: Callable[[object], None],
        spot: Callable[[Iterable[tuple[str, int, str]]], Spot],
        complain: Callable[[str], None],
        tensors: Tensors | None = None,
    ) -> None:
        #: the step at whose end it is to be called next
        self.due_step = FIRST - 1
        #: what was recorded of the step with the highest peak
        self.highest: PeakContents | None = None
        self.tensors = tensors or Tensors()
        self._reports, self._write, self._spot, self._complain = reports, write, spot, complain
        self._next, self._step = FIRST, 0
        self._recording: Recording | None = None
        self._is_closed = False
        self._seen_bytes = 0  # the highest that torch's reports knew when a step was recorded
        self._newer, self._newest = 0, 0  # how many were recorded for a new peak, and the last one
        self._is_newer = False  # what is recorded now is for a new peak
        self._ended, self._took = time.monotonic(), 0.0  # the newest step, on the monotonic clock

    def begin_anew(self, step: int) -> None:
        """Count steps from here on: they are something else than before."""
        if self._is_closed:
            return
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        self._step, self._next, self.due_step = step, step + FIRST, step + FIRST - 1
        self._ended = time.monotonic()

    @property
    def is_open(self) -> bool:
        return self._recording is not None

    def step_ended(self, step: int) -> None:
        """End what was recorded, where that is so."""
        if step <= self._step:
            return
        now = time.monotonic()
        self._took, self._ended = (now - self._ended) / (step - self._step), now
        self._step = step
        recording, self._recording = self._recording, None
        if recording is None:
            return
        with self._guarded(recording):
            found = recording.end(step, self._spot)
            if found is not None:
                self._keep(found)
            self._seen_bytes = max(self._seen_bytes, self._reports.blocks.peak)

    def step_begins(self, step: int, *, is_free: bool = True) -> None:
        """Begin to record, where the step that begins is one to be recorded.

        Args:
            step: the number of the one that has ended.
            is_free: False where something else is on that may not be disturbed.
        """
        if self._is_closed or self._recording is not None or step < self._step:
            return
        is_due = step + 1 >= self._next
        self._is_newer = not is_due and self._is_a_new_peak(step)
        if is_due or self._is_newer:
            with self._guarded(None):
                self._begin(step, is_free=is_free)
        self.due_step = step + 1 if self._recording is not None else self._next - 1

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
            if (
                self._is_closed or not recording.is_on
            ):  # closed meanwhile, on another thread, or failed
                self._recording = None
                recording.close()

    def _keep(self, found: PeakContents) -> None:
        """Write it, unless it was recorded for a new peak that has not come again. How the step
        went from its begin to its end is of the highest alone: it is most of an event, and a record
        has room for so many bytes of events."""
        if self.highest is None or found.peak_bytes > self.highest.peak_bytes:
            self._write(found)
            self.highest = found
        elif not self._is_newer:
            self._write(replace(found, layers=(), spans=()))

    @contextlib.contextmanager
    def _guarded(self, recording: Recording | None) -> Any:
        """Whatever fails ends the recording, and all later ones. An interrupt goes on to the
        program."""
        try:
            yield
        except Exception as error:
            is_closed = self._is_closed  # on another thread: then this is what it has come to
            self.close()
            why = f"{type(error).__name__}: {error}"
            if not is_closed:
                self._complain(f"what lives at the peak is not recorded from here on: {why}")
        except BaseException:
            self.close()
            raise
        finally:
            if recording is not None:
                recording.close()

    def close(self) -> None:
        """Record nothing more, and turn off what is on. May be called twice."""
        self._is_closed, self._next, self.due_step = True, 1 << 62, 1 << 62
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()


class Recording:
    """One step that is recorded, from `begin` to `end`.

    Args:
        blocks: of torch's host allocator.
        tensors: of the program.
    """

    def __init__(self, blocks: BlocksLike, tensors: Tensors) -> None:
        self._blocks, self._tensors = blocks, tensors
        self._marked: dict[tuple[int, int], Marked] = {}  # by address and category
        self._called: set[int] = set()  # modules whose calls were heard, by id
        self._ns = 0  # that memtools itself took
        self._is_on = self._hears = self._is_late = False
        self._over = _thread.allocate_lock()

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin(self, longest_s: float) -> None:
        """Begin. Where the step takes more than `longest_s` seconds it is given up."""
        begun = time.thread_time_ns()
        process.at_fork(_in_child)
        self._tensors.find()
        _open.add(self)
        self._blocks.record(True)
        self._is_on = True
        self._mark()
        self._hears = _hear(self._heard)
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

    def _heard(self, call: tuple[Any, ...]) -> None:
        """A call of an outermost module has ended: its inputs are there still. Where no gradient is
        computed, what an earlier call has made looks like an input: there the first call counts."""
        try:
            is_first = id(call[0]) not in self._called
            self._called.add(id(call[0]))
            if not is_first and not bridge.loaded().is_grad_enabled():
                return
            found = inputs_of(call[1:])
            known = [one for one in found if self._blocks.site_of(one[0][0]) is not None]
            self._add(INPUT, known)
        except Exception:  # of the program's own tensors; it goes on as it would
            self._stop_hearing()

    def end(
        self, step: int, spot: Callable[[Iterable[tuple[str, int, str]]], Spot]
    ) -> PeakContents | None:
        """End, and tell what was recorded; None where the step was given up."""
        if self._is_late or not self._is_on or not self._blocks.is_on:
            self.close()
            return None
        begun = time.thread_time_ns()
        self._mark()
        self._off()
        found = self._blocks.contents()
        if found is None or found.events == 0:  # a step without tensors has no peak
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
        """End what takes too long."""
        self._is_late = True
        self.close()

    def _off(self) -> None:
        is_on, self._is_on = self._is_on, False
        _open.discard(self)
        self._stop_hearing()
        if is_on and self._blocks.is_on:  # not in a forked child, nor where they were stopped
            self._blocks.record(False)
        with contextlib.suppress(RuntimeError):
            self._over.release()

    def _stop_hearing(self) -> None:
        hears, self._hears = self._hears, False
        if hears:
            _core._hear_calls(None, None, 0, True)


_open: set[Recording] = set()  # in this process, of all monitors: one at a time


def _hear(told: Callable[[tuple[Any, ...]], None]) -> bool:
    """Whether the calls of outermost modules are heard from now on, with their arguments."""
    module = getattr(getattr(bridge.loaded(), "nn", None), "Module", None)
    call = vars(module).get("__call__") if isinstance(module, type) else None
    if call is None:
        return False
    main = threading.main_thread().ident or 0
    try:
        return _core._hear_calls(call, told, main, True)
    except TypeError:  # a class of the program's own in its place
        return False


def _in_child() -> None:
    """A forked child records nothing."""
    for recording in list(_open):
        recording._off()
    _open.clear()


def _end_in_time(recording: Recording, over: _thread.LockType, longest_s: float) -> None:
    """On a thread of its own: give a step up that does not end."""
    if not over.acquire(timeout=longest_s):
        recording.give_up()

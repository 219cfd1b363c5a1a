"""step(): trains on a whole batch in micro-batches that fit, and takes smaller ones after an OOM.

    next micro-batch ─► forward, backward ─► counted ─► ... ─► the window's end: one update
          ▲                   │ out of memory
          │                   ▼
        half the rows ◄─ leave the except block, clear frames, empty the cache, restore
                         random numbers, buffers, gradients and the window's numbers

The end of a window is never tried again: an optimizer that stopped halfway has moved parameters.
Any other exception propagates unchanged, and the window is dropped.

`SizeControl` keeps the size from window to window, `BackOff` is the step() of one accumulator,
`_Step` is one window of it, and `Failed` is a micro-batch that ran out of memory.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from memtools._base import malloc, reclaim
from memtools._base import torch as bridge
from memtools._base.limits import lowest_limit_of_process
from memtools._base.oom import Shortage, remedy, shortage
from memtools._base.size import format_bytes
from memtools._grad.pressure import FIRST_ROWS, Watermark, WatermarkError, write_mark
from memtools._grad.report import WATERMARK, Retry
from memtools._grad.split import PartsByFunction, PartsByRows, Split
from memtools._grad.undo import Undo

if TYPE_CHECKING:
    from memtools._grad.settings import Settings

#: After so many windows in a row in which the allocator of a device emptied its cache, the size is
#: halved.
THRASHING: Final = 3
#: A larger size is tried after so many good windows at first, and at most.
FIRST_WAIT: Final = 8
LONGEST_WAIT: Final = 1024
#: After so many good windows, one failure is due to the data.
PROVEN: Final = 32
_STATE: Final = ("size", "good", "wait", "before")
_CHANGED: Final = (
    "set glibc's mmap_threshold to 1.0 MiB and its trim_threshold to 16.0 MiB, so that freed "
    "memory goes back to the system"
)
_REFUSAL: Final = "could not create a primitive"
_ONEDNN_IS_OFF: Final = (
    "turned oneDNN off, which cannot make kernels on this thread since it found no memory for one"
)
#: oneDNN has no kernel for shapes of these widths yet.
_new_widths = itertools.count(100_003, 2)


class Runner(Protocol):
    """What runs the micro-batches of a window: the WindowRunner of an accumulator, or BatchPasses
    for a trainer that makes its updates itself. `window` has mark() and rewind()."""

    model: Any
    gradients: Any
    window: Any
    ranks: Any
    totals: Any
    retries: list[Retry]
    micro_batch_size: int | None

    def begin(self) -> None: ...
    def run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool, rows: int = 0) -> None: ...
    def end(self) -> Any: ...
    def keep_retries(self) -> None: ...
    def require_outside(self, call: str) -> None: ...
    def require_whole(self, call: str) -> None: ...


class BackOff:
    """The step() of one accumulator or trainer, with what it has learned about sizes.

    Attributes:
        control: the size that windows begin with.
        watermark: compares memory with the limits of a monitor; None without one.
    """

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self._runner, self._torch = runner, bridge.connect().torch
        self.control = SizeControl(settings.micro_batch_size)
        self._undo = Undo(self._tensors())
        # Whether the last backward pass of a window reduces the gradients in place.
        self._overlap = settings.overlap
        self._thrashed = 0  # windows in a row in which a device's allocator emptied its cache
        self._flushes = 0
        self.watermark: Watermark | None = None
        if settings.monitor is not None:
            self.watermark = Watermark(settings.monitor, runner)
        # If freed memory counts against a limit, malloc has to give it back before memory runs out:
        # else oneDNN may fail first, in a place that does not check for it. With a monitor memory
        # stays below the limit, and pages that malloc keeps need no page fault.
        self._set, limit = "", None if self.watermark is not None else lowest_limit_of_process()
        if limit is not None and malloc.map_large_blocks():
            self._set = f"{limit[1]} is {format_bytes(limit[0])}: {_CHANGED}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was set so that freed memory goes back to the system, and why sizes do not depend on
        the watermark; a sentence each, or ""."""
        return self._set, "" if self.watermark is None else self.watermark.note

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        split: Split | None = None,
        *,
        sizes: Sequence[int] = (),
        row_bytes: float = 0.0,
    ) -> Any:
        """Run one window, and return what the runner's end() returns. `sizes` are the rows of its
        first micro-batches, in place of the learned size; `row_bytes` is the size of a row, if
        `batch` does not hold the rows themselves."""
        runner = self._runner
        self._require_ready(loss_fn)
        left = PartsByRows(batch) if split is None else PartsByFunction(batch, split)
        self._flushes = _allocator_flushes(self._torch)
        runner.begin()
        window = runner.window
        start = window.mark()
        self._undo.begin_window(runner.model, self._tensors())
        try:
            if self.watermark is not None:
                self.watermark.begin_window(row_bytes or left.row_bytes)
                if self.control.is_new and split is None and self.watermark.has_limits:
                    self.control.start_low(FIRST_ROWS)
            window_step = _Step(self, left, loss_fn, sizes)
            window_step.run()
        except BaseException as error:
            self._give_up(start, "")
            for retry in runner.retries:
                error.add_note(f"memtools: {retry}")
            runner.keep_retries()
            if isinstance(error, Exception):  # An interrupt reaches all ranks by itself.
                runner.ranks.fail(error)
            raise
        try:
            return self._end(window_step)
        except BaseException:
            if runner.window is window:  # Else it has ended, and a new one has begun.
                self._give_up(start, window.torn)
            raise

    def _tensors(self) -> list[Any]:
        """Return the tensors to which a backward pass may add gradients: the parameters of the
        model and of the optimizer."""
        runner = self._runner
        found = (*runner.model.parameters(), *runner.gradients.parameters)
        return list(dict(zip(map(id, found), found, strict=True)).values())

    def _require_ready(self, loss_fn: Any) -> None:
        runner = self._runner
        window = runner.window
        if window.open or window.torn:
            runner.require_outside("step()")
            runner.require_whole("step()")
        if window.guess != 0.0:
            count = window.count
            raise RuntimeError(
                f"step() makes a whole window, but this one has {count:,} "
                f"micro-batch{'es' * (count != 1)} already: flush() or reset() first"
            )
        if not callable(loss_fn):
            raise TypeError(
                "loss_fn must be a function of a micro-batch that returns (loss_sum, weight) or "
                f"(loss_sum, weight, sums), got {type(loss_fn).__name__}"
            )

    def _end(self, done: _Step) -> Any:
        """Make the update, and choose the size of the next window."""
        runner, control = self._runner, self.control
        single = runner.window.count == 1
        runner.micro_batch_size = done.largest or None
        self._heed_allocator(done.largest)
        report = runner.end()
        assert report is not None  # this rank had a loss
        most = control.size if single else done.left.most
        control.end_window(most, done.used, done.lowest, self._may_rise)
        return report

    def _may_rise(self, rows: float) -> bool:
        """Whether the next window may begin with so many rows."""
        return self.watermark is None or self.watermark.may_rise(rows)

    def _heed_allocator(self, rows: int) -> None:
        """Halve the rows if the allocator of a device emptied its cache in several windows in a row
        to find a block: that is what it does before it gives up, and it takes time."""
        flushed = _allocator_flushes(self._torch) - self._flushes
        self._thrashed = self._thrashed + 1 if flushed else 0
        if self._thrashed < THRASHING or rows < 2:
            return
        runner, self._thrashed = self._runner, 0
        smaller = (rows + 1) // 2
        self.control.lower(smaller)
        times = "once" if flushed == 1 else f"{flushed:,} times"
        runner.retries.append(
            Retry(
                window=runner.totals.windows,
                micro_batch=runner.window.count,
                rows=rows,
                phase="allocator",
                error=f"its cache was emptied {times} in this window, and in the last ones",
                asked=None,
                restored="",
                next_rows=smaller,
                probing=False,
                ms=0.0,
            )
        )

    def _give_up(self, start: Any, torn: str) -> None:
        """Drop the window as if it had not begun. If parameters have moved, it stays torn."""
        self._runner.window.rewind(start)
        self._runner.window.torn = torn
        self._undo.drop()
        self._runner.gradients.drop()


class _Step:
    """One window of step(), until its end."""

    def __init__(
        self,
        owner: BackOff,
        left: PartsByRows | PartsByFunction,
        loss_fn: Callable[[Any], Any],
        sizes: Sequence[int],
    ) -> None:
        self.owner, self.runner, self.undo = owner, owner._runner, owner._undo
        self.left, self.loss_fn = left, loss_fn
        self.plan, self.done = list[float](sizes), list[float]()
        self.start = self.mark = owner._runner.window.mark()
        self.size = owner.control.size
        self.failures = 0
        # The rows of the largest micro-batch, the same in the units of sizes, and the size after
        # the last failure. Each is 0 if there is none.
        self.largest, self.used, self.lowest = 0, 0.0, 0
        self.gave_all_back = False
        self.watched = True  # False if no smaller size can be tried
        self.spared = 0  # rows that this micro-batch leaves to the last one
        # When the window last began, and when this micro-batch began.
        self.window_began = self.began = time.perf_counter()

    def run(self) -> None:
        left = self.left
        while True:
            at = len(self.done)
            size = self.plan[at] if at < len(self.plan) else self._next_size()
            part = left.next(size)
            if part is None:
                break
            micro, rows, last = part
            del part
            failed = self._try(micro, rows, last)
            del micro
            if failed is not None:
                self._go_back(failed, rows)
                continue
            left.advance(rows)
            self.done.append(size)
            self.used = max(self.used, (rows or size) + self.spared)
            self.largest = max(self.largest, rows)

    def _next_size(self) -> float:
        """Return the size of the next micro-batch: the learned size, below the watermark, and the
        same on all ranks that run it together."""
        watermark, left = self.owner.watermark, self.left.left
        self.spared = 0
        if watermark is None or not left:
            return self.size
        if watermark.is_on and min(self.size, left) < math.inf:
            self._heed_watermark(watermark, left)
        size = self.size
        if left - size == 1 and size >= FIRST_ROWS:
            # BatchNorm refuses a last micro-batch of one row.
            self.spared = 1 if size > FIRST_ROWS else -int(self._has_room_for(watermark, size + 1))
        least: float = self.runner.ranks.least(size - self.spared)
        return least

    def _has_room_for(self, watermark: Watermark, rows: float) -> bool:
        """Whether one more row than a size may be tried. Not after an OOM in this window, as it
        would be tried again and again."""
        return rows <= self.owner.control.top and not self.lowest and not watermark.over(rows)

    def _heed_watermark(self, watermark: Watermark, left: float) -> None:
        """Double the rows if there is room for them and the search for a size still climbs; halve
        them if there is no room."""
        control, rows = self.owner.control, min(self.size, left)
        if control.climbing and left > self.size and watermark.is_measured(self.size):
            most = min(2 * self.size, control.top)
            if watermark.over(min(most, self.left.most)):  # The next window begins with as many.
                most = watermark.larger(self.size, most)
            if not watermark.is_on:  # The monitor failed, and no larger size is tried without it.
                return
            if most > self.size:
                self.size = control.size = most
                return
            control.climbing = False
        smallest = min(FIRST_ROWS, control.top)
        if rows <= smallest or not watermark.over(rows):
            return
        began = time.perf_counter()
        watermark.give_back()
        fits, why = rows, ""
        while fits > smallest and (over := watermark.over(fits)):
            fits, why = (fits + 1) // 2, why or over
        if fits == rows:
            return
        retry = Retry(
            window=self.runner.totals.windows,
            micro_batch=self.runner.window.count,
            rows=int(rows),
            phase=WATERMARK,
            error=why,
            asked=None,
            restored="",
            next_rows=int(fits),
            probing=bool(control.before),
            ms=1e3 * (time.perf_counter() - began),
        )
        self.runner.retries.append(retry)
        write_mark(str(retry))
        self.size = fits
        if not watermark.is_unusual(rows):  # Else the next window begins with the old size.
            control.lower(fits)

    def _try(self, micro: Any, rows: int, last: bool) -> Failed | None:
        """Run one micro-batch. Returns the failure, outside the `except` block."""
        runner = self.runner
        window = runner.window
        self.began, self.mark = time.perf_counter(), window.mark()
        self.undo.begin(in_place=last and self.owner._overlap)
        failed, watermark = None, self.owner.watermark
        known = 0 if isinstance(self.left, PartsByFunction) else rows
        # A micro-batch in which other ranks took part cannot run again.
        final = bool(runner.ranks.no_retry) or (last and self.owner._overlap)
        try:
            if watermark is None:
                runner.run(micro, self.loss_fn, last, known)
            else:
                with watermark.measured(rows, watched=self.watched and not final and rows != 1):
                    runner.run(micro, self.loss_fn, last, known)
        except Exception as error:
            found = None if final else shortage(error)
            if isinstance(error, WatermarkError):
                found = error.shortage
            if found is None:
                raise
            # Ranks that share a pass go back equally far, wherever each of them was.
            failed = Failed(error, found, runner.ranks.sharded or bool(window.torn))
        if failed is None and window.weighted is False:
            raise ValueError(
                "step(): the loss has no weight and it is unknown how many rows it averages, so "
                "the gradient would depend on how the batch is split: let loss_fn return "
                "(loss_sum, weight), the SUM of the losses and the number of their units"
            )
        if runner.ranks.world > 1 or runner.ranks.sharded:
            others = runner.ranks.agree("" if failed is None else failed.shortage.line)
            if others and failed is None:
                failed = Failed(None, Shortage(others, None, of_host=False), True)
        if failed is None:
            self.undo.keep()
        return failed

    def _go_back(self, failed: Failed, rows: int) -> None:
        """Undo the micro-batch, or, if its gradients cannot be separated from the others, the
        window. Then go on with fewer rows."""
        runner, undo, index = self.runner, self.undo, self.runner.window.count
        failed.clear()
        smaller = self.left.smaller(rows)
        # If one more failure ends the window, all idle memory is given back.
        is_last = smaller is None or smaller == 1
        changed = failed.give_back(thorough=self.failures > 0 or is_last)
        once_more = smaller is None and (bool(changed) or not self.gave_all_back)
        if smaller is None and failed.phase == WATERMARK:
            once_more, self.watched = True, False
        self.gave_all_back = self.failures > 0 or is_last
        self.failures += 1
        try:
            whole, restored = undo.back(failed.touched)
        except RuntimeError as error:  # A buffer without a copy has changed.
            raise error from failed.error
        began = self.began if whole else self.window_began
        retry = Retry(
            window=runner.totals.windows,
            micro_batch=index,
            rows=rows or None,
            phase=failed.phase,
            error=failed.shortage.line,
            asked=failed.shortage.asked,
            restored=restored,
            next_rows=rows if once_more else smaller,
            probing=bool(self.owner.control.before),
            ms=1e3 * (time.perf_counter() - began),
            changed=changed,
        )
        runner.retries.append(retry)
        if failed.phase == WATERMARK:
            write_mark(str(retry))
        if smaller is not None:
            self.size = self.lowest = smaller
            self.owner.control.climbing = False
        elif not once_more:
            self._raise(failed, retry)
        window = runner.window
        agreed = (window.guess, window.weighted)
        window.rewind(self.mark if whole else self.start)
        if self.owner._overlap and agreed[0]:
            # Ranks that reduce in a backward pass agree on a guess once in a window. It stays.
            window.guess, window.weighted = agreed
        if whole:
            del self.plan[len(self.done) :]
            return
        runner.gradients.drop()
        self.plan, self.done, self.window_began = self.done, [], time.perf_counter()
        self.left.restart()

    def _raise(self, failed: Failed, retry: Retry) -> NoReturn:
        """Raise the error of a micro-batch that cannot be smaller."""
        if failed.error is None:
            raise MemoryError(
                f"step(): another rank ran out of memory: {failed.shortage.line}; {retry}"
            )
        failed.error.add_note(
            f"memtools: no smaller micro-batch is possible, so the window is dropped; "
            f"{failed.remedy()}"
        )
        with contextlib.suppress(Exception):  # It looks at all objects while memory is short.
            from memtools._census.holders import kept_graphs

            kept = kept_graphs([*self.owner._tensors(), *self.runner.model.buffers()])
            if kept:
                failed.error.add_note(f"memtools: {kept}")
        raise failed.error


class Failed:
    """A micro-batch, or an optimizer's state, that ran out of memory.

    Attributes:
        error: the exception; None if another rank raised it.
        shortage: what the exception says.
        touched: whether a backward pass may have changed gradients.
        phase: where it was raised, as in Retry.phase.
    """

    __slots__ = ("error", "phase", "shortage", "touched")

    def __init__(self, error: Exception | None, shortage: Shortage, touched: bool) -> None:
        self.error, self.shortage, self.touched = error, shortage, touched
        self.phase = "another rank" if error is None else "forward"
        trace = None if error is None else error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "_engine_run_backward":
                self.phase = "backward"
            trace = trace.tb_next
        if isinstance(error, WatermarkError):
            self.phase = WATERMARK

    def clear(self) -> None:
        """Clear the frames of the traceback, whose variables hold the tensors that filled memory.
        Collecting the young objects is enough in most cases: a collection of the whole heap takes
        half a second in a program with many imports."""
        if self.error is not None:
            for error in _related(self.error, set()):
                traceback.clear_frames(error.__traceback__)
        gc.collect(1)

    def give_back(self, thorough: bool) -> str:
        """Give idle memory back to the device and the system, and turn oneDNN off if it cannot make
        kernels any more.

        Args:
            thorough: collect the whole heap first.

        Returns what was set for that, in words, or "".
        """
        if thorough:
            gc.collect()
        bridge.connect().torch.cuda.empty_cache()
        if not self.shortage.of_host:
            return ""
        # At the watermark memory has not run out, and the next pass uses what malloc keeps.
        is_out = self.phase != WATERMARK
        changed = [_CHANGED] if is_out and malloc.map_large_blocks() else []
        reclaim.trim()
        if _REFUSAL in self.shortage.line and _turn_onednn_off():
            changed.append(_ONEDNN_IS_OFF)
        return "; ".join(changed)

    def remedy(self) -> str:
        """Return what the program can do if no smaller micro-batch is possible, as a clause."""
        return remedy(*malloc.idle()) if self.shortage.of_host else remedy(None)


def _turn_onednn_off() -> bool:
    """Turn oneDNN off for the rest of the process if it cannot make a kernel on this thread. Its
    assembler keeps the first error of a thread, so that after one kernel without memory it refuses
    every new one. Returns whether it was turned off. Takes 0.2 ms if not."""
    torch = bridge.connect().torch
    if not torch.backends.mkldnn.enabled:
        return False
    try:
        torch.zeros(1, next(_new_widths)).to_mkldnn()  # This makes a kernel.
    except RuntimeError as error:
        if _REFUSAL in str(error):
            torch._C._set_mkldnn_enabled(False)  # mkldnn.enabled is read-only in some programs.
            return True
    return False


def _related(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the members of groups."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *inner):
        yield from _related(other, seen)


def _allocator_flushes(torch: Any) -> int:
    """Return how often the allocators of devices emptied their caches to find a block; 0 without
    CUDA."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(
        int(torch.cuda.memory_stats_as_nested_dict(index).get("num_alloc_retries", 0))
        for index in range(torch.cuda.device_count())
    )


# --- the size of micro-batches ---


class SizeControl:
    """The size that windows begin with: halved after an OOM, remembered, and raised later on trial.
    It is arithmetic only: the same failures give the same sizes.

         rows
          16  ##x                    #x          x: out of memory
           8     ########...########   #########     ...
           4
                 |- 8 good windows -|  |- 16 good windows, and so on up to 1,024 -|

    After a larger size fails, the next trial waits twice as long. A larger size that lasts for as
    many windows as it waited is accepted, and the wait is short again. The size never exceeds the
    first one.

    A size that was good in 32 windows is not lowered after one failure, as data have an occasional
    giant: that window goes on in smaller parts, and the next one begins with the old size.

    Attributes:
        top: the first size, inf for the whole batch.
        size: rows of a micro-batch in the next window; inf for the whole batch.
        good: windows without a failure that used this size since it last changed.
        wait: good windows before a larger size is tried.
        before: the size before the current trial, 0 without one.
        climbing: whether the size began low and still doubles within windows.
        is_new: whether no window and no state has set it.
    """

    __slots__ = ("before", "climbing", "good", "is_new", "size", "top", "wait")

    def __init__(self, start: int | None) -> None:
        self.top = self.size = math.inf if start is None else float(start)
        self.good, self.wait, self.before = 0, FIRST_WAIT, 0.0
        self.climbing, self.is_new = False, True

    def start_low(self, rows: int) -> None:
        """Begin with few rows, and climb from there."""
        self.size, self.climbing, self.is_new = min(self.top, float(rows)), True, False

    def end_window(
        self,
        most: float,
        used: float,
        lowest: float,
        may_rise: Callable[[float], bool] = lambda rows: True,
    ) -> None:
        """Learn from a window that made its update.

        Args:
            most: the largest useful size.
            used: rows of the largest successful micro-batch.
            lowest: the size after the last failure of the window; 0 without one.
            may_rise: called with a larger size; returns whether to take it.
        """
        self.is_new = False
        if lowest:
            if self.before or self.good < PROVEN:
                self.lower(lowest)
            self.good = 0
        elif used >= self.size or self.size == math.inf:
            self.good += 1
            self._rise(most, may_rise)

    def lower(self, smaller: float) -> None:
        """Lower the size, to that before the current trial, else to `smaller`."""
        if self.before:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        halved_once = 2 * smaller >= self.size  # Then the size before the trial has not failed.
        self.size = self.before if self.before and halved_once else min(self.size, smaller)
        self.before, self.good, self.climbing = 0.0, 0, False

    def _rise(self, most: float, may_rise: Callable[[float], bool]) -> None:
        if self.good < self.wait:
            return
        if self.before:  # The trial has lasted as long as it had waited.
            self.before, self.wait = 0.0, FIRST_WAIT
        if self.size < min(self.top, most):
            larger = min(2 * self.size, self.top)
            if not may_rise(min(larger, most)):
                self.good = self.wait - min(self.wait, FIRST_WAIT)  # Ask again soon: it is cheap.
                return
            self.before, self.size, self.good = self.size, larger, 0

    def state(self) -> dict[str, Any]:
        """Return its part of a state_dict, with None for the whole batch."""
        state = {name: getattr(self, name) for name in _STATE}
        return state | {"size": None if self.size == math.inf else self.size}

    def load(self, state: dict[str, Any]) -> None:
        """Load a state that was checked."""
        self.size, self.good, self.wait, self.before = (state[name] for name in _STATE)
        self.size = self.top if self.size is None else min(self.size, self.top)
        self.is_new = False

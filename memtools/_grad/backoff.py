"""step(): a whole batch in micro-batches that fit. Out of memory is answered by smaller ones.

    next micro-batch ─► forward, backward ─► counted ─► ... ─► the window's end: one update
          ▲                   │ out of memory
          │                   ▼
        half the rows ◄─ out of the except block, frames cleared, cache emptied,
                         random numbers, buffers, gradients and the window's numbers as before

The window's end is never tried again: an optimizer that stopped halfway has moved parameters.
Every other exception comes out as it is, with the window dropped.

`SizeControl` keeps the size from window to window, `BackOff` is one accumulator's step(), `_Step`
is one window of it, and `Failed` is what ran out of memory.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import malloc, reclaim
from memtools._base import torch as bridge
from memtools._base.limits import lowest_limit_of_process
from memtools._base.oom import Shortage, remedy, shortage
from memtools._base.size import format_bytes
from memtools._grad.pressure import FIRST_ROWS, Watermark, WatermarkError, tell
from memtools._grad.report import WATERMARK, Retry, WindowReport
from memtools._grad.split import PartsByFunction, PartsByRows, Split
from memtools._grad.undo import Undo

if TYPE_CHECKING:
    from memtools._grad.settings import Settings
    from memtools._grad.window import Mark, WindowRunner

THRASHING: Final = 3  # windows in a row in which the device's allocator emptied its cache
FIRST_WAIT: Final = 8  # good windows before a step up
LONGEST_WAIT: Final = 1024
PROVEN: Final = 32  # good windows after which one failure is the data's
_STATE: Final = ("size", "good", "wait", "before")
_CHANGED: Final = (
    "set glibc's mmap_threshold to 1.0 MiB and its trim_threshold to 16.0 MiB, so that freed "
    "memory goes back to the system"
)
_REFUSAL: Final = "could not create a primitive"
_ONEDNN_IS_OFF: Final = (
    "turned oneDNN off, which makes no kernel on this thread any more since it found no memory for "
    "one"
)
_new_widths = itertools.count(100_003, 2)  # of shapes for which oneDNN has no kernel yet


class BackOff:
    """One accumulator's step(), with what it has learnt of sizes.

    Attributes:
        control: the size that windows begin with.
        watermark: what a monitor says of the memory that is left; None without one.
    """

    def __init__(self, runner: WindowRunner, settings: Settings) -> None:
        self._runner, self._torch = runner, bridge.connect().torch
        self.control = SizeControl(settings.micro_batch_size)
        self._undo = Undo(self._tensors())
        # Whether the last backward pass reduces the gradients where they are.
        self._overlap = settings.overlap
        self._thrashed = 0  # windows in a row in which the device's allocator emptied its cache
        self._flushes = 0
        self.watermark: Watermark | None = None
        if settings.monitor is not None:
            self.watermark = Watermark(settings.monitor, runner)
        # Let malloc keep no freed memory where a limit counts it, before anything runs out: what
        # oneDNN needs for a kernel fails first otherwise, and not all of it checks that. A monitor
        # keeps away from the limit, and pages that are kept are not faulted in again.
        self._set, limit = "", None if self.watermark is not None else lowest_limit_of_process()
        if limit is not None and malloc.map_large_blocks():
            self._set = f"{limit[1]} is {format_bytes(limit[0])}: {_CHANGED}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was set so that freed memory goes back to the system, and why sizes are not kept
        below the watermark; a sentence each, or ""."""
        return self._set, "" if self.watermark is None else self.watermark.note

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        split: Split | None = None,
        *,
        sizes: Sequence[int] = (),
    ) -> WindowReport:
        """Run one window; `sizes` are the rows of its first micro-batches, instead of what was
        learnt."""
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
                self.watermark.begin_window()
                if self.control.is_new and split is None and self.watermark.has_limits:
                    self.control.start_low(FIRST_ROWS)
            window_step = _Step(self, left, loss_fn, sizes)
            window_step.run()
        except BaseException as error:
            self._give_up(start, "")
            for retry in runner.retries:
                error.add_note(f"memtools: {retry}")
            runner.keep_retries()
            if isinstance(error, Exception):  # an interrupt reaches all ranks, and does not wait
                runner.ranks.fail(error)
            raise
        try:
            return self._end(window_step)
        except BaseException:
            if runner.window is window:  # else it ended well, and a new one has begun
                self._give_up(start, window.torn)
            raise

    def _tensors(self) -> list[Any]:
        """All that a backward pass may add gradients to: the parameters of the model and of the
        optimizer."""
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
                f"step() is a window of its own, and this one has {count:,} "
                f"micro-batch{'es' * (count != 1)} already: flush() or reset() first"
            )
        if not callable(loss_fn):
            raise TypeError(
                "loss_fn is called with each micro-batch and returns (loss_sum, weight) or "
                "(loss_sum, weight, sums); got "
                f"{type(loss_fn).__name__}"
            )

    def _end(self, done: _Step) -> WindowReport:
        """Make the update; then see what the sizes of this window say about the next."""
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
        """Halve the rows where the device's allocator emptied its cache window after window to find
        a block: that is what it does before it gives up, and it is slower with each window."""
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

    def _give_up(self, start: Mark, torn: str) -> None:
        """Drop the window, as if it had not begun; where parameters have moved, it stays torn and
        says so."""
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
        # Rows of the largest micro-batch, the same in the units of sizes, and what the window went
        # on with after the last failure; each 0 without one.
        self.largest, self.used, self.lowest = 0, 0.0, 0
        self.gave_all_back = False
        self.watched = True  # False: nothing smaller can be tried
        self.spared = 0  # rows that this micro-batch left to the last one
        #: when the window began, or began anew, and when this micro-batch did
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
        """Return the size of the next micro-batch: what was learnt, below the watermark, and the
        same on all ranks that go through it together."""
        watermark, left = self.owner.watermark, self.left.left
        self.spared = 0
        if watermark is None or not left:
            return self.size
        if watermark.is_on and min(self.size, left) < math.inf:
            self._heed_watermark(watermark, left)
        size = self.size
        if left - size == 1 and size >= FIRST_ROWS:
            # A last micro-batch of one row is refused by BatchNorm.
            self.spared = 1 if size > FIRST_ROWS else -int(self._has_room_for(watermark, size + 1))
        return self.runner.ranks.least(size - self.spared)

    def _has_room_for(self, watermark: Watermark, rows: float) -> bool:
        """Whether one row more than a size may be tried: not where rows ran out of memory in this
        window, which would be tried again and again."""
        return rows <= self.owner.control.top and not self.lowest and not watermark.over(rows)

    def _heed_watermark(self, watermark: Watermark, left: float) -> None:
        """Take twice as many rows where the monitor has room for them and larger sizes are still
        being looked for, half as many where it has none."""
        control, rows = self.owner.control, min(self.size, left)
        if control.climbing and left > self.size and watermark.is_measured(self.size):
            most = min(2 * self.size, control.top)
            if watermark.over(min(most, self.left.most)):  # the next window begins with as many
                most = watermark.larger(self.size, most)
            if not watermark.is_on:  # the monitor failed, and says nothing of larger sizes
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
        tell(str(retry))
        self.size = fits
        control.lower(fits)

    def _try(self, micro: Any, rows: int, last: bool) -> Failed | None:
        """Run one micro-batch; return what failed, when the exception's block is left."""
        runner = self.runner
        window = runner.window
        self.began, self.mark = time.perf_counter(), window.mark()
        self.undo.begin(in_place=last and self.owner._overlap)
        failed, watermark = None, self.owner.watermark
        known = 0 if isinstance(self.left, PartsByFunction) else rows  # a loss is the mean of these
        # What others took part in cannot be done again.
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
            # ranks in one pass go back equally far, wherever in it each of them was
            failed = Failed(error, found, runner.ranks.sharded or bool(window.torn))
        if failed is None and window.weighted is False:
            raise ValueError(
                "step(): a loss came without a weight, and how many rows it is the mean of is not "
                "known here, so that the gradient would depend on how the batch is cut: loss_fn "
                "returns (loss_sum, weight), the SUM of the losses and the number of their units"
            )
        if runner.ranks.world > 1 or runner.ranks.sharded:
            others = runner.ranks.agree("" if failed is None else failed.shortage.line)
            if others and failed is None:
                failed = Failed(None, Shortage(others, None, of_host=False), True)
        if failed is None:
            self.undo.keep()
        return failed

    def _go_back(self, failed: Failed, rows: int) -> None:
        """Go back to before the micro-batch, or, where its gradients cannot be told from those of
        before, to before the window; then go on with fewer rows."""
        runner, undo, index = self.runner, self.undo, self.runner.window.count
        failed.clear()
        smaller = self.left.smaller(rows)
        # where one more failure ends the window, all that can be given back is
        is_last = smaller is None or smaller == 1
        changed = failed.give_back(thorough=self.failures > 0 or is_last)
        once_more = smaller is None and (bool(changed) or not self.gave_all_back)
        if smaller is None and failed.phase == WATERMARK:
            once_more, self.watched = True, False
        self.gave_all_back = self.failures > 0 or is_last
        self.failures += 1
        try:
            whole, restored = undo.back(failed.touched)
        except RuntimeError as error:  # a buffer that had never changed has changed
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
            tell(str(retry))
        if smaller is not None:
            self.size = self.lowest = smaller
            self.owner.control.climbing = False
        elif not once_more:
            self._raise(failed, retry)
        window = runner.window
        agreed = (window.guess, window.weighted)
        window.rewind(self.mark if whole else self.start)
        if self.owner._overlap and agreed[0]:
            # Where ranks reduce in a backward pass they have agreed on a guess: that stays, for
            # they would not agree again.
            window.guess, window.weighted = agreed
        if whole:
            del self.plan[len(self.done) :]
            return
        runner.gradients.drop()
        self.plan, self.done, self.window_began = self.done, [], time.perf_counter()
        self.left.restart()

    def _raise(self, failed: Failed, retry: Retry) -> NoReturn:
        """The smallest possible micro-batch did not fit."""
        if failed.error is None:
            raise MemoryError(
                f"step(): another rank ran out of memory: {failed.shortage.line}; {retry}"
            )
        failed.error.add_note(
            f"memtools: nothing smaller can be tried, so the window is dropped; {failed.remedy()}"
        )
        with contextlib.suppress(Exception):  # it looks at all objects, when memory is out
            from memtools._census.holders import kept_graphs

            kept = kept_graphs([*self.owner._tensors(), *self.runner.model.buffers()])
            if kept:
                failed.error.add_note(f"memtools: {kept}")
        raise failed.error


class Failed:
    """What ran out of memory, when its `except` block is left.

    Attributes:
        error: what was raised; None where that was on another rank.
        shortage: what it says.
        touched: whether a backward pass may have changed gradients.
        phase: where it was raised, as a Retry has it.
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
        """Clear the frames of the traceback, whose variables are the tensors that filled the
        memory. What is young is most often enough: a collection of the whole heap takes half a
        second in a program that has imported much."""
        if self.error is not None:
            for error in _related(self.error, set()):
                traceback.clear_frames(error.__traceback__)
        gc.collect(1)

    def give_back(self, thorough: bool) -> str:
        """Give idle memory back to the device and the system, and turn oneDNN off where it makes no
        kernels any more. Returns what was set for that.

        Args:
            thorough: collect the whole heap first.
        """
        if thorough:
            gc.collect()
        bridge.connect().torch.cuda.empty_cache()
        if not self.shortage.of_host:
            return ""
        # At a watermark nothing has run out, and the next pass uses what malloc keeps.
        is_out = self.phase != WATERMARK
        changed = [_CHANGED] if is_out and malloc.map_large_blocks() else []
        reclaim.trim()
        if _REFUSAL in self.shortage.line and _turn_onednn_off():
            changed.append(_ONEDNN_IS_OFF)
        return "; ".join(changed)

    def remedy(self) -> str:
        """Say what the program can do where no smaller micro-batch is left, in one clause."""
        return remedy(*malloc.idle()) if self.shortage.of_host else remedy(None)


def _turn_onednn_off() -> bool:
    """Turn oneDNN off for the rest of the process where it makes no kernel on this thread. Its
    assembler keeps the first error of a thread, so that one kernel whose code found no memory is
    followed by the refusal of every new one. Takes 0.2 ms where nothing is to be done."""
    torch = bridge.connect().torch
    if not torch.backends.mkldnn.enabled:
        return False
    try:
        torch.zeros(1, next(_new_widths)).to_mkldnn()  # makes a kernel
    except RuntimeError as error:
        if _REFUSAL in str(error):
            torch._C._set_mkldnn_enabled(False)  # mkldnn.enabled can be read only, in some programs
            return True
    return False


def _related(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield the error, what it was raised from or while handling, and what it groups."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *inner):
        yield from _related(other, seen)


def _allocator_flushes(torch: Any) -> int:
    """Return how often the devices' allocators emptied their caches to find a block; without CUDA
    that is 0."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(
        int(torch.cuda.memory_stats_as_nested_dict(index).get("num_alloc_retries", 0))
        for index in range(torch.cuda.device_count())
    )


# --- the size of micro-batches ---


class SizeControl:
    """The size that windows begin with: half after an OOM, remembered, and tried upward later.
    Numbers only; the same failures give the same sizes.

         rows
          16  ##x                    #x          x: out of memory
           8     ########...########   #########     ...
           4
                 |- 8 good windows -|  |- 16 good windows, and so on up to 1,024 -|

    A step up that fails makes the next one wait twice as long; one that lasts as long as it waited
    counts as found, and the wait is short again. It never goes above the size that it began with.

    A size that did well in 32 windows is not given up for one failure: data have giants now and
    then. That window goes on in smaller parts, the next one begins with the old size.

    Attributes:
        top: rows that it began with, inf for the whole batch.
        size: rows of a micro-batch in the next window; inf: the whole batch, however large.
        good: windows without a failure since the size last changed, of those that used it.
        wait: good windows before it goes up.
        before: the size before the last step up, while that is on trial; else 0.
        climbing: whether the size began low, and larger ones are still being looked for within
            windows.
        is_new: whether no window and no state has said anything of it.
    """

    __slots__ = ("before", "climbing", "good", "is_new", "size", "top", "wait")

    def __init__(self, start: int | None) -> None:
        self.top = self.size = math.inf if start is None else float(start)
        self.good, self.wait, self.before = 0, FIRST_WAIT, 0.0
        self.climbing, self.is_new = False, True

    def start_low(self, rows: int) -> None:
        """Begin with few rows, to climb from there."""
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
            most: more rows in a micro-batch than these are of no use.
            used: rows of the largest micro-batch that went well.
            lowest: what the window went on with after its last failure; 0 without one.
            may_rise: called with a larger size before it is taken.
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
        """Lower the size: to that before a step up on trial, else to `smaller`."""
        if self.before:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        halved_once = 2 * smaller >= self.size  # then what is known to fit has not failed
        self.size = self.before if self.before and halved_once else min(self.size, smaller)
        self.before, self.good, self.climbing = 0.0, 0, False

    def _rise(self, most: float, may_rise: Callable[[float], bool]) -> None:
        if self.good < self.wait:
            return
        if self.before:  # it lasted as long as it had waited
            self.before, self.wait = 0.0, FIRST_WAIT
        if self.size < min(self.top, most):
            larger = min(2 * self.size, self.top)
            if not may_rise(min(larger, most)):
                self.good = self.wait - min(self.wait, FIRST_WAIT)  # asked again soon: it is cheap
                return
            self.before, self.size, self.good = self.size, larger, 0

    def state(self) -> dict[str, Any]:
        """For a state_dict, with None for the whole batch."""
        state = {name: getattr(self, name) for name in _STATE}
        return state | {"size": None if self.size == math.inf else self.size}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state that was checked."""
        self.size, self.good, self.wait, self.before = (state[name] for name in _STATE)
        self.size = self.top if self.size is None else min(self.size, self.top)
        self.is_new = False

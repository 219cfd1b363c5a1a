"""step(): a whole batch in micro-batches that fit. Out of memory is answered by smaller ones.

    next micro-batch ─► forward, backward ─► counted ─► ... ─► the window's end: one update
          ▲                   │ out of memory
          │                   ▼
        half the rows ◄─ out of the except block, frames cleared, cache emptied,
                         random numbers, buffers, gradients and the window's numbers as before

The window's end is never tried again: an optimizer that stopped halfway has moved parameters.
Every other exception comes out as it is, with the window dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._base.oom import is_out_of_memory
from memtools.grad.kept_graph import kept_graphs
from memtools.grad.main_grads import MainGrads
from memtools.grad.pieces import Hooked, Rows, pieces
from memtools.grad.retry import Failed, Retry, prepare_host
from memtools.grad.sizes import SizeControl
from memtools.grad.split import Readings
from memtools.grad.undo import Undo, choose

if TYPE_CHECKING:
    from memtools.grad.accumulator import GradAccumulator
    from memtools.grad.report import WindowReport
    from memtools.grad.split import Split

THRASHING: Final = 3  # windows in a row in which the device's allocator emptied its cache


class BackOff:
    """One accumulator's step(), with what it has learnt of sizes."""

    def __init__(
        self,
        acc: GradAccumulator,
        undo: str = "auto",
        micro_batch_size: int | None = None,
        overlap: bool = False,
    ) -> None:
        """As GradAccumulator was told; `acc` may be a weak proxy of it."""
        self._acc, self.control = acc, SizeControl(micro_batch_size)
        self._overlap = overlap  # the last backward pass reduces the gradients where they are
        self._way, self._known = undo, _parameters(acc)
        self.undo = Undo(choose(undo, self._known))
        self._rows: int | None = None
        self._readings = Readings()
        self._thrashed = 0
        self._flushes = 0
        note = prepare_host()
        if note:
            acc._notes += (note,)

    def _adopt(self) -> None:
        """What gradients there are now: groups may have been added to the optimizer."""
        found = _parameters(self._acc)
        if list(map(id, found)) != list(map(id, self._known)):
            self._known, self.undo = found, Undo(choose(self._way, found))

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        split: Split | None = None,
        *,
        sizes: Sequence[int] = (),
    ) -> WindowReport:
        """One window; `sizes`: rows of the first micro-batches, instead of what was learnt."""
        acc = self._acc
        self._require_ready(loss_fn)
        left = pieces(batch, split, self._readings.of(loss_fn))
        self._flushes = _allocator_flushes()
        acc._begin_window()
        self._adopt()
        start = acc.window.mark()
        self.undo.begin_window(acc.model)
        self.control.begin_window()
        try:
            _Step(self, left, loss_fn, sizes).run()
        except BaseException as error:
            self._give_up(start, "")
            for retry in acc._retries:
                error.add_note(f"memtools: {retry}")
            acc._totals.keep(acc._retries)
            acc._retries = []
            if isinstance(error, Exception):  # an interrupt reaches all ranks, and does not wait
                acc.ranks.fail(error)
            raise
        window = acc.window
        try:
            return self._end(left)
        except BaseException:
            if acc.window is window:  # else it ended well, and a new one has begun
                self._give_up(start, window.torn)
            raise

    def _require_ready(self, loss_fn: Any) -> None:
        acc = self._acc
        acc._require_outside("step()")
        acc._require_whole("step()")
        if not acc.window.empty:
            many = f"{acc.window.count:,} micro-batch{'es' * (acc.window.count != 1)}"
            raise RuntimeError(
                f"step() is a window of its own, and this one has {many} already: flush() or "
                "reset() first"
            )
        if not callable(loss_fn):
            raise TypeError(
                "loss_fn is called with each micro-batch and returns (loss_sum, weight) or "
                "(loss_sum, weight, sums); got "
                f"{type(loss_fn).__name__}"
            )

    def _end(self, left: Rows | Hooked) -> WindowReport:
        """The update; then what the sizes of this window say about the next."""
        acc, control = self._acc, self.control
        single = acc.window.count == 1
        acc.micro_batch_size = self._rows
        self._heed_allocator()
        report = acc._end_window()
        assert report is not None  # this rank had a loss
        control.end_window(control.size if single else left.most)
        return report

    def _heed_allocator(self) -> None:
        """Emptying its cache to find a block is what a device's allocator does before it gives up:
        slower with each window, and half the rows cure it."""
        flushed = _allocator_flushes() - self._flushes
        self._thrashed = self._thrashed + 1 if flushed else 0
        rows = self._rows or 0
        if self._thrashed < THRASHING or rows < 2:
            return
        acc, self._thrashed = self._acc, 0
        self.control.lower((rows + 1) // 2)
        index, count = acc._totals.windows, acc.window.count
        times = "once" if flushed == 1 else f"{flushed:,} times"
        line = f"its cache was emptied {times} in this window, and in the last ones"
        acc._retries.append(
            Retry(index, count, rows, "allocator", line, None, "", (rows + 1) // 2, False, 0.0)
        )

    def _give_up(self, start: Any, moved: str) -> None:
        """The window is dropped, as if it had not begun; where parameters have moved, it stays
        torn and says so."""
        self._acc.window.rewind(start)
        self._acc.window.torn = moved
        self.undo.drop()
        self._acc._drop_gradients()


class _Step:
    """One window of step(), until its end."""

    def __init__(
        self, owner: BackOff, left: Rows | Hooked, loss_fn: Callable[[Any], Any], sizes: Any
    ) -> None:
        self.owner, self.acc, self.undo = owner, owner._acc, owner.undo
        self.left, self.loss_fn = left, loss_fn
        self.plan, self.done = list(sizes), list[float]()
        self.start = owner._acc.window.mark()
        self.size = owner.control.size
        self.most = self.failures = 0
        self.gave_all_back = False
        self.began = self.begun = time.perf_counter()

    def run(self) -> None:
        left = self.left
        while not left.over:
            at = len(self.done)
            size = self.plan[at] if at < len(self.plan) else self.size
            micro, rows, last = left.next(size)
            failed = self._try(micro, rows, last)
            del micro
            if failed is not None:
                self._go_back(failed, rows)
                continue
            left.advance(rows)
            self.done.append(size)
            self.owner.control.used(rows or size)
            self.most = max(self.most, rows)
        self.owner._rows = self.most or None

    def _try(self, micro: Any, rows: int, last: bool) -> Failed | None:
        """One micro-batch; what failed, when the exception's block is left."""
        acc = self.acc
        self.begun, self.mark = time.perf_counter(), acc.window.mark()
        self.undo.begin(in_place=last and self.owner._overlap)
        failed = None
        try:
            acc._run(micro, self._weighted(rows), last)
        except Exception as error:
            if not is_out_of_memory(error) or self._is_final(last):
                raise
            # ranks in one pass go back equally far, wherever in it each of them was
            failed = Failed(error, acc.ranks.sharded or bool(acc.window.torn))
        if failed is None and acc.window.weighted is False:
            raise ValueError(
                "step(): a loss came without a weight, and how many rows it is the mean of is not "
                "known here, so that the gradient would depend on how the batch is cut: loss_fn "
                "returns (loss_sum, weight), the SUM of the losses and the number of their units"
            )
        others = acc.ranks.agree("" if failed is None else failed.line)
        if others and failed is None:
            failed = Failed(None, True, others)
        if failed is None:
            self.undo.keep()
        if failed is not None or acc.window.count > 1:
            self._forget()
        return failed

    def _forget(self) -> None:
        """fp32 sums are measured as they are added: those of one micro-batch, put aside or undone,
        are not those of the window."""
        gradients = self.acc.gradients
        if isinstance(gradients, MainGrads):
            gradients._forget()

    def _weighted(self, rows: int) -> Callable[[Any], Any]:
        """loss_fn; a loss without a weight is a mean over the rows, and counts as many."""
        if isinstance(self.left, Hooked):
            return self.loss_fn
        loss_fn, tensor = self.loss_fn, bridge.connect().torch.Tensor

        def weighted(micro: Any) -> Any:
            result = loss_fn(micro)
            if isinstance(result, tensor):
                return result * rows, rows
            if isinstance(result, tuple) and len(result) in (2, 3) and result[1] is None:
                return (result[0] * rows, rows, *result[2:])
            return result

        return weighted

    def _is_final(self, last: bool) -> bool:
        """Whether what failed cannot be done again, because others took part in it."""
        return bool(self.acc.ranks.no_retry) or (last and self.owner._overlap)

    def _go_back(self, failed: Failed, rows: int) -> None:
        """As before the micro-batch, or where its gradients cannot be told from those of before,
        as before the window; then with fewer rows."""
        acc, undo, index = self.acc, self.undo, self.acc.window.count
        failed.clear()
        smaller = self.left.smaller(rows)
        # where one more failure ends the window, all that can be given back is
        is_last = smaller is None or smaller == 1
        changed = failed.give_back(thorough=self.failures > 0 or is_last)
        once_more = smaller is None and not self.gave_all_back
        self.gave_all_back = self.failures > 0 or is_last
        self.failures += 1
        try:
            whole = undo.back(failed.touched)
        except RuntimeError as error:  # a buffer that had never changed has changed
            raise error from failed.error
        began = self.begun if whole else self.began
        retry = Retry(
            window=acc._totals.windows,
            micro_batch=index,
            rows=rows or None,
            phase=failed.phase,
            error=failed.line,
            asked=failed.asked,
            restored=undo.in_words(whole),
            next_rows=rows if once_more else smaller,
            probing=bool(self.owner.control.before),
            ms=1e3 * (time.perf_counter() - began),
            changed=changed,
        )
        acc._retries.append(retry)
        if smaller is not None:
            self.owner.control.failed(smaller)
            self.size = smaller
        elif not once_more:
            self._raise(failed, retry)
        self._rewind(self.mark if whole else self.start)
        if whole:
            del self.plan[len(self.done) :]
            return
        acc._drop_gradients()
        self.plan, self.done, self.began = self.done, [], time.perf_counter()
        self.left.restart()

    def _rewind(self, mark: Any) -> None:
        """Where ranks reduce in a backward pass they have agreed on a guess: that stays, for they
        would not agree again."""
        window = self.acc.window
        agreed = (window.guess, window.weighted)
        window.rewind(mark)
        if self.owner._overlap and agreed[0]:
            window.guess, window.weighted = agreed

    def _raise(self, failed: Failed, retry: Retry) -> NoReturn:
        """The smallest possible micro-batch did not fit."""
        if failed.error is None:
            raise MemoryError(f"step(): another rank ran out of memory: {failed.line}; {retry}")
        failed.error.add_note(
            f"memtools: nothing smaller can be tried, so the window is dropped; {failed.remedy()}"
        )
        with contextlib.suppress(Exception):  # it looks at all objects, when memory is out
            kept = kept_graphs([*self.owner._known, *self.acc.model.buffers()])
            if kept:
                failed.error.add_note(f"memtools: {kept}")
        raise failed.error


def _parameters(acc: GradAccumulator) -> list[Any]:
    """Of the model and of the optimizer, and what holds the fp32 sums of 16-bit ones as its
    gradients: all that a backward pass may add to."""
    holders = acc.gradients.parameters
    found = {id(p): p for p in (*acc.model.parameters(), *acc.parameters, *holders)}
    return list(found.values())


def _allocator_flushes() -> int:
    """How often the devices' allocators emptied their caches to find a block. 0 without CUDA."""
    torch = bridge.loaded()
    if not initialised(torch):
        return 0
    return sum(
        int(torch.cuda.memory_stats_as_nested_dict(index).get("num_alloc_retries", 0))
        for index in range(torch.cuda.device_count())
    )

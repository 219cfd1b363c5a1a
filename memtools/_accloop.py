"""What happens to micro-batches and windows, underneath GradAccumulator.

    _open   forward, backward()   _close  | _open ... _close |  _end_window
                                          |                  |    ranks.reduce
    window.count 0                      1 |                K |    measure, decide, apply, step

What step() with its back-off and the ranks build on, and so is kept stable:

    model, optimizer, parameters (the optimizer's), gradients, window, ranks, micro_batch_size
    _run(micro, loss_fn, last)      forward and backward of one micro-batch, counted in the window;
                                    raises what they raise, and the window is torn if a backward
                                    pass had begun
    _end_window() -> WindowReport   what the end of the K-th micro-batch does
    window.mark() / .rewind(mark)   the numbers of a window, `torn` among them
    _begin_window()                 drops what is in the gradients; _run does it where needed
    _drop_gradients()
    _require_outside(call), _require_whole(call)    refuse an open micro-batch, a torn window
    _retries                        a list that the next WindowReport takes over
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memtools._accreport import Totals, WindowReport
from memtools._backward import Passes, refuse_loss, unfit, units
from memtools._finish import Finish
from memtools._gradients import Gradients
from memtools._gradranks import RankError, Ranks, Reduced
from memtools._lossscale import LossScale
from memtools._window import Window

if TYPE_CHECKING:
    import torch


class WindowLoop:
    """The state of an accumulator and the steps it goes through."""

    __slots__ = (
        "__weakref__",
        "_context",
        "_finish",
        "_max_skips",
        "_passes",
        "_retries",
        "_scale",
        "_scheduler",
        "_steps",
        "_torch",
        "_totals",
        "gradients",
        "micro_batch_size",
        "model",
        "optimizer",
        "parameters",
        "ranks",
        "window",
    )

    _context: Any
    _finish: Finish
    _max_skips: int
    _passes: Passes
    _retries: list[Any]
    _scale: LossScale
    _scheduler: Any
    _steps: int
    _torch: Any
    _totals: Totals
    gradients: Gradients
    micro_batch_size: int | None
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]
    ranks: Ranks
    window: Window

    # --- one micro-batch ---

    def _run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool) -> None:
        """One micro-batch of step()."""
        self._open(last)
        try:
            self._take(loss_fn(micro))
        except BaseException as error:
            self._abort(error)
            raise
        self._close()

    def _take(self, result: Any) -> None:
        """What a loss function returned: (loss, weight), the loss, or None where it went backward
        itself."""
        if isinstance(result, tuple) and len(result) == 2:
            self._backward(*result)
        elif result is not None:
            self._backward(result)

    def _backward(self, loss: Any, weight: Any = None, retain: bool = False) -> None:
        """Check all, then go backward, then count."""
        window = self.window
        if not window.open or window.torn:
            self._require_whole("backward()")
            raise RuntimeError(
                "backward() outside of a micro-batch: call it in `with acc.micro_batch():`"
            )
        if not isinstance(loss, self._torch.Tensor):
            raise TypeError(f"backward() takes a loss as a tensor, got {type(loss).__name__}")
        if unfit(loss):
            refuse_loss(loss)
        if weight is not None:
            weight = units(self._torch, weight)
        if window.guess == 0.0:
            window.begin(self._steps, weight)
            window.guess = self.ranks.guess(window.guess)
        elif window.weighted is (weight is None):
            self._refuse_mixed()
        try:
            self._passes.backward(loss, window.scale * window.guess, retain)
        except BaseException as error:
            window.torn = type(error).__name__
            raise
        window.add(weight)

    def _open(self, last: bool | None = None) -> None:
        """A micro-batch begins. `last`: whether the window ends with it; None: by its count."""
        window = self.window
        if window.open or window.torn:
            self._require_outside("micro_batch()")
            self._require_whole("micro_batch()")
        if window.guess == 0.0:
            self._begin_window()
        if self.ranks.world > 1:
            last = window.count + 1 >= self._steps if last is None else last
            context = self.ranks.forward(last)
            context.__enter__()
            self._context = context
        self._passes.enter()
        window.open, window.chunks = True, 0

    def _leave(self) -> None:
        """Out of the contexts, whatever happened."""
        self.window.open = False
        self._passes.leave()
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def _close(self) -> None:
        """A micro-batch ends well."""
        self._leave()
        window = self.window
        if window.torn:
            self._require_whole("micro_batch()")
        if not window.chunks:
            raise RuntimeError(
                "no backward() in this micro-batch: call acc.backward(loss_sum, weight) in it; "
                "nothing was counted"
            )
        window.count, window.chunks = window.count + 1, 0

    def _abort(self, error: BaseException) -> None:
        """A micro-batch ends by an exception."""
        self._leave()
        window = self.window
        if window.chunks and not window.torn:
            window.torn = type(error).__name__
        window.chunks = 0

    def _end_block(self) -> None:
        """A micro-batch of a loop ends well, and maybe the window with it."""
        window = self.window
        try:
            self._close()
        except RuntimeError as error:
            self.ranks.abort(error, window)
            raise
        if window.count < self._steps:
            return
        try:
            self._end_window()
        except BaseException:
            if self.window is window:  # it goes on: as before the end of this micro-batch
                window.count -= 1
            raise

    # --- a window ---

    def _begin_window(self) -> None:
        """What others left in the gradients goes, as zero_grad() has it in other loops."""
        self._drop_gradients()
        self.window.scale = self._scale.value

    def _end_window(self) -> WindowReport:
        """What the end of the last micro-batch does."""
        report = self._end()
        assert report is not None  # this rank has a loss in it
        return report

    def _end(self, flushing: bool = False) -> WindowReport | None:
        """Reduce, measure, decide, step, count. Until the factor is applied an error changes
        nothing. None where no rank had a loss."""
        began, window = time.perf_counter(), self.window
        self._adopt()
        reduced = self._reduce(flushing)
        if reduced.guess == 0.0:
            return None
        if not (math.isfinite(reduced.weight) and reduced.weight > 0):
            raise ValueError(
                f"the weights of this window sum to {reduced.weight:g}: there is nothing to "
                "average over; go on with a micro-batch that has some, or reset()"
            )
        measure = self.ranks.measure(self.gradients.measure())
        squares, finite = self._read(measure)
        bad = (0, 0, None) if finite else (measure.infs, measure.nans, measure.first_bad)
        if finite:
            norm, coefficient, applied = self._update(squares, reduced.average(window.scale))
        else:
            norm, coefficient, applied = math.nan if bad[1] else math.inf, 0.0, "skipped"
        self._drop_gradients()
        self._scale.update(not finite)
        self.window = Window(self._scale.value)
        report = WindowReport(
            index=self._totals.windows,
            micro_batches=reduced.micro_batches,
            weight=reduced.weight,
            norm=norm,
            coefficient=coefficient,
            scale=window.scale,
            skipped=not finite,
            infs=bad[0],
            nans=bad[1],
            first_bad=bad[2],
            applied=applied,
            ms=(time.perf_counter() - began) * 1e3,
            micro_batch_size=self.micro_batch_size,
            retries=tuple(self._retries),
        )
        self._retries = []
        self._totals.add(report, self._scale.value)
        self._require_progress(report)
        return report

    def _read(self, measure: Any) -> tuple[float, bool]:
        """Sum of squares and whether all is finite; of a device both in one read, the only one
        that a window waits for."""
        squares, finite = measure.sum_squares, measure.finite
        if isinstance(squares, self._torch.Tensor):
            squares, finite = self._torch.stack((squares, finite.to(squares.dtype))).tolist()
        return float(squares), bool(finite)

    def _reduce(self, flushing: bool) -> Reduced:
        """Over the ranks. What makes this one's window useless is raised after they were told."""
        window, problem = self.window, self._sparse()
        if window.empty:
            self._begin_window()
        try:
            reduced = self.ranks.reduce(self.gradients, window, flushing=flushing, problem=problem)
        except RankError as error:
            window.torn = type(error).__name__
            raise
        if reduced.guess and self.gradients.empty():
            raise RuntimeError(
                "no parameter of the optimizer has a gradient at the end of this window: does the "
                "loss depend on the model?"
            )
        return reduced

    def _update(self, sum_squares: float, average: float) -> tuple[float, float, str]:
        decided = self._finish.decide(sum_squares, average)
        try:
            applied, norm = self._finish.apply(self.gradients, decided)
            if self._scheduler is not None:
                self._scheduler.step()
        except BaseException as error:
            self.window.torn = type(error).__name__
            raise
        return norm, decided.coefficient, applied

    def _adopt(self) -> None:
        """The optimizer's parameters as they are now: groups may have been added."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = getattr(self, "parameters", ())
        if list(map(id, known)) != list(map(id, parameters)):
            found = {id(p): name for name, p in self.model.named_parameters()}
            names = [found.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
            self.parameters, self.gradients = parameters, Gradients(parameters, names)

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # --- refusals ---

    def _sparse(self) -> TypeError | None:
        name = self.gradients.sparse()
        if name is None:
            return None
        return TypeError(
            f"the gradient of {name} is sparse, and cannot be averaged with the others: make its "
            "embedding with sparse=False"
        )

    def _require_progress(self, report: WindowReport) -> None:
        in_a_row = self._totals.skipped_in_a_row
        if in_a_row >= self._max_skips:
            raise RuntimeError(
                f"{in_a_row} updates in a row were left out, as gradients were not finite "
                f"({report.infs:,} inf and {report.nans:,} nan in the last, first in "
                f"{report.first_bad}, loss scale {report.scale:g}): lower the learning rate, look "
                "at the data, or raise max_skips"
            )

    def _require_outside(self, call: str) -> None:
        if self.window.open:
            raise RuntimeError(f"{call} inside of a micro-batch: end that first")

    def _require_whole(self, call: str) -> None:
        if self.window.torn:
            raise RuntimeError(
                f"{call}: {self.window.torn} came after a backward pass had begun, so the "
                "gradients of this window are not those of whole micro-batches; reset() drops the "
                "window"
            )

    def _refuse_mixed(self) -> None:
        have, got = ("weights", "none") if self.window.weighted else ("no weight", "one")
        raise ValueError(
            f"this window's losses came with {have} and this one with {got}: an average needs "
            "weights of all or of none"
        )

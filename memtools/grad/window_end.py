"""The end of a window: what all its micro-batches come to is one update, or none.

    ranks.reduce    one table, then the gradients, summed over the ranks
    measure         one read pass: sum of squares, inf, nan
    decide, apply   see finish;  or nothing, where the gradients are not finite
    count           report, loss scale, an empty window

With `main_grads` the gradients of 16-bit parameters are sums in fp32 until they are applied.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools.grad.finish import Finish
from memtools.grad.gradients import Gradients
from memtools.grad.gradwatch import GradientWatch
from memtools.grad.loss_scale import LossScale
from memtools.grad.main_grads import MainGrads
from memtools.grad.optimizer_state import make_state
from memtools.grad.owner import Ownership
from memtools.grad.ranks import Ranks, Reduced
from memtools.grad.report import Sums, Totals, WindowReport
from memtools.grad.window import Window

if TYPE_CHECKING:
    import torch


INTERRUPTED: Final = "an interrupt"  # why a window is torn, until what was begun is counted


class Outcome(NamedTuple):
    """What became of the gradients; see WindowReport."""

    norm: float
    coefficient: float
    applied: str
    infs: int = 0
    nans: int = 0
    first_bad: str | None = None

    @property
    def skipped(self) -> bool:
        return self.applied == "skipped"


class WindowEnds:
    """The state of an accumulator, and how its windows begin and end."""

    __slots__ = (
        "__weakref__",
        "_finish",
        "_main",
        "_max_skips",
        "_owner",
        "_retries",
        "_scale",
        "_scheduler",
        "_steps",
        "_torch",
        "_totals",
        "_wants_main",
        "_watch",
        "gradients",
        "micro_batch_size",
        "model",
        "optimizer",
        "parameters",
        "ranks",
        "window",
    )

    _finish: Finish
    _main: MainGrads | None
    _max_skips: int
    _owner: Ownership
    _retries: list[Any]
    _scale: LossScale
    _scheduler: Any
    _steps: int
    _torch: Any
    _totals: Totals
    _wants_main: bool
    _watch: GradientWatch
    gradients: Gradients
    micro_batch_size: int | None
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    parameters: list[torch.Tensor]
    ranks: Ranks
    window: Window

    # --- a window ---

    def _begin_window(self) -> None:
        """The parameters are the optimizer's as it is now; what others left in their gradients
        goes, as zero_grad() has it in other loops."""
        self._adopt()
        self._drop_gradients()
        self.window.scale = self._scale.value

    def _set_window(self, window: Window) -> None:
        self.window = self._owner.window = window

    def _end_window(self) -> WindowReport:
        """What the end of the last micro-batch does."""
        report = self._end()
        assert report is not None  # this rank has a loss in it
        return report

    def _end(self, flushing: bool = False) -> WindowReport | None:
        """Reduce, measure, decide, step, count. Until the factor is applied an error changes
        nothing. None where no rank had a loss."""
        began, window = time.perf_counter(), self.window
        self._require_same()
        reduced = self._reduce(flushing)
        if reduced.guess == 0.0:
            return None
        self._require_weight(reduced.weight)
        outcome = self._measure_and_update(reduced.average(window.scale))
        self._drop_gradients()
        self._scale.update(outcome.skipped)
        self._set_window(Window(self._scale.value))
        report = WindowReport(
            index=self._totals.windows,
            micro_batches=reduced.micro_batches,
            weight=reduced.weight,
            norm=outcome.norm,
            coefficient=outcome.coefficient,
            scale=window.scale,
            skipped=outcome.skipped,
            infs=outcome.infs,
            nans=outcome.nans,
            first_bad=outcome.first_bad,
            applied=outcome.applied,
            ms=(time.perf_counter() - began) * 1e3,
            micro_batch_size=self.micro_batch_size,
            retries=tuple(self._retries),
            own_weight=window.total(),
            _sums=Sums(window.loss, window.extras),
        )
        self._retries = []
        self._totals.add(report, self._scale.value)
        self._require_progress(report)
        return report

    def _measure_and_update(self, average: float) -> Outcome:
        measure = self.ranks.measure(self.gradients.measure())
        squares, finite = self._read(measure)
        if not finite:
            infs, nans = measure.infs, measure.nans
            norm = math.nan if nans else math.inf
            return Outcome(norm, 0.0, "skipped", infs, nans, measure.first_bad)
        decided = self._finish.decide(squares, average)
        self._retries += make_state(
            self.optimizer, self._totals.windows, self.window.count, self._main
        )
        with self._update():
            applied, norm = self._finish.apply(self.gradients, self.parameters, self._main, decided)
            self._step_scheduler()
        return Outcome(norm, decided.coefficient, applied)

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Around the optimizer's step. From its begin on the window cannot go on: it stays torn
        until a new one takes its place, also where an interrupt comes in between."""
        window, owner = self.window, self._owner
        window.torn, owner.stepping = INTERRUPTED, True
        try:
            yield
        except BaseException as error:
            window.torn = type(error).__name__
            raise
        finally:
            owner.stepping = False

    def _step_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

    def _read(self, measure: Any) -> tuple[float, bool]:
        """Sum of squares and whether all is finite; of a device both in one read, the only one
        that a window waits for."""
        squares, finite = measure.sum_squares, measure.finite
        if isinstance(squares, self._torch.Tensor):
            squares, finite = self._torch.stack((squares, finite.to(squares.dtype))).tolist()
        return float(squares), bool(finite)

    def _reduce(self, flushing: bool) -> Reduced:
        """Over the ranks. What makes this one's window useless is raised after they were told."""
        window, problem = self.window, self._changed("the window's end") or self._sparse()
        if window.empty:
            self._begin_window()
        reduced = self.ranks.reduce(self.gradients, window, flushing=flushing, problem=problem)
        if reduced.guess and self.gradients.empty():
            raise RuntimeError(
                "no parameter of the optimizer has a gradient at the end of this window: does the "
                "loss depend on the model, and has the model still the parameters that the "
                "optimizer was made with, which load_state_dict(assign=True) replaces?"
            )
        return reduced

    def _adopt(self, hooks: bool = True) -> None:
        """The optimizer's parameters: groups may have been added since the last window."""
        parameters = self._held()
        if list(map(id, getattr(self, "parameters", ()))) == list(map(id, parameters)):
            return
        found = {id(p): name for name, p in self.model.named_parameters()}
        names = [found.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        self.parameters, self.gradients = parameters, Gradients(parameters, names)
        if self._main is not None:
            self._main.close()
        if self._wants_main:
            hooks = hooks and (self._main is None or self._main.hooked)
            self.gradients = self._main = MainGrads(parameters, names, hooks=hooks)

    def _held(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _drop_gradients(self) -> None:
        self._watch.forget()
        for parameter in self.parameters:
            parameter.grad = None
        if self._main is not None:
            self._main.clear()

    # --- refusals ---

    def _require_same(self) -> None:
        if list(map(id, self.parameters)) != list(map(id, self._held())):
            raise RuntimeError(
                "the optimizer got other parameters inside of a window, whose gradients are not "
                "averaged: change its groups between windows; reset() drops this one"
            )

    def _changed(self, call: str) -> RuntimeError | None:
        """What somebody else did to the gradients since the last micro-batch; the window is torn
        by it."""
        change = self._watch.changed(self.gradients) if self._watch.on else None
        if change is None:
            return None
        self.window.torn = "a change from outside"
        return RuntimeError(
            f"{call}: the gradients of this window were {change.what}, after {self.window.count} "
            f"of {self._steps} micro-batches and outside of acc.backward(), so they are not those "
            f"of its micro-batches: {change.remedy}; reset() drops this window"
        )

    def _sparse(self) -> TypeError | None:
        name = self.gradients.sparse()
        if name is None:
            return None
        return TypeError(
            f"the gradient of {name} is sparse, and cannot be averaged with the others: make its "
            "embedding with sparse=False"
        )

    def _require_weight(self, total: float) -> None:
        if not (math.isfinite(total) and total > 0):
            raise ValueError(
                f"the weights of this window sum to {total:g}: there is nothing to average over; "
                "go on with a micro-batch that has some, or reset()"
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

    def _require_own(self, call: str) -> None:
        if self._owner.ended:
            raise RuntimeError(
                f"{call}: this GradAccumulator has ended: {self._owner.ended}; use the one that "
                "has the optimizer now, or make a new one"
            )

    def _require_whole(self, call: str) -> None:
        self._require_own(call)
        if self.window.torn:
            raise RuntimeError(
                f"{call}: {self.window.torn} came after a backward pass had begun, so the "
                "gradients of this window are not those of whole micro-batches; reset() drops the "
                "window"
            )

"""GradAccumulator: the full batch's gradient from micro-batches, whatever their sizes."""

from __future__ import annotations

import functools
import math
import time
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memtools import _accsettings as settings_of
from memtools import _bridge
from memtools._accplain import OneRank, PlainGradients
from memtools._accreport import AccumulatorReport, Totals, WindowReport
from memtools._finish import Finish
from memtools._lossscale import LossScale
from memtools._window import Window

if TYPE_CHECKING:
    import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DONE = "_memtools_backward"  # on a loss that went backward


class GradAccumulator:
    """Gradients of several micro-batches, one update: the gradient of the full batch.

        acc = memtools.GradAccumulator(model, optimizer, steps=4, precision="bf16", max_norm=1.0)
        for batch in loader:
            with acc.micro_batch():
                loss_sum, n_tokens = model(batch)
                acc.backward(loss_sum, weight=n_tokens)
        acc.flush()

    `loss_sum` is the SUM of the losses over n units: tokens, samples, nodes. After `steps`
    micro-batches the gradient is sum(grad loss_sum) / sum(n), over all of them and all ranks,
    however units are spread; the optimizer and the scheduler step by themselves. `flush()` does
    the same for the fewer ones of a last window. Averaging, the loss scale of fp16, the number of
    ranks and the clip coefficient are one factor, applied once, and folded into the optimizer
    where it is fused.

    An update whose gradient has an inf or a nan is left out: parameters, optimizer and scheduler
    stay, it is counted, and the report names the first such parameter.

    An error leaves gradients and counters as they were. Where an exception comes between a
    micro-batch's backward pass and its end, its gradients cannot be told from the others: the next
    call says so, and `reset()` drops the window.

    Args:
        model: the module that is trained; its parameters' names are for reports.
        optimizer: any of torch.optim's form that needs no closure; its parameters' gradients are
            what is measured, clipped and dropped. `fused=True` is fastest.
        steps: micro-batches in a window.
        precision: None or "fp32": as torch computes; "bf16": under autocast; "fp16": under
            autocast with a loss scale that moves at the ends of windows.
        max_norm: clip by the 2-norm of all gradients together.
        max_value: clip each element.
        clip: called with the parameters once gradients are averaged; returns a norm for the
            report, or None. One of the three at most.
        scheduler: its `step()` is called after each update that was made.
        init_scale, growth_interval, min_scale: the loss scale of "fp16": where it begins, after
            how many good windows it doubles, and the least it falls to.
        max_skips: so many updates left out in a row raise RuntimeError.
        micro_batch_size: rows that `step()` begins with; None: the whole batch.

    Raises:
        TypeError, ValueError: an argument that makes no sense, an optimizer that needs a closure,
            one that belongs to another accumulator, or one without any of the model's parameters.
    """

    # What step() with its back-off and the ranks build on; kept stable:
    #   model, optimizer, parameters (of the optimizer), gradients, window, ranks
    #   _run(micro, loss_fn, last): forward and backward of one micro-batch, counted in `window`;
    #       raises what they raise, with the window torn if gradients were touched
    #   _end_window() -> WindowReport: what the end of the K-th micro-batch does
    #   window.mark() / window.rewind(mark): the numbers of a window, `torn` among them
    #   _require_whole(call), _require_outside(call): refuse a torn window, an open micro-batch
    #   _drop_gradients(), micro_batch_size, _retries (taken over by the next WindowReport)
    __slots__ = (
        "__weakref__",
        "_autocast",
        "_backoff",
        "_block",
        "_context",
        "_device",
        "_enabled",
        "_finish",
        "_max_skips",
        "_notes",
        "_precision",
        "_retries",
        "_scale",
        "_scheduler",
        "_seed",
        "_seed_version",
        "_settings",
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

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int = 1,
        *,
        precision: str | None = None,
        max_norm: float | None = None,
        max_value: float | None = None,
        clip: Callable[[list[torch.nn.Parameter]], Any] | None = None,
        scheduler: Any = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_skips: int = 50,
        main_grads: bool = False,
        undo: str = "auto",
        micro_batch_size: int | None = None,
        ranks: Any = None,
        overlap: bool = False,
        in_backward: bool = False,
    ) -> None:
        self._settings = {
            key: value for key, value in locals().items() if key not in ("self", "__class__")
        }
        settings_of.check(self._settings)
        torch = self._torch = _bridge.connect().torch
        settings_of.check_model(torch, model, optimizer)
        settings_of.take(optimizer, self)
        self.model, self.optimizer, self._scheduler = model, optimizer, scheduler
        self._steps, self._max_skips = steps, max_skips
        self._precision = precision or "fp32"
        self._adopt()
        self._autocast = self._new_autocast()
        self._block = _Block()
        self._context: Any = None
        self._finish = Finish(optimizer, max_norm, max_value, clip)
        fp16 = self._precision == "fp16"
        self._scale = LossScale(float(init_scale), growth_interval, float(min_scale), fp16)
        self._totals = Totals(self._scale.value)
        self.window = Window(self._scale.value)
        self.ranks: Any = OneRank()
        self.micro_batch_size = micro_batch_size
        self._retries: list[Any] = []
        self._seed: Any = None
        self._seed_version = 0
        self._backoff: Any = None
        self._advise()

    # --- in the loop ---

    def micro_batch(self) -> _Block:
        """`with acc.micro_batch():` around forward and `backward()`: under autocast, where a
        precision was asked for, and without the ranks' reduction. The end of the last of a
        window makes the update.

        Raises RuntimeError inside of another, in a window that an exception tore, and at its end
        where there was no backward(); what `flush()` does, where the window ends.
        """
        self._block.acc = self
        return self._block

    def backward(self, loss_sum: torch.Tensor, weight: Any = None, *, retain: bool = False) -> None:
        """Add the gradient of a sum of losses over `weight` units.

        Several in one micro-batch are parts of it: their weights add up. Without weights, in a
        whole window, each micro-batch counts one: its loss is a mean (several losses in it are
        added), and the gradient is the mean over micro-batches. A weight of 0 is fine for a
        micro-batch of padding. A weight on a device is not waited for.

        Args:
            retain: keep the graph, for another loss of this micro-batch that shares it.

        Raises TypeError and ValueError for what is no scalar loss, for weights that are negative,
        nan or inf, and for weights here and none there; RuntimeError outside of a micro-batch,
        for a loss that needs no gradient or went backward before.
        """
        window = self.window
        if not window.open or window.torn:
            self._refuse_backward()
        torch = self._torch
        if not isinstance(loss_sum, torch.Tensor):
            raise TypeError(f"backward() takes a loss as a tensor, got {type(loss_sum).__name__}")
        if not loss_sum.requires_grad or loss_sum.dim() or getattr(loss_sum, _DONE, False):
            self._refuse_loss(loss_sum)
        if weight is not None:
            weight = _units(torch, weight)
        if window.guess == 0.0:
            window.begin(self._steps, weight)
        elif window.weighted is (weight is None):
            self._refuse_mixed(weight)
        setattr(loss_sum, _DONE, True)
        self._go_backward(loss_sum, retain)
        window.add(weight)

    def step(
        self, batch: Any, loss_fn: Callable[[Any], Any], split: Callable[..., Any] | None = None
    ) -> WindowReport:
        """One window of a whole batch, in micro-batches as large as fit; see docs/oom_backoff.md.
        `loss_fn(micro)` returns the loss and its weight."""
        if self._backoff is None:
            from memtools._backoff import BackOff

            self._backoff = BackOff(weakref.proxy(self))
        return self._backoff.step(batch, loss_fn, split)  # type: ignore[no-any-return]

    def flush(self) -> WindowReport | None:
        """End a window that has fewer micro-batches than `steps`, with the gradient of those
        there are. Returns its report, or None where there is none.

        Raises TypeError for sparse gradients, ValueError where all weights were 0, RuntimeError
        where no parameter has a gradient, or after `max_skips` updates left out in a row.
        """
        self._require_outside("flush()")
        self._require_whole("flush()")
        if self.window.empty:
            return None
        return self._end_window()

    def accumulate(self, function: _Function) -> _Function:
        """A decorator: each call is a micro-batch. The function returns the loss, or the loss and
        its weight, or None where it called `backward()` itself; the call returns the same."""

        @functools.wraps(function)
        def micro_batch(*args: Any, **kwargs: Any) -> Any:
            with self.micro_batch():
                result = function(*args, **kwargs)
                self._take(result)
            return result

        return micro_batch  # type: ignore[return-value]

    def reset(self) -> None:
        """Drop the window: its gradients, and what was counted of it. Outside of micro-batches.

        Raises RuntimeError inside of one."""
        self._require_outside("reset()")
        if self.window.begun:
            self._totals.dropped += 1
        self._drop_gradients()
        self.window = Window(self._scale.value)

    # --- one micro-batch ---

    def _run(self, micro: Any, loss_fn: Callable[[Any], Any], last: bool) -> None:
        """One micro-batch of step(): see above."""
        self._open(last)
        try:
            self._take(loss_fn(micro))
        except BaseException as error:
            self._abort(error)
            raise
        self._close()

    def _take(self, result: Any) -> None:
        if isinstance(result, tuple) and len(result) == 2:
            self.backward(*result)
        elif result is not None:
            self.backward(result)

    def _open(self, last: bool | None = None) -> None:
        """A micro-batch begins."""
        window = self.window
        if window.open or window.torn:
            self._require_outside("micro_batch()")
            self._require_whole("micro_batch()")
        if not window.begun:
            self._drop_gradients()
            window.scale, window.begun = self._scale.value, True
        if self.ranks.world > 1:
            last = window.count + 1 >= self._steps if last is None else last
            context = self.ranks.forward(last)
            context.__enter__()
            self._context = context
        if self._autocast is not None:
            self._autocast.__enter__()
        window.open, window.chunks = True, 0

    def _leave(self) -> None:
        """Out of the contexts, whatever happened."""
        self.window.open = False
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def _close(self) -> None:
        """A micro-batch ends well."""
        self._leave()
        window = self.window
        if window.torn:
            self._require_whole("the end of micro_batch()")
        if not window.chunks:
            raise RuntimeError(
                "no backward() in this micro-batch: call acc.backward(loss_sum, weight) inside of "
                "it; nothing was counted"
            )
        window.count += 1

    def _abort(self, error: BaseException) -> None:
        """A micro-batch ends by an exception."""
        self._leave()
        window = self.window
        if window.chunks and not window.torn:
            window.torn = type(error).__name__

    def _end_block(self) -> None:
        self._close()
        window = self.window
        if window.count >= self._steps:
            try:
                self._end_window()
            except BaseException:
                if self.window is window:  # it goes on: as before the end of this micro-batch
                    window.count -= 1
                raise

    def _go_backward(self, loss: Any, retain: bool) -> None:
        """Backward, out of autocast: it would compute in low precision what the forward pass had
        kept out of it."""
        torch, window = self._torch, self.window
        seed = self._seed
        if (
            seed is None
            or seed.dtype is not loss.dtype
            or seed.device != loss.device
            or seed._version != self._seed_version
            or self._enabled != window.constant
        ):
            seed = self._new_seed(loss)
        try:
            if self._autocast is None:
                loss.backward(seed, retain)
                return
            device = self._device
            before = torch.is_autocast_enabled(device)
            torch.set_autocast_enabled(device, False)
            torch.clear_autocast_cache()
            try:
                loss.backward(seed, retain)
            finally:
                torch.set_autocast_enabled(device, before)
        except BaseException as error:
            window.torn = type(error).__name__
            raise

    def _new_seed(self, loss: torch.Tensor) -> torch.Tensor:
        """The window's constant as the gradient that the pass begins with: saves the
        multiplication of the loss, forward and backward."""
        self._enabled = self.window.constant
        seed = self._torch.full((), self._enabled, dtype=loss.dtype, device=loss.device)
        self._seed, self._seed_version = seed, seed._version
        return seed  # type: ignore[no-any-return]

    # --- the end of a window ---

    def _end_window(self) -> WindowReport:
        """Reduce, measure, decide, step, count. Until the optimizer steps an error changes
        nothing."""
        began, window = time.perf_counter(), self.window
        self._adopt()
        self._require_gradients()
        reduced = self.ranks.reduce(self.gradients, window)
        if not (math.isfinite(reduced.weight) and reduced.weight > 0):
            raise ValueError(
                f"the weights of this window sum to {reduced.weight:g}: there is nothing to "
                "average over; go on with a micro-batch that has some, or reset()"
            )
        measure = self.ranks.measure(self.gradients.measure())
        if measure.finite:
            norm, coefficient, applied = self._update(measure.sum_squares, reduced.weight)
        else:
            norm = math.nan if measure.nans else math.inf
            coefficient, applied = 0.0, "skipped"
        self._drop_gradients()
        self._scale.update(not measure.finite)
        self.window = Window(self._scale.value)
        retries, self._retries = tuple(self._retries), []
        report = WindowReport(
            self._totals.windows,
            reduced.micro_batches,
            reduced.weight,
            norm,
            coefficient,
            window.scale,
            not measure.finite,
            measure.infs,
            measure.nans,
            measure.first_bad,
            applied,
            (time.perf_counter() - began) * 1e3,
            self.micro_batch_size,
            retries,
        )
        self._totals.add(report, self._scale.value)
        self._require_progress(report)
        return report

    def _update(self, sum_squares: float, weight: float) -> tuple[float, float, str]:
        decided = self._finish.decide(sum_squares, 1.0 / (self.window.constant * weight))
        try:
            applied, norm = self._finish.apply(self.gradients, decided)
        except BaseException as error:
            self.window.torn = type(error).__name__
            raise
        if self._scheduler is not None:
            self._scheduler.step()
        return norm, decided.coefficient, applied

    def _require_gradients(self) -> None:
        name = self.gradients.sparse()
        if name is not None:
            raise TypeError(
                f"the gradient of {name} is sparse, and cannot be averaged with the others: make "
                "its embedding with sparse=False"
            )
        if self.gradients.empty():
            raise RuntimeError(
                "no parameter of the optimizer has a gradient at the end of this window: does the "
                "loss depend on the model?"
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

    # --- what there is to train ---

    def _adopt(self) -> None:
        """The optimizer's parameters as they are now: groups may have been added."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = getattr(self, "parameters", None)
        if known is not None and list(map(id, known)) == list(map(id, parameters)):
            return
        found = {id(p): name for name, p in self.model.named_parameters()}
        names = [found.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        self.parameters, self.gradients = parameters, PlainGradients(parameters, names)

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _new_autocast(self) -> Any:
        torch, types = self._torch, {p.device.type for p in self.parameters}
        self._device = next((kind for kind in sorted(types) if kind != "cpu"), "cpu")
        self._enabled = 0.0
        if self._precision == "fp32":
            return None
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float16
        return torch.autocast(self._device, dtype)

    def _advise(self) -> None:
        advice = settings_of.fused_advice(self.optimizer)
        self._notes = (advice,) if advice else ()
        if advice:
            warnings.warn(advice, UserWarning, stacklevel=3)

    # --- what it is told and tells ---

    @property
    def steps(self) -> int:
        """Micro-batches in a window. To be changed between windows: RuntimeError inside of one."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        settings_of.steps(value)
        if self.window.open or not self.window.empty:
            raise RuntimeError(
                f"steps cannot become {value} inside of a window, after {self.window.count} of "
                f"{self._steps} micro-batches: flush() or reset() first"
            )
        self._steps = value

    @property
    def scale(self) -> float:
        """The loss scale of the next window; 1 without fp16."""
        return self._scale.value

    def report(self) -> AccumulatorReport:
        """What was done so far. Takes some 10 us."""
        totals = self._totals
        return AccumulatorReport(
            self._steps,
            self._precision,
            totals.windows,
            totals.updates,
            totals.skipped,
            totals.skipped_in_a_row,
            totals.inf_windows,
            totals.nan_windows,
            totals.first_bad,
            totals.dropped,
            totals.micro_batches,
            totals.weight,
            self._scale.value,
            totals.least_scale,
            self.micro_batch_size,
            (*totals.retries, *self._retries),
            totals.last,
            self._notes,
        )

    def close(self) -> None:
        """Give the optimizer back, so that another accumulator may have it. Gradients stay."""
        settings_of.give_back(self.optimizer, self)

    def __repr__(self) -> str:
        done = f"{self.window.count} of {self._steps} micro-batches"
        return f"GradAccumulator({done}, {self._totals.updates:,} updates, {self._precision})"

    # --- refusals ---

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

    def _refuse_backward(self) -> NoReturn:
        self._require_whole("backward()")
        raise RuntimeError(
            "backward() outside of a micro-batch: call it in `with acc.micro_batch():`"
        )

    def _refuse_loss(self, loss: torch.Tensor) -> None:
        if loss.dim():
            raise ValueError(
                f"backward() takes a loss of one element and no dimensions, got shape "
                f"{tuple(loss.shape)}: sum it"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss needs no gradient: it was detached, or computed without grad mode or "
                "from frozen parameters only"
            )
        raise RuntimeError("backward() twice for the same loss: its gradient is already counted")

    def _refuse_mixed(self, weight: Any) -> NoReturn:
        have, got = ("no weight", "one") if weight is not None else ("weights", "none")
        raise ValueError(
            f"this window's losses came with {have} and this one with {got}: an average needs "
            "weights of all or of none"
        )


class _Block:
    """One object for all micro-batches of an accumulator; holds it only inside of one."""

    __slots__ = ("acc",)

    acc: GradAccumulator

    def __enter__(self) -> None:
        self.acc._open()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        acc = self.acc
        del self.acc
        if error is None:
            acc._end_block()
        else:
            acc._abort(error)


def _units(torch: Any, weight: Any) -> Any:
    """A weight as a float, or as a 0-d tensor where it lives on a device."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.dtype is torch.bool:
            raise TypeError(
                f"weight is a number or a tensor of one, got {weight.dtype} of shape "
                f"{tuple(weight.shape)}"
            )
        weight = weight.detach()
        if weight.device.type != "cpu":
            return weight.reshape(()).to(torch.float64)
        weight = weight.item()
    elif isinstance(weight, bool) or not hasattr(weight, "__float__"):
        raise TypeError(f"weight is a number or a tensor of one, got {type(weight).__name__}")
    weight = float(weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight counts units, so it is 0 or more and finite; got {weight:g}")
    return weight

"""GradAccumulator: the full batch's gradient from micro-batches, whatever their sizes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memtools._base import torch as bridge
from memtools.grad import settings
from memtools.grad import state as accstate
from memtools.grad.backward import Passes
from memtools.grad.finish import Finish
from memtools.grad.gradwatch import GradientWatch
from memtools.grad.loop import WindowLoop
from memtools.grad.loss_scale import LossScale
from memtools.grad.owner import Ownership
from memtools.grad.ranks import Ranks, check_together, find_ranks
from memtools.grad.report import AccumulatorReport, Totals, WindowReport
from memtools.grad.window import Window

if TYPE_CHECKING:
    import torch

    from memtools.grad.backoff import BackOff

_Function = TypeVar("_Function", bound=Callable[..., Any])


class GradAccumulator(WindowLoop):
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
            what is measured, clipped and dropped. `fused=True` is fastest. It belongs to the
            newest accumulator that was made with it; the one that had it is closed.
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
            or one without any of the model's parameters.
    """

    __slots__ = ("_backoff", "_block", "_notes", "_precision", "_stepping")

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
    ) -> None:
        told = locals()
        settings.check({name: told[name] for name in settings.NAMES})
        torch = self._torch = bridge.connect().torch
        settings.check_model(torch, model, optimizer, main_grads)
        self.model, self.optimizer, self._scheduler = model, optimizer, scheduler
        self._steps, self._max_skips = steps, max_skips
        self._precision = precision or "fp32"
        self._wants_main, self._main, self._context = main_grads, None, None
        self._owner, self._watch, self.ranks = Ownership(self), GradientWatch(), Ranks()
        self._block = _Block()
        self._passes = Passes(torch, _device(self._held()), self._precision)
        self._finish = Finish(optimizer, max_norm, max_value, clip)
        fp16 = self._precision == "fp16"
        self._scale = LossScale(float(init_scale), growth_interval, float(min_scale), fp16)
        self._totals = Totals(self._scale.value)
        self._set_window(Window(self._scale.value))
        self.micro_batch_size, self._retries = micro_batch_size, []
        self._backoff: BackOff | None = None
        self._stepping = (undo, micro_batch_size, overlap)
        advice = settings.fused_advice(optimizer)
        self._notes: tuple[str, ...] = (advice,) if advice else ()
        try:
            self._adopt(hooks=False)
            self.ranks = find_ranks(model, self.parameters, ranks, overlap)
            check_together(self.ranks, main_grads, overlap)
            self._owner.take(optimizer)  # from here on nothing is refused
            if self._main is not None:
                self._main.hook()
            self.ranks.attach()
        except BaseException:
            self._release("it could not be made")
            raise

    # --- in the loop ---

    def micro_batch(self) -> _Block:
        """`with acc.micro_batch():` around forward and `backward()`: under autocast, where a
        precision was asked for, and without the ranks' reduction. The end of the last one of a
        window makes the update.

        Raises RuntimeError inside of another, in a window that an exception tore, at its end where
        there was no backward(); and what `flush()` does, where the window ends.
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

        Raises TypeError and ValueError for what is no loss without dimensions, for weights that
        are negative, nan or inf, and for weights here and none there; RuntimeError outside of a
        micro-batch, for a loss that needs no gradient or went backward before.
        """
        self._backward(loss_sum, weight, retain)

    def step(
        self, batch: Any, loss_fn: Callable[[Any], Any], split: Callable[..., Any] | None = None
    ) -> WindowReport:
        """One window of a whole batch, in micro-batches as large as fit: where memory runs out,
        state is restored and smaller ones go on, with the same gradient. `loss_fn(micro)` returns
        the sum of losses and its weight, and may return a dict of more sums. The report has the
        mean of the losses as `loss` and the sums as `extras`, in which a micro-batch that was tried
        again counts once. See docs/guides/oom_backoff.md.

        Args:
            split: called with a batch and a size, returns a list of batches of at most that size;
                for what is no tensor and no dict, list, tuple or dataclass of them.

        Raises what `flush()` does, and what `loss_fn` does, with the gradients and counters as
        before; out of memory only where one row does not fit.
        """
        return self._back_off().step(batch, loss_fn, split)

    def _back_off(self) -> BackOff:
        """Made where it is needed. It holds the accumulator weakly: no cycle, so that both go with
        the last reference."""
        if self._backoff is None:
            from memtools.grad.backoff import BackOff

            self._backoff = BackOff(weakref.proxy(self), *self._stepping)
            if self._main is not None:
                self._main.unhook()  # what a failed pass made can still be dropped
        return self._backoff

    def flush(self) -> WindowReport | None:
        """End a window that has fewer micro-batches than `steps`, with the gradient of those
        there are. Returns its report, or None where there is none.

        With several ranks every one of them calls it where its loader has ended: it takes part in
        the windows of those that go on, and returns when all have flushed.

        Raises TypeError for sparse gradients, ValueError where all weights were 0, RuntimeError
        where no parameter has a gradient, or after `max_skips` updates left out in a row.
        """
        self._require_outside("flush()")
        self._require_whole("flush()")
        if self.ranks.world == 1:
            return None if self.window.empty else self._end_window()
        report = self._end(flushing=True)
        while not self.ranks.finished:
            report = self._end(flushing=True) or report
        return report

    def accumulate(self, function: _Function) -> _Function:
        """A decorator: each call is a micro-batch. The function returns the loss, or the loss and
        its weight, or these and a dict of more sums, or None where it called `backward()` itself;
        the call returns the same.

        Raises TypeError for a generator or a coroutine function: a call of it runs nothing yet.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError("accumulate() takes a plain function, not a generator or a coroutine")

        @functools.wraps(function)
        def micro_batch(*args: Any, **kwargs: Any) -> Any:
            with self.micro_batch():
                result = function(*args, **kwargs)
                self._take(result)
            return result

        return micro_batch  # type: ignore[return-value]

    def reset(self) -> None:
        """Drop the window: its gradients, and what was counted of it. In a micro-batch, as after
        an interrupt that left one open, it drops that too: the rest of its block does nothing.
        """
        self._require_own("reset()")
        self._abandon()
        self._totals.dropped += not self.window.empty
        self._drop_gradients()
        self._totals.keep(self._retries)
        self._retries = []
        self._set_window(Window(self._scale.value))

    # --- what it is told ---

    @property
    def steps(self) -> int:
        """Micro-batches in a window. To be changed between windows: RuntimeError inside of one."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        settings.count("steps", value)
        if self.window.open or not self.window.empty:
            raise RuntimeError(
                f"steps cannot become {value} inside of a window, after {self.window.count} of "
                f"{self._steps} micro-batches: flush() or reset() first"
            )
        self._steps = value

    def state_dict(self, *, gradients: bool = True, rng: bool = True) -> dict[str, Any]:
        """What a run needs to go on bit for bit, in the middle of a window too: counters, weights,
        loss scale, copies of the gradients so far (one more gradient-sized buffer; none between
        windows), torch's random state of the CPU and of the parameters' CUDA devices. The model,
        the optimizer and the scheduler have their own.

        Every rank saves its own. `torch.load(weights_only=True)` reads it.

        Raises RuntimeError inside of a micro-batch and in a window that an exception tore.
        """
        self._require_outside("state_dict()")
        self._require_whole("state_dict()")
        return accstate.state_of(self, gradients, rng)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the window that is here is dropped.

        Raises RuntimeError inside of a micro-batch; ValueError and TypeError for what is no such
        state, or one of other parameters or, in the middle of a window, of other `steps`: then
        nothing was changed.
        """
        self._require_own("load_state_dict()")
        self._require_outside("load_state_dict()")
        accstate.load(self, state)

    def close(self) -> None:
        """Give the optimizer back and take away every hook; a window that is not at its end is
        dropped, and a RuntimeWarning says so. What is in `p.grad` stays; sums of `main_grads` go.
        Afterwards only report() works. A newer accumulator of the same optimizer closes this one.
        """
        self._release("it was closed")

    def _release(self, why: str) -> None:
        if self._owner.ended:
            return
        self._abandon()
        self._watch.forget()
        self._owner.end(why)
        if self._main is not None:
            self._main.close()
        self.ranks.close()
        self.window = Window(self._scale.value)
        self.window.torn = why

    # --- what it tells ---

    @property
    def scale(self) -> float:
        """The loss scale of the next window; 1 without fp16."""
        return self._scale.value

    def report(self) -> AccumulatorReport:
        """What was done so far. Takes some microseconds."""
        totals = self._totals
        return AccumulatorReport(
            steps=self._steps,
            precision=self._precision,
            windows=totals.windows,
            updates=totals.updates,
            skipped=totals.skipped,
            skipped_in_a_row=totals.skipped_in_a_row,
            inf_windows=totals.inf_windows,
            nan_windows=totals.nan_windows,
            first_bad=totals.first_bad,
            dropped=totals.dropped,
            micro_batches=totals.micro_batches,
            weight=totals.weight,
            scale=self._scale.value,
            least_scale=totals.least_scale,
            micro_batch_size=self.micro_batch_size,
            retries=(*totals.retries, *self._retries),
            ran_out=totals.ran_out + len(self._retries),
            last=totals.last,
            notes=self._notes,
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError, in copy.copy(), copy.deepcopy() and pickle."""
        raise TypeError(
            "a GradAccumulator cannot be copied or pickled, as it belongs to one optimizer: save "
            "its state_dict() beside the model's and the optimizer's, or make a new one of the "
            "copied model and optimizer"
        )

    def __repr__(self) -> str:
        done = f"{self.window.count} of {self._steps} micro-batches"
        return f"GradAccumulator({done}, {self._totals.updates:,} updates, {self._precision})"


class _Block:
    """One object for all micro-batches of an accumulator; holds it only inside of one."""

    __slots__ = ("acc",)

    acc: GradAccumulator

    def __enter__(self) -> None:
        if not hasattr(self, "acc"):
            raise RuntimeError("this micro-batch has ended: call micro_batch() for each")
        self.acc._open()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        acc = self.acc
        del self.acc
        if not acc.window.open:  # reset() or close() came in the middle of it
            return
        try:
            if error is None:
                acc._end_block()
            else:
                acc._abort(error)
                acc.ranks.abort(error, acc.window)
        except BaseException:
            acc._passes.recover()  # an interrupt may have come before autocast was left
            raise


def _device(parameters: list[torch.Tensor]) -> str:
    """Where autocast is to work: where parameters are on two kinds, not the CPU."""
    kinds = sorted({p.device.type for p in parameters})
    return next((kind for kind in kinds if kind != "cpu"), "cpu")

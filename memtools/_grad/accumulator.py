"""GradAccumulator: the full batch's gradient from micro-batches, whatever their sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memtools._base.number import whole_number
from memtools._grad.backoff import BackOff
from memtools._grad.ranks import check_together, find_ranks
from memtools._grad.report import WATERMARK, AccumulatorReport, WindowReport
from memtools._grad.settings import Settings, check_model, fused_advice
from memtools._grad.state import load, state_of
from memtools._grad.window import Block, WindowRunner

if TYPE_CHECKING:
    import torch

    from memtools._grad.pressure import Monitor

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
        model: the module that is trained; the names of its parameters are used in reports.
        optimizer: an optimizer as torch.optim has them, which needs no closure. The gradients of
            its parameters are measured, clipped and dropped. `fused=True` is fastest. An optimizer
            belongs to the newest accumulator that was made with it; the one before is closed.
        steps: how many micro-batches make a window, at least 1, which is the default.
        precision: None, the default, and "fp32": compute as torch does. "bf16": under autocast.
            "fp16": under autocast, with a loss scale that changes at the ends of windows.
        max_norm: the largest 2-norm of all gradients together, above 0; larger ones are scaled to
            it. None, the default: the norm is not clipped.
        clip: a function that is called with the parameters after the gradients have been averaged,
            such as one that clips by value; it returns a norm for the report, or None. None by
            default. Give at most one of max_norm and clip.
        scheduler: a scheduler, whose `step()` is called without arguments after each update that
            was made. None, the default: no scheduler.
        init_scale: the loss scale of "fp16" at the beginning, above 0; 65,536 by default.
        micro_batch_size: the number of rows that `step()` begins with, at least 1. None, the
            default: the whole batch.
        ranks: the processes that train the model together. None, the default: look for
            DistributedDataParallel and fully_shard in the model. True or a process group: all ranks
            of the job, or of the group, have the same plain model, which starts as it is on the
            first of them. False: this process trains alone in any case.
        overlap: whether DistributedDataParallel reduces in the backward pass of a window's last
            micro-batch, which cannot be tried again then. False, the default: gradients are summed
            at the end of the window.
        monitor: a MemoryMonitor, by which `step()` keeps memory in use below 90 % of each limit. It
            has to be running by the first `step()`. None, the default: fewer rows after an error.

    Raises:
        TypeError: an argument of the wrong type, or an optimizer that needs a closure.
        ValueError: an argument out of its range, two ways of clipping, an optimizer without any of
            the model's parameters, or a combination that cannot work.
    """

    __slots__ = ("__weakref__", "_advice", "_back_off", "_block", "_runner", "_settings")

    _back_off: BackOff | None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int = 1,
        *,
        precision: str | None = None,
        max_norm: float | None = None,
        clip: Callable[[list[torch.nn.Parameter]], Any] | None = None,
        scheduler: Any = None,
        init_scale: float = 2.0**16,
        micro_batch_size: int | None = None,
        ranks: Any = None,
        overlap: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        settings = Settings(
            steps=steps,
            precision=precision,
            max_norm=max_norm,
            clip=clip,
            scheduler=scheduler,
            init_scale=init_scale,
            micro_batch_size=micro_batch_size,
            overlap=overlap,
            monitor=monitor,
        )
        check_model(model, optimizer)
        self._settings = settings
        self._runner = runner = WindowRunner(model, optimizer, settings)
        self._advice = fused_advice(optimizer)
        self._block, self._back_off = Block(), None
        try:
            parameters = runner.gradients.parameters
            runner.ranks = find_ranks(model, parameters, ranks, overlap)
            check_together(runner.ranks, parameters, overlap, monitor is not None)
            runner.attach()
        except BaseException:
            runner.release("it could not be made")
            raise

    # --- in the loop ---

    def micro_batch(self) -> Block:
        """Return a context for the forward pass and `backward()` of one micro-batch.

        Inside of it autocast is on, where a precision was asked for, and the ranks' own reduction
        is off. The end of a window's last micro-batch makes the update.

        Raises RuntimeError inside of another micro-batch, in a window that an exception tore, or at
        its end if backward() was not called; and what `flush()` raises, where the window ends.
        """
        self._block.runner = self._runner
        return self._block

    def backward(self, loss_sum: torch.Tensor, weight: Any = None, *, retain: bool = False) -> None:
        """Add the gradient of a sum of losses over `weight` units.

        Several calls in one micro-batch are parts of it: their weights add up. Without weights, in
        a whole window, each micro-batch counts one: its loss is a mean (several losses in it are
        added), and the gradient is the mean over micro-batches.

        Args:
            loss_sum: a tensor without dimensions: the SUM of the losses.
            weight: how many units it is the sum over: a number, or a tensor of one element, 0 or
                more; 0 is for a micro-batch of padding. A tensor on a device is not waited for.
                None: the loss is a mean.
            retain: keep the graph, for another loss of this micro-batch that shares it.

        Raises TypeError if `loss_sum` is not a tensor; ValueError if it has dimensions, if a weight
        is negative or not finite, or if only some losses of the window have weights; RuntimeError
        outside of a micro-batch, or if the loss needs no gradient or went backward before.
        """
        self._runner.backward(loss_sum, weight, retain)

    def step(
        self, batch: Any, loss_fn: Callable[[Any], Any], split: Callable[..., Any] | None = None
    ) -> WindowReport:
        """Make one window of a whole batch, in micro-batches as large as fit.

        Where memory runs out, state is restored and smaller micro-batches go on, with the same
        gradient. See docs/guides/oom_backoff.md.

        Args:
            batch: a tensor, array, list, dict, tuple or dataclass of them, cut along its rows.
            loss_fn: called with each micro-batch; returns the sum of losses and its weight, and may
                return a dict of more sums.
            split: called with a batch and a size, returns a list of batches of at most that size.
                It is for what is not made of tensors, lists, dicts, tuples and dataclasses.

        Returns the window's report, which has the mean of the losses as `loss` and the sums as
        `extras`; a micro-batch that was tried again counts once in them.

        Raises what `flush()` raises, and what `loss_fn` raises, with the gradients and counters as
        before; out of memory only where one row does not fit.
        """
        return self._get_back_off().step(batch, loss_fn, split)

    def _get_back_off(self) -> BackOff:
        """The back-off, which is made where it is needed: it sets malloc's thresholds."""
        if self._back_off is None:
            self._back_off = BackOff(self._runner, self._settings)
        return self._back_off

    def flush(self) -> WindowReport | None:
        """End a window that has fewer micro-batches than `steps`, with the gradient of those that
        it has. Returns its report, or None if it is empty.

        With several ranks every one of them calls it where its loader has ended: it takes part in
        the windows of those that go on, and returns when all have flushed.

        Raises TypeError if a gradient is sparse, ValueError if all weights were 0, RuntimeError if
        no parameter has a gradient, or after 50 updates left out in a row.
        """
        runner = self._runner
        runner.require_outside("flush()")
        runner.require_whole("flush()")
        if runner.ranks.world == 1:
            return None if runner.window.empty else runner.end()
        report = runner.end(flushing=True)
        while not runner.ranks.finished:
            report = runner.end(flushing=True) or report
        return report

    def accumulate(self, function: _Function) -> _Function:
        """Decorate a function of which each call is a micro-batch.

        The function returns the loss, or the loss and its weight, or these and a dict of more sums,
        or None if it called `backward()` itself; the call returns the same.

        Raises TypeError for a generator or a coroutine function: a call of it runs nothing yet.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError("accumulate() takes a plain function, not a generator or a coroutine")

        @functools.wraps(function)
        def micro_batch(*args: Any, **kwargs: Any) -> Any:
            with self.micro_batch():
                result = function(*args, **kwargs)
                self._runner.take(result)
            return result

        return micro_batch  # type: ignore[return-value]

    def reset(self) -> None:
        """Drop the window: its gradients, and what was counted of it. A micro-batch that is open,
        as after an interrupt, is dropped too: the rest of its block does nothing.
        """
        self._runner.require_owned("reset()")
        self._runner.reset()

    # --- settings and state ---

    @property
    def steps(self) -> int:
        """Micro-batches in a window. Setting it inside of a window raises RuntimeError."""
        return self._runner.steps

    @steps.setter
    def steps(self, value: int) -> None:
        value = whole_number("steps", value)
        window = self._runner.window
        if window.open or not window.empty:
            raise RuntimeError(
                f"steps cannot become {value} inside of a window, after {window.count} of "
                f"{self.steps} micro-batches: flush() or reset() first"
            )
        self._runner.steps = value

    def state_dict(self, *, gradients: bool = True, rng: bool = True) -> dict[str, Any]:
        """Return what a run needs to go on bit for bit, in the middle of a window too.

        It has counters, weights and the loss scale; the model, the optimizer and the scheduler have
        their own states. Every rank saves its own. `torch.load(weights_only=True)` reads it.

        Args:
            gradients: add copies of the gradients so far: one more gradient-sized buffer in the
                middle of a window, nothing between windows.
            rng: add torch's random state of the CPU and of the parameters' CUDA devices.

        Raises RuntimeError inside of a micro-batch and in a window that an exception tore.
        """
        self._runner.require_outside("state_dict()")
        self._runner.require_whole("state_dict()")
        return state_of(self._runner, self._back_off, gradients, rng)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); the window that is open here is dropped.

        Raises RuntimeError inside of a micro-batch; ValueError or TypeError if `state` is not such
        a state, or is one of other parameters or, in the middle of a window, of other `steps`. Then
        nothing was changed.
        """
        self._runner.require_owned("load_state_dict()")
        self._runner.require_outside("load_state_dict()")
        load(self._runner, state, self._get_back_off)

    def close(self) -> None:
        """Give the optimizer back and take every hook away.

        A window that is not at its end is dropped, and a RuntimeWarning says so. What is in
        `p.grad` stays. Afterwards only report() works. A newer accumulator of the same optimizer
        closes this one.
        """
        self._runner.release("it was closed")

    # --- what was done ---

    @property
    def scale(self) -> float:
        """The loss scale of the next window; 1 without fp16."""
        return self._runner.precision.scale.value

    def report(self) -> AccumulatorReport:
        """Return what was done so far. Takes some microseconds."""
        totals, retries = self._runner.totals, self._runner.retries
        lowered = sum(retry.phase == WATERMARK for retry in retries)
        notes = (self._advice, *(() if self._back_off is None else self._back_off.notes))
        return AccumulatorReport(
            **totals.state() | {"ran_out": totals.ran_out + len(retries) - lowered},
            lowered=int(totals.lowered) + lowered,
            steps=self.steps,
            precision=self._settings.precision or "fp32",
            scale=self.scale,
            micro_batch_size=self.micro_batch_size,
            retries=(*totals.retries, *retries),
            last=totals.last,
            notes=tuple(note for note in notes if note),
        )

    @property
    def model(self) -> torch.nn.Module:
        """The module that is trained."""
        return self._runner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the windows step."""
        return self._runner.optimizer

    @property
    def micro_batch_size(self) -> int | None:
        """Rows that step() gives to a micro-batch, or None."""
        return self._runner.micro_batch_size

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError, in copy.copy(), copy.deepcopy() and pickle."""
        raise TypeError(
            "a GradAccumulator cannot be copied or pickled, as it belongs to one optimizer: save "
            "its state_dict() beside the model's and the optimizer's, or make a new one of the "
            "copied model and optimizer"
        )

    def __repr__(self) -> str:
        done = f"{self._runner.window.count} of {self.steps} micro-batches"
        updates = f"{self._runner.totals.updates:,} updates"
        return f"GradAccumulator({done}, {updates}, {self._settings.precision})"

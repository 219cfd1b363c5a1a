"""GradAccumulator: the gradient of the full batch from micro-batches of any sizes."""

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
    """Accumulates gradients over micro-batches and updates with the gradient of the full batch.

        acc = memtools.GradAccumulator(model, optimizer, steps=4, precision="bf16", max_norm=1.0)
        for batch in loader:
            with acc.micro_batch():
                loss_sum, n_tokens = model(batch)
                acc.backward(loss_sum, weight=n_tokens)
        acc.flush()

    `loss_sum` is the SUM of the losses over n units: tokens, samples, nodes. After `steps`
    micro-batches the gradient is sum(grad loss_sum) / sum(n) over all micro-batches and ranks, and
    the accumulator steps the optimizer and the scheduler.

    An update whose gradient has an inf or a nan is skipped. An error leaves gradients and counters
    unchanged. An exception after the backward pass of a micro-batch began interrupts the window:
    the next call raises RuntimeError until `reset()`.

    Args:
        model: the module to train.
        optimizer: an optimizer of torch.optim, or one like it, that needs no closure. `fused=True`
            is fastest. A newer accumulator of the same optimizer closes the older one.
        steps: micro-batches in a window.
        precision: "bf16" uses autocast, "fp16" autocast and a loss scale; None or "fp32" neither.
        max_norm: the 2-norm of all gradients above which they are scaled down.
        clip: instead of max_norm, a function of the parameters, called after averaging; it returns
            a norm for the report or None.
        scheduler: a learning rate scheduler, stepped after each update.
        init_scale: the first loss scale of "fp16".
        micro_batch_size: rows that `step()` starts with. None: the whole batch.
        ranks: None detects DistributedDataParallel and fully_shard. True, or a process group: the
            ranks have the same plain model and start with the first rank's values. False: this
            process alone.
        overlap: let DistributedDataParallel reduce during the last backward pass of a window, which
            then cannot be retried.
        monitor: a running MemoryMonitor, with which `step()` keeps memory below 90 % of each limit.

    Raises ValueError if arguments conflict, or the optimizer has none of the model's parameters.
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
        """Return a context manager for the forward pass and `backward()` of one micro-batch.

        Inside it autocast is on if `precision` asks for it. The end of a window's last micro-batch
        makes the update.

        Raises RuntimeError inside another micro-batch, in an interrupted window, or at the end
        without backward(); at the end of a window also what `flush()` raises.
        """
        self._block.runner = self._runner
        return self._block

    def backward(self, loss_sum: torch.Tensor, weight: Any = None, *, retain: bool = False) -> None:
        """Add the gradient of a sum of losses over `weight` units.

        Several calls in one micro-batch add up. If no loss of a window has a weight, the gradient
        is the mean over its micro-batches.

        Args:
            loss_sum: the SUM of the losses, a 0-d tensor.
            weight: the number of units in the sum: a number or a tensor of one element, which is
                not waited for. None: the loss is a mean.
            retain: keep the graph for another loss of this micro-batch.

        Raises ValueError if `loss_sum` is not 0-d, a weight is negative or not finite, or only some
        losses of the window have one; RuntimeError outside a micro-batch, if the loss needs no
        gradient, or for a second backward.
        """
        self._runner.backward(loss_sum, weight, retain)

    def step(
        self, batch: Any, loss_fn: Callable[[Any], Any], split: Callable[..., Any] | None = None
    ) -> WindowReport:
        """Train on a whole batch as one window, in micro-batches that fit into memory.

        If memory runs out, the state before the micro-batch is restored, and the window continues
        with smaller micro-batches and the same gradient.

        Args:
            batch: a tensor, array, list, dict, tuple or dataclass of these, split along its rows.
            loss_fn: called with each micro-batch; returns (loss_sum, weight), optionally with a
                dict of more sums, the report's `extras`.
            split: for other batches: a function of (batch, size) that returns a list of batches of
                at most that size.

        Raises what `flush()` and `loss_fn` raise; an out-of-memory error only if a single row does
        not fit.
        """
        report: WindowReport = self._get_back_off().step(batch, loss_fn, split)
        return report

    def _get_back_off(self) -> BackOff:
        """Return the back-off. The first call makes it, as it sets malloc's thresholds."""
        if self._back_off is None:
            self._back_off = BackOff(self._runner, self._settings)
        return self._back_off

    def flush(self) -> WindowReport | None:
        """End a window with fewer than `steps` micro-batches, and update.

        Each rank calls it when its loader has ended; it returns when all ranks have flushed.

        Returns the report, or None if the window is empty.

        Raises TypeError if a gradient is sparse, ValueError if all weights were 0, RuntimeError if
        no parameter has a gradient or after 50 skipped updates in a row.
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
        """Decorate a `function` so that each call is a micro-batch.

        It returns the loss, (loss, weight), (loss, weight, sums), or None if it called `backward()`
        itself. Generators and coroutine functions raise TypeError.
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
        """Drop the window, its gradients and counters, and an interrupted micro-batch."""
        self._runner.require_owned("reset()")
        self._runner.reset()

    # --- settings and state ---

    @property
    def steps(self) -> int:
        """Micro-batches in a window. Setting it inside a window raises RuntimeError."""
        return self._runner.steps

    @steps.setter
    def steps(self, value: int) -> None:
        value = whole_number("steps", value)
        window = self._runner.window
        if window.open or not window.empty:
            raise RuntimeError(
                f"steps cannot become {value} inside a window, after {window.count} of "
                f"{self.steps} micro-batches: flush() or reset() first"
            )
        self._runner.steps = value

    def state_dict(self, *, gradients: bool = True, rng: bool = True) -> dict[str, Any]:
        """Return the state that resumes a run bit for bit, even inside a window.

        Save it on each rank, with the states of the model, the optimizer and the scheduler.
        `torch.load(weights_only=True)` can read it.

        Args:
            gradients: copy the gradients of an open window.
            rng: include torch's random state of the CPU and of the parameters' CUDA devices.

        Raises RuntimeError inside a micro-batch and in an interrupted window.
        """
        self._runner.require_outside("state_dict()")
        self._runner.require_whole("state_dict()")
        return state_of(self._runner, self._back_off, gradients, rng)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state` of `state_dict()`. Drops the current window; an error changes nothing.

        Raises RuntimeError inside a micro-batch; ValueError if it has gradients of other
        parameters, or is from a window with other `steps`.
        """
        self._runner.require_owned("load_state_dict()")
        self._runner.require_outside("load_state_dict()")
        load(self._runner, state, self._get_back_off)

    def close(self) -> None:
        """Release the optimizer and remove all hooks.

        Drops an unfinished window with a RuntimeWarning, and leaves `p.grad` as it is. Only
        report() works afterwards.
        """
        self._runner.release("it was closed")

    # --- what was done ---

    @property
    def scale(self) -> float:
        """The loss scale of the next window; 1 without fp16."""
        return self._runner.precision.scale.value

    def report(self) -> AccumulatorReport:
        """Return a report of all windows so far."""
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
        """The trained module."""
        return self._runner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._runner.optimizer

    @property
    def micro_batch_size(self) -> int | None:
        """Rows that step() gives to a micro-batch."""
        return self._runner.micro_batch_size

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError, in copy.copy(), copy.deepcopy() and pickle."""
        raise TypeError(
            "a GradAccumulator cannot be copied or pickled, as it belongs to one optimizer: save "
            "its state_dict() with those of the model and the optimizer, or make a new one of the "
            "copied model and optimizer"
        )

    def __repr__(self) -> str:
        done = f"{self._runner.window.count} of {self.steps} micro-batches"
        updates = f"{self._runner.totals.updates:,} updates"
        return f"GradAccumulator({done}, {updates}, {self._settings.precision})"

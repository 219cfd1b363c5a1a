"""The batches of a Trainer in parts that fit: its own `compute_loss`, once for each part.

    training_step()                        the trainer's own
      compute_loss(batch)   ─► part: compute_loss(rows), accelerator.backward()   as often as needed
      ◄─ the loss of the batch, without a graph
      accelerator.backward(loss)           adds nothing: the gradients are there
    clip, optimizer, scheduler, logs       the trainer's own

So the norm, the learning rate, the scaler and checkpoints are the trainer's, and right. Where it
divides a mean by the number of batches in an update, a batch counts here by its rows or tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools._base.torch import connect
from memtools._grad.passes import BatchPasses
from memtools._grad.pressure import FIRST_ROWS
from memtools.integrations._rows import (
    Rows,
    Rule,
    Rules,
    UncuttableError,
    computes_coarsely,
    documented,
    looking,
)
from memtools.integrations.use import told

if TYPE_CHECKING:
    import torch

    from memtools.integrations.transformers._callback import MemoryCallback
else:
    torch = connect().torch

_COUNTERS: Final = (bool, int, float)
_OF_ROWS: Final = ("rewards/", "logps/", "vespo/")


class Accumulation:
    """Replaces `trainer.compute_loss` and `trainer.get_batch_samples` until `remove()`.

    Args:
        trainer: a transformers.Trainer.
        callback: the trainer's, whose monitor runs while it trains.
        micro_batch_size: the rows of a part to begin with; None for the whole batch.

    Attributes:
        why_not: why batches are not cut; "" while they are.
        rule: what the loss of a batch is; None before the first batch of two rows.
        passes: the back-off; None before the first batch.
    """

    def __init__(
        self, trainer: Any, callback: MemoryCallback, micro_batch_size: int | None
    ) -> None:
        self._trainer, self._size = trainer, micro_batch_size
        self._callback, self._monitor = callback, callback.monitor
        self._compute_loss = trainer.compute_loss
        self._get_batch_samples = trainer.get_batch_samples
        self._is_scaled = trainer.loss_is_scaled_for_ga
        self.why_not = ""
        self.rule: Rule | None = None
        self.passes: BatchPasses | None = None
        self._rules: Rules | None = None
        self._samples: Sequence[Any] = ()
        self._at = 0  # batches of this update that have ended
        self._factors: list[float] = []  # of the losses of its batches
        # Of the current batch: the factor of its loss, and what compute_loss() was called with.
        self._factor = 1.0
        self._model: Any = None
        self._items: Any = None
        trainer.compute_loss, trainer.get_batch_samples = self.compute_loss, self._batch_samples
        trainer.loss_is_scaled_for_ga = True  # by _factors_in_update()

    def remove(self) -> None:
        """Put the trainer's methods back."""
        for name in ("compute_loss", "get_batch_samples", "loss_is_scaled_for_ga"):
            vars(self._trainer).pop(name, None)

    @property
    def rows(self) -> int | None:
        """The rows of a part that is known to fit, or to begin with; None for the whole batch."""
        if self.passes is not None and self.passes.micro_batch_size is not None:
            return self.passes.micro_batch_size
        return self._size or (FIRST_ROWS if self._monitor.headroom() else None)

    @property
    def changed(self) -> list[str]:
        """What was changed, a sentence each."""
        return [] if self.why_not else told(self.rule, self.passes)

    @property
    def left(self) -> list[str]:
        """What was left, and why, a sentence each."""
        return [f"Batches run whole: {self.why_not}."] if self.why_not else []

    @property
    def busy(self) -> str:
        """Why it cannot be removed now."""
        if self._callback.is_training and 0 < self._at < len(self._samples):
            return "in the middle of an update: call it in on_step_end, or after train()"
        return ""

    # --- what the trainer calls ---

    def _batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next update, as the trainer gets them."""
        found = self._get_batch_samples(*args, **kwargs)
        self._samples, self._at = found[0], 0
        return found

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss of a batch. In training its gradients are added here, in parts."""
        if return_outputs or not (torch.is_grad_enabled() and self._trainer.model.training):
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        self._model, self._items = model, num_items_in_batch
        rule = self._find_rule(inputs)
        if self._at == 0:
            self._factors = self._factors_in_update(rule)
        self._factor = self._factors[self._at % len(self._factors)]
        self._at += 1
        if rule is None:
            with self._monitor.phase("loss"):
                return self._loss_of(inputs) * self._factor
        rows = Rows(inputs, rule.blocks)
        weights = rule.weights(rows)
        if self.passes is None or self.passes.model is not model:  # model_init made another
            self.passes = BatchPasses(
                model, self._backward, micro_batch_size=self._size, monitor=self._monitor
            )
        passes, before = self.passes, _Logged(self._trainer)

        def forward(at: slice) -> _Part:
            # What a part that was undone has logged is undone, too.
            (passes.done[-1].logged if passes.done else before).restore()
            share = rule.share(weights[at], weights)
            if not share:  # A mean over no tokens is nan.
                return _Part(None, at, before)
            with self._monitor.phase("loss"):
                loss = self._loss_of(rows.take(at)) * share
            return _Part(loss, at, before)

        parts = passes.step(rows.count, forward)
        before.merge(parts, rows)
        losses = [part.loss for part in parts if part.loss is not None]
        # The trainer goes backward from this number, which adds nothing.
        return (sum(losses) * self._factor).requires_grad_()

    # --- one batch ---

    def _loss_of(self, inputs: Any) -> Any:
        """The trainer's own loss of a batch or a part of it."""
        return self._compute_loss(self._model, dict(inputs), num_items_in_batch=self._items)

    def _backward(self, part: _Part) -> _Part:
        if part.loss is None:
            return part._replace(logged=_Logged(self._trainer))
        device = part.loss.device.type
        with self._monitor.phase("backward"), torch.autocast(device, enabled=False):
            self._trainer.accelerator.backward(part.loss * self._factor)
        return part._replace(loss=part.loss.detach(), logged=_Logged(self._trainer))

    def _find_rule(self, inputs: Any) -> Rule | None:
        """The rule for a batch; None if it is not cut."""
        if self.why_not:
            return None
        if self._rules is None:
            half = self._trainer.accelerator.mixed_precision != "no"
            half = half or computes_coarsely(self._model)
            self._rules = Rules(self._look, half, documented(self._trainer))
        try:
            found = self._rules.find(inputs)
        except UncuttableError as error:
            self.why_not = str(error)
            return None
        self.rule = found or self.rule
        return found

    def _look(self, inputs: dict[str, Any]) -> float:
        """The loss of a few rows, without dropout. Nothing changes by it."""
        trainer, model = self._trainer, self._model
        logged = _Logged(trainer)
        try:
            # By the mode of the first TRL tells training from evaluation.
            with looking(model, trainer.model, model):
                return float(self._loss_of(inputs))
        finally:
            logged.restore()

    def _factors_in_update(self, rule: Rule | None) -> list[float]:
        """The factor of the loss of each batch in that of this update."""
        trainer, count = self._trainer, max(1, len(self._samples))
        scaled = self._is_scaled
        if scaled is None:  # The rule of Trainer.training_step.
            by_model = trainer.model_accepts_loss_kwargs and self._items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        if scaled:
            return [1.0] * count
        if rule is not None and rule.is_mean:
            with contextlib.suppress(UncuttableError):
                samples = [Rows(sample, rule.blocks) for sample in self._samples]
                weights = [sum(rule.weights(rows)) for rows in samples]
                return [weight / (sum(weights) or 1.0) for weight in weights]
        return [1.0 / trainer.current_gradient_accumulation_steps] * count


class _Part(NamedTuple):
    """A part of a batch.

    Attributes:
        loss: its share of the batch's loss; None for a part without tokens.
        at: its rows.
        logged: what had been logged after it.
    """

    loss: Any
    at: slice
    logged: _Logged


class _Logged:
    """The counters of a trainer, and the lists in which TRL keeps metrics until it logs them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        own = vars(trainer)
        self._counters = {name: value for name, value in own.items() if type(value) in _COUNTERS}
        self._lists = {
            mode: {name: list(values) for name, values in lists.items()}
            for mode, lists in own.get("_metrics", {}).items()
        }

    def restore(self) -> None:
        """Put them back."""
        vars(self._trainer).update(self._counters)
        for mode, lists in self._lists.items():
            now = self._trainer._metrics[mode]
            now.clear()
            now.update({name: list(values) for name, values in lists.items()})

    def merge(self, parts: Sequence[_Part], batch: Rows) -> None:
        """Make one value of those that the parts of a batch have added to a list since, as the
        whole batch would have done: an extreme, or a mean over rows or tokens."""
        parts = [part for part in parts if part.loss is not None]
        metrics = getattr(self._trainer, "_metrics", {})
        if len(parts) < 2 or not metrics:
            return
        units, of_rows = batch.units(), self._of_rows
        rows = [float(part.at.stop - part.at.start) for part in parts]
        tokens = [sum(units[part.at]) for part in parts]
        for mode, lists in metrics.items():
            for name, values in lists.items():
                at = len(self._lists[mode].get(name, ()))
                if len(values) - at == len(parts):
                    weights = rows if name.startswith(of_rows) else tokens
                    values[at:] = [_merged(name, values[at:], weights)]

    @property
    def _of_rows(self) -> tuple[str, ...]:
        """How the names of metrics begin that are means over rows, and not over tokens."""
        level = getattr(self._trainer, "importance_sampling_level", "sequence")  # RLOO has no other
        return _OF_ROWS + ("clip_ratio/",) * (level == "sequence")


def _merged(name: str, values: list[float], weights: list[float]) -> float:
    for word, choose in (("min", min), ("max", max)):
        if word in name:
            return choose(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / (sum(weights) or 1.0)

"""The batches of a Trainer in parts that fit: its own `compute_loss`, once for each part.

    training_step()                        the trainer's own
      compute_loss(batch)   ─► part: compute_loss(rows), accelerator.backward()   as often as needed
      ◄─ the loss of the batch, without a graph
      accelerator.backward(loss)           adds nothing: the gradients are there
    clip, optimizer, scheduler, logs       the trainer's own

So the norm, the learning rate, the scaler and checkpoints are the trainer's, and right. Where it
divides a mean by the number of batches in an update, a batch counts here by its rows or tokens.

On several processes all backward passes run here, and the last batch of an update ends with the
mean of the gradients over the processes, which the trainer's wrapper would have made in a backward
pass (`integrations/_ranks.py`). What TRL gathers for its logs is exchanged once for a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools._base.torch import connect
from memtools._grad.passes import BatchPasses
from memtools._grad.pressure import FIRST_ROWS
from memtools._grad.ranks import Ranks
from memtools.integrations._ranks import Looks, gathering_nothing, held_back, ranks_of
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
_TOKENS_SO_FAR: Final = "num_tokens"  # TRL's sum over the run, in a list of one


class Accumulation:
    """Replaces `trainer.compute_loss` and `trainer.get_batch_samples` until `remove()`.

    Args:
        trainer: a transformers.Trainer.
        callback: the trainer's, whose monitor runs while it trains.
        micro_batch_size: the rows of a part to begin with; None for the whole batch.

    Attributes:
        why_not: why batches are not cut, the same on all processes; "" while they are.
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
        self._processes: int = trainer.accelerator.num_processes
        # TRL's own losses gather values for the log.
        owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
        self._gathers = self._processes > 1 and owner.__module__.startswith("trl.")
        self.why_not = ""
        self.rule: Rule | None = None
        self.passes: BatchPasses | None = None
        self._whole: BatchPasses | None = None
        self._ranks = Ranks()
        self._rules: Rules | None = None
        self._looks: Looks | None = None
        self._problem = ""  # why batches cannot be cut here, before the other processes know
        self._held_back = 0  # batches that ran whole for another process
        self._samples: Sequence[Any] = ()
        self._at = 0  # batches of this update that have ended
        self._factors: list[float] = []  # of the losses of its batches
        # Of the current batch: the factor of its loss, and what compute_loss() was called with.
        self._factor = 1.0
        self._model: Any = None
        self._items: Any = None
        trainer.compute_loss, trainer.get_batch_samples = self.compute_loss, self._batch_samples

    def remove(self) -> None:
        """Put the trainer's methods back."""
        self._ranks.close()
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
        if self.why_not:
            return [f"Batches run whole: {self.why_not}."]
        return [held_back(self._held_back)] if self._held_back else []

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
        """Return the loss of a batch. In train() its gradients are added here, in parts."""
        is_step = self._callback.is_training and self._trainer.model.training
        if return_outputs or not (is_step and torch.is_grad_enabled()):
            self._trainer.loss_is_scaled_for_ga = self._is_scaled
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        self._trainer.loss_is_scaled_for_ga = True  # by _factors_in_update()
        self._items = num_items_in_batch
        if model is not self._model:  # The first one, or model_init has made another.
            self._take(model)
        rule = self._find_rule(inputs)
        if self._at == 0:
            self._factors = self._factors_in_update(rule)
        self._factor = self._factors[self._at % len(self._factors)]
        self._at += 1
        if rule is None and self._ranks.world == 1:
            with self._monitor.phase("loss"):
                return self._loss_of(inputs) * self._factor
        losses = self._run(inputs, rule)
        device = self._trainer.args.device
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        # The trainer goes backward from this number, which adds nothing.
        return (loss * self._factor).requires_grad_()

    # --- one batch ---

    def _take(self, model: Any) -> None:
        """Begin with a model."""
        self._model, self.passes, self._whole = model, None, None
        self._ranks.close()
        self._ranks = Ranks()
        if not self.why_not:
            self._ranks, self.why_not = ranks_of(model, self._processes)
        half = self._trainer.accelerator.mixed_precision != "no" or computes_coarsely(model)
        self._looks = Looks(self._ranks, self._look)
        self._rules = Rules(self._looks.look, half, documented(self._trainer))

    def _run(self, inputs: Any, rule: Rule | None) -> list[Any]:
        """Return the losses of the parts of a batch, whose gradients were added. Without a rule the
        batch is one part."""
        passes, before = self._passes_of(rule), _Logged(self._trainer)
        rows = None if rule is None else Rows(inputs, rule.blocks)
        weights = [1.0] if rule is None or rows is None else rule.weights(rows)

        def forward(at: slice) -> _Part:
            # What a part that was undone has logged is undone, too.
            logged = passes.done[-1].logged if passes.done else before
            logged.restore()
            own, taken, share = weights[at], inputs, 1.0
            if rule is not None and rows is not None:
                share = rule.share(own, weights) if own else 0.0
                if not share and not self._ranks.in_step:  # A mean over no tokens is nan.
                    return _Part(None, at, logged, False)
                # Else a filler, of the row with the most tokens.
                taken = rows.take(at if share else [weights.index(max(weights))])
            with self._monitor.phase("loss"):
                loss = self._loss_of(taken) * share
            return _Part(loss, at, logged, bool(share))

        row_bytes = 0.0 if rows is None else rows.row_bytes
        ran = passes.step(len(weights), forward, row_bytes=row_bytes)
        parts = [part for part in ran if part.counts]
        logs = [before.log_of(parts, rows, inputs)]
        if self._ranks.world > 1:
            logs = self._end_on_all(passes, logs)
        before.merge(logs)
        return [part.loss for part in parts]

    def _end_on_all(self, passes: BatchPasses, logs: list[_Log]) -> list[_Log]:
        """End a batch on several processes: make the mean of the gradients at the end of an update,
        and tell the others what cannot be cut. Returns what all of them have logged."""
        is_end = self._trainer.accelerator.sync_gradients
        if is_end:
            passes.reduce()
        if not is_end and not self._gathers:
            return logs
        found = self._ranks.exchange((self._problem, logs))
        problems = {rank: problem for rank, (problem, _) in enumerate(found) if problem}
        if is_end and problems:
            rank = min(problems)
            self.why_not = self._problem or f"on process {rank}, {problems[rank]}"
            self._ranks.close()  # The trainer's wrapper reduces again, from the next update on.
            self._ranks = Ranks()
        return [log for _, others in found for log in others] if self._gathers else logs

    def _passes_of(self, rule: Rule | None) -> BatchPasses:
        """The passes of a batch. What batches that are not cut take says nothing about rows, so
        that these have passes of their own."""
        if rule is None:
            if self._whole is None:
                self._whole = BatchPasses(self._model, self._backward, ranks=self._ranks)
            return self._whole
        if self.passes is None:
            self.passes = BatchPasses(
                self._model,
                self._backward,
                micro_batch_size=self._size,
                monitor=self._monitor,
                ranks=self._ranks,
            )
        return self.passes

    def _loss_of(self, inputs: Any) -> Any:
        """The trainer's own loss of a batch or a part of it."""
        here: Any = contextlib.nullcontext()
        if self._gathers and self._ranks.world > 1:
            here = gathering_nothing(self._trainer.accelerator)
        with here:
            return self._compute_loss(self._model, dict(inputs), num_items_in_batch=self._items)

    def _backward(self, part: _Part) -> _Part:
        if part.loss is not None:
            device = part.loss.device.type
            with self._monitor.phase("backward"), torch.autocast(device, enabled=False):
                self._trainer.accelerator.backward(part.loss * self._factor)
        if not part.counts:
            part.logged.restore()
            return part._replace(loss=None)
        return part._replace(loss=part.loss.detach(), logged=_Logged(self._trainer))

    def _find_rule(self, inputs: Any) -> Rule | None:
        """The rule for a batch; None if it is not cut."""
        rules, looks = self._rules, self._looks
        if self.why_not or rules is None or looks is None:
            return None
        found = None
        try:
            try:
                found = None if self._problem else rules.find(inputs)
            except UncuttableError as error:
                self._problem = str(error)
                if self._ranks.world == 1:
                    self.why_not = self._problem
            filler = inputs if found is None else Rows(inputs, found.blocks).take([0])
            if not looks.agree(found is not None, filler):
                self._held_back += found is not None
                return None
        except Exception as error:
            self._ranks.fail(error)
            raise
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
        loss: its share of the batch's loss; None for a part that does not count.
        at: its rows.
        logged: what had been logged before its forward pass, and then after it.
        counts: whether it has rows and tokens.
    """

    loss: Any
    at: slice
    logged: _Logged
    counts: bool


class _Log(NamedTuple):
    """What the parts of one batch have logged.

    Attributes:
        rows, tokens: of each part.
        values: one value of each part, by the mode and name of the list.
        counted: what was added to the trainer's counters, by name.
    """

    rows: list[float]
    tokens: list[float]
    values: dict[tuple[str, str], list[float]]
    counted: dict[str, float]


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

    def log_of(self, parts: Sequence[_Part], rows: Rows | None, inputs: Any) -> _Log:
        """What the parts of a batch have added since. `rows` are those of the batch; None if it is
        one part."""
        trainer, metrics = self._trainer, getattr(self._trainer, "_metrics", {})
        counted = {
            name: getattr(trainer, name) - value
            for name, value in self._counters.items()
            if type(value) is not bool and getattr(trainer, name, value) != value
        }
        if not metrics:
            return _Log([], [], {}, counted)
        if rows is None:
            with contextlib.suppress(UncuttableError):
                rows = Rows(inputs)
            of_rows, units = (
                [float(rows.count if rows else 1)],
                [sum(rows.units()) if rows else 1.0],
            )
        else:
            all_units = rows.units()
            of_rows = [float(rows.blocks * len(all_units[part.at])) for part in parts]
            units = [sum(all_units[part.at]) for part in parts]
        values = {
            (mode, name): new
            for mode, lists in metrics.items()
            for name, kept in lists.items()
            if len(new := kept[len(self._lists[mode].get(name, ())) :]) == len(parts)
        }
        return _Log(of_rows, units, values, counted)

    def merge(self, logs: Sequence[_Log]) -> None:
        """Make one value of those that the parts of a batch have added to a list since, on all
        processes, as the whole batch would have done: an extreme, or a mean over rows or tokens."""
        rows = [number for log in logs for number in log.rows]
        tokens = [number for log in logs for number in log.tokens]
        if len(logs) > 1:
            self._add_up(logs)
        if len(rows) < 2 and len(logs) == 1:
            return
        for mode, name in dict.fromkeys(key for log in logs for key in log.values):
            values = [value for log in logs for value in log.values.get((mode, name), ())]
            if len(values) == len(rows) and name != _TOKENS_SO_FAR:
                at = len(self._lists[mode].get(name, ()))
                weights = rows if name.startswith(self._of_rows) else tokens
                self._trainer._metrics[mode][name][at:] = [_merged(name, values, weights)]

    def _add_up(self, logs: Sequence[_Log]) -> None:
        """Count what other processes have counted, too."""
        trainer = self._trainer
        for name in {name for log in logs for name in log.counted}:
            total = sum(log.counted.get(name, 0) for log in logs)
            setattr(trainer, name, self._counters[name] + total)
            if name == "_total_train_tokens":
                trainer._metrics["train"][_TOKENS_SO_FAR] = [getattr(trainer, name)]

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

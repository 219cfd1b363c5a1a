"""What `memtools.use()` changes of Lightning's Trainer.

    Watching        monitor, phases, steps         a MemoryCallback
    Cleaning        gc and trim                    run() of the loops that optimise
    Accumulation    batches in parts that fit      the closure of automatic optimization

    closure      plain   training_step(batch), zero_grad(), backward()
                 here    zero_grad(), then training_step(rows) and backward() for each part, then
                         backward() of the batch's loss, which has no graph and adds nothing

Under DDPStrategy the passes run without DDP's reduction, and the last batch of an update ends with
the mean of the gradients over the processes. A batch that one process cannot cut runs whole on all.

So the hooks around backward() run once for a batch, with its loss and its gradients, and clipping,
accumulation, precision and checkpoints are the trainer's own. Everything is set on objects of the
trainer, and on no class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools import CleanupPolicy, MemoryMonitor, managed
from memtools._base.torch import connect
from memtools._grad.passes import BatchPasses
from memtools._grad.ranks import Ranks
from memtools.integrations._ranks import Looks, held_back, ranks_of
from memtools.integrations._rows import (
    Rows,
    Rule,
    Rules,
    UncuttableError,
    computes_coarsely,
    looking,
)
from memtools.integrations.lightning import MemoryCallback
from memtools.integrations.use import Left, told

if TYPE_CHECKING:
    import torch

    from memtools.integrations.use import Change
else:
    torch = connect().torch

_COUNTERS: Final = (bool, int, float)
#: What processes say to each other of a batch.
_NEVER, _WHOLE, _CUT = -1.0, 0.0, 1.0
_REDUCED: Final[dict[str, Callable[[Sequence[Any]], Any]]] = {"min": min, "max": max, "sum": sum}


class Watching:
    """A MemoryCallback."""

    busy = ""

    def __init__(self, trainer: Any, monitor: MemoryMonitor) -> None:
        self._trainer, self._callback = trainer, MemoryCallback(monitor)
        trainer.callbacks.insert(0, self._callback)
        self.changed = ["Phases and steps of the training go to a MemoryMonitor."]
        self.left: list[str] = []

    def remove(self) -> None:
        """Remove the callback."""
        self._callback.stop()
        self._trainer.callbacks.remove(self._callback)


class Cleaning:
    """A CleanupPolicy around the steps of the training."""

    busy = ""

    def __init__(self, trainer: Any, policy: CleanupPolicy) -> None:
        epochs = trainer.fit_loop.epoch_loop
        self._loops = (epochs.automatic_optimization, epochs.manual_optimization)
        for loop in self._loops:
            loop.run = managed(policy)(loop.run)
        self.changed = ["A CleanupPolicy collects garbage and trims in the steps of fit()."]
        self.left: list[str] = []

    def remove(self) -> None:
        """Put the loops' methods back."""
        for loop in self._loops:
            del loop.run


class Accumulation:
    """Replaces how the loop of automatic optimization makes its closure, until `remove()`.

    Args:
        trainer: Lightning's Trainer.
        monitor: the monitor, which runs while it trains.
        micro_batch_size: the rows of a part to begin with; None for the whole batch.

    Attributes:
        why_not: why batches are not cut; "" while they are.
        rule: what the loss of a batch is; None before the first batch of two rows.
        passes: the back-off; None before the first batch.
    """

    def __init__(self, trainer: Any, monitor: MemoryMonitor, micro_batch_size: int | None) -> None:
        self._trainer, self._monitor, self._size = trainer, monitor, micro_batch_size
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make_closure = self._loop._make_closure
        self._loop._make_closure = self.make_closure
        self.why_not = ""
        self.rule: Rule | None = None
        self.passes: BatchPasses | None = None
        self._rules: Rules | None = None
        self._module: Any = None  # and the optimizer, of the batch that runs
        self._optimizer: Any = None
        self._metrics: set[str] = set()
        self._lists: set[str] = set()  # of the module, with an entry for each part
        self._runs = False
        self._ranks = Ranks()
        self._held_back = 0  # batches that ran whole for another process

    def remove(self) -> None:
        """Put the loop's method back."""
        self._ranks.close()
        del self._loop._make_closure

    @property
    def changed(self) -> list[str]:
        """What was changed, a sentence each."""
        return told(self.rule, self.passes) if not self._why_whole else []

    @property
    def left(self) -> list[str]:
        """What was left, and why, a sentence each."""
        if self._why_whole:
            return [f"Batches run whole: {self._why_whole}."]
        if self._held_back:
            return [held_back(self._held_back)]
        sentences = []
        if self._metrics:
            names = ", ".join(sorted(self._metrics))
            sentences.append(f"A step's value of {names} is of its last part.")
        if self._lists:
            names = ", ".join(sorted(self._lists))
            sentences.append(f"What training_step() appends to {names} has an entry for each part.")
        return sentences

    @property
    def busy(self) -> str:
        """Why it cannot be removed now."""
        return "in the middle of a batch: call it after fit()" if self._runs else ""

    @property
    def _why_whole(self) -> str:
        module = self._trainer.lightning_module
        if module is not None and not module.automatic_optimization:
            return (
                f"{type(module).__name__} optimises by hand: make its updates by "
                "memtools.integrations.lightning.accumulator"
            )
        return self.why_not

    # --- what the trainer calls ---

    def make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Return the trainer's closure for a batch, which then runs it in parts."""
        closure = self._make_closure(kwargs, optimizer, batch_idx)
        backward, zero_grad = closure._backward_fn, closure._zero_grad_fn
        if backward is not None:
            step = functools.partial(self._step, closure._step_fn, kwargs, optimizer, zero_grad)
            closure._step_fn, closure._zero_grad_fn = step, None
            closure._backward_fn = functools.partial(self._in_phase, backward)
        return closure

    def _in_phase(self, backward: Callable[[Any], None], loss: Any) -> None:
        with self._monitor.phase("backward"):
            backward(loss)

    def _step(self, whole: Any, kwargs: Any, optimizer: Any, zero_grad: Any) -> Any:
        """The result of training_step() for a batch, whose gradients are added here, in parts."""
        self._runs = True
        try:
            rule = self._rule_of_all(kwargs)
            if rule is None:
                with self._monitor.phase("loss"):
                    result = whole()
                if zero_grad is not None:
                    zero_grad()
                return result
            if zero_grad is not None:
                zero_grad()
            return self._in_parts(kwargs, optimizer, rule)
        finally:
            self._runs = False

    def _in_parts(self, kwargs: Any, optimizer: Any, rule: Rule) -> Any:
        named, restored = _named(_batch(kwargs))
        rows = Rows(named, rule.blocks)
        weights = rule.weights(rows)
        self._optimizer = optimizer
        passes, before = self._passes_of(), _State(self._module)

        def forward(at: slice) -> _Part:
            # What a part that was undone has kept is undone, too.
            (passes.done[-1].state if passes.done else before).restore()
            share, logged = rule.share(weights[at], weights), list[_Call]()
            with self._monitor.phase("loss"), self._records(logged):
                result = self._loss_of(kwargs, restored(rows.take(at)))
            return _Part(result.closure_loss, share, at.stop - at.start, logged, before)

        parts = passes.step(rows.count, forward, row_bytes=rows.row_bytes)
        if not self._trainer.fit_loop._should_accumulate():
            passes.reduce()
        factor = self._trainer.accumulate_grad_batches
        merge = functools.partial(_merged, parts, factor, rule.is_mean)
        self._lists.update(before.merge([part.rows for part in parts], merge))
        for calls in zip(*(part.logged for part in parts), strict=False):
            self._log(calls, merge)
        loss = sum(part.loss * part.share for part in parts)
        # The trainer goes backward from this number, which adds nothing.
        return self._loop.output_result_cls(closure_loss=loss.requires_grad_())

    def _backward(self, part: _Part) -> _Part:
        precision = self._trainer.precision_plugin
        loss, scaler = part.loss * part.share, getattr(precision, "scaler", None)
        with self._monitor.phase("backward"):
            precision.backward(
                loss if scaler is None else scaler.scale(loss), self._module, self._optimizer
            )
        return part._replace(loss=part.loss.detach(), state=_State(self._module))

    # --- one batch ---

    def _passes_of(self) -> BatchPasses:
        model = self._trainer.strategy.model  # the module, in its wrapper
        if self.passes is None or self.passes.model is not model:
            self.passes = BatchPasses(
                model,
                self._backward,
                micro_batch_size=self._size,
                monitor=self._monitor,
                ranks=self._ranks,
            )
        return self.passes

    def _loss_of(self, kwargs: Any, batch: Any) -> Any:
        """What the module's training_step() makes of rows of a batch."""
        result = self._loop._training_step({**kwargs, next(iter(kwargs)): batch})
        if result.extra:
            names = ", ".join(map(repr, result.extra))
            raise UncuttableError(f"training_step() returns {names} of the batch with its loss")
        return result

    def _rule_of_all(self, kwargs: Any) -> Rule | None:
        """The rule for a batch, which all processes cut; None if they do not."""
        module = self._trainer.lightning_module
        if module is not self._module:
            self._module, self._rules, self.rule = module, None, None
            self._ranks.close()
            self._ranks, self.why_not = ranks_of(
                self._trainer.strategy.model, self._trainer.world_size
            )
        if self.why_not:
            return None
        try:
            rule = self._find_rule(kwargs)
        except Exception as error:
            self._ranks.fail(error)
            raise
        if self._ranks.world == 1:
            return rule
        found = self._ranks.share(_NEVER if self.why_not else _WHOLE if rule is None else _CUT)
        if _NEVER in found:
            reasons = self._ranks.exchange(self.why_not)
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            self.why_not = self.why_not or f"on process {rank}, {reasons[rank]}"
            self._ranks.close()
        if set(found) == {_CUT}:
            return rule
        self._held_back += rule is not None and not self.why_not
        return None

    def _find_rule(self, kwargs: Any) -> Rule | None:
        """The rule for a batch on this process; None if it is not cut."""
        module = self._module
        named, restored = _named(_batch(kwargs))
        if self._rules is None:
            is_coarse = not str(self._trainer.precision).startswith(("32", "64"))
            is_coarse = is_coarse or computes_coarsely(module)
            looks = Looks(self._ranks, lambda rows: self._look(kwargs, restored(rows)))
            self._rules = Rules(looks.look, is_coarse, "")
        try:
            found = self._rules.find(named)
        except UncuttableError as error:
            self.why_not = str(error)
            return None
        self.rule = found or self.rule
        return found

    def _look(self, kwargs: Any, batch: Any) -> float:
        """The loss of a few rows, without dropout. Nothing changes by it."""
        module = self._module
        state = _State(module)
        try:
            with looking(module, module), self._records([]):
                return float(self._loss_of(kwargs, batch).closure_loss)
        finally:
            state.restore()

    # --- what the module logs ---

    @contextmanager
    def _records(self, logged: list[_Call]) -> Iterator[None]:
        """Keep what the module logs, as (arguments, keywords)."""
        results = self._trainer._results
        results.log = lambda *args, **kwargs: logged.append(_Call(args, kwargs))
        try:
            yield
        finally:
            del results.log

    def _log(self, calls: Sequence[_Call], merge: Callable[..., Any]) -> None:
        """Log one value of those that the parts of a batch have logged under a name."""
        (where, name, value), keywords = calls[0]
        if isinstance(value, torch.Tensor):
            value = merge([call.args[2] for call in calls], keywords.get("reduce_fx"))
        elif len(calls) > 1:
            self._metrics.add(repr(name))
        sizes: list[Any] = [call.keywords.get("batch_size") for call in calls]
        size = None if None in sizes else sum(sizes)
        self._trainer._results.log(where, name, value, **{**keywords, "batch_size": size})


class _Call(NamedTuple):
    """A call of the log."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]


class _Part(NamedTuple):
    """A part of a batch.

    Attributes:
        loss: its loss, over accumulate_grad_batches.
        share: the factor of its loss in the batch's.
        rows: its rows.
        logged: what it has logged.
        state: what the module had kept after it.
    """

    loss: Any
    share: float
    rows: int
    logged: list[_Call]
    state: _State


def _merged(
    parts: Sequence[_Part], factor: int, is_mean: bool, values: Sequence[Any], reduced: Any = "mean"
) -> Any:
    """One value of those of the parts of a batch: as the loss, if it is the loss; else a mean over
    rows, or what the module has asked for."""
    name = getattr(reduced, "__name__", reduced)
    if all(
        torch.is_tensor(value) and torch.allclose(value.detach(), part.loss * factor, rtol=1e-6)
        for value, part in zip(values, parts, strict=True)
    ):
        return sum(value * part.share for value, part in zip(values, parts, strict=True))
    if name in _REDUCED:
        return _REDUCED[name](values)
    rows = sum(part.rows for part in parts)
    return sum(value * (part.rows / rows) for value, part in zip(values, parts, strict=True))


class _State:
    """The counters and lists of a module, and the states of its torchmetrics."""

    def __init__(self, module: Any) -> None:
        self._module, own = module, vars(module)
        self._counters = {name: value for name, value in own.items() if type(value) in _COUNTERS}
        self._lists = {n: (v, list(v)) for n, v in own.items() if type(v) is list}
        self._metrics = [
            (metric, {name: _copied(value) for name, value in vars(metric).items()
                      if name in metric._defaults or name in _OF_METRIC})
            for metric in module.modules() if hasattr(metric, "_defaults")
        ]  # fmt: skip

    def restore(self) -> None:
        """Put them back."""
        vars(self._module).update(self._counters)
        for kept, values in self._lists.values():
            kept[:] = values
        for metric, state in self._metrics:
            vars(metric).update({name: _copied(value) for name, value in state.items()})

    def merge(self, rows: Sequence[int], merge: Callable[[Sequence[Any]], Any]) -> list[str]:
        """Make one entry of those that the parts, of so many rows each, have added to a list since.
        Returns the names of the lists where it cannot be made."""
        left = []
        for name, (kept, values) in self._lists.items():
            new = kept[len(values) :]
            if len(rows) == 1 or not new:
                continue
            if len(new) == len(rows) and (made := _of_batch(new, rows, merge)) is not None:
                kept[len(values) :] = [made]
            else:
                left.append(name)
        return left


_OF_METRIC: Final = ("_update_count", "_computed", "_forward_cache")


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else (
        list(value) if isinstance(value, list) else value
    )  # fmt: skip


def _of_batch(values: Sequence[Any], rows: Sequence[int], merge: Callable[..., Any]) -> Any:
    """One value of a batch of those of its parts: of numbers, of tensors with the rows of the
    parts, or of dicts and tuples of these; None if there is none."""
    first = values[0]
    if all(map(_is_number, values)):
        return merge(values)
    if any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values)) if [len(value) for value in values] == rows else None
    keys: Any = ()
    if type(first) is dict and all(value.keys() == first.keys() for value in values):
        keys = first.keys()
    elif type(first) in (tuple, list) and len({len(value) for value in values}) == 1:
        keys = range(len(first))
    made = {key: _of_batch([value[key] for value in values], rows, merge) for key in keys}
    if not made or any(value is None for value in made.values()):
        return None
    return made if type(first) is dict else type(first)(made.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _batch(kwargs: Any) -> Any:
    """The batch among the arguments of training_step(), which is the first."""
    return next(iter(kwargs.values()))


def _named(batch: Any) -> tuple[Any, Callable[[dict[str, Any]], Any]]:
    """The values of a batch by name, and what makes a batch of such values again."""
    if isinstance(batch, torch.Tensor):
        return {"batch": batch}, lambda rows: rows["batch"]
    if type(batch) in (tuple, list):
        named = {f"value {at}": value for at, value in enumerate(batch)}
        return named, lambda rows: type(batch)(rows.values())
    return batch, type(batch)


def changes(
    trainer: Any, monitor: MemoryMonitor, policy: CleanupPolicy, micro_batch_size: int | None
) -> list[Change]:
    """Make the changes of `use()`.

    Raises ValueError if the trainer's strategy accumulates by itself, as DeepSpeed's.
    """
    name = type(trainer.strategy).__name__
    if trainer.strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{name} runs the backward pass and the update itself, so that a batch cannot run in "
            "parts: leave use() out, and watch the training by `memtools run`"
        )
    made: list[Change] = [Watching(trainer, monitor), Cleaning(trainer, policy)]
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    by_hand = "DDPStrategy" if trainer.world_size > 1 else "SingleDeviceStrategy"
    if name != by_hand:
        made.append(Left(f"Batches run whole: {name} has its own backward pass."))
    elif not hasattr(loop, "_make_closure"):
        made.append(Left("Batches run whole: this version of Lightning has other loops."))
    else:
        made.append(Accumulation(trainer, monitor, micro_batch_size))
    made.append(Left(_LEFT))
    return made


_LEFT: Final = (
    "Batch size, accumulate_grad_batches, clipping, optimizer, learning rate and checkpoints; the "
    "loss of each batch is divided by accumulate_grad_batches, also in a last window of fewer."
)

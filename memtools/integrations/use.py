"""`memtools.use(trainer)`: what memtools does for a training loop, in one line.

The trainer is known by its class, and its library is not imported for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from memtools._base.number import whole_number

if TYPE_CHECKING:
    from memtools import CleanupPolicy, MemoryMonitor
    from memtools._grad.passes import BatchPasses
    from memtools.integrations._rows import Rule

__all__ = ["Adapter", "use"]

#: The attribute of a trainer that is in use.
_NAME = "_memtools"
#: The library of a trainer, by its class or a base of that.
_LIBRARIES: Final = {
    "transformers.trainer.Trainer": "transformers",
    "lightning.pytorch.trainer.trainer.Trainer": "lightning",
    "pytorch_lightning.trainer.trainer.Trainer": "lightning",
    "accelerate.accelerator.Accelerator": "accelerate",
}


class Change(Protocol):
    """One thing that memtools does for a trainer.

    Attributes:
        changed, left: what it does, and what it leaves and why; a sentence each.
        busy: why it cannot be removed now, as a clause; "" if it can.
    """

    @property
    def changed(self) -> list[str]: ...
    @property
    def left(self) -> list[str]: ...
    @property
    def busy(self) -> str: ...
    def remove(self) -> None: ...


class Left:
    """Something that is left as it is."""

    busy = ""

    def __init__(self, sentence: str) -> None:
        self.changed: list[str] = []
        self.left = [sentence]

    def remove(self) -> None:
        """Nothing was changed."""


def told(rule: Rule | None, passes: BatchPasses | None) -> list[str]:
    """Return how batches are cut, a sentence each."""
    made = ["Batches run in parts that fit, with the gradient of the whole batch."]
    if rule is not None:
        made.append(f"The loss of a batch is {rule.name}.")
    if passes is None:
        return made
    if passes.micro_batch_size is not None:
        rows = f"{passes.micro_batch_size:,} row{'s' * (passes.micro_batch_size != 1)}"
        made.append(f"The largest part of the last batch had {rows}.")
    if passes.retries:
        count, last = len(passes.retries), passes.retries[-1]
        parts = f"{count:,} part{'s' * (count != 1)}"
        made.append(f"{parts} ran again with fewer rows; the last: {last}.")
    if passes.ranks.sharded:
        made.append(f"All {passes.ranks.world} processes run each part together.")
    elif passes.ranks.world > 1:
        count = passes.ranks.world
        made.append(f"Gradients of the {count} processes are summed at the end of an update.")
    return made + [f"{note[0].upper()}{note[1:]}." for note in passes.notes]


class Adapter:
    """What memtools does for one trainer. `print()` shows what was changed, what was not, and why.

    Attributes:
        trainer: the trainer.
        monitor: it runs during training.
        policy: the cleanup policy.
    """

    def __init__(
        self,
        trainer: Any,
        monitor: MemoryMonitor,
        policy: CleanupPolicy,
        changes: list[Change],
        own: dict[str, Any],
    ) -> None:
        self.trainer, self.monitor, self.policy = trainer, monitor, policy
        self._changes, self._own = changes, own

    @property
    def changed(self) -> tuple[str, ...]:
        """The changes, a sentence each."""
        return tuple(sentence for change in self._changes for sentence in change.changed)

    @property
    def left(self) -> tuple[str, ...]:
        """What was not changed, and why."""
        return tuple(sentence for change in self._changes for sentence in change.left)

    def remove(self) -> None:
        """Restore everything. May be called twice. Raises RuntimeError inside an update."""
        if vars(self.trainer).get(_NAME) is not self:
            return
        for busy in [change.busy for change in self._changes if change.busy]:
            raise RuntimeError(f"remove() {busy}")
        for change in reversed(self._changes):
            change.remove()
        for name, value in self._own.items():
            vars(self.trainer).setdefault(name, value)
        delattr(self.trainer, _NAME)

    def __str__(self) -> str:
        lines = [f"memtools on {type(self.trainer).__name__}"]
        lines += [f"  changed  {sentence}" for sentence in self.changed]
        lines += [f"  left     {sentence}" for sentence in self.left]
        return "\n".join(lines)


def use(
    trainer: Any,
    *,
    limit: int | str | None = None,
    micro_batch_size: int | None = None,
    chunked_loss: bool = False,
    monitor: MemoryMonitor | None = None,
    cleanup: CleanupPolicy | None = None,
) -> Adapter:
    """Keep a trainer within its memory.

        trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data)
        memtools.use(trainer)
        trainer.train()

    Batches run in parts that fit, with the gradient of the whole batch: batch size, accumulation,
    clipping, learning rate, logs and checkpoints do not change. A mean over tokens counts every
    token of an update once. A monitor watches the phases, and a cleanup policy trims. In TRL's
    GRPOTrainer and RLOOTrainer each prompt of a group is computed and stored once.

    Args:
        trainer: a `transformers.Trainer` or a subclass, such as TRL's SFTTrainer or DPOTrainer; or
            a Trainer of `lightning` or `pytorch_lightning`, before `fit()`. Both also under
            DistributedDataParallel, a transformers.Trainer under FSDP2 as well. Or an
            `accelerate.Accelerator` after `prepare()`, whose batches run whole.
        limit: the memory that the process may use, or like "20 GiB"; batches stay below 90 % of it.
        micro_batch_size: rows of the first part. None: few if memory has a limit, else all.
        chunked_loss: compute the loss of a causal language model with `memtools.grad.log_probs`,
            without the logits of all tokens, which are computed twice. TRL's trainers have their
            own options for that.
        monitor: None: a `MemoryMonitor(limit)`.
        cleanup: None: a `CleanupPolicy()`.

    Raises TypeError for an unknown class of trainer, ValueError if it is in use already or runs
    under DeepSpeed, for both limit and monitor, or for an option that is not for this trainer.
    """
    if monitor is not None and limit is not None:
        raise ValueError("pass limit= or monitor=, as a monitor has its own limit")
    from memtools import CleanupPolicy, MemoryMonitor

    monitor = MemoryMonitor(limit=limit) if monitor is None else monitor
    policy = CleanupPolicy() if cleanup is None else cleanup
    if not isinstance(policy, CleanupPolicy):
        raise TypeError(f"cleanup must be a CleanupPolicy, got {type(policy).__name__}")
    if micro_batch_size is not None:
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size)
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(trainer).__mro__}
    library = next((library for name, library in _LIBRARIES.items() if name in names), "")
    if not library:
        raise TypeError(
            "use() knows transformers.Trainer and its subclasses, Lightning's Trainer and "
            "accelerate's Accelerator, and got a "
            f"{type(trainer).__module__}.{type(trainer).__name__}: for your own loop see "
            "GradAccumulator and MemoryMonitor"
        )
    if _NAME in vars(trainer):
        raise ValueError("use() is in use on this trainer already: call its remove() first")
    if chunked_loss and library != "transformers":
        raise ValueError(
            "chunked_loss is for a transformers.Trainer: in your own loss call "
            "memtools.grad.log_probs()"
        )
    # What the program itself has set in place of the methods of the class.
    own = {name: value for name, value in vars(trainer).items() if hasattr(type(trainer), name)}
    made: list[Change]
    if library == "accelerate":
        from memtools.integrations import _accelerate as accelerate

        if micro_batch_size is not None:
            raise ValueError("use(accelerator) cuts no batches: leave micro_batch_size out")
        made = accelerate.changes(trainer, monitor, policy)
    elif library == "lightning":
        from memtools.integrations import _lightning as lightning

        made = lightning.changes(trainer, monitor, policy, micro_batch_size)
    else:
        from memtools.integrations.transformers import _changes as transformers

        made = transformers.changes(trainer, monitor, policy, micro_batch_size, chunked_loss)
    adapter = Adapter(trainer, monitor, policy, made, own)
    setattr(trainer, _NAME, adapter)
    return adapter

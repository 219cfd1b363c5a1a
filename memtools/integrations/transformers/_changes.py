"""What `memtools.use()` changes of a transformers.Trainer.

    Watching           monitor, phases, steps              a callback, train()
    Cleaning           gc and trim                         training_step()
    ChunkedLoss        the loss without logits             head and loss_function of the model
    Accumulation       batches in parts that fit           compute_loss(), get_batch_samples()
    Scoring            log-probabilities in parts          _get_per_token_logps_...() of TRL
    GroupGeneration    a prompt once for its group         _generate_single_turn() of TRL

Everything is set on the trainer or its model, and on no class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memtools import CleanupPolicy, MemoryMonitor, managed
from memtools.integrations._ranks import will_shard
from memtools.integrations.transformers._accumulation import Accumulation
from memtools.integrations.transformers._callback import MemoryCallback
from memtools.integrations.transformers._chunked_loss import ChunkedLoss
from memtools.integrations.transformers._scoring import Scoring
from memtools.integrations.use import Left

if TYPE_CHECKING:
    from memtools.integrations.use import Change


class Watching:
    """A MemoryCallback."""

    busy = ""

    def __init__(self, trainer: Any, monitor: MemoryMonitor) -> None:
        self._trainer, self.callback = trainer, MemoryCallback(monitor).add_to(trainer)
        self.changed = ["Phases and steps of the training go to a MemoryMonitor."]
        self.left: list[str] = []

    def remove(self) -> None:
        """Remove the callback."""
        self.callback.remove_from(self._trainer)


class Cleaning:
    """A CleanupPolicy around the steps of the training."""

    busy = ""

    def __init__(self, trainer: Any, policy: CleanupPolicy) -> None:
        self._trainer = trainer
        trainer.training_step = managed(policy)(trainer.training_step)
        self.changed = ["A CleanupPolicy collects garbage and trims in training_step()."]
        self.left: list[str] = []

    def remove(self) -> None:
        """Put the trainer's method back."""
        del self._trainer.training_step


def changes(
    trainer: Any,
    monitor: MemoryMonitor,
    policy: CleanupPolicy,
    micro_batch_size: int | None,
    chunked_loss: bool,
) -> list[Change]:
    """Make the changes of `use()`.

    Raises ValueError if the trainer runs under DeepSpeed.
    """
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "DeepSpeed runs the backward pass and the update itself, so that a batch cannot run in "
            "parts: leave use() out, and watch the training by `memtools run`"
        )
    watching = Watching(trainer, monitor)
    made: list[Change] = [watching, Cleaning(trainer, policy)]
    if chunked_loss:
        made.append(ChunkedLoss(trainer))
    if why := _why_not_cut(trainer):
        made.append(Left(f"Batches run whole: {why}."))
    else:
        accumulation = Accumulation(trainer, watching.callback, micro_batch_size)
        made.append(accumulation)
        if hasattr(trainer, "_get_per_token_logps_and_entropies"):  # GRPOTrainer, RLOOTrainer
            made.append(Scoring(trainer, monitor, accumulation))
    if hasattr(trainer, "_generate_single_turn"):  # TRL's GRPOTrainer and RLOOTrainer
        from memtools.integrations.transformers._generation import GroupGeneration

        if why := _why_no_groups(trainer):
            made.append(Left(f"Generation is the trainer's own: {why}."))
        else:
            made.append(GroupGeneration(trainer, monitor))
    if _keeps_outputs(trainer):
        made.append(Left(_OUTPUTS))
    made.append(Left("Batch size, optimizer, clipping, learning rate, logs and checkpoints."))
    return made


#: What an evaluation keeps, and the trainer's option for less.
_OUTPUTS: Final = (
    "Evaluation keeps the model's outputs for all rows until compute_metrics gets them: "
    "Trainer(preprocess_logits_for_metrics=...) keeps what it returns, such as "
    "logits.argmax(-1), and batch_eval_metrics=True nothing."
)


def _keeps_outputs(trainer: Any) -> bool:
    """Whether an evaluation keeps what the model returns, for all rows."""
    args = trainer.args
    is_less = args.batch_eval_metrics or args.prediction_loss_only
    is_less = is_less or getattr(args, "predict_with_generate", False)
    return (
        trainer.compute_metrics is not None
        and trainer.preprocess_logits_for_metrics is None
        and not is_less
    )


def _why_not_cut(trainer: Any) -> str:
    """Why the batches of this trainer cannot run in parts, as a clause; "" if they can."""
    step = next(kind for kind in type(trainer).__mro__ if "training_step" in vars(kind))
    devices = set(getattr(trainer.model, "hf_device_map", {}).values())
    if step.__module__.partition(".")[0] not in ("transformers", "trl"):
        return f"{step.__name__} has its own training_step()"
    for what in ("tp", "cp", "sp"):
        if (size := getattr(trainer, f"get_{what}_size", int)()) > 1:
            return f"{size} processes run each batch together ({what}_size)"
    if trainer.args.n_gpu > 1:
        return f"DataParallel cuts them for {trainer.args.n_gpu} GPUs already"
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    if trainer.args.optim in ("lomo", "adalomo"):
        return f"{trainer.args.optim} updates in the backward pass"
    return _why_of_whole_batch(trainer)


#: Losses of sentence_transformers that compare rows, and of which it has a Cached one.
_CACHED: Final = (
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "GISTEmbedLoss",
)


def _why_of_whole_batch(trainer: Any) -> str:
    """Why the loss of a trainer of TRL or sentence_transformers is of all rows together, as a
    clause; "" if it is not. Where losses are equal, as those before the first update, they do not
    tell."""
    kinds = {kind.__name__ for kind in type(trainer).__mro__}
    loss = type(getattr(trainer, "loss", None)).__name__
    if loss in _CACHED:
        return f"{loss} compares the rows of a batch; Cached{loss} computes it in parts"
    if "KTOTrainer" in kinds:
        return "KTO compares each row with the KL divergence of its batch"
    if "DPOTrainer" in kinds and (found := {"aot", "aot_unpaired"} & set(trainer.loss_types)):
        return f"loss_type={min(found)!r} sorts the rows of a batch"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile compares the tokens of a batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over the tokens of a batch, whatever the loss_type"
    return ""


def _why_no_groups(trainer: Any) -> str:
    """Why a trainer that generates does it by itself, as a clause; "" if it need not."""
    if will_shard(trainer):
        return "each process has a part of the model"
    if trainer.use_vllm:
        return "vLLM has its own cache"
    if getattr(trainer, "use_transformers_paged", False):
        return "continuous batching has its own cache"
    return ""

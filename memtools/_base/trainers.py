"""Trainers of libraries: where a program enters them, and what their options are called.

    train.py       trainer.train() ─┐
    transformers   Trainer.train    ◄┘ an entry: the frames inside are the training's own
                     training_step, compute_loss, ...

The call of an entry is the line of all that the training does, and so says nothing: a place inside
of it is named instead, and a change of the program by the trainer's option for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Final

from memtools import _core

#: By the end of the path of a library's file, the methods by which programs enter its trainer.
_ENTRIES: Final = {
    "/transformers/trainer.py": ("train", "evaluate", "predict"),
    "/pytorch/trainer/trainer.py": ("fit", "validate", "test", "predict"),
    "/pytorch_lightning/trainer/trainer.py": ("fit", "validate", "test", "predict"),
}
_USE: Final = (
    "; memtools.use(trainer) does this automatically, with the gradient of the whole batch"
)
_TRANSFORMERS: Final = {
    "micro-batches": "per_device_train_batch_size divided by {n} and gradient_accumulation_steps "
    f"multiplied by {{n}}{_USE}",
    "checkpoint": "gradient_checkpointing=True: the forward pass runs twice",
    "autocast": "bf16=True; the losses differ, and the peak is approximate",
    "chunks": "memtools.use(trainer, chunked_loss=True) for a causal language model, or "
    "use_liger_kernel=True (on a GPU, with liger-kernel): no logits of the whole batch",
    "fused": 'optim="adamw_torch_fused"',
    "no-cache": "model.config.use_cache = False: training needs no cache of keys and values",
    "evaluate": "a smaller per_device_eval_batch_size",
}
_LIGER: Final = {"chunks": "use_liger_kernel=True (on a GPU, with liger-kernel)"}
_SFT: Final = {"chunks": 'loss_type="chunked_nll": no logits of the whole batch'}
_GROUPS: Final = {
    "micro-batches": "per_device_train_batch_size divided by {n} and gradient_accumulation_steps "
    "multiplied by {n}, where generation_batch_size stays a multiple of num_generations"
    f"{_USE}",
}
_SENTENCES: Final = {
    "micro-batches": "mini_batch_size=... of CachedMultipleNegativesRankingLoss or another Cached "
    "loss, with the gradient of the whole batch: accumulation gives a loss that compares the rows "
    "of a batch fewer negatives",
}
_LIGHTNING: Final = {
    "micro-batches": "a batch size divided by {n} and Trainer(accumulate_grad_batches={n})",
    "autocast": 'Trainer(precision="bf16-mixed"); the losses differ, and the peak is approximate',
    "evaluate": "a smaller batch size of the loader for validation",
}
#: By the class of a trainer: what its option is, by the kind of change. `{n}` is into how many
#: parts a batch is cut. A subclass has what its bases have.
_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "transformers.trainer.Trainer": _TRANSFORMERS,
    "trl.trainer.sft_trainer.SFTTrainer": _TRANSFORMERS | _SFT,
    "trl.trainer.dpo_trainer.DPOTrainer": _TRANSFORMERS | _LIGER,
    "trl.trainer.grpo_trainer.GRPOTrainer": _TRANSFORMERS | _LIGER | _GROUPS,
    "trl.trainer.rloo_trainer.RLOOTrainer": _TRANSFORMERS | _LIGER | _GROUPS,
    "sentence_transformers.base.trainer.BaseTrainer": _TRANSFORMERS | _LIGER | _SENTENCES,
    "lightning.pytorch.trainer.trainer.Trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer.Trainer": _LIGHTNING,
}


def is_entry(file: str, function: str | None) -> bool:
    """Whether a frame is that of the method by which the program has entered a trainer."""
    return any(file.endswith(end) and function in names for end, names in _ENTRIES.items())


def entries() -> tuple[str, ...]:
    """The same as texts for the core, such as "/transformers/trainer.py:Trainer.train"."""
    return tuple(f"{end}:Trainer.{name}" for end, names in _ENTRIES.items() for name in names)


def running_trainer(frame: FrameType | None) -> str:
    """The class of the trainer that runs in a frame or in one that has called it, the most special
    of those that have options; "" without one."""
    while frame is not None:
        if is_entry(frame.f_code.co_filename, frame.f_code.co_name):
            kinds = type(dict(_core._frame_variables(frame)).get("self")).__mro__
            names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
            return next((name for name in names if name in _OPTIONS), "")
        frame = frame.f_back
    return ""


def option_of(trainer: str, change: str) -> str:
    """The trainer's option for a change; "" where it has none.

    Args:
        trainer: the name that `running_trainer` has returned.
        change: the name of a change, such as "micro-batches:4" or "checkpoint:model.layers".
    """
    kind, _, parts = change.partition(":")
    kind = "chunks" if kind == "linear_cross_entropy" else kind
    text = _OPTIONS.get(trainer, {}).get(kind, "")
    return text.replace("{n}", parts or "2")

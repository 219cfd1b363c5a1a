"""The options of trainers, by the real libraries: each one that is named exists."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

import memtools
from memtools._base import trainers

CHANGES = ("micro-batches:4", "checkpoint:model.layers", "autocast", "chunks:8", "fused")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        ("transformers.trainer.Trainer", "transformers.TrainingArguments"),
        ("trl.trainer.sft_trainer.SFTTrainer", "trl.SFTConfig"),
        ("trl.trainer.dpo_trainer.DPOTrainer", "trl.DPOConfig"),
        ("trl.trainer.grpo_trainer.GRPOTrainer", "trl.GRPOConfig"),
        ("trl.trainer.rloo_trainer.RLOOTrainer", "trl.RLOOConfig"),
        ("lightning.pytorch.trainer.trainer.Trainer", "lightning.Trainer"),
    ],
)
def test_each_option_is_an_argument_of_the_trainer_and_each_entry_is_its_method(trainer, config):
    import importlib

    module, _, name = config.rpartition(".")
    known = set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    module, _, name = trainer.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    texts = [trainers.option_of(trainer, change) for change in (*CHANGES, "evaluate")]
    snake = r"\b[a-z0-9]+(?:_[a-z0-9]+)+(?==| divided| multiplied| stays)"
    named = set(re.findall(snake + r"|\b(?:bf16|precision|optim)(?==)", " ".join(texts)))
    assert named
    assert named <= known | {"model.config", *inspect.signature(memtools.use).parameters}
    owner = next(one for one in kind.__mro__ if one.__name__ == "Trainer")
    file = sys.modules[owner.__module__].__file__ or ""
    methods = [name for end, names in trainers._ENTRIES.items() if file.endswith(end)
               for name in names]  # fmt: skip
    assert methods
    assert all(f"Trainer.{name}" == getattr(owner, name).__qualname__ for name in methods)


@pytest.mark.parametrize("trainer", ["", "mine.Trainer"])
def test_a_loop_of_the_programs_own_has_no_options(trainer):
    assert [trainers.option_of(trainer, change) for change in CHANGES] == [""] * len(CHANGES)


def test_a_loss_that_compares_rows_is_not_told_to_accumulate():
    trainer = "sentence_transformers.base.trainer.BaseTrainer"
    text = trainers.option_of(trainer, "micro-batches:2")
    assert "mini_batch_size" in text
    assert "gradient_accumulation_steps" not in text
    assert trainers.option_of(trainer, "checkpoint:layers").startswith("gradient_checkpointing")


def test_a_number_of_parts_is_named():
    text = trainers.option_of("transformers.trainer.Trainer", "micro-batches:8")
    assert "per_device_train_batch_size divided by 8" in text
    assert "gradient_accumulation_steps multiplied by 8" in text

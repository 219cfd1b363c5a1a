"""Evaluations of a Trainer in a process of its own, as users have them: what they keep, in a heap
without all the tests. `python -m tests.integrations.evaluating callback FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memtools
from memtools._record.figures import figures_of
from memtools.integrations.transformers import MemoryCallback
from memtools.report._explain import explain

VOCAB, TOKENS, ROWS = 8000, 64, 4
KEPT = VOCAB * TOKENS * ROWS * 4  # bytes of the logits of a batch


def trainer(folder: Path, callbacks: Any = None, **options: Any) -> Trainer:
    """A few steps of training, and then 24 batches whose logits compute_metrics wants."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, num_attention_heads=2, bos_token_id=1, eos_token_id=2, **sizes
        )
    )
    ids = torch.randint(3, VOCAB, (24 * ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS,
        max_steps=6, eval_strategy="steps", eval_steps=6, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks,
        compute_metrics=lambda found: {"mean": float(found.predictions.mean())}, **options,
    )  # fmt: skip


def keeps_logits(tmp_path: Path, how: str) -> None:
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem", limit="4 GiB")
    found: list[tuple[int, memtools.LeakFinding]] = []
    batches: list[int] = []
    monitor.on_leak(lambda one: found.append((len(batches), one)))
    made = trainer(tmp_path / "out", [MemoryCallback(monitor)] if how == "callback" else None)
    if how == "use":
        memtools.use(made, monitor=monitor)
    predict = made.prediction_step
    made.prediction_step = lambda *given, **by: (
        batches.append(1),
        predict(*given, **by),
    )[1]
    made.train()
    assert monitor.step_count == 6
    batch, first = found[0]
    assert batch <= 16
    assert (first.holder, first.phase) == ("EvalLoopContainer.tensors", "evaluate")
    assert first.rate_bytes == pytest.approx(KEPT, rel=0.1)
    for cure in ("preprocess_logits_for_metrics", "batch_eval_metrics", "eval_accumulation_steps"):
        assert cure in first.advice
    _, last = found[-1]
    assert last.over
    assert last.freed_bytes > 20 * KEPT
    text = explain(figures_of(memtools.read_record(tmp_path / "run.mem")))
    assert "too early to say" not in text
    assert "of evaluate, the highest of " in text


def keeps_labels(tmp_path: Path, _: str) -> None:
    monitor = memtools.MemoryMonitor(limit="4 GiB")
    found: list[memtools.LeakFinding] = []
    monitor.on_leak(found.append)
    keeps = lambda logits, labels: logits.argmax(-1)  # noqa: E731
    made = trainer(tmp_path, [MemoryCallback(monitor)], preprocess_logits_for_metrics=keeps)
    made.train()
    assert [one for one in found if one.holder] == []


if __name__ == "__main__":
    own = keeps_labels if sys.argv[1] == "labels" else keeps_logits
    own(Path(sys.argv[2]), sys.argv[1])

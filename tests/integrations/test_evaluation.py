"""The batches of a Trainer's evaluation: what they keep is found, and its peak is the run's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import memtools
from memtools._record.figures import figures_of
from memtools.integrations.transformers import MemoryCallback
from memtools.report._explain import explain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
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


@pytest.mark.parametrize("how", ["callback", "use"])
def test_an_evaluation_that_keeps_logits_is_named_within_16_batches(tmp_path, how):
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
    assert "of evaluate, the highest of the" in text


def test_labels_in_place_of_logits_are_not_found(tmp_path):
    monitor = memtools.MemoryMonitor(limit="4 GiB")
    found: list[memtools.LeakFinding] = []
    monitor.on_leak(found.append)
    keeps = lambda logits, labels: logits.argmax(-1)  # noqa: E731
    made = trainer(tmp_path, [MemoryCallback(monitor)], preprocess_logits_for_metrics=keeps)
    made.train()
    assert [one for one in found if one.holder] == []


def test_memtools_run_finds_it_in_an_unchanged_script(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            from tests.integrations.test_evaluation import trainer

            trainer(Path("out")).train()
            """
        )
    )
    here = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "memtools", "run", "--limit", "4 GiB", "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("memtools: ")]
    named = next(line for line in lines if "EvalLoopContainer.tensors" in line)
    step = re.match(r"memtools: step (\d+) of evaluate: ", named)
    assert step is not None
    assert int(step[1]) <= 16
    assert any("6 steps; peak" in line for line in lines)
    assert any("to do: evaluate() keeps" in line for line in lines)
    assert any("Peak of step" in line and "of evaluate" in line for line in lines)
    assert "train.py:5" not in ended.stderr  # the call of train() is not a place
    assert "memtools accumulates" not in ended.stderr

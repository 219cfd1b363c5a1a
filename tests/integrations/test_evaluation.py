"""The batches of a Trainer's evaluation: what they keep is found, and its peak is the run's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["callback", "use", "labels"])
def test_an_evaluation_that_keeps_logits_is_named_within_16_batches(tmp_path, how):
    """And one that keeps labels in their place is not."""
    command = [sys.executable, "-m", "tests.integrations.evaluating", how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def run_that_names(folder: Path, holder: str, phase: str) -> tuple[str, list[str]]:
    """What a run of train.py writes, and the lines of memtools in it, which name a holder within 16
    steps."""
    here = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "memtools", "run", "--limit", "4 GiB", "train.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("memtools: ")]
    named = next(line for line in lines if holder in line)
    step = re.match(rf"memtools: step (\d+) of {phase}  ", named)
    assert step is not None
    assert int(step[1]) <= 16
    return ended.stderr, lines


def test_memtools_run_finds_it_in_an_unchanged_script(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            from tests.integrations.evaluating import trainer

            trainer(Path("out")).train()
            """
        )
    )
    written, lines = run_that_names(tmp_path, "EvalLoopContainer.tensors", "evaluate")
    assert any("6 steps; peak" in line for line in lines)
    assert any("fix: " in line and "preprocess_logits_for_metrics" in line for line in lines)
    assert any("Peak of step" in line and "of evaluate" in line for line in lines)
    assert "train.py:5" not in written  # the call of train() is not a place
    assert "memtools accumulates" not in written


VALIDATION = """
import warnings

warnings.simplefilter("ignore")
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

WORDS = 20000


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, WORDS)
        self.validation_step_outputs = []

    def loss(self, batch):
        logits = self.net(batch[0])
        return torch.nn.functional.cross_entropy(logits, batch[1]), logits

    def training_step(self, batch, index):
        return self.loss(batch)[0]

    def validation_step(self, batch, index):
        loss, logits = self.loss(batch)
        self.log("val_loss", loss)
        self.validation_step_outputs.append(logits)

    def on_validation_epoch_end(self):
        self.validation_step_outputs.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


data = TensorDataset(torch.randn(256, 64), torch.randint(0, WORDS, (256,)))
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, 16), DataLoader(data, 8))
"""


def test_memtools_run_finds_what_a_validation_of_lightning_keeps(tmp_path):
    """Each validation ends with an empty list: the growth is over, and no other is found in the
    second one, for whose looks there is no time."""
    (tmp_path / "train.py").write_text(VALIDATION)
    _, lines = run_that_names(tmp_path, "Net.validation_step_outputs", "validate")
    assert any(line.startswith("memtools: before: list Net.validation_step") for line in lines)
    assert any("32 steps; peak" in line for line in lines)
    assert not any("memory in use  +" in line for line in lines)

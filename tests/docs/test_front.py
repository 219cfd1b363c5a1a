"""README.md: the changes, the run and the figures that it shows are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import memtools
from tests.docs.pages import blocks_of, compare, run, sides_of, typed

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", README, re.S | re.M)
TRAIN = """\
import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses = []

    def training_step(self):
        x = torch.randn(2048, 64)
        loss = (self.model(x) - x).square()
        self.optimizer.zero_grad()
        loss.mean().backward()
        self.optimizer.step()
        self.losses.append(loss.detach() * 2)


trainer = Trainer()
for _ in range(300):
    trainer.training_step()
"""


def results(diff: str, given: str, result: str) -> tuple[Any, Any]:
    """What both sides of a change compute, from the same begin."""
    found = []
    for side in sides_of(diff):
        names: dict[str, Any] = {}
        exec(given, names)
        exec(side, names)
        exec(f"result = {result}", names)
        found.append(names["result"])
    return found[0], found[1]


def test_each_part_in_the_table_is_one_of_memtools() -> None:
    table = README.split("| what you see |")[1].split("\n\n")[0]
    names = set(re.findall(r"\bmemtools\.([A-Za-z]\w*)", table)) - {"testing"}
    assert {"MemoryMonitor", "GradAccumulator", "GateHistory", "holder_of"} <= names
    assert all(hasattr(memtools, name) for name in names)


@pytest.mark.slow
def test_a_history_has_what_the_list_had() -> None:
    import torch

    given = (
        "import torch, memtools\ntorch.manual_seed(0)\n"
        "def router_gates():\n    return [torch.rand(64, 8).softmax(-1) for _ in range(50)]\n"
    )
    before, after = results(DIFFS[0], given, "history[:]")
    assert len(before) == len(after) == 50
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_a_group_has_the_answers_of_plain_generate() -> None:
    import torch

    given = (
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "from memtools.integrations.transformers import generate_group, pool_for\n"
        "torch.manual_seed(0)\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64,"
        " intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,"
        " num_key_value_heads=2, eos_token_id=None, pad_token_id=0)).eval()\n"
        "prompts = torch.randint(1, 128, (1, 30))\n"
    )
    before, after = results(DIFFS[1], given, "answers")
    assert before.shape == (16, 50)
    assert torch.equal(before, after)


@pytest.mark.slow
def test_a_step_has_the_gradient_of_the_loop_by_hand() -> None:
    import torch

    given = (
        "import torch, memtools\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(16, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "batches = [torch.rand(64, 16) for _ in range(3)]\n"
        "def loss_mean(micro):\n    return model(micro).square().mean(-1).mean()\n"
        "def loss_sum(micro):\n    return model(micro).square().mean(-1).sum(), len(micro)\n"
    )
    before, after = results(DIFFS[2], given, "[p.detach().clone() for p in model.parameters()]")
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_the_run_says_what_is_shown(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks_of(README) if block.language == "console")
    (tmp_path / "train.py").write_text(TRAIN)
    ((command, text),) = typed(shown.text)
    output = next(run([command], tmp_path))
    compare(text, output)


def test_its_figures_are_those_of_the_pages_behind_it() -> None:
    pages = [PROJECT / "docs/performance.md", PROJECT / "docs/internals/performance.md"]
    known = "".join(page.read_text() for page in [*pages, PROJECT / "docs/guides/testing.md"])
    table = README.split("| the strongest other way |")[1].split("\n\n")[0]
    cells = [cell for row in table.splitlines()[2:] for cell in row.split("|")[2:4]]
    figures = re.findall(r"\d+(?:\.\d+)?(?: of \d+)?(?: us| s| MiB)?", " ".join(cells))
    assert len(figures) > 12
    for figure in figures:
        bare = figure.removesuffix(" us").removesuffix(" s").removesuffix(" MiB")
        assert re.search(rf"(?<![\d.]){re.escape(bare)}(?![\d])", known), figure

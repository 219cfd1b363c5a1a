"""memtools.use(trainer) where a training runs on two processes: batches in parts, and the plain
training's losses, norms and parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import two_lightning_ranks
from tests.integrations.two_ranks import CASES

pytestmark = pytest.mark.slow
SUMMED = "Gradients of the 2 processes are summed at the end of an update."
TOGETHER = "All 2 processes run each part together."
NO_RULE = "the loss of two of its rows is neither"
#: What the adapters of the first and the second process say, beside that.
SAID: dict[str, tuple[str, str]] = {
    "uneven rows, two batches": ("last batch had 1 row.", "last batch had 1 row."),
    "a mean": ("the mean over the tokens of 'labels' after", "the mean over the tokens of"),
    "with evaluations": ("last batch had 2 rows.", "last batch had 2 rows."),
    "SFT": ("last batch had 2 rows.", "last batch had 2 rows."),
    "DPO": ("is the mean over its rows.", "is the mean over its rows."),
    "GRPO": ("last batch had 2 rows.", "last batch had 2 rows."),
    "RLOO": ("is the mean over its rows.", "is the mean over its rows."),
    "out of memory": ("last batch had 4 rows.", "2 parts ran again with fewer rows"),
    "SFT out of memory": ("last batch had 4 rows.", "1 part ran again with fewer rows"),
    "no row fits": ("RankError: rank 1 failed", "OutOfMemoryError: "),
    "one row first": ("last batch had 2 rows.", "last batch had 2 rows."),
    "an extreme": (f"Batches run whole: on process 1, {NO_RULE}", f"Batches run whole: {NO_RULE}"),
    "a gathered loss": ("Batches run whole: its loss exchanges",) * 2,
    "a static graph": ("Batches run whole: DistributedDataParallel(static_graph=True)",) * 2,
    "sharded: out of memory": ("2 parts ran again with fewer", "2 parts ran again with fewer"),
    "sharded: SFT out of memory": ("1 part ran again with fewer", "1 part ran again with fewer"),
    "sharded: one row first": ("1 batch ran whole, as another", "last batch had 2 rows."),
    "sharded: no row fits": ("MemoryError: out of memory on rank 1", "OutOfMemoryError: "),
    "sharded by accelerate": ("1 part ran again with fewer", "1 part ran again with fewer"),
}
# TRL means these over the chosen tokens of a batch.
ABOUT = ("logits/", "mean_token_accuracy")


def launch(folder: Path, module: str, *names: str) -> Path:
    """Run all cases in two processes, which import once. Returns the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", f"tests.integrations.{module}", str(folder), *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory: Any) -> Path:
    """A folder with what each case of transformers and TRL has found."""
    return launch(tmp_path_factory.mktemp("ranks"), "two_ranks", *CASES)


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: Any) -> Path:
    """A folder with what each case of Lightning has found."""
    return launch(tmp_path_factory.mktemp("lightning"), "two_lightning_ranks")


@pytest.mark.parametrize("name", CASES)
def test_on_two_processes_a_training_in_parts_is_the_plain_one(name, launched):
    found, case = torch.load(launched / f"{name}.pt"), CASES[name]
    is_cut = not case.loss and name != "a static graph"
    for said, wanted in zip(found["said"], SAID.get(name) or SAID[name[9:]], strict=True):
        assert wanted in said
        assert ((TOGETHER if case.shards else SUMMED) in said) is is_cut
    assert {"train", "loss"} <= set(found["phases"])
    if "no row" in name:
        return
    torch.testing.assert_close(found["used"], found["plain"], rtol=1e-6, atol=1e-6)
    for plain, used in zip(*found["logs"], strict=True):
        left_out = ("eval_runtime", "eval_samples_per", "eval_steps_per")
        left_out += ABOUT if case.kind == "DPO" else ()
        same = {k: v for k, v in plain.items() if not k.startswith(left_out)}
        assert {k: used[k] for k in same} == pytest.approx(same, rel=1e-6, abs=1e-6)
    # A first batch may be whole.
    assert found["passes"] >= (3 * (4 // case.part) if is_cut else 4)


LIGHTNING = {
    "uneven rows": ("last batch had 3 rows.", "last batch had 3 rows."),
    "out of memory": ("last batch had 3 rows.", "2 parts ran again with fewer rows"),
    "one row": ("8 batches ran whole, as another process", ""),
    "an extreme": (f"Batches run whole: on process 1, {NO_RULE}", f"Batches run whole: {NO_RULE}"),
}


@pytest.mark.parametrize("name", two_lightning_ranks.CASES)
def test_under_lightnings_ddp_strategy_too(name, lightning):
    found = torch.load(lightning / f"{name}.pt")
    for said, wanted in zip(found["said"], LIGHTNING[name], strict=True):
        assert wanted in said
        assert (SUMMED in said) is (name in ("uneven rows", "out of memory"))
    (plain, logs, norms), (used, own_logs, own_norms) = found["plain"], found["used"]
    torch.testing.assert_close(used, plain, rtol=1e-6, atol=1e-6)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    for ours, theirs in zip(own_logs, logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert (found["passes"] > 16) is (SUMMED in found["said"][1])

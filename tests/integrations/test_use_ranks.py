"""memtools.use(trainer) where a training runs on two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow


def test_on_two_processes_batches_run_whole_and_it_says_so(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.integrations.two_ranks", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert "Batches run whole: it trains on 2 processes, which reduce together." in found["said"]
    torch.testing.assert_close(found["use"], found["plain"], rtol=0, atol=0)
    assert {"train", "optimizer"} <= set(found["phases"])

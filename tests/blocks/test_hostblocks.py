"""A run's part in the reports of torch's allocator: when it begins, and why it does not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from memtools import MemoryMonitor
from memtools._blocks.reports import HostBlocks

MIB = 1 << 20


def test_it_begins_by_itself_and_ends_for_good() -> None:
    blocks = HostBlocks()
    assert (blocks.in_use(), blocks.reason, blocks.blocks.is_on) == (0, "", True)
    kept = torch.zeros(1000)
    assert blocks.in_use() == 4000
    blocks.leave()
    assert blocks.in_use() is None
    assert len(kept) == 1000


def test_without_the_shim_it_is_not_known_and_says_why(
    without_shim: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    with without_shim():
        blocks = HostBlocks()
        assert blocks.in_use() is None
        assert "memtools._torch, which is not there" in blocks.reason
    assert blocks.in_use() is None, "asked once"


@pytest.mark.slow
def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys\nfrom memtools._blocks.reports import HostBlocks\n"
        "blocks = HostBlocks()\n"
        "assert blocks.in_use() is None and 'torch' not in sys.modules and not blocks.reason\n"
        "import torch\n"
        "assert blocks.in_use() == 0\n"
        "kept = torch.zeros(10)\n"
        "print(blocks.in_use())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("40\n", "", 0)


def test_tensors_that_stay_are_a_signal_without_noise() -> None:
    """512 bytes a step, by step 20: the heap of the process needs more than twice as many."""
    kept = []
    with MemoryMonitor(device="cpu") as monitor:
        for _ in range(20):
            kept.append(torch.zeros(128))
            torch.randn(300, 300)  # and what comes and goes
            monitor.step()
        watch = monitor._watch()
        assert watch is not None
        (verdict,) = (one for one in watch.verdicts() if one.kind == "suspect")
    assert verdict.signal == "tensors"
    assert verdict.rate_bytes_per_step == 512
    with MemoryMonitor(device="cpu") as monitor:
        for _ in range(40):
            torch.randn(300, 300)
            monitor.step()
        assert monitor.findings() == ()

"""Allocator settings on a real device: that they take effect and are read."""

from __future__ import annotations

from tests.allocators.allocatorcases import program

COMMON = """
import torch

def segments():
    return {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
"""


def test_a_variable_takes_effect() -> None:
    assert program(
        COMMON + """
block = torch.empty(2**20, device="cuda")
print(segments(), allocator_settings().cuda.expandable_segments)
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    ) == "{True} Setting(value=True, source='PYTORCH_ALLOC_CONF')\n"  # fmt: skip


def test_reading_makes_no_context() -> None:
    program(
        COMMON
        + """
now = allocator_settings()
assert not now.cuda.in_use and now.cuda.devices == ()
assert not torch.cuda.is_initialized()
block = torch.empty(2**20, device="cuda:0")
(device,) = allocator_settings().cuda.devices
assert (device.index, device.reserved) == (0, torch.cuda.memory_reserved())
assert (device.allocated, device.fraction) == (torch.cuda.memory_allocated(), 1.0)
"""
    )

"""Allocator settings on a real device: that they take effect, and when it is too late."""

from __future__ import annotations

from tests.allocators.allocatorcases import program

COMMON = """
import torch

def segments():
    return {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
"""


def test_a_variable_set_before_the_import_takes_effect() -> None:
    assert program(
        "allocator_settings().set(expandable_segments=True)" + COMMON + """
block = torch.empty(2**20, device="cuda")
print(segments(), allocator_settings().cuda.expandable_segments)
"""
    ) == "{True} Setting(value=True, source='PYTORCH_ALLOC_CONF')\n"  # fmt: skip


def test_the_setter_takes_effect_until_there_are_segments() -> None:
    program(
        COMMON
        + """
torch.cuda.init()
allocator_settings().set(expandable_segments=True)
block = torch.empty(2**20, device="cuda")
assert segments() == {True}
refused("too late for expandable_segments: torch already has", expandable_segments=False)
allocator_settings().set(garbage_collection_threshold=0.5)
assert allocator_settings().cuda.expandable_segments.value is True
del block
torch.cuda.empty_cache()
allocator_settings().set(expandable_segments=False)
block = torch.empty(2**20, device="cuda")
assert segments() == {False}
"""
    )


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

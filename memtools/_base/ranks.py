"""Ranks of a job: the number of this process, and the process groups of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def rank_of_several(environment: Mapping[str, str] = os.environ) -> str:
    """The number of this process in its job, as torchrun and other launchers set it; "" where there
    is none, or no other process."""
    rank = environment.get("RANK", "")
    return rank if rank.isdecimal() and environment.get("WORLD_SIZE") != "1" else ""


def device_of(group: Any) -> str:
    """The type of device whose tensors the group's collectives take: "cpu" if they take that."""
    kinds = sorted(device.type for device in group._device_types)
    return "cpu" if "cpu" in kinds or not kinds else kinds[0]


def host_group(dist: Any, group: Any, purpose: str) -> Any:
    """A group of the same ranks whose collectives take tensors in host memory.

    Args:
        dist: the module torch.distributed.
        group: the process group.
        purpose: what the group is for, shown in torch's logs.

    Returns the group itself if it takes such tensors, as gloo does. If it does not, as nccl, and is
    the group of the whole job, a gloo group is made, which is a collective of the whole job and
    takes some milliseconds. None for a group of some of the ranks: the others would have to join.
    """
    if device_of(group) == "cpu":
        return group
    if group is dist.group.WORLD:
        return dist.new_group(backend="gloo", group_desc=purpose)
    return None

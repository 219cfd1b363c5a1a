"""Process groups of torch.distributed: by which tensors their ranks can talk."""

from __future__ import annotations

from typing import Any


def device_of(group: Any) -> str:
    """The type of device whose tensors the group's collectives take: "cpu" where they do."""
    kinds = sorted(device.type for device in group._device_types)
    return "cpu" if "cpu" in kinds or not kinds else kinds[0]


def host_group(dist: Any, group: Any, purpose: str) -> Any:
    """A group of the same ranks that takes tensors in host memory: the group itself where it does,
    as gloo does; where it does not, as nccl, and is the group of the whole job, a gloo group that
    is made here: a collective of the whole job, of some milliseconds. None for a group of some
    ranks, as making one would need the others.

    Args:
        dist: torch.distributed.
        group: the process group.
        purpose: what the new group is for, which torch's logs show.
    """
    if device_of(group) == "cpu":
        return group
    if group is dist.group.WORLD:
        return dist.new_group(backend="gloo", group_desc=purpose)
    return None

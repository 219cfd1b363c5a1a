"""What the job may use of the host's memory, and the bytes of it that a cache in this process may
have where nobody says how many."""

from __future__ import annotations

import os
import resource
import sys

from memtools import _core

#: the part of the job's memory that the caches of all its workers have together
PART = 4
#: what is left to a cache on a machine whose memory is unknown, or very small
SMALLEST = 16 * 2**20


def room_of(limit: int | None, used: int | None) -> int | None:
    """What is left of a limit; None where one of the two is not known."""
    return None if limit is None or used is None else max(0, limit - used)


def job_of(sample: _core.Sample) -> tuple[int | None, int | None]:
    """The limit that the job comes to first, its control group's or the machine's, and what is used
    of it."""
    group, available = (sample.cgroup_limit, sample.cgroup_used), sample.available
    left = None if group[0] is None or group[0] < 0 else room_of(*group)
    if left is not None and (available is None or left <= available):
        return group
    return sample.total, room_of(sample.total, available)


def job_bytes() -> int | None:
    """What the job may use: the container's limit, or else the machine's memory. None: unknown."""
    sample = _core.Probe("/", True).host()
    found = [n for n in (sample.cgroup_limit, sample.total) if n is not None and n > 0]
    return min(found, default=None)


def workers() -> int:
    """How many DataLoader workers this process is one of; 1 outside of a worker."""
    data = sys.modules.get("torch.utils.data")  # where it is not loaded, this is not a worker
    info = None if data is None else data.get_worker_info()
    return 1 if info is None else max(1, info.num_workers)


def local_ranks() -> int:
    """How many ranks torchrun started on this machine; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def default_limit() -> int:
    """A quarter of the job's memory, divided by workers and local ranks, and at most a quarter of
    what RLIMIT_AS and RLIMIT_DATA allow this process."""
    job = job_bytes()
    shares = [] if job is None else [job // (PART * workers() * local_ranks())]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            shares.append(limit // PART)
    return max(SMALLEST, min(shares, default=0))

"""What the job may use of the host's memory, and the bytes of it that a cache in this process may
have where nobody says how many."""

from __future__ import annotations

import os
import sys

from memtools._base.limits import job_limit, lowest_limit_of_process

#: the part of the job's memory that the caches of all its workers have together
PART = 4
#: what is left to a cache on a machine whose memory is unknown, or very small
SMALLEST = 16 * 2**20


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
    job = job_limit()
    shares = [] if job is None else [job // (PART * workers() * local_ranks())]
    own = lowest_limit_of_process()
    shares += [] if own is None else [own[0] // PART]
    return max(SMALLEST, min(shares, default=0))

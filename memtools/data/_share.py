"""The share of the host's memory that a cache in this process may use if it is given no limit."""

from __future__ import annotations

import os
import sys

from memtools._base.limits import job_limit, lowest_limit_of_process

PART = 4  # The caches of all workers together get this part of the job's memory.
SMALLEST = 16 * 2**20  # A cache gets at least so much, also if the machine's memory is unknown.


def workers() -> int:
    """The number of workers of this process's DataLoader; 1 outside of a worker."""
    data = sys.modules.get("torch.utils.data")  # If it is not loaded, this is not a worker.
    info = None if data is None else data.get_worker_info()
    return 1 if info is None else max(1, info.num_workers)


def local_ranks() -> int:
    """The number of ranks that torchrun started on this machine; 1 without it."""
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

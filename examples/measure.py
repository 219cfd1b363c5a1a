"""What the examples measure about themselves, so that their loops hold only what trains.

The demo compares two runs of an example by what is written here: each loss as an exact float, a
hash of everything that was sampled, and how much memory and processor time it took.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

MIB = 2**20
F = TypeVar("F", bound=Callable[..., Any])


def peak_rss() -> int:
    """The most bytes of RAM that this process ever held, as the kernel knows it."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def rss() -> int:
    """The bytes of RAM that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def return_free_heap() -> None:
    """Give what malloc keeps of freed memory back to the system, in every variant: RSS then does
    not depend on when malloc does so by itself."""
    ctypes.CDLL(None).malloc_trim(0)


class Meter:
    """Collects the losses, rewards and samples of a run, and what they cost.

    Args:
        updates: how many updates the run makes.
        every: print a line at each so many updates.
    """

    def __init__(self, updates: int, every: int = 1) -> None:
        self.updates, self.every = updates, every
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self.rss: list[int] = []  # after each update
        self.lengths: list[int] = []  # of all samples, in tokens
        self.samples = hashlib.sha256()
        self.sampling_cpu_seconds = 0.0
        self.began = time.perf_counter(), time.process_time()

    def sampling(self, function: F) -> F:
        """`function`, with the processor time of its calls added up."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.sampling_cpu_seconds += time.process_time() - began

        return timed  # type: ignore[return-value]

    def after_update(self, loss: float, answers: list[list[int]], rewards: list[float]) -> None:
        """Record one update: its loss, the tokens of every answer, and their rewards."""
        self.losses.append(loss)
        self.rewards.append(sum(rewards) / len(rewards))
        self.lengths += map(len, answers)
        self.samples.update(json.dumps(answers).encode())
        return_free_heap()
        self.rss.append(rss())
        done = len(self.losses)
        if done % self.every == 0 or done == self.updates:
            state = f"RSS {self.rss[-1] / MIB:.1f} MiB, mean reward {self.rewards[-1]:.3f}"
            print(f"update {done} of {self.updates}, {state}", flush=True)

    def result(self) -> dict[str, Any]:
        """Everything as plain types, for a file of JSON."""
        return {
            "losses": [loss.hex() for loss in self.losses],
            "final_loss": self.losses[-1],
            "rewards": self.rewards,
            "tokens": self.samples.hexdigest(),
            "lengths": [min(self.lengths), max(self.lengths)],
            "peak_rss_bytes": peak_rss(),
            "samples": {"rss_bytes": self.rss},
            "sampling_cpu_seconds": self.sampling_cpu_seconds,
            "seconds": time.perf_counter() - self.began[0],
            "cpu_seconds": time.process_time() - self.began[1],
        }

"""Resident memory and processor time of the programs in this folder."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from pathlib import Path

MIB = 2**20


def resident() -> float:
    """MiB of this process that are resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def most_resident() -> float:
    """The most MiB that were resident since the last `Meter` began."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def trim() -> None:
    """Ask glibc to give all idle memory of its heap back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


class Meter:
    """Memory and processor time from here on.

    Both are of this process with all its threads: the time of its children counts once they ended.
    """

    def __init__(self) -> None:
        gc.collect()
        trim()
        Path("/proc/self/clear_refs").write_text("5")
        self._resident, self._seconds = resident(), self._now()

    @staticmethod
    def _now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    def seconds(self) -> float:
        return self._now() - self._seconds

    def grown(self) -> float:
        """MiB that are resident beyond the start."""
        return resident() - self._resident

    def peak(self) -> float:
        """The most MiB that were resident, beyond the start."""
        return most_resident() - self._resident

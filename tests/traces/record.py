"""Records the memory of the loops in loops.py, and reads what was recorded.

    python -m tests.traces.record               # all, each in a process of its own; some minutes
    python -m tests.traces.record plain graph   # these

A trace is an .npz of at most 100 KB beside this file: for each signal the first reading and the
differences between readings, in bytes, one a step. The recorder writes into arrays that were made
and touched before the loop begins: a list that grows would be a leak of its own, and was found as
one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent / "recorded"
STEPS = 4500
PAGE = os.sysconf("SC_PAGE_SIZE")
#: bytes that a step leaks, and the signals that see it; the other loops leak nothing
LEAKS = {
    "gates_list": (16384, ("heap",)),
    "metrics_dict": (0, ("python",)),
    "graph": (0, ("heap",)),
    "late_onset": (16384, ("heap",)),
    "workers_leak": (32 * 1024, ("children",)),
}
LEAK_FREE = ("plain", "replay_buffer", "gc_off", "varlen", "workers")


class Mallinfo2(ctypes.Structure):
    """As in malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
        + ("uordblks", "fordblks", "keepcost")
    ]


class Readings:
    """All signals, into arrays that exist before the loop does."""

    def __init__(self, steps: int) -> None:
        self.mallinfo2 = ctypes.CDLL(None).mallinfo2
        self.mallinfo2.restype = Mallinfo2
        self.statm = os.open("/proc/self/statm", os.O_RDONLY)
        self.of = {
            name: np.full(steps, -1, np.int64) for name in ("heap", "python", "children", "rss")
        }

    def children(self) -> int:
        """Private resident bytes of this process's children."""
        pages = 0
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(resident) - int(shared)
        return pages * PAGE

    def take(self, step: int) -> None:
        info = self.mallinfo2()
        self.of["heap"][step] = info.uordblks + info.hblkhd
        self.of["python"][step] = 64 * sys.getallocatedblocks()
        self.of["children"][step] = self.children()
        self.of["rss"][step] = int(os.pread(self.statm, 256, 0).split()[1]) * PAGE


def record(name: str, steps: int = STEPS) -> None:
    import torch

    from tests.traces.loops import LOOPS

    torch.set_num_threads(1)
    loop, readings = LOOPS[name](), Readings(steps)
    for step in range(steps):
        next(loop)
        readings.take(step)
    FOLDER.mkdir(exist_ok=True)
    deltas = {key: np.diff(values, prepend=0) for key, values in readings.of.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", **deltas)  # type: ignore[arg-type]


def load(name: str) -> dict[str, NDArray[np.int64]]:
    """Bytes of each signal, one reading a step."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: np.cumsum(file[key]) for key in file.files}


def main() -> None:
    for name in sys.argv[1:] or [*LEAK_FREE, *LEAKS]:
        code = f"from tests.traces.record import record; record({name!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        size = (FOLDER / f"{name}.npz").stat().st_size
        print(f"{name}: {size / 1000:.0f} KB", flush=True)


if __name__ == "__main__":
    main()

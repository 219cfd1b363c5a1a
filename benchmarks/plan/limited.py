"""Runs the GPT's steps in a process of its own under a limit that the system enforces.

    python -m benchmarks.plan.limited ROWS BYTES    # exit code 0: it ran; 3: no memory

The limit is RLIMIT_DATA, which bounds what a process allocates: what it has after two small steps,
as libraries come with buffers of their own, and BYTES more. Each larger block of the host allocator
is a mapping of its own (MALLOC_MMAP_THRESHOLD_), so that what is freed counts no more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

NO_MEMORY = 3
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MKL_DISABLE_FAST_MM": "1",
    "OMP_NUM_THREADS": "1",
}


def fits(rows: int, nbytes: int) -> bool:
    """Whether three steps of so many rows run with so many bytes."""
    words = [sys.executable, "-m", "benchmarks.plan.limited", str(rows), str(nbytes)]
    found = subprocess.run(words, env=os.environ | SETTINGS, capture_output=True, check=False)
    if found.returncode not in (0, NO_MEMORY):
        raise RuntimeError(found.stderr.decode())
    return found.returncode == 0


def fill_holes() -> None:
    """Take what is free within the heap and large enough for a tensor. It would come on top of a
    limit: 7 to 13 MiB, which differ from process to process."""
    system = ctypes.CDLL(None)
    system.sbrk.restype = system.malloc.restype = ctypes.c_void_p
    end = system.sbrk(0)
    while system.sbrk(0) == end:
        system.malloc(60_000)  # below MALLOC_MMAP_THRESHOLD_


def main() -> int:
    import torch

    from benchmarks.plan.loops import OPTIMIZERS, gpt

    torch.set_num_threads(1)
    rows, nbytes = map(int, sys.argv[1:])
    for _ in range(2):
        gpt(OPTIMIZERS["AdamW"], 1).step()
    gc.collect()
    fill_holes()
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    most = 1024 * int(match[1]) + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        loop = gpt(OPTIMIZERS["AdamW"], rows)
        for _ in range(3):
            loop.step()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return NO_MEMORY
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

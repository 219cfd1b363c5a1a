"""What the parts of the gate-history benchmark share: gates, a memcpy ring in C, ways to run."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from benchmarks.kit.harness import Runner, compiled
from memtools import _core
from memtools._base import torch as base_torch

MIB, PAGE = 2**20, 4096
SMALL, LARGE = (512, 8), (2048, 64)
SLOTS = {SMALL: 1000, LARGE: 128}  # what the default limits, 1000 entries and 64 MiB, hold
OURS, OURS_BARE = "GateHistory.append", "GateHistory.append, no shim"
MEMCPY, MEMCPY_PAGE = "memcpy in C", "memcpy in C, ring on a page"

MEMCPY_SOURCE = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static int64_t
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

void *
ring_new(size_t bytes)
{
    void *ring = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return ring == MAP_FAILED ? NULL : memset(ring, 1, bytes);
}

/* n copies into one slot after the other; *at goes on where the last call ended. */
int64_t
ring_copies(char *ring, size_t slots, size_t bytes, const void *source, size_t *at, size_t n)
{
    int64_t start = now();
    for (size_t i = 0; i < n; i++) {
        memcpy(ring + *at * bytes, source, bytes);
        *at = *at + 1 == slots ? 0 : *at + 1;
    }
    return now() - start;
}
"""


def memcpy_ring(gates: Tensor, slots: int, offset: int | None = None) -> Runner:
    """memcpy of the same source into as many slots; loop and clock in C, no call from Python.

    Where the ring starts within a page matters by up to a factor of two: a store to an address that
    a load a little later shares the low 12 bits with holds that load up. By default it starts where
    this does not happen, which is the strict baseline; `offset` is some other place.
    """
    library, size = compiled(MEMCPY_SOURCE), gates.numel() * gates.element_size()
    library.ring_new.restype, library.ring_new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.ring_copies.restype = ctypes.c_int64
    ring, at = library.ring_new(slots * size + PAGE), ctypes.c_size_t(0)
    if not ring:
        raise MemoryError(f"no room for a ring of {slots} x {size} bytes")
    start = (gates.data_ptr() + PAGE // 2) % PAGE if offset is None else offset

    def run(n: int) -> float:
        elapsed: int = library.ring_copies(
            ctypes.c_void_p(ring + start),
            ctypes.c_size_t(slots),
            ctypes.c_size_t(size),
            ctypes.c_void_p(gates.data_ptr()),
            ctypes.byref(at),
            ctypes.c_size_t(n),
        )
        return elapsed

    return run


def gates_like(shape: tuple[int, int], *, grad: bool = True) -> Tensor:
    """Gates as a router makes them, with the graph behind them unless told otherwise."""
    torch.manual_seed(0)
    return torch.softmax(torch.randn(shape, requires_grad=grad), -1)


@contextlib.contextmanager
def without_shim() -> Iterator[None]:
    """memtools._core by public torch calls alone, as where memtools._torch was not built."""
    bridge, connect = base_torch.connect(), cast(Callable[..., None], _core._connect)
    parts = base_torch.parts(torch)
    connect(*parts, None)
    try:
        yield
    finally:
        connect(*parts, bridge.shim.ops if bridge.shim else None)


def shimless(runner: Runner) -> Runner:
    def run(n: int) -> float:
        with without_shim():
            return runner(n)

    return run


def with_threads(runner: Runner, threads: int) -> Runner:
    def run(n: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return runner(n)
        finally:
            torch.set_num_threads(before)

    return run

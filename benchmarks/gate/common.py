"""What the parts of the gate-history benchmark share: gates, and a memcpy ring in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from benchmarks.kit.harness import Runner, compiled

MIB, PAGE = 2**20, 4096
SMALL, LARGE = (512, 8), (2048, 64)
SLOTS = {SMALL: 1000, LARGE: 128}  # what the default limits, 1000 entries and 64 MiB, hold
OURS, MEMCPY = "GateHistory.append", "memcpy in C"

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


def memcpy_ring(gates: Tensor, slots: int) -> Runner:
    """memcpy of the same source into as many slots; loop and clock in C, no call from Python.

    Where the ring starts within a page matters by up to a factor of two: a store delays a later
    load whose address has the same low 12 bits. The ring starts where this does not happen, which
    is the strict baseline.
    """
    library, size = compiled(MEMCPY_SOURCE), gates.numel() * gates.element_size()
    library.ring_new.restype, library.ring_new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.ring_copies.restype = ctypes.c_int64
    ring, at = library.ring_new(slots * size + PAGE), ctypes.c_size_t(0)
    if not ring:
        raise MemoryError(f"no room for a ring of {slots} x {size} bytes")
    start = (gates.data_ptr() + PAGE // 2) % PAGE

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
    """Gates as a router makes them, by default with the graph that made them."""
    torch.manual_seed(0)
    return torch.softmax(torch.randn(shape, requires_grad=grad), -1)

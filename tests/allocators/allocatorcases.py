"""Programs of their own for the allocator tests: what a C library has read cannot be undone."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from tests.kit.ownprocess import in_own_process

MIB = 2**20
OURS = ("MALLOC_", "GLIBC_TUNABLES", "PYTORCH_", "LD_PRELOAD")
BEGIN = """
import ctypes, os, sys, threading
from memtools import allocator_settings
from memtools._base.malloc import malloc_info
MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def take(count, size):
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        libc.memset(block, 1, size)
    return blocks

def give(blocks):
    for block in blocks:
        libc.free(block)

def arenas(threads):
    "Made by now, after so many threads at once have asked for memory."
    ready, leave = threading.Barrier(threads + 1), threading.Event()
    def work():
        libc.free(libc.malloc(100_000))
        ready.wait()
        leave.wait()
    all_of_them = [threading.Thread(target=work) for _ in range(threads)]
    for thread in all_of_them:
        thread.start()
    ready.wait()
    count = malloc_info().count("<heap nr=")
    leave.set()
    for thread in all_of_them:
        thread.join()
    return count

def refused(text, **settings):
    before = {name: os.environ.get(name) for name in os.environ}
    try:
        done = allocator_settings().set(**settings)
    except RuntimeError as error:
        assert text in str(error) and "\\n" not in str(error), error
        assert str(error).startswith("set() changed nothing: "), error
    else:
        raise AssertionError(done)
    assert before == dict(os.environ)
"""


def program(code: str, **variables: str) -> str:
    """Runs it with these variables and no others that concern allocators; what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return in_own_process(BEGIN + code, env=env | variables)


class FakeTorch:
    """As much of a torch that uses CUDA as the allocator settings ask for."""

    def __init__(self, reserved: int = 0, ready: bool = True) -> None:
        self.text = ""
        self.reserved, self.inactive, self.retries, self.share = [reserved, 0], 0, 0, 1.0
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            is_initialized=lambda: ready,
            device_count=lambda: 2,
            memory_stats_as_nested_dict=self._stats,
            get_per_process_memory_fraction=lambda index: self.share,
        )
        self._C = SimpleNamespace(_accelerator_getAllocatorSettings=lambda: self.text)

    def _stats(self, index: int) -> dict[str, Any]:
        reserved = self.reserved[index]
        return {
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
            "allocated_bytes": {"all": {"current": reserved // 2, "peak": reserved}},
            "inactive_split_bytes": {"all": {"current": self.inactive, "peak": 0}},
            "num_alloc_retries": self.retries,
        }

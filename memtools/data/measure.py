"""What a batch of a loader takes, found out in a forked child.

The child draws batches as a worker would and says what they take. So the sampler, the random state
and the data set of this process stay as they are, whatever they do when a batch is drawn.
"""

from __future__ import annotations

import copy
import json
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memtools._base import torch as bridge
from memtools.data.sizes import size_of


@dataclass(frozen=True)
class Measured:
    """What batches take; None for what could not be found out."""

    #: bytes of the largest batch that was drawn
    batch_bytes: int | None = None
    #: bytes of each tensor of that batch, which is what /dev/shm and pinned memory hold
    tensors: tuple[int, ...] = ()
    #: the least seconds that one process took for a batch
    batch_seconds: float | None = None
    #: private bytes of the process after it had drawn the batches, without a batch
    worker_bytes: int | None = None
    #: why nothing could be drawn; "" where that worked
    why: str = ""


def measure(loader: Any, batches: int, timeout: float) -> Measured:
    """Draw batches in a forked child. Raises nothing for what goes wrong there."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads
        pid = os.fork()
    if pid == 0:
        _answer(write, loader, batches)
    os.close(write)
    try:
        answer = _read_all(read, timeout)
        if answer is None:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(read)
        status = os.waitpid(pid, 0)[1]
    if answer is None:
        return Measured(why=f"no batch came within {timeout:g} s")
    if os.WIFSIGNALED(status) or not answer:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return Measured(why=f"the process that drew it was killed by signal {number}")
    found = json.loads(answer)
    found["tensors"] = tuple(found["tensors"])
    return Measured(**found)


def _read_all(fd: int, timeout: float) -> bytes | None:
    """What is written until the other end is closed; None if that takes too long."""
    poll, parts = select.poll(), list[bytes]()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + timeout
    while poll.poll(max(0.0, 1e3 * (end - time.monotonic()))):
        part = os.read(fd, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _answer(fd: int, loader: Any, batches: int) -> None:
    """What the child does. It ends without the program's handlers and open files."""
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stdout = sys.stderr = nowhere
            found = _draw(loader, batches)
    except BaseException as error:
        found = Measured(why=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
        os.write(fd, json.dumps(asdict(found)).encode())
        os._exit(0)


def _draw(loader: Any, batches: int) -> Measured:
    torch = bridge.connect().torch
    torch.set_num_threads(1)  # as in a worker: threads of the parent's pool are not here
    plain = copy.copy(loader)
    if loader.num_workers and loader.worker_init_fn is not None:
        loader.worker_init_fn(0)
    as_one_process = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    vars(plain).update(as_one_process, pin_memory=False, timeout=0, _iterator=None)
    source, seconds, private = iter(plain), list[float](), list[int]()
    largest, tensors = 0, tuple[int, ...]()
    for _ in range(batches):
        begin = time.perf_counter()
        batch = next(source, None)
        if batch is None:
            break
        seconds.append(time.perf_counter() - begin)
        size = size_of(batch)
        if size > largest:
            largest, tensors = size, tuple(_tensors_of(batch, torch))
        own = _private_bytes()
        if own is not None:
            private.append(max(0, own - size))
    if not seconds:
        return Measured(why="the loader has no batch")
    worker = max(private) if private else None
    return Measured(largest, tensors, min(seconds), worker)


def _tensors_of(batch: Any, torch: Any) -> Iterator[int]:
    """The bytes of each storage in a batch as collate functions make it."""
    todo, seen = [batch], set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()


def _private_bytes() -> int | None:
    """What this process has written to, and does not share with its parent any more."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            found = re.search(r"^Private_Dirty:\s*(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])

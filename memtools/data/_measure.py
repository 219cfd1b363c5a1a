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
from types import ModuleType
from typing import Any, NoReturn

from memtools._base import torch as bridge
from memtools.data._sizes import size_of

_END = object()  # Marks the end of the batches.


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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads
            pid = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        return Measured(why=f"no process can be forked to draw it ({error.strerror})")
    if pid == 0:
        _answer(write, loader, batches)
    os.close(write)
    answer = None
    try:
        answer = _read_line(read, timeout)
    finally:
        if answer is None:  # too late, or an exception of this process, such as Ctrl-C
            os.kill(pid, signal.SIGKILL)
        os.close(read)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answer is None:
        return Measured(why=f"it did not come within {timeout:g} s; pass a larger timeout")
    if not answer.endswith(b"\n"):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Measured(why=f"the process that drew it {how}")
    found = json.loads(answer)
    found["tensors"] = tuple(found["tensors"])
    return Measured(**found)


def _read_line(fd: int, timeout: float) -> bytes | None:
    """What is written until the line or the pipe ends; None if that takes too long."""
    poll, parts = select.poll(), list[bytes]()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + timeout
    while poll.poll(min(1e9, max(0.0, 1e3 * (end - time.monotonic())))):
        part = os.read(fd, 65536)
        parts.append(part)
        if not part or part.endswith(b"\n"):  # a process of the data set may keep the pipe open
            return b"".join(parts)
    return None


def _answer(fd: int, loader: Any, batches: int) -> NoReturn:
    """What the child does. It ends without the program's handlers and open files, whatever happens:
    it must not return into the program, which would then run twice."""
    code = 1
    try:
        try:
            with open(os.devnull, "w") as nowhere:
                sys.stdout = sys.stderr = nowhere
                found = _draw(loader, batches)
        except BaseException as error:
            first_line = str(error).strip().partition("\n")[0][:200]
            found = Measured(why=f"{type(error).__name__}: {first_line}".rstrip(": "))
        with open(fd, "wb") as file:
            file.write(json.dumps(asdict(found)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _draw(loader: Any, batches: int) -> Measured:
    torch = bridge.connect().torch
    torch.set_num_threads(1)  # as in a worker: threads of the parent's pool are not here
    plain = copy.copy(loader)
    if loader.num_workers:
        worker = torch.utils.data._utils.worker
        worker._worker_info = worker.WorkerInfo(
            id=0, num_workers=loader.num_workers, seed=torch.initial_seed(), dataset=loader.dataset
        )
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
    as_one_process = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    vars(plain).update(as_one_process, pin_memory=False, timeout=0, _iterator=None)
    source, seconds, private = iter(plain), list[float](), list[int]()
    largest, tensors = 0, tuple[int, ...]()
    for _ in range(batches):
        begin = time.perf_counter()
        batch = next(source, _END)
        if batch is _END:
            break
        seconds.append(time.perf_counter() - begin)
        size = size_of(batch)
        if size > largest:
            largest, tensors = size, tuple(_tensors_of(batch, torch))
        del batch  # that of a worker lies in /dev/shm
        if (own := _private_bytes()) is not None:
            private.append(own)
    if not seconds:
        return Measured(why="the loader has no batch")
    worker = max(private) if private else None
    return Measured(largest, tensors, min(seconds), worker)


def _tensors_of(batch: Any, torch: Any) -> Iterator[int]:
    """The bytes of each storage in a batch as collate functions make it."""
    todo, seen, storages = [batch], dict[int, Any](), set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, ModuleType):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            yield size_of(value)  # a sparse one: what its parts have
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
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

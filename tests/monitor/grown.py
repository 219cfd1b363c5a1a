"""Small programs in which something grows or fills, made from a description in numbers.

`python -m tests.monitor.grown` reads a Program as JSON from its input, runs it under a monitor and
prints what that found. The steps do not wait, so what is found depends on their number alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import io
import itertools
import json
import linecache
import logging
import logging.handlers
import queue
import sqlite3
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree


@dataclass(frozen=True)
class Program:
    """A loop that keeps something.

    Attributes:
        keeper: who keeps it; a name in KEEPERS.
        size: bytes of an entry.
        entries: how many are added at a time.
        every: in how many steps entries are added once.
        bound: how many entries are kept at most; None, the default: all.
        steps: how many steps the loop has.
        threaded: whether the steps are made on a thread beside the main one.
        worker: whether a worker of a DataLoader keeps it, of which each step takes a batch.
        limit_mib: the limit of the monitor.
    """

    keeper: str
    size: int = 20_000
    entries: int = 1
    every: int = 1
    bound: int | None = None
    steps: int = 256
    threaded: bool = False
    worker: bool = False
    limit_mib: int = 1 << 14

    @property
    def rate(self) -> float:
        """Bytes a step."""
        return self.size * self.entries / self.every


class Keeper(NamedTuple):
    """Keeps entries: `add(number, size)` adds one, and `drop()` lets the oldest go."""

    add: Callable[[int, int], object]
    drop: Callable[[], object] | None


class Trainer:
    """What people write themselves."""

    def __init__(self) -> None:
        self.outputs = list[bytearray]()
        self.log = io.StringIO()
        self.buffer = bytearray()
        self.state = contextvars.ContextVar[list[bytearray]]("state")
        self.state.set([])


class Text(str):
    """A string that has a tree, as those of parsers have."""


def own_list() -> Keeper:
    kept = Trainer().outputs
    return Keeper(lambda i, size: kept.append(bytearray(size)), lambda: kept.pop(0))


def texts() -> Keeper:
    trainer: Any = Trainer()
    trainer.titles = []

    def add(i: int, size: int) -> None:
        text: Any = Text(f"title {i}")
        text.tree = bytearray(size)
        trainer.titles.append(text)

    return Keeper(add, lambda: trainer.titles.pop(0))


def handler() -> Keeper:
    found = logging.handlers.MemoryHandler(1 << 40, logging.CRITICAL + 1)
    log = logging.Logger("trainer")  # not of the tree of loggers
    log.addHandler(found)
    return Keeper(
        lambda i, size: log.info("outputs %s", bytearray(size)), lambda: found.buffer.pop(0)
    )


def waiting() -> Keeper:
    found = queue.Queue[bytearray]()
    return Keeper(lambda i, size: found.put(bytearray(size)), lambda: found.get())


def archive() -> Keeper:
    found = zipfile.ZipFile(io.BytesIO(), "w")

    def add(i: int, size: int) -> None:
        info = zipfile.ZipInfo(f"{i}.bin")
        info.comment = bytes(min(size, 65_535))
        found.writestr(info, b"")

    def drop() -> None:
        del found.NameToInfo[found.filelist.pop(0).filename]

    return Keeper(add, drop)


def stack() -> Keeper:
    found: Any = contextlib.ExitStack()
    return Keeper(
        lambda i, size: found.callback(len, bytearray(size)),
        lambda: found._exit_callbacks.popleft(),
    )


def lines() -> Keeper:
    def add(i: int, size: int) -> None:
        linecache.cache[f"<step {i}>"] = size, None, ["x" * size], f"<step {i}>"

    return Keeper(add, lambda: linecache.cache.pop(next(iter(linecache.cache))))


def context() -> Keeper:
    state = Trainer().state
    return Keeper(lambda i, size: state.get().append(bytearray(size)), lambda: state.get().pop(0))


def elements() -> Keeper:
    root = ElementTree.Element("root")

    def add(i: int, size: int) -> None:
        ElementTree.SubElement(root, "page").text = "x" * size

    return Keeper(add, lambda: root.remove(root[0]))


def string() -> Keeper:
    log = Trainer().log
    return Keeper(lambda i, size: log.write("x" * size), None)


def doubling() -> Keeper:
    """A buffer that is made twice as large when it is full, which is a jump for whoever looks at
    what is in use."""
    trainer, used = Trainer(), 0

    def add(i: int, size: int) -> None:
        nonlocal used
        if used + size > len(trainer.buffer):
            trainer.buffer = trainer.buffer + bytes(max(size, len(trainer.buffer)))
        trainer.buffer[used : used + size] = b"x" * size
        used += size

    return Keeper(add, None)


def malloc() -> Keeper:
    """Memory of C, of which Python knows a number."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    kept = list[int]()

    def add(i: int, size: int) -> None:
        kept.append(library.malloc(size))
        library.memset(kept[-1], 1, size)

    return Keeper(add, lambda: library.free(kept.pop(0)))


def table() -> Keeper:
    base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    base.execute("create table kept (number integer primary key, row blob)")
    return Keeper(
        lambda i, size: base.execute("insert into kept values (?, ?)", (i, bytes(size))),
        lambda: base.execute("delete from kept where number = (select min(number) from kept)"),
    )


#: name ► (what makes the keeper, how the finding names it)
KEEPERS: dict[str, tuple[Callable[[], Keeper], str]] = {
    "a list of the program": (own_list, r"outputs|\bkept\b"),
    "strings with a tree": (texts, "titles"),
    "logging.handlers.MemoryHandler": (handler, r"MemoryHandler\.buffer"),
    "queue.Queue": (waiting, r"Queue\.queue|deque"),
    "zipfile.ZipFile": (archive, r"ZipFile\.(NameToInfo|filelist)"),
    "contextlib.ExitStack": (stack, r"ExitStack\._exit_callbacks"),
    "linecache": (lines, r"linecache\.cache"),
    "contextvars.ContextVar": (context, r"ContextVar|\bstate\b"),
    "xml.etree.ElementTree": (elements, r"Element"),
    "io.StringIO": (string, r"\blog\b|StringIO"),
    "a buffer that doubles": (doubling, r"Trainer\.buffer|bytearray"),
    "C code": (malloc, "C heap|C memory|C code"),
    "sqlite3": (table, "C heap|C memory|C code|sqlite3|Connection"),
}


def in_worker(work: Callable[[], Iterator[int]]) -> Iterator[object]:
    """The same work, done by a worker."""
    from torch.utils.data import DataLoader, IterableDataset

    class Work(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return work()

    return iter(DataLoader(Work(), batch_size=None, num_workers=1))


def run(program: Program) -> list[dict[str, Any]]:
    """Run a program under a monitor; returns its findings, as `explain --json` prints them."""
    import memtools

    logging.getLogger("memtools").setLevel(logging.CRITICAL)
    monitor = memtools.MemoryMonitor(limit=f"{program.limit_mib} MiB")

    def work() -> Iterator[int]:
        keeper, kept = KEEPERS[program.keeper][0](), 0
        for step in itertools.count():
            for _ in range(program.entries if step % program.every == 0 else 0):
                keeper.add(kept, program.size)
                kept += 1
                if program.bound is not None and kept > program.bound and keeper.drop:
                    keeper.drop()
            yield step

    def loop() -> None:
        steps = in_worker(work) if program.worker else work()
        for _ in itertools.islice(steps, program.steps):
            monitor.step()

    with monitor:
        if program.threaded:
            thread = threading.Thread(target=loop)
            thread.start()
            thread.join()
        else:
            loop()
        return [one.as_json() for one in monitor.findings()]


if __name__ == "__main__":
    json.dump(run(Program(**json.load(sys.stdin))), sys.stdout)

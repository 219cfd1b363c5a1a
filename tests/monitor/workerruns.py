"""Programs with workers in which something grows: `python -m tests.monitor.workerruns KIND START
WORKERS ASKS` prints what the parent learns as JSON."""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

#: what each sample leaves behind: a text and its place in a dict, or a tensor of that size
SIZE = 13_500
BATCH = 4
KEPT: list[bytes] = []


class Frames(Dataset[torch.Tensor]):
    """Keeps something of each sample."""

    def __init__(self) -> None:
        self.seen: dict[int, bytes] = {}

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen[index] = bytes(SIZE)
        return torch.zeros(4)


@functools.cache
def load(index: int) -> torch.Tensor:
    return torch.ones(SIZE // 4)


class Cached(Dataset[torch.Tensor]):
    """Keeps each sample in a cache without a bound."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return load(index)[:4].clone()


def work(number: int) -> bool:
    """What a worker does that is no DataLoader's: whether its census has been loaded so far."""
    KEPT.append(bytes(SIZE))
    return "memtools._census.growth" in sys.modules


def loop(given: Any, done: Any) -> None:
    while (number := given.get()) is not None:
        done.put(work(number))


def talk(connection: Any) -> None:
    while (number := connection.recv()) is not None:
        connection.send(work(number))


class Worker(multiprocessing.Process):
    def __init__(self, given: Any, done: Any) -> None:
        super().__init__(daemon=True)
        self.given, self.done = given, done

    def run(self) -> None:
        loop(self.given, self.done)


def loader(kind: str, start: str, workers: int) -> Any:
    data = Frames() if kind == "dict" else Cached()
    return DataLoader(
        data, batch_size=BATCH, num_workers=workers, multiprocessing_context=start
    )  # fmt: skip


def answers(kind: str) -> Iterator[object]:
    """One piece of work after the other, by one worker or by two."""
    if kind == "pool":
        with multiprocessing.Pool(1) as pool:
            while True:
                yield pool.apply(work, (0,))
    elif kind == "executor":
        with ProcessPoolExecutor(1) as executor:
            while True:
                yield executor.submit(work, 0).result()
    elif kind == "pipe":
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=talk, args=(theirs,), daemon=True).start()
        while True:
            ours.send(0)
            yield ours.recv()
    given, done = multiprocessing.Queue(), multiprocessing.Queue()
    if kind == "class":
        Worker(given, done).start()
    else:
        multiprocessing.Process(target=loop, args=(given, done), daemon=True).start()
    while True:
        given.put(0)
        yield done.get()


def private_bytes(pid: int) -> int:
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith(("Private_Dirty", "Private_Clean")):
                total += 1024 * int(line.split()[1])
    return total


def main() -> None:
    from memtools._base import torch as bridge
    from memtools._census import growth  # noqa: F401 -- as a monitor's parent has it
    from memtools._monitor.workers import WorkerReports

    kind, start, workers, asks = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "ask"
    bridge.connect()
    multiprocessing.set_start_method(start)
    reports = WorkerReports()
    is_loader = kind in ("dict", "lru_cache")
    steps: Any = iter(loader(kind, start, workers)) if is_loader else answers(kind)
    found: Any = ()
    looked = answer = None
    for step in range(1, 20 * max(workers, 3)):
        answer = next(steps)
        time.sleep(0.002)
        if step == 10 and asks:
            reports.ask()
        if step >= 10 and step % 4 == 0:
            found = reports.findings(step)
            looked = step if found and looked is None else looked
    time.sleep(0.5)
    processes = multiprocessing.active_children()
    print(
        json.dumps(
            {
                "found": [finding.as_json() for finding in found],
                "first": looked,
                "loaded": answer if isinstance(answer, bool) else None,
                "private": [private_bytes(p.pid) for p in processes if p.pid is not None],
                "reported": [pid for pid, _, _ in reports._page.read()],
            }
        )
    )
    sys.stdout.flush()
    reports.close()


if __name__ == "__main__":
    main()

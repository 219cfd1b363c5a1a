"""PackedList in the workers of a DataLoader, beside a list, the NumPy recipe and pyarrow.

    python -m benchmarks.data.packed [--quick] [--only memory|read] [--out FILE]

A million records (a path, a caption and a label in a dict), four forked workers, three epochs in
which each worker reads a quarter of the records in random order, another quarter in each epoch. The
memory is the sum of the proportional set sizes (PSS) of the parent and its workers, read when the
workers have started and after each epoch: pages that processes share count once. Each way runs in a
process of its own. The NumPy recipe: all records pickled, one after the other in one array of
bytes, and an array of offsets. pyarrow: a table with a column for each field.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.kit.harness import (
    Json,
    arguments,
    as_module,
    environment,
    interleave,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools.data import PackedList

RECORDS, WORKERS, EPOCHS = 1_000_000, 4, 3
OURS, LIST, RECIPE, ARROW = "PackedList", "a list", "NumPy of bytes", "pyarrow table"
MIB = 1 << 20


def records(count: int) -> Iterator[dict[str, Any]]:
    for n in range(count):
        yield {
            "path": f"images/{n % 1000:03d}/{n:09d}.jpg",
            "caption": f"a photo of number {n}",
            "label": n % 1000,
        }


class Recipe:
    """What is usually recommended: pickled records in one array, and where each begins."""

    def __init__(self, source: Iterator[Any]) -> None:
        pickled = [np.frombuffer(pickle.dumps(record, -1), np.uint8) for record in source]
        self.ends = np.cumsum([len(one) for one in pickled])
        self.data = np.concatenate(pickled)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        start = 0 if index == 0 else self.ends[index - 1]
        return pickle.loads(memoryview(self.data[start : self.ends[index]]))  # type: ignore[arg-type]


class Arrow:
    def __init__(self, source: Iterator[Any]) -> None:
        import pyarrow

        self.table = pyarrow.Table.from_pylist(list(source)).combine_chunks()
        self.columns = [
            (name, self.table.column(name).chunk(0)) for name in self.table.column_names
        ]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Any:
        return {name: column[index].as_py() for name, column in self.columns}


WAYS: dict[str, Callable[[Iterator[Any]], Any]] = {
    LIST: list,
    OURS: PackedList,
    RECIPE: Recipe,
    ARROW: Arrow,
}


# --- memory ---------------------------------------------------------------------------------------


def pss(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def work(sequence: Any, worker: int, begin: Any, done: Any) -> None:
    """A worker: reads its share whenever it is told to, and says so. What it is to read is there
    before the first reading of its memory."""
    draw = np.random.default_rng(worker)
    shares = [
        draw.permutation(
            np.arange((worker + epoch) % WORKERS, len(sequence), WORKERS, dtype=np.int32)
        )
        for epoch in range(EPOCHS)
    ]
    done.put(0)
    for share in shares:
        begin[worker].get()
        for index in share:
            sequence[int(index)]
        done.put(len(share))
    begin[worker].get()


def grown(way: str, count: int) -> Json:
    """One way, in this process."""
    sequence = WAYS[way](records(count))
    gc.collect()
    context = multiprocessing.get_context("fork")
    begin = [context.SimpleQueue() for _ in range(WORKERS)]
    done: Any = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(sequence, n, begin, done)) for n in range(WORKERS)
    ]
    for process in workers:
        process.start()
    for _ in workers:
        done.get()

    def total() -> int:
        return pss(os.getpid()) + sum(pss(process.pid or 0) for process in workers)

    readings = [total()]
    for _ in range(EPOCHS):
        for queue in begin:
            queue.put(1)
        for _ in workers:
            done.get()
        readings.append(total())
    for queue in begin:
        queue.put(1)
    for process in workers:
        process.join()
    return {
        "way": way,
        "pss_bytes": readings,
        "growth_percent": 100 * (max(readings) / readings[0] - 1),
    }


def memory(count: int) -> list[Json]:
    rows = []
    for way in WAYS:
        command = [*as_module(__file__), "--child", f"{way}|{count}"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append(json.loads(out.splitlines()[-1]))
    return rows


# --- reading --------------------------------------------------------------------------------------


def reading(count: int, seconds: float) -> list[Json]:
    """One record in random order, in one process."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    at = iter(order * 1000)
    runners = {
        way: statement("s[next(at)]", s=make(records(count)), at=at) for way, make in WAYS.items()
    }
    return interleave(runners, 2000, seconds=seconds, first=1000).summary(LIST)


def limits(sections: Json) -> list[Limit]:
    rows = {row["way"]: row for row in sections.get("memory", [])}
    if not rows:
        return []
    ours = rows[OURS]["growth_percent"]
    what = f"growth of PSS in {WORKERS} workers over {EPOCHS} epochs"
    return [number_limit(what, 1.0, "%", ours, ours)]


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.child:
        way, count = options.child.split("|")
        print(json.dumps(grown(way, int(count))))
        sys.exit()
    facts = environment(options.threads)
    count = RECORDS // 10 if options.quick else RECORDS
    sections: Json = {}
    if not options.only or options.only == "memory":
        rows = sections["memory"] = memory(count)
        head = [
            "PSS of parent and workers, MiB",
            "at start",
            *(f"epoch {n + 1}" for n in range(EPOCHS)),
            "growth",
        ]
        print(table(head, (
            [row["way"], *(f"{n / MIB:.1f}" for n in row["pss_bytes"]),
             f"{row['growth_percent']:.2f} %"]
            for row in rows
        )))  # fmt: skip
    if not options.only or options.only == "read":
        rows = sections["read"] = reading(count // 10, 1.0 if options.quick else 6.0)
        print(timing_table(rows, LIST))
    finish("packed", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()

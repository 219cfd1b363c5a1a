"""bounded(): what it costs where the limit does not bind, and what is in flight where it does;
beside the plain DataLoader and what people set by hand, in the same run.

    python -m benchmarks.data.loader [--quick] [--only throughput|memory] [--out FILE]

Throughput: an epoch of a new plain loader and of a new bounded one in turns, with loops that take
nothing and that take as long as a batch. A loader whose workers share cores badly is up to four
times as slow for all of its epochs, plain or bounded, so each turn has a loader of its own.

Memory: a slow loop, so that the workers are always ahead. After each batch, the memory of this
process and its workers in /dev/shm is read, which is in files without names.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.kit.harness import Json, arguments, environment, interleave, table
from benchmarks.kit.limits import Limit, at_least, finish
from memtools import _core
from memtools.data import bounded

MIB = 1 << 20
WORKERS, PREFETCH = 2, 4
LIMIT = 12 * MIB  # for the section in which it binds


class Images(Dataset[torch.Tensor]):
    """Images of 3 x side x side floats, each made by some work."""

    def __init__(self, length: int, side: int) -> None:
        self.length, self.side = length, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3, self.side, self.side), float(i)).sqrt_()


def bounded_of(make: Callable[[], DataLoader[torch.Tensor]]) -> Any:
    return bounded(make(), "1 GiB")


def loader_of(batches: int, batch: int, side: int, **options: Any) -> DataLoader[torch.Tensor]:
    arguments_of = {"num_workers": WORKERS, "prefetch_factor": PREFETCH, **options}
    return DataLoader(Images(batches * batch, side), batch_size=batch, **arguments_of)


def epoch(
    make: Callable[[], Any], step: Callable[[torch.Tensor], object], own: list[int]
) -> Callable[[int], float]:
    """Runs epochs of new loaders and returns the nanoseconds that their batches took from the ninth
    to the last, when both loaders have filled their queues. What this process itself took for them
    of the processor, its workers apart, goes to `own`."""

    def run(epochs: int) -> float:
        took = 0
        for _ in range(epochs):
            begin = end = 0, 0
            for number, batch in enumerate(make()):
                step(batch)
                end = time.perf_counter_ns(), time.process_time_ns()  # later workers are joined
                if number == 7:
                    begin = end
            took += end[0] - begin[0]
            own.append(end[1] - begin[1])
        return float(took)

    return run


def throughput(seconds: float) -> list[Json]:
    """Epochs in turns, whose ratio is taken turn by turn."""
    rows = []
    steps: dict[str, Callable[[torch.Tensor], object]] = {
        "a loop that takes nothing": lambda batch: None,
        "a loop that computes": lambda batch: batch.square().sum(),
    }
    for batch, side, batches in ((8, 16, 300), (16, 64, 150)):
        for name, step in steps.items():
            plain = functools.partial(loader_of, batches, batch, side)
            own: dict[str, list[int]] = {"plain": [], "bounded": []}
            runners = {
                "plain": epoch(plain, step, own["plain"]),
                "bounded": epoch(functools.partial(bounded_of, plain), step, own["bounded"]),
            }
            samples = interleave(runners, 1, seconds=seconds, least=5)
            ratios = samples.ratios("plain", "bounded")
            rows.append({
                "loop": f"{name}, batches of {batch * 3 * side * side * 4 / MIB:.2f} MiB",
                "turns": len(ratios),
                "plain us": samples.least("plain") / (batches - 8) / 1e3,
                "bounded us": samples.least("bounded") / (batches - 8) / 1e3,
                "ratio of mins": samples.least("plain") / samples.least("bounded"),
                "median ratio": statistics.median(ratios),
                "own plain us": min(own["plain"]) / (batches - 8) / 1e3,
                "own bounded us": min(own["bounded"]) / (batches - 8) / 1e3,
            })  # fmt: skip
    return rows


def in_flight(loader: Any, seconds: float) -> list[int]:
    """Bytes of shared memory of this job after each batch, less the batch that the loop has."""
    probe, found = _core.Probe("/", True), []
    for batch in loader:
        time.sleep(seconds)  # the loop's own work, during which the workers fill their queues
        shm = probe.read(_core.READ_CHILDREN | _core.READ_SHM).shm
        found.append((shm or 0) - batch.untyped_storage().nbytes())
    return found


def memory(quick: bool) -> list[Json]:
    """What lies in /dev/shm in a loop that is slower than its workers."""
    batch, side, batches = 16, 128, 16 if quick else 48
    size = batch * 3 * side * side * 4
    ways: dict[str, Callable[[], Any]] = {
        "plain, prefetch_factor 4": lambda: loader_of(batches, batch, side),
        "plain, prefetch_factor 1": lambda: loader_of(batches, batch, side, prefetch_factor=1),
        f"bounded, {LIMIT // MIB} MiB": lambda: bounded(loader_of(batches, batch, side), LIMIT),
    }
    rows = []
    for name, make in ways.items():
        held = in_flight(make(), 0.1)
        rows.append({
            "way": name,
            "samples": len(held),
            "batch MiB": size / MIB,
            "most MiB": max(held) / MIB,
            "median MiB": statistics.median(held) / MIB,
            "above limit + batch": sum(one > LIMIT + size for one in held),
        })  # fmt: skip
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    facts = environment(options.threads)
    facts["sched_cores"] = len(os.sched_getaffinity(0))
    sections: Json = {}
    limits: list[Limit] = []
    if options.only in (None, "throughput"):
        rows = sections["throughput"] = throughput(2 if options.quick else 20)
        for row in rows:
            what = f"throughput of bounded() beside the plain loader: {row['loop']}"
            limits.append(at_least(what, 0.97, row["ratio of mins"], row["median ratio"]))
    if options.only in (None, "memory"):
        rows = sections["memory"] = memory(options.quick)
        above = rows[-1]["above limit + batch"]
        limits.append(Limit("samples with more in flight than the limit and one batch", "<= 0",
                            str(above), str(above), above == 0, above == 0))  # fmt: skip
    for name, found in sections.items():
        print(f"\n{name}")
        cells = ([f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
                 for row in found)  # fmt: skip
        print(table(tuple(found[0]), cells))
    finish("loader", options, facts, sections, limits)


if __name__ == "__main__":
    main()

"""The small programs whose memory and time the pages in docs/symptoms show.

Each function is one program. It is called in a process of its own with the name of one way of doing
it, and returns figures: `..._mib` are MiB, `cpu_s` seconds of processor time. The first way is the
one that the other ways are compared with.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import backward
from torch.utils.data import DataLoader, Dataset

import memtools
from benchmarks.symptoms.meter import MIB, Meter, trim
from memtools.data import bounded

Figures = dict[str, float]


# --- a training step whose batch is too large -----------------------------------------------------


class Layers(torch.nn.Module):
    """A network of equal layers, 256 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(16)
        )
        self.head = torch.nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def step(way: str) -> Figures:
    """Two updates of a network with 16 layers, by a batch of 2,048 rows."""
    rows = 2048
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=way == "fused optimizer")
    if way == "checkpointing":
        memtools.checkpoint_layers(model)
    acc = memtools.GradAccumulator(
        model, optimizer, micro_batch_size=rows // 4 if way == "acc.step" else None
    )
    data = torch.randn(rows // 2 if way == "half the batch" else rows, 256)

    def loss_of(micro: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss: torch.Tensor = model(micro).float().square().mean()
        return loss

    def update() -> None:
        if way == "acc.step":
            acc.step(data, lambda micro: (loss_of(micro) * len(micro), len(micro)))
            return
        parts = data.chunk(4) if way == "loss / 4" else [data]
        for part in parts:
            backward(loss_of(part) / len(parts))
        optimizer.step()
        optimizer.zero_grad()
        if way == "gc.collect":
            gc.collect()

    update()  # the optimizer's state, and what is set up lazily
    meter = Meter()
    for _ in range(2):
        update()
    return {"peak_mib": meter.peak(), "cpu_s": meter.seconds()}


# --- what a loop keeps ----------------------------------------------------------------------------


#: What a loop keeps of an update, from its list, the output and the loss.
KEEP: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "output": lambda kept, output, loss: kept.append(output),
    "detach": lambda kept, output, loss: kept.append(output.detach()),
    "half": lambda kept, output, loss: kept.append(output.detach().half()),
    "item": lambda kept, output, loss: kept.append(output.mean().item()),
    "losses": lambda kept, output, loss: kept.append(loss),
    "losses.item": lambda kept, output, loss: kept.append(loss.item()),
}


def kept(way: str) -> Figures:
    """300 updates of a small network; a list keeps something of each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs: Any = deque(maxlen=20) if way == "deque" else []
    keep = KEEP.get(way, KEEP["output"])

    def update(number: int) -> None:
        output = model(torch.randn(256, 64))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(outputs, output, loss)
        if way == "clear" and number % 50 == 49:
            outputs.clear()
        if way == "gc.collect" and number % 10 == 9:
            gc.collect()

    for number in range(50):
        update(number)
    meter = Meter()
    for number in range(300):
        update(number)
    seconds = meter.seconds()
    trim()  # memory that malloc keeps after free() does not count
    return {"per_1000_mib": meter.grown() / 0.3, "cpu_s": seconds}


# --- growth in C ----------------------------------------------------------------------------------


def shapes(way: str) -> Figures:
    """Forward and backward passes of three convolutions over images of 200 widths."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])
    widths = list(range(32, 432, 2))
    random.Random(0).shuffle(widths)
    by_torch = torch.backends.mkldnn.flags(enabled=False) if way == "off" else None

    def train(width: int) -> None:
        model(torch.zeros(1, 16, 32, width)).sum().backward()

    with by_torch or contextlib.nullcontext():
        for _ in range(5):
            train(448)
        meter = Meter()
        for width in widths:
            train(-(-width // 64) * 64 if way == "pad" else width)
            if way == "gc.collect" and width % 20 == 0:
                gc.collect()
        seconds = meter.seconds()
    trim()
    return {"grown_mib": meter.grown(), "cpu_s": seconds}


# --- batches in shared memory ---------------------------------------------------------------------


class Images(Dataset[torch.Tensor]):
    """Random images of 64 by 64 points, as floats or bytes."""

    def __init__(self, as_bytes: bool) -> None:
        self._as_bytes = as_bytes

    def __len__(self) -> int:
        return 64 * 32

    def __getitem__(self, index: int) -> torch.Tensor:
        kind = torch.uint8 if self._as_bytes else torch.float32
        return torch.full((3, 64, 64), index % 251, dtype=kind)


def shared(way: str) -> Figures:
    """What a DataLoader has in /dev/shm while the loop works on its first batch.

    A batch of 64 images takes 3 MiB as floats.
    """
    options: dict[str, Any] = {"num_workers": 4, "batch_size": 64}
    if way == "2 workers":
        options["num_workers"] = 2
    elif way == "prefetch_factor=1":
        options["prefetch_factor"] = 1
    elif way == "half the batch":
        options["batch_size"] = 32
    elif way == "no workers":
        options["num_workers"] = 0
    if way == "file_system":
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    dataset = Images(as_bytes=way == "uint8")

    def used() -> float:
        room = os.statvfs("/dev/shm")
        return (room.f_blocks - room.f_bfree) * room.f_frsize / MIB

    before, most = used(), 0.0
    meter = Meter()
    loader: Any = DataLoader(dataset, **options)
    batches = iter(bounded(loader, "12 MiB") if way == "bounded" else loader)
    first = next(batches)
    last_rise = time.monotonic()
    while time.monotonic() - last_rise < 2.0:  # the loop works; the workers fill their queues
        if used() - before > most + 0.01:
            most, last_rise = used() - before, time.monotonic()
        time.sleep(0.01)
    count = 1 + sum(1 for _ in batches)
    assert len(first) == options["batch_size"]
    del batches, first
    return {"shm_mib": most, "cpu_s": meter.seconds(), "batches": count}


def private_of_children() -> float:
    """Private MiB of all children of this process."""
    total = 0
    for child in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            lines = Path("/proc", child, "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total / 1024


def workers(way: str) -> Figures:
    """Private memory of four workers that read a list of 1,000,000 texts of the parent."""
    texts: Any = [f"sample number {n:07}" for n in range(1_000_000)]
    if way == "array":
        import numpy

        texts = numpy.array(texts, dtype="S")
    gc.collect()
    if way == "gc.freeze":
        gc.freeze()

    class Texts(Dataset[int]):
        def __len__(self) -> int:
            return len(texts)

        def __getitem__(self, index: int) -> int:
            return len(texts[index])

    number = 0 if way == "no workers" else 4
    loader = DataLoader(Texts(), batch_size=10_000, num_workers=number)
    most = 0.0
    meter = Meter()
    for position, _ in enumerate(loader):
        if position % 10 == 9:
            most = max(most, private_of_children())
    return {"workers_mib": most, "cpu_s": meter.seconds()}


# --- what stays after del -------------------------------------------------------------------------


def freed(way: str) -> Figures:
    """Make some 400 MiB of tensors in one way, `del` them, collect garbage, trim: what is resident
    after each, beyond the start."""
    meter = Meter()
    keeps: list[Any] = []  # what outlives the tensors
    held = MAKERS[way](keeps)
    figures = {"made_mib": meter.peak()}
    del held
    figures["after_del_mib"] = meter.grown()
    gc.collect()
    figures["after_collect_mib"] = meter.grown()
    trim()
    figures["after_trim_mib"] = meter.grown()
    keeps.clear()
    return figures


def large() -> list[Any]:
    """Four tensors of 100 MiB, which malloc maps by themselves."""
    return [torch.ones(25 * MIB) for _ in range(4)]


def small_between(number: int, keeps: list[Any]) -> list[Any]:
    """Tensors of 96 KiB, which come from malloc's heap; between them small ones, which are kept."""
    held = []
    for _ in range(number):
        held.append(torch.ones(24 * 1024))
        keeps.append(torch.ones(256))
    return held


def by_threads(keeps: list[Any]) -> list[Any]:
    held: list[Any] = []
    start = threading.Barrier(8)

    def fill() -> None:
        start.wait()
        held.append(small_between(512, keeps))

    threads = [threading.Thread(target=fill) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return held


def in_a_cycle(keeps: list[Any]) -> list[Any]:
    held = large()
    held.append(held)
    return held


def with_views(keeps: list[Any]) -> list[Any]:
    held = large()
    keeps += [held[0].view(5, -1)[0], held[1][:10]]
    return held


def failed(keeps: list[Any], *, with_traceback: bool) -> None:
    """A function with large locals raises an exception, which is kept."""

    def work() -> None:
        big = large()
        raise RuntimeError(f"after {len(big)} tensors")

    try:
        work()
    except RuntimeError as error:
        keeps.append(error if with_traceback else error.with_traceback(None))


MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "large": lambda keeps: large(),
    "small between": lambda keeps: small_between(4096, keeps),
    "threads": by_threads,
    "cycle": in_a_cycle,
    "another name": with_views,
    "traceback": lambda keeps: failed(keeps, with_traceback=True),
    "traceback=None": lambda keeps: failed(keeps, with_traceback=False),
}


def heap(way: str) -> Figures:
    """60 steps that each make, fill and drop tensors of 48 KiB to 6 MiB on four threads, and keep
    one of 4 KiB for each thread, with malloc set in several ways."""
    dice = [random.Random(seed) for seed in range(4)]
    records: list[torch.Tensor] = []
    if way == "settings":
        memtools.allocator_settings().set(mmap_threshold="1 MiB", trim_threshold="16 MiB")
    strict = memtools.CleanupPolicy(trim_every=25, strict=True) if way == "strict" else None
    policy = memtools.CleanupPolicy(trim_every=25) if way == "CleanupPolicy" else strict

    def work(own: random.Random) -> None:
        tensors = [torch.ones(own.randrange(12, 1536) * 1024) for _ in range(8)]
        records.append(torch.ones(1024) * len(tensors))

    def a_step() -> None:
        threads = [threading.Thread(target=work, args=(own,)) for own in dice]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    a_step()
    meter = Meter()
    for number in range(1, 61):  # the last trim is ten steps ago at the end
        a_step()
        if way == "malloc_trim" and number % 25 == 0:
            trim()
        if policy is not None:
            policy.step()
    return {"peak_mib": meter.peak(), "grown_mib": meter.grown(), "cpu_s": meter.seconds()}


# --- the garbage collector ------------------------------------------------------------------------


class Sample:
    """An entry of a log, as many loops keep it: an object for each sample."""

    def __init__(self, number: int) -> None:
        self.number, self.path, self.box = number, f"{number:06}.png", [number, number + 1]


def collector(way: str) -> Figures:
    """300 updates; each adds 600 objects to a log, and leaves a reference cycle with a tensor of
    64 KiB. `slower` is the time of the last 100 by that of the first 100."""
    torch.manual_seed(0)
    log: Any = deque(maxlen=60_000) if way == "deque" else []
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        model(torch.randn(256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log.extend(Sample(number) for number in range(600))
        cycle: dict[str, Any] = {"tensor": torch.ones(16 * 1024)}
        cycle["self"] = cycle

    for _ in range(10):
        update()
    meter = Meter()
    policy = memtools.CleanupPolicy() if way == "CleanupPolicy" else None
    if way == "freeze":
        gc.collect()
        gc.freeze()
    elif way in ("disable", "torchtitan"):
        gc.disable()
    times = []
    with policy or contextlib.nullcontext():
        for number in range(1, 301):
            began = time.process_time()
            update()
            if way in ("gc.collect", "deque") and number % 10 == 0:
                gc.collect()
            elif way == "torchtitan" and number % 50 == 0:
                gc.collect(1)
            elif way == "freeze each" and number % 100 == 0:
                gc.freeze()
            if policy is not None:
                policy.step()
            times.append(time.process_time() - began)
    return {
        "slower": sum(times[-100:]) / sum(times[:100]),
        "longest_ms": 1e3 * max(times),
        "peak_mib": meter.peak(),
        "cpu_s": sum(times),
    }


PROGRAMS: dict[str, Callable[[str], Figures]] = {
    program.__name__: program
    for program in (step, kept, shapes, shared, workers, freed, heap, collector)
}

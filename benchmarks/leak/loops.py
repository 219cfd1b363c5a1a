"""More training loops for benchmarks/monitor/monitor_leaks.py, beside those of
tests/traces/loops.py.

Each is a generator that does one step between two yields. LEAKS: the signal that grows, a part of
the holder's name (or of the report if no Python object holds it), and the step at which the leak
begins. CLEAN: loops that leak nothing, or only fill a buffer.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memtools import GateHistory
from tests.traces.loops import LOOPS, Trainer, batch

LATE = 1500


def c_heap() -> Iterator[None]:
    """8 KB a step that C code never frees."""
    trainer, malloc = Trainer(), ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    while True:
        trainer.update(batch())
        ctypes.memset(malloc(8192), 1, 8192)
        yield


def epochs() -> Iterator[None]:
    """1 MiB at the end of each epoch of 150 steps."""
    trainer, snapshots, step = Trainer(), list[Tensor](), 0
    while True:
        trainer.update(batch())
        step += 1
        if step % 150 == 0:
            snapshots.append(torch.randn(2**18))
        yield


def eval_checkpoint_leak() -> Iterator[None]:
    """8 KiB a step beside an evaluation and a checkpoint every 100 steps."""
    kept = list[Tensor]()
    for _ in eval_checkpoint():
        kept.append(torch.randn(2048))
        yield


def gc_off_leak() -> Iterator[None]:
    """16 KiB a step, with cycles that are collected every 300 steps."""
    trainer, kept, step = Trainer(), list[Tensor](), 0
    gc.disable()
    while True:
        trainer.update(batch())
        cycle: list[Any] = [torch.randn(1024)]
        cycle.append(cycle)
        kept.append(torch.randn(4096))
        step += 1
        if step % 300 == 0:
            gc.collect()
        yield


def varlen_leak() -> Iterator[None]:
    """64 KiB a step beside batches of 8 to 400 rows."""
    trainer, kept = Trainer(), list[Tensor]()
    while True:
        trainer.update(batch(int(torch.randint(8, 400, ()))))
        kept.append(torch.randn(16384))
        yield


def beside_replay() -> Iterator[None]:
    """4 KiB a step beside a full replay buffer that replaces its entries."""
    trainer, kept = Trainer(), list[Tensor]()
    replay = deque((torch.randn(4096) for _ in range(500)), maxlen=500)
    while True:
        trainer.update(batch())
        replay.append(torch.randn(4096))
        kept.append(torch.randn(1024))
        yield


def eval_checkpoint() -> Iterator[None]:
    trainer, step = Trainer(), 0
    while True:
        trainer.update(batch())
        step += 1
        if step % 100 == 0:
            with torch.no_grad():
                trainer.net(batch(4096))
            torch.save(trainer.net.state_dict(), io.BytesIO())
        yield


def deque_fills() -> Iterator[None]:
    """A replay buffer of 16 KiB entries that is not full when the run ends."""
    trainer, replay = Trainer(), deque[Tensor](maxlen=20_000)
    while True:
        trainer.update(batch())
        replay.append(torch.randn(4096))
        yield


def lru_fills() -> Iterator[None]:
    """A cache that is not full when the run ends."""
    trainer, step = Trainer(), 0

    @functools.lru_cache(maxsize=20_000)
    def embed(key: int) -> Tensor:
        return torch.full((4096,), float(key))

    while True:
        trainer.update(batch())
        embed(step)
        step += 1
        yield


def gate_history() -> Iterator[None]:
    """memtools' own bounded history, not full when the run ends."""
    trainer, history = Trainer(), GateHistory(max_entries=100_000, max_bytes="256 MiB")
    while True:
        trainer.update(batch())
        history.append(torch.rand(512, 8))
        yield


def capped_metrics() -> Iterator[None]:
    trainer, metrics = Trainer(), deque[dict[str, object]](maxlen=200)
    while True:
        loss = trainer.update(batch()).item()
        metrics.append({"loss": loss, "more": [loss * 2, loss * 3]})
        yield


#: name: (loop, the signal that grows, part of the holder's name, first step of the leak)
LEAKS: dict[str, tuple[Callable[[], Iterator[None]], str, str, int]] = {
    "gates list, 16 KiB": (LOOPS["gates_list"], "heap", "'history'", 0),
    "metrics dict": (LOOPS["metrics_dict"], "python", "'metrics'", 0),
    "loss graph": (LOOPS["graph"], "heap", "'total'", 0),
    "late onset, 16 KiB": (LOOPS["late_onset"], "heap", "'history'", LATE),
    "worker, 1 KiB an item": (LOOPS["workers_leak"], "children", "Rows.kept", 0),
    "C heap, 8 KB": (c_heap, "heap", "C heap", 0),
    "1 MiB an epoch": (epochs, "heap", "'snapshots'", 0),
    "eval and checkpoint, 8 KiB": (eval_checkpoint_leak, "heap", "'kept'", 0),
    "gc off, 16 KiB": (gc_off_leak, "heap", "'kept'", 0),
    "varlen, 64 KiB": (varlen_leak, "heap", "'kept'", 0),
    "beside a replay buffer, 4 KiB": (beside_replay, "heap", "'kept'", 0),
}
CLEAN: dict[str, Callable[[], Iterator[None]]] = {
    "plain": LOOPS["plain"],
    "replay buffer, full at 1,500": LOOPS["replay_buffer"],
    "gc off": LOOPS["gc_off"],
    "varlen": LOOPS["varlen"],
    "workers": LOOPS["workers"],
    "eval and checkpoint": eval_checkpoint,
    "deque that fills": deque_fills,
    "lru_cache that fills": lru_fills,
    "GateHistory that fills": gate_history,
    "capped metrics": capped_metrics,
}

"""What takes a process of its own: memory over 100,000 appends, an update, the import."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gate.common import MIB, SMALL, gates_like
from benchmarks.kit.harness import (
    Json,
    Runner,
    Samples,
    interleave,
    peak_resident_bytes,
    resident_bytes,
)
from memtools import GateHistory

# --- flat memory -----------------------------------------------------------------------------


def grown(append: Callable[[Tensor], Any], pool: list[Tensor], before: int, after: int) -> Json:
    """Resident bytes that `after` appends add, once `before` of them have been made."""
    gates = itertools.cycle(pool)
    for _ in range(before):
        append(next(gates))
    start, peak = resident_bytes(), peak_resident_bytes()
    for _ in range(after):
        append(next(gates))
    return {
        "appends": after,
        "resident_growth_bytes": resident_bytes() - start,
        "peak_growth_bytes": max(0, peak_resident_bytes() - peak),
        "resident_bytes": resident_bytes(),
    }


def history_growth(pool: list[Tensor], max_entries: int, max_bytes: int) -> Json:
    history = GateHistory(max_entries, max_bytes)
    most = 0

    def append(gates: Tensor) -> None:
        nonlocal most
        history.append(gates)
        most = max(most, history.nbytes)

    result = grown(append, pool, 3000, 100_000)
    return {**result, "most_nbytes": most, "max_bytes": max_bytes}


def list_growth(pool: list[Tensor], *, trimmed: bool) -> Json:
    kept: list[Tensor] = []

    def append(gates: Tensor) -> None:
        nonlocal kept
        kept.append(gates.detach().clone())
        if trimmed and len(kept) > 1000:
            kept = kept[-500:]

    return grown(append, pool, 3000, 100_000 if trimmed else 20_000)


def deque_growth(pool: list[Tensor]) -> Json:
    kept: deque[Tensor] = deque(maxlen=1000)
    return grown(lambda gates: kept.append(gates.detach().clone()), pool, 3000, 100_000)


#: What is grown, given 16 tensors of one size and 16 of many.
MEMORY: dict[str, Callable[[list[Tensor], list[Tensor]], Json]] = {
    "max_entries=1000": lambda pool, ragged: history_growth(pool, 1000, 64 * MIB),
    "max_bytes=8 MiB, rows vary": lambda pool, ragged: history_growth(ragged, 10_000, 8 * MIB),
    "list of clones": lambda pool, ragged: list_growth(pool, trimmed=False),
    "list of clones, trimmed to half": lambda pool, ragged: list_growth(pool, trimmed=True),
    "deque(maxlen=1000) of clones": lambda pool, ragged: deque_growth(pool),
}


def memory(variant: str, _seconds: float) -> Json:
    """In a process of its own, with 16 tensors that take turns."""
    pool = [torch.softmax(torch.randn(SMALL), -1) for _ in range(16)]
    ragged = [torch.softmax(torch.randn(1 + 37 * i, 8), -1) for i in range(16)]
    return MEMORY[variant](pool, ragged)


# --- share of an update ----------------------------------------------------------------------

CLOCK = "nothing, between clocks"
Append = Callable[[Tensor], object]


class Update:
    """A dense network and a router, sized so that an update takes about 10 ms."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        self.width, self.repeats = width, 1
        body = [module for _ in range(4) for module in (nn.Linear(width, width), nn.GELU())]
        self.body, self.router = nn.Sequential(*body), nn.Linear(width, SMALL[1])
        parameters = [*self.body.parameters(), *self.router.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, fused=True)

    def sized(self) -> Update:
        """Repeats the forward pass until an update takes 10 ms."""
        took = min(self.time_one() for _ in range(8))
        self.repeats = max(1, round(10e6 / took))
        return self

    def time_one(self) -> float:
        start = time.perf_counter_ns()
        self(lambda gates: None)
        return time.perf_counter_ns() - start

    def __call__(self, append: Append) -> None:
        x = torch.randn(SMALL[0], self.width)
        loss = torch.zeros(())
        for _ in range(self.repeats):
            y = self.body(x)
            loss = loss + y.square().mean()
        gates = torch.softmax(self.router(y), -1)
        append(gates)
        loss = loss + 0.01 * gates.mean(0).square().sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def update(seconds: float) -> Json:
    """Times the append where it happens, with caches as cold as the update leaves them.

    Each turn is one update whose append is timed by a clock around it. The clock alone takes turns
    too, and its time is subtracted.
    """
    work, clock, spent = Update().sized(), time.perf_counter_ns, [0]
    history = GateHistory()
    history.extend([gates_like(SMALL, grad=False)] * 1000)

    def appends(way: Append) -> Runner:
        def append(gates: Tensor) -> None:
            start = clock()
            way(gates)
            spent[0] += clock() - start

        def run(n: int) -> float:
            spent[0] = 0
            for _ in range(n):
                work(append)
            return spent[0]

        return run

    runners = {CLOCK: appends(lambda gates: None), "GateHistory": appends(history.append)}
    return {"turns": interleave(runners, 1, seconds=seconds, first=2).turns}


def update_summary(samples: Samples) -> list[Json]:
    """The time of an append less that of the clock, and its share of 10 ms."""
    rows = []
    for name, turns in samples.turns.items():
        least = samples.least(name) - (name != CLOCK) * samples.least(CLOCK)
        median = samples.median(name) - (name != CLOCK) * samples.median(CLOCK)
        rows.append(
            {
                "name": name,
                "turns": len(turns),
                "min_ns": least,
                "median_ns": median,
                "share_min_percent": 100 * least / 10e6,
                "share_median_percent": 100 * median / 10e6,
            }
        )
    return rows


# --- import ----------------------------------------------------------------------------------

IMPORT = """
import sys, time
start = time.perf_counter_ns()
import memtools
took = time.perf_counter_ns() - start
print(took, *(name for name in ("torch", "numpy") if name in sys.modules))
"""


def import_time(seconds: float) -> Json:
    """Fresh interpreters, at least 20; what each of them loads beside memtools is not counted."""
    took: list[int] = []
    pulled: set[str] = set()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 20:
        command = [sys.executable, "-c", IMPORT]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        took.append(int(answer[0]))
        pulled.update(answer[1:])
    return {
        "times": len(took),
        "min_ns": min(took),
        "median_ns": statistics.median(took),
        "pulls_in": sorted(pulled),
    }

"""What takes a process of its own: memory over 100,000 appends, an update, the import."""

from __future__ import annotations

import itertools
import math
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
    quantile,
    resident_bytes,
)
from memtools import GateHistory

# --- (c) flat memory -----------------------------------------------------------------------------


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
    most = most_entries = 0

    def append(gates: Tensor) -> None:
        nonlocal most, most_entries
        history.append(gates)
        most, most_entries = max(most, history.nbytes), max(most_entries, len(history))

    result = grown(append, pool, 3000, 100_000)
    limits = {"most_nbytes": most, "max_bytes": max_bytes, "most_entries": most_entries}
    return {**result, **limits, "max_entries": max_entries}


def list_growth(pool: list[Tensor], *, trimmed: bool) -> Json:
    kept: list[Tensor] = []

    def append(gates: Tensor) -> None:
        nonlocal kept
        kept.append(gates.detach().clone())
        if trimmed and len(kept) > 1000:
            kept = kept[-500:]

    return grown(append, pool, 3000, 100_000 if trimmed else 20_000)


def memory(variant: str, _seconds: float) -> Json:
    """In a process of its own, with 16 tensors that take turns."""
    pool = [torch.softmax(torch.randn(SMALL), -1) for _ in range(16)]
    ragged = [torch.softmax(torch.randn(1 + 37 * i, 8), -1) for i in range(16)]
    runs: dict[str, Callable[[], Json]] = {
        "max_entries=1000": lambda: history_growth(pool, 1000, 64 * MIB),
        "max_bytes=8 MiB, rows vary": lambda: history_growth(ragged, 10_000, 8 * MIB),
        "list of clones": lambda: list_growth(pool, trimmed=False),
        "list of clones, trimmed to half": lambda: list_growth(pool, trimmed=True),
        "deque(maxlen=1000) of clones": lambda: deque_growth(pool),
    }
    return runs[variant]()


def deque_growth(pool: list[Tensor]) -> Json:
    kept: deque[Tensor] = deque(maxlen=1000)
    return grown(lambda gates: kept.append(gates.detach().clone()), pool, 3000, 100_000)


MEMORY = (
    "max_entries=1000",
    "max_bytes=8 MiB, rows vary",
    "list of clones",
    "list of clones, trimmed to half",
    "deque(maxlen=1000) of clones",
)


# --- (d) share of an update ----------------------------------------------------------------------

LAYERS = (1, 3)  # gates that one update records
CLOCK = "nothing, between clocks"
Append = Callable[[int, Tensor], object]  # the layer's number, its gates


class Update:
    """A dense network and one router a layer, sized so that an update takes about 10 ms."""

    def __init__(self, layers: int, width: int = 256) -> None:
        torch.manual_seed(0)
        self.width, self.repeats = width, 1
        body = [module for _ in range(4) for module in (nn.Linear(width, width), nn.GELU())]
        self.body = nn.Sequential(*body)
        self.routers = nn.ModuleList(nn.Linear(width, SMALL[1]) for _ in range(layers))
        parameters = [*self.body.parameters(), *self.routers.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, fused=True)

    def sized(self) -> Update:
        """Repeats the forward pass until an update takes 10 ms."""
        took = min(self.time_one() for _ in range(8))
        self.repeats = max(1, round(10e6 / took))
        return self

    def time_one(self) -> float:
        start = time.perf_counter_ns()
        self(lambda layer, gates: None)
        return time.perf_counter_ns() - start

    def __call__(self, append: Append) -> None:
        x = torch.randn(SMALL[0], self.width)
        loss = torch.zeros(())
        for last in reversed(range(self.repeats)):
            y = self.body(x)
            loss = loss + y.square().mean()
            for layer, router in enumerate(self.routers if last == 0 else ()):
                gates = torch.softmax(router(y), -1)
                append(layer, gates)
                loss = loss + 0.01 * gates.mean(0).square().sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def recorders_of_layers(layers: int) -> dict[str, Append]:
    """Ways to record where every layer has a full history of its own."""

    def filled(*, statistics: bool) -> list[GateHistory]:
        histories = [GateHistory(statistics=statistics) for _ in range(layers)]
        for history in histories:
            history.extend([gates_like(SMALL, grad=False)] * 1000)
        return histories

    full, plain = filled(statistics=True), filled(statistics=False)
    some = [gates_like(SMALL, grad=False).clone() for _ in range(1000)]
    clones = [deque(some, maxlen=1000) for _ in range(layers)]
    aliases = [deque(some, maxlen=1000) for _ in range(layers)]
    return {
        CLOCK: lambda layer, gates: None,
        "GateHistory": lambda layer, gates: full[layer].append(gates),
        "GateHistory, statistics=False": lambda layer, gates: plain[layer].append(gates),
        "deque, alias": lambda layer, gates: aliases[layer].append(gates.detach().cpu()),
        "deque, clone": lambda layer, gates: clones[layer].append(gates.detach().clone()),
    }


def update(layers: int, seconds: float) -> Json:
    """Times the appends where they happen, with caches as cold as the update leaves them.

    Each turn is one update whose appends are made in one way and timed by a clock around them; the
    clocks alone are a way too, to be subtracted. Beside that, updates with nothing and with a
    GateHistory but no clock take turns: the plain A/B answer, which drowns in noise.
    """
    work, clock = Update(layers).sized(), time.perf_counter_ns
    ways, spent = recorders_of_layers(layers), [0]

    def timed(way: Append) -> Append:
        def append(layer: int, gates: Tensor) -> None:
            start = clock()
            way(layer, gates)
            spent[0] += clock() - start

        return append

    def whole(append: Append) -> Runner:
        def run(n: int) -> float:
            start = clock()
            for _ in range(n):
                work(append)
            return clock() - start

        return run

    def appends(append: Append) -> Runner:
        def run(n: int) -> float:
            spent[0] = 0
            whole(append)(n)
            return spent[0]

        return run

    runners = {"off": whole(ways[CLOCK]), "on": whole(ways["GateHistory"])}
    runners |= {name: appends(timed(way)) for name, way in ways.items()}
    return {"turns": interleave(runners, 1, seconds=seconds, first=2).turns}


def update_summary(samples: Samples) -> list[Json]:
    """The appends of an update in all ways; shares are of 10 ms."""
    off, differences = samples.median("off"), samples.differences("on", "off")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    rows: list[Json] = [
        {
            "name": "whole update, and A/B of recording",
            "turns": len(differences),
            "min_ns": samples.least("off"),
            "median_ns": off,
            "share_min_percent": None,
            "share_median_percent": 100 * statistics.median(differences) / off,
            "standard_error_percent": 100 * error / off,
        }
    ]
    for name in itertools.islice(samples.turns, 2, None):
        least = samples.least(name) - (name != CLOCK) * samples.least(CLOCK)
        median = samples.median(name) - (name != CLOCK) * samples.median(CLOCK)
        rows.append(
            {
                "name": name,
                "turns": len(samples.turns[name]),
                "min_ns": least,
                "median_ns": median,
                "share_min_percent": 100 * least / 10e6,
                "share_median_percent": 100 * median / 10e6,
                "standard_error_percent": None,
            }
        )
    return rows


# --- (e) import ----------------------------------------------------------------------------------

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
        "p90_ns": quantile(took, 0.9),
        "pulls_in": sorted(pulled),
    }

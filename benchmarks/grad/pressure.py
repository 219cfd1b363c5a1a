"""A loop that is killed at its batch, and finishes when step() reads a monitor: time and losses.

    python -m benchmarks.grad.pressure           # three minutes; writes results/pressure.json
    python -m benchmarks.grad.pressure --quick   # one process for each way
    python -m benchmarks.grad.pressure --only convolutional

Each way is a process of its own, in turns. `free` is the usual loop without a limit. The limit is
60 % of the most that it held, the interpreter and torch included. `limited` is the same loop under
that limit, and `monitor` the loop with GradAccumulator(monitor=...) and acc.step(). Limits:

    killer       the parent sends SIGKILL as soon as more than the limit is resident, as the kernel
                 does in a control group. It looks each millisecond. The monitor gets the limit.
    RLIMIT_DATA  60 % of the most that the kernel counted against it; allocations fail.

Times are of the loop by the clock, with all windows, also the first ones, which have few rows.
Losses of each window are compared with those of `free`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import HERE, Json, arguments, as_module, environment, table
from benchmarks.kit.limits import Limit, finish, number_limit

SHARE = 0.6
SLOWER = 1.10
BATCH = 24
WINDOWS = 6
PAGE = os.sysconf("SC_PAGE_SIZE")
KINDS = {"killer": "VmRSS", "RLIMIT_DATA": "VmData"}


class Transformer(torch.nn.Module):
    """Four layers over sequences of 512 tokens, and the logits of 512 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(512, 128)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = torch.nn.Linear(128, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layers(self.words(ids)))
        return found


def convolutional() -> tuple[torch.nn.Module, Callable[[int], Any], Callable[..., Any]]:
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 24), (24, 24), (24, 24), (24, 24)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.GroupNorm(4, after),
                   torch.nn.ReLU()]  # fmt: skip
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
                                torch.nn.Linear(24 * 16, 14))  # fmt: skip

    def batch(index: int) -> Any:
        make = torch.Generator().manual_seed(index)
        return (torch.randn(BATCH, 3, 128, 160, generator=make),
                torch.randn(BATCH, 14, generator=make))  # fmt: skip

    return model, batch, lambda out, y: (out - y).square().sum() / 14


def transformer() -> tuple[torch.nn.Module, Callable[[int], Any], Callable[..., Any]]:
    def batch(index: int) -> Any:
        make = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 512, (BATCH, 513), generator=make)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = out.flatten(0, 1), y.flatten()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") / y.shape[1]

    return Transformer(), batch, loss


LOOPS = {"convolutional": convolutional, "transformer": transformer}


def child(loop: str, way: str, kind: str, limit: int, threads: int) -> None:
    """In a process of its own: losses, seconds and sizes."""
    torch.set_num_threads(threads)
    if kind == "RLIMIT_DATA" and limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model, batch, loss = LOOPS[loop]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    report = None
    began, used = time.perf_counter(), time.process_time()
    if way == "monitor":
        given = limit if kind == "killer" else None
        with memtools.MemoryMonitor(limit=given) as monitor:
            acc = memtools.GradAccumulator(model, optimizer, monitor=monitor)
            for index in range(WINDOWS):
                step = acc.step(
                    batch(index), lambda micro: (loss(model(micro[0]), micro[1]), len(micro[1]))
                )
                losses.append(step.loss)
                monitor.step()
        report = acc.report()
    else:
        for index in range(WINDOWS):
            x, y = batch(index)
            optimizer.zero_grad()
            mean = loss(model(x), y) / len(y)
            mean.backward()
            optimizer.step()
            losses.append(mean.item())
    done = {"losses": losses, "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - used}  # fmt: skip
    if report is not None:
        done |= {"rows": report.micro_batch_size, "lowered": report.lowered,
                 "ran_out": report.ran_out, "micro_batches": report.micro_batches}  # fmt: skip
    print(json.dumps(done))


def status(pid: int) -> dict[str, int]:
    """What the kernel counts of a process, in bytes; empty once it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[2:] == ["kB"]}


def run(loop: str, way: str, kind: str, limit: int, threads: int) -> Json:
    """One process: how it ended, and the largest sizes that the kernel counted."""
    command = [*as_module(__file__), "--child", f"{loop} {way} {kind} {limit}"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads)], cwd=HERE.parent, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    most = dict.fromkeys(KINDS.values(), 0)
    while process.poll() is None:
        now = status(process.pid)
        for name in most:
            most[name] = max(most[name], now.get(name, 0))
        if kind == "killer" and 0 < limit < now.get("VmRSS", 0):
            process.send_signal(signal.SIGKILL)
        time.sleep(0.001)
    out, error = process.communicate()
    found = json.loads(out) if process.returncode == 0 else {}
    last = (error.strip().splitlines() or [""])[-1]
    ended = "finished"
    if process.returncode:
        by = process.returncode
        ended = signal.Signals(-by).name if by < 0 else last[:100]
    return {"way": way, "ended": ended, "most": most, **found}


def section(loop: str, times: int, threads: int) -> Json:
    """All ways of one loop, in turns."""
    free = [run(loop, "free", "killer", 0, threads)]
    found: Json = {}
    for kind, name in KINDS.items():
        limit = int(SHARE * free[0]["most"][name])
        ways: dict[str, list[Json]] = {"limited": [], "monitor": []}
        for _ in range(times):
            for way, done in ways.items():
                done.append(run(loop, way, kind, limit, threads))
            free.append(run(loop, "free", "killer", 0, threads))
        found[kind] = {"limit_bytes": limit, **ways}
    return {"free": free, **found}


def differs(found: Json, free: Json) -> float:
    """The largest relative difference of a loss; inf if some are missing."""
    if len(found.get("losses", ())) != len(free["losses"]):
        return math.inf
    pairs = zip(found["losses"], free["losses"], strict=True)
    return float(max(abs(a - b) / abs(b) for a, b in pairs))


def seconds(runs: list[Json], clock: str = "seconds") -> list[float]:
    return [one.get(clock, math.inf) for one in runs]


def limits(loop: str, found: Json) -> list[Limit]:
    rows = []
    free = seconds(found["free"])
    for kind in KINDS:
        ours = seconds(found[kind]["monitor"])
        least, median = min(ours) / min(free), statistics.median(ours) / statistics.median(free)
        what = f"{loop}, {kind}: time with the monitor, to the loop without a limit"
        rows.append(number_limit(what, SLOWER, "x", least, median))
        worst = max(differs(one, found["free"][0]) for one in found[kind]["monitor"])
        what = f"{loop}, {kind}: largest relative difference of a loss"
        rows.append(number_limit(what, 1e-4, "", worst, worst))
        died = sum(one["ended"] == "finished" for one in found[kind]["limited"])
        what = f"{loop}, {kind}: runs without the monitor that finished"
        rows.append(number_limit(what, 0, "runs", died, died))
    return rows


def shown(loop: str, found: Json) -> str:
    rows = []
    for kind in KINDS:
        name = KINDS[kind]
        for way in ("free", "limited", "monitor"):
            runs = found["free"] if way == "free" else found[kind][way]
            took = seconds(runs)
            ends = ", ".join(sorted({one["ended"] for one in runs}))
            more = [f"{one['rows']} rows" for one in runs if one.get("rows")]
            rows.append((
                f"{kind}: {way}", f"{max(one['most'][name] for one in runs) / 2**20:.0f}",
                f"{min(took):.2f}", f"{statistics.median(took):.2f}",
                f"{min(seconds(runs, 'cpu_seconds')):.2f}",
                " ".join([ends, *sorted(set(more))]),
            ))  # fmt: skip
    limit = ", ".join(f"{kind} {found[kind]['limit_bytes'] / 2**20:.0f} MiB" for kind in KINDS)
    head = (f"{loop} ({limit})", "most MiB", "min s", "median s", "min CPU s", "ended")
    return table(head, rows)


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.child:
        loop, way, kind, limit = options.child.split()
        child(loop, way, kind, int(limit), options.threads)
        return
    facts, sections, rows = environment(options.threads), {}, []
    for loop in LOOPS:
        if loop.startswith(options.only or ""):
            sections[loop] = section(loop, 1 if options.quick else 2, options.threads)
            print(f"\n{shown(loop, sections[loop])}\n", flush=True)
            rows += limits(loop, sections[loop])
    finish("pressure", options, facts, sections, rows)


if __name__ == "__main__":
    main()

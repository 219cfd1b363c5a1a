"""What memtools.plan says of a step before it runs, beside the peak of the real step.

    python -m benchmarks.plan.plan    # about half a minute; writes results/plan.json

The measured peak is that of the third step, by the reports of torch's host allocator, without a
trace. The settings have no convolutions: what those need for themselves is not part of a plan. The
first plan of a process also imports what torch needs for fake tensors; it is made before and not
timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memtools
from benchmarks.blocks.loops.gpt import LENGTH, WORDS, Gpt
from benchmarks.kit.harness import Json, arguments, environment, table
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core
from memtools._base.libraries import library_paths

OFF = 0.01  # A planned peak may differ by this share from the measured one.
SECONDS = 5.0  # A plan may take so long.
Step = Callable[[], None]


def mlp(optimizer: Any, rows: int) -> Step:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers)
    made = optimizer(model.parameters())

    def step() -> None:
        x, y = torch.randn(rows, 1024), torch.randint(1024, (rows,))
        loss: Any = nn.functional.cross_entropy(model(x), y)
        made.zero_grad()
        loss.backward()
        made.step()

    return step


def gpt(optimizer: Any, rows: int) -> Step:
    model = Gpt()
    made = optimizer(model.parameters())

    def step() -> None:
        x, y = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
        loss: Any = model(x, y)[1]
        made.zero_grad()
        loss.backward()
        made.step()

    return step


MODELS = {"mlp": mlp, "gpt": gpt}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda given: torch.optim.SGD(given, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "AdamW fused": lambda given: torch.optim.AdamW(given, fused=True),
}


def measured(make: Callable[[], Step]) -> int:
    """The peak of the third step in bytes, by torch's allocator."""
    blocks = _core.Blocks()
    blocks.start(library_paths())
    step = make()
    for _ in range(2):
        step()
    blocks.record(True)
    step()
    blocks.record(False)
    contents = blocks.contents()
    blocks.stop()
    assert contents is not None
    return int(contents.peak_bytes)


def measure(model: str, optimizer: str, rows: int) -> Json:
    def make() -> Step:
        return MODELS[model](OPTIMIZERS[optimizer], rows)

    gc.collect()
    begun = time.perf_counter()
    plan = memtools.plan(make, device="cpu")
    seconds = time.perf_counter() - begun
    return {
        "model": model,
        "optimizer": optimizer,
        "rows": rows,
        "planned": plan.peak_bytes,
        "measured": measured(make),
        "reserved": plan.reserved_bytes,
        "phase": plan.phase,
        "operators": len(plan.curve),
        "seconds": seconds,
    }


def limits(rows: list[Json]) -> list[Limit]:
    off = 100 * max(abs(row["planned"] / row["measured"] - 1) for row in rows)
    seconds = max(row["seconds"] for row in rows)
    return [
        number_limit("peaks, planned beside measured", 100 * OFF, "%", off, off),
        number_limit("time of a plan", SECONDS, "s", seconds, seconds),
    ]


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    memtools.plan(lambda: mlp(OPTIMIZERS["SGD"], 1), device="cpu")
    rows = [
        measure(model, optimizer, batch)
        for model in MODELS
        for optimizer in OPTIMIZERS
        for batch in (4, 16)
    ]
    print(
        table(
            ("model", "optimizer", "batch", "planned MiB", "measured", "off", "peak in", "seconds"),
            (
                (
                    row["model"],
                    row["optimizer"],
                    str(row["rows"]),
                    mib(row["planned"]),
                    mib(row["measured"]),
                    f"{100 * (row['planned'] / row['measured'] - 1):+.2f} %",
                    row["phase"],
                    f"{row['seconds']:.2f}",
                )
                for row in rows
            ),
        )
    )
    finish("plan", options, environment(options.threads), {"rows": rows}, limits(rows))


if __name__ == "__main__":
    main()

"""What it costs to be able to take a micro-batch back, by way of undoing: time and memory.

    python -m benchmarks.grad.backoff         # two minutes; writes results/backoff.json
    python -m benchmarks.grad.backoff --quick
    python -m benchmarks.grad.backoff --only small

Each window is four micro-batches that all fit: what is measured is the price of being ready.
`large` trains 12 layers of 1024 x 1024 (48 MiB of gradients), `small` two of 32 x 32, where what
is kept besides gradients shows: random numbers and buffers. `loop` is the same written by hand,
`with acc.micro_batch():`, which cannot take anything back. `peak` is the most memory that a fresh
process held with 256 MiB of gradients, less what the loop's held.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import torch

import memtools
from benchmarks.kit.harness import (
    HERE,
    Json,
    Runner,
    arguments,
    as_module,
    environment,
    interleave,
    peak_resident_bytes,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import finish
from memtools._grad.undo import Redo, Scratch, Undo

WAYS = {"scratch": Scratch, "redo": Redo}
MICRO = 4


def runner(way: str, width: int, layers: int, rows: int) -> Runner:
    """Windows of four micro-batches, in nanoseconds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    model.append(torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    acc = memtools.GradAccumulator(model, optimizer, MICRO, micro_batch_size=rows)
    if way in WAYS:
        back_off = acc._get_back_off()
        back_off._undo = Undo(back_off._tensors(), WAYS[way])
    batch = torch.randn(rows * MICRO, width)

    def loss_fn(micro: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(micro).square().sum(), len(micro)

    def by_hand() -> None:
        for micro in torch.split(batch, rows):
            with acc.micro_batch():
                acc.backward(*loss_fn(micro))

    if way == "loop":
        return statement("by_hand()", by_hand=by_hand)
    return statement("step(batch, loss_fn)", step=acc.step, batch=batch, loss_fn=loss_fn)


def timed(width: int, layers: int, rows: int, seconds: float) -> list[Json]:
    runners = {way: runner(way, width, layers, rows) for way in ("loop", *WAYS)}
    samples = interleave(runners, 1, seconds=seconds, first=2)
    for turns in samples.turns.values():
        turns[:] = [turn / MICRO for turn in turns]
    return samples.summary("loop")


def peak_child(way: str) -> None:
    """In a process of its own: the most it held, in bytes."""
    runner(way, 2048, 16, 8)(3)
    print(json.dumps(peak_resident_bytes()))


def peaks() -> list[Json]:
    found = {}
    for way in ("loop", *WAYS):
        command = [*as_module(__file__), "--child", way]
        done = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout)
    return [
        {"name": way, "peak_bytes": most, "more_bytes": most - found["loop"]}
        for way, most in found.items()
    ]


def peak_table(rows: list[Json]) -> str:
    header = ("256 MiB of gradients", "peak MiB", "more than loop")
    return table(
        header,
        (
            (row["name"], f"{row['peak_bytes'] / 2**20:.0f}", f"{row['more_bytes'] / 2**20:+.0f}")
            for row in rows
        ),
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        peak_child(sys.argv[2])
        return
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    facts, sections = environment(options.threads), {}
    seconds = 5.0 if options.quick else 30.0
    for name, sizes in {"large": (1024, 12, 64), "small": (32, 2, 4)}.items():
        if name.startswith(options.only or ""):
            sections[name] = timed(*sizes, seconds)
            print(f"\n{name}, a micro-batch\n{timing_table(sections[name], 'loop')}")
    if "peak".startswith(options.only or ""):
        sections["peak"] = peaks()
        print(f"\n{peak_table(sections['peak'])}")
    finish("backoff", options, facts, sections, [])


if __name__ == "__main__":
    main()

"""What memtools.plan says of a step before it runs, beside the peak of the real step and others.

    python -m benchmarks.plan.plan    # about 10 minutes; writes results/plan.json

peaks: the measured peak is that of the third step, by the reports of torch's host allocator,
without a trace. The first plan of a process also imports what torch needs for fake tensors; it is
made before and not timed.
beside: the same for torch's MemTracker, also under fake tensors; for what `accelerate
estimate-memory` says of training with Adam: four times the parameters, without activations; and for
DeepSpeed's `estimate_zero2_model_states_mem_needs` on one GPU without offload: 20 bytes a
parameter, as it trains in half precision, without activations.
limits: for random limits, whether the largest GPT that fits by the plan runs in a process with that
limit, and one with one row more does not.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import Json, arguments, environment, table
from benchmarks.kit.limits import Limit, finish, number_limit
from benchmarks.plan.limited import fits
from benchmarks.plan.loops import CONVOLUTIONS, LOOPS, OPTIMIZERS, Loop, gpt, mlp
from memtools import _core
from memtools._base.libraries import library_paths

OFF, OFF_CONVOLUTIONS = 0.01, 0.05  # A planned peak may differ by this share from the measured one.
SECONDS = 5.0  # A plan may take so long.
LIMITS, MOST_ROWS = 20, 8  # random limits, between what 1 and 8 rows take
OWN = 1 << 20  # bytes for what Python allocates during the steps


def measured(loop: str, optimizer: str, rows: int) -> int:
    """The peak of the third step in bytes, by torch's allocator."""
    blocks = _core.Blocks()
    blocks.start(library_paths())
    step = LOOPS[loop](OPTIMIZERS[optimizer], rows).step
    for _ in range(2):
        step()
    blocks.record(True)
    step()
    blocks.record(False)
    contents = blocks.contents()
    blocks.stop()
    assert contents is not None
    return int(contents.peak_bytes)


def measure(loop: str, optimizer: str, rows: int) -> Json:
    gc.collect()
    begun = time.perf_counter()
    plan = memtools.plan(lambda: LOOPS[loop](OPTIMIZERS[optimizer], rows).step, device="cpu")
    seconds = time.perf_counter() - begun
    return {
        "loop": loop,
        "optimizer": optimizer,
        "rows": rows,
        "planned": plan.peak_bytes,
        "measured": measured(loop, optimizer, rows),
        "phase": plan.phase,
        "operators": len(plan.curve),
        "seconds": seconds,
    }


def beside(loop: str) -> Json:
    """What others say of the loop with AdamW and 8 rows; a text where they cannot."""
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]
    from torch._subclasses.fake_tensor import FakeTensorMode

    begun = time.perf_counter()
    tracker: Any
    with FakeTensorMode():
        made = LOOPS[loop](OPTIMIZERS["AdamW"], 8)
        try:
            tracker = tracked(made)
        except Exception as error:
            tracker = type(error).__name__
        seconds = time.perf_counter() - begun
        parameters, _ = calculate_maximum_sizes(made.model)
    return {
        "loop": loop,
        "tracker": tracker,
        "seconds": seconds,
        "accelerate": 4 * parameters,
        "deepspeed": by_deepspeed(sum(one.numel() for one in made.model.parameters())),
    }


def by_deepspeed(parameters: int) -> int | str:
    """Its bytes for so many parameters; a text without DeepSpeed."""
    try:
        from deepspeed.runtime.zero import stage_1_and_2  # type: ignore[import-not-found]
    except ImportError:
        return "not installed"
    estimate = stage_1_and_2.estimate_zero2_model_states_mem_needs
    return int(estimate(parameters, cpu_offload=False)[1])


def tracked(made: Loop) -> int:
    """The peak of the second step by torch's MemTracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(made.model, made.optimizer)
    with tracker:
        made.step()
        tracker.reset_mod_stats()
        made.step()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return int(found["Total"])


def limited() -> list[Json]:
    """For random limits, the most rows of the GPT that fit by the plan, and what ran."""

    def make(rows: int = 1) -> Any:
        return gpt(OPTIMIZERS["AdamW"], rows).step

    vary = {"rows": list(range(1, MOST_ROWS + 1))}
    sizes = [
        one.plan.reserved_bytes for one in memtools.plan(make, vary=vary, device="cpu").settings
    ]
    chance = random.Random(1)
    limits = sorted(chance.randrange(min(sizes), max(sizes)) for _ in range(LIMITS))
    settings = memtools.plan(make, vary=vary, limits=limits, device="cpu").settings
    found = list[Json]()
    for number, limit in enumerate(limits):
        rows = max(one.values["rows"] for one in settings if one.plan.limits[number].fits)
        row = {
            "limit": limit,
            "rows": rows,
            "fits": fits(rows, limit + OWN),
            "next_fits": fits(rows + 1, limit + OWN),
        }
        found.append(row)
        print(f"limit {mib(limit)} MiB: {rows} rows {row['fits']}, one more {row['next_fits']}")
    return found


def off(row: Json) -> float:
    return 100.0 * (float(row["planned"]) / float(row["measured"]) - 1)


def limits_of(rows: list[Json], limited_rows: list[Json]) -> list[Limit]:
    found = list[Limit]()
    for what, most, are_convolutions in (
        ("peaks, planned beside measured", OFF, False),
        ("peaks of loops with convolutions", OFF_CONVOLUTIONS, True),
    ):
        offs = [abs(off(row)) for row in rows if (row["loop"] in CONVOLUTIONS) == are_convolutions]
        if offs:
            found.append(number_limit(what, 100 * most, "%", max(offs), max(offs)))
    if rows:
        seconds = max(row["seconds"] for row in rows)
        found.append(number_limit("time of a plan", SECONDS, "s", seconds, seconds))
    if limited_rows:
        wrong = float(sum(not row["fits"] or row["next_fits"] for row in limited_rows))
        found.append(number_limit(f"wrong of {LIMITS} random limits", 0, "", wrong, wrong))
    return found


def mib(nbytes: float | str) -> str:
    return nbytes if isinstance(nbytes, str) else f"{nbytes / 2**20:.2f}"


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    memtools.plan(lambda: mlp(OPTIMIZERS["SGD"], 1).step, device="cpu")
    chosen = [name for name in ("peaks", "beside", "limits") if name.startswith(options.only or "")]
    settings = [(optimizer, 8) for optimizer in OPTIMIZERS] + [("AdamW", 1), ("AdamW", 64)]
    rows, others, under = list[Json](), list[Json](), list[Json]()
    if "peaks" in chosen:
        some = settings[:1] if options.quick else settings
        rows = [measure(loop, *setting) for loop in LOOPS for setting in some]
        print(peaks_table(rows))
    if "beside" in chosen:
        others = [beside(loop) for loop in LOOPS]
        print(beside_table(rows, others))
    if "limits" in chosen and not options.quick:
        under = limited()
    sections = {"rows": rows, "beside": others, "limits": under}
    finish("plan", options, environment(options.threads), sections, limits_of(rows, under))


def peaks_table(rows: list[Json]) -> str:
    return table(
        ("loop", "optimizer", "batch", "planned MiB", "measured", "off", "peak in", "seconds"),
        (
            (
                row["loop"],
                row["optimizer"],
                str(row["rows"]),
                mib(row["planned"]),
                mib(row["measured"]),
                f"{off(row):+.2f} %",
                row["phase"],
                f"{row['seconds']:.2f}",
            )
            for row in rows
        ),
    )


def beside_table(rows: list[Json], others: list[Json]) -> str:
    known = {row["loop"]: row for row in rows if (row["optimizer"], row["rows"]) == ("AdamW", 8)}
    return table(
        (
            *("AdamW, batch 8", "measured MiB", "plan", "MemTracker", "accelerate", "DeepSpeed"),
            *("s", "MemTracker s"),
        ),
        (
            (
                row["loop"],
                *(mib(known.get(row["loop"], {}).get(key, "")) for key in ("measured", "planned")),
                mib(row["tracker"]),
                mib(row["accelerate"]),
                mib(row["deepspeed"]),
                f"{known.get(row['loop'], {}).get('seconds', 0):.2f}",
                f"{row['seconds']:.2f}",
            )
            for row in others
        ),
    )


if __name__ == "__main__":
    main()

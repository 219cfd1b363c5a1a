"""What the sampling thread costs the training beside it, at 100 samples a second.

`step` is a training step of about 10 ms (a small MLP in torch, one thread) alone, and beside the
native sampler with a record. `rate` is the processor time of the sampling thread.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from benchmarks.kit.harness import (
    Json,
    Runner,
    Samples,
    arguments,
    environment,
    interleave,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core

COLUMNS = ["step", "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available",
           "pressure", "heap_used", "children", "children_private", "process", "job",
           "shm"]  # fmt: skip
WATCHED, INTERVAL_NS = "native 100 Hz", 10_000_000
STEPS = 24  # a turn: about a quarter of a second
FOLDER = tempfile.TemporaryDirectory()


@contextmanager
def native() -> Iterator[_core.Sampler]:
    path = os.path.join(FOLDER.name, "run.mem")
    sampler = _core.Sampler(INTERVAL_NS, _core.RecordWriter(path, COLUMNS, rows=16384))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


# --- the training step ----------------------------------------------------------------------------


def training() -> Callable[[], None]:
    """A step of about 10 ms on the machine that the figures are from."""
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
        torch.nn.Linear(512, 64),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 256)

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def beside(
    step: Callable[[], None],
    watch: Callable[[], AbstractContextManager[object]],
    turns: list[float],
) -> Runner:
    """Steps beside a thread: the processor time of all threads. The time of each step by the clock
    goes into `turns`."""

    def run(n: int) -> float:
        with watch():
            step()
            began, before = time.process_time_ns(), time.perf_counter_ns()
            for _ in range(n):
                step()
                now = time.perf_counter_ns()
                turns.append(float(now - before))
                before = now
            return float(time.process_time_ns() - began)

    return run


def step_section(seconds: float) -> Json:
    """By the clock each step counts by itself, because a busy neighbour would dominate the sum of a
    turn. The processor time is what a step takes on a machine without a core to spare."""
    step = training()
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "alone": nullcontext,
        WATCHED: native,
    }
    clock = Samples({name: [] for name in ways})
    runners = {name: beside(step, watch, clock.turns[name]) for name, watch in ways.items()}
    processor = interleave(runners, STEPS, seconds=seconds, first=STEPS)
    found: Json = {}
    for what, samples in (("clock", clock), ("processor", processor)):
        rows = samples.summary("alone")
        for row in rows:
            ratios = samples.ratios(row["name"], "alone")
            row["standard_error"] = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(timing_table(f"a step by the {what}", rows))
        errors = ", ".join(f"{row['name']} {100 * row['standard_error']:.1f} %" for row in rows[1:])
        print(f"standard error of a turn's ratio: {errors}")
        found[what] = rows
    return found


# --- the sampling thread --------------------------------------------------------------------------


def share_of_a_core(step: Callable[[], None], seconds: float) -> float:
    """Percent of a core that the sampling thread takes beside training."""
    began = time.monotonic()
    with native() as sampler:
        while time.monotonic() < began + seconds:
            step()
    return sampler.cpu_ns / (time.monotonic() - began) / 1e7


def rate_section(seconds: float) -> Json:
    """The sampling thread's share of a core, in four runs."""
    step = training()
    shares = [share_of_a_core(step, seconds / 4) for _ in range(4)]
    share = {"min": min(shares), "median": statistics.median(shares)}
    print(f"the sampling thread: {share['min']:.3g} / {share['median']:.3g} % of a core")
    return {WATCHED: {"cpu_percent": share}}


# --- limits ---------------------------------------------------------------------------------------


def limits(sections: Json) -> list[Limit]:
    rows = []
    if step := sections.get("step"):
        for what in ("clock", "processor"):
            row = next(row for row in step[what] if row["name"] == WATCHED)
            more = [100 * (row[key] - 1) for key in ("ratio_of_mins", "median_ratio")]
            rows.append(number_limit(f"a step beside 100 Hz, {what}", 1.0, "%", *more))
    if rate := sections.get("rate"):
        share = rate[WATCHED]["cpu_percent"]
        rows.append(number_limit("of a core, 100 Hz", 1.0, "%", share["min"], share["median"]))
    return rows


SECTIONS: dict[str, tuple[Callable[[float], Json], float]] = {
    "step": (step_section, 0.4),
    "rate": (rate_section, 0.1),
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    import torch

    torch.set_num_threads(options.threads)
    facts = environment(options.threads)
    seconds = options.seconds or (20 if options.quick else 110)
    sections: Json = {}
    for name, (section, share) in SECTIONS.items():
        if not name.startswith(options.only or ""):
            continue
        print(f"\n--- {name} ---")
        sections[name] = section(share * seconds)
    finish("sampler", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()

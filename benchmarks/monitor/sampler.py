"""What a sampling thread costs the training beside it, and how evenly it samples.

`step` is a training step of about 10 ms (a small MLP in torch, one thread) alone, beside the native
sampler with a record, and beside a Python thread that reads psutil's pair, at 100 and 1,000 samples
a second. `rate` is what each got of the samples that it was asked for, the longest gap, and the
processor time of its thread. `children` is the native thread's share of a processor while
thousands of short-lived processes come and go. `call` is what the training thread itself calls.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.kit.harness import (
    Json,
    Runner,
    Samples,
    arguments,
    environment,
    interleave,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core

COLUMNS = ["step", "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available",
           "pressure", "heap_used", "children", "children_private", "process", "job",
           "shm"]  # fmt: skip
RATES = {"100 Hz": 10_000_000, "1 kHz": 1_000_000}
STEPS = 24  # a turn: about a quarter of a second
FOLDER = tempfile.TemporaryDirectory()
Times = list[int]


class PythonThread:
    """The usual way: a thread that reads psutil and waits for the rest of the interval."""

    def __init__(self, interval_ns: int) -> None:
        self.times: Times = []
        self.cpu_ns = 0
        self._interval = interval_ns / 1e9
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(self._interval):
            process.memory_info()
            psutil.virtual_memory()
            self.times.append(time.monotonic_ns())
        self.cpu_ns = time.thread_time_ns()

    def __enter__(self) -> PythonThread:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def native(interval_ns: int) -> Iterator[_core.Sampler]:
    path = os.path.join(FOLDER.name, "run.mem")
    sampler = _core.Sampler(interval_ns, _core.RecordWriter(path, COLUMNS, rows=16384))
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
    """Steps beside a thread: the processor time of all threads. What each step took by the clock
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
    """By the clock each step counts by itself: of a turn's sum a busy neighbour would be most. The
    processor time is what a step takes of a machine without a core to spare."""
    step = training()
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"alone": nullcontext}
    for rate, interval in RATES.items():
        ways[f"native {rate}"] = partial(native, interval)
        ways[f"psutil thread {rate}"] = partial(PythonThread, interval)
    clock = Samples({name: [] for name in ways})
    runners = {name: beside(step, watch, clock.turns[name]) for name, watch in ways.items()}
    processor = interleave(runners, STEPS, seconds=seconds, first=STEPS)
    found: Json = {}
    for what, samples in (("clock", clock), ("processor", processor)):
        rows = samples.summary("alone")
        for row in rows:
            ratios = samples.ratios(row["name"], "alone")
            row["standard_error"] = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"a step by the {what}\n{timing_table(rows, 'alone')}")
        errors = ", ".join(f"{row['name']} {100 * row['standard_error']:.1f} %" for row in rows[1:])
        print(f"standard error of a turn's ratio: {errors}")
        found[what] = rows
    return found


# --- rate and processor ---------------------------------------------------------------------------


def sample_times(path: Path) -> Times:
    from memtools import read_record

    return list(read_record(path).samples.time_ns)


def one_run(kind: str, interval_ns: int, seconds: float) -> Json:
    step = training()
    began = time.monotonic()
    thread: AbstractContextManager[_core.Sampler | PythonThread] = (
        native(interval_ns) if kind == "native" else PythonThread(interval_ns)
    )
    with thread as sampler:
        while time.monotonic() < began + seconds:
            step()
    elapsed = time.monotonic() - began
    times = (
        sampler.times
        if isinstance(sampler, PythonThread)
        else sample_times(Path(FOLDER.name, "run.mem"))
    )
    gaps = [b - a for a, b in pairwise(times)]
    return {
        "samples_per_second": len(times) / elapsed,
        "longest_gap_ms": max(gaps) / 1e6,
        "cpu_us_per_sample": sampler.cpu_ns / len(times) / 1e3,
        "cpu_percent": sampler.cpu_ns / elapsed / 1e7,
    }


def rate_section(seconds: float) -> Json:
    found: Json = {}
    for rate, interval in RATES.items():
        for kind in ("native", "psutil thread"):
            runs = [one_run(kind, interval, seconds / 16) for _ in range(4)]
            found[f"{kind} {rate}"] = {
                key: {
                    "min": min(r[key] for r in runs),
                    "median": statistics.median(r[key] for r in runs),
                }
                for key in runs[0]
            }
    header = ("min / median of 4 runs", "samples/s", "longest gap ms", "us/sample", "% of a core")
    rows = [
        (name, *(f"{cell['min']:.3g} / {cell['median']:.3g}" for cell in row.values()))
        for name, row in found.items()
    ]
    print(table(header, rows))
    return found


def children_section(seconds: float) -> Json:
    """As many short-lived processes as the machine makes, one hundred at a time."""
    began, made = time.monotonic(), 0
    with native(RATES["1 kHz"]) as sampler:
        while time.monotonic() < began + seconds:
            batch = [subprocess.Popen(["/bin/true"]) for _ in range(100)]
            made += len(batch)
            for process in batch:
                process.wait()
        elapsed = time.monotonic() - began
        percent = sampler.cpu_ns / elapsed / 1e7
    print(f"{made} processes in {elapsed:.1f} s: the sampler took {percent:.2f} % of a core")
    return {"processes": made, "seconds": elapsed, "cpu_percent": percent}


def call_section(seconds: float) -> Json:
    with native(RATES["100 Hz"]) as sampler:
        runners = {
            "step()": statement("step()", step=sampler.step),
            "latest()": statement("latest()", latest=sampler.latest),
            "len(())": statement("f(x)", f=len, x=()),
        }
        rows = interleave(runners, 2000, seconds=seconds, warm=200).summary("len(())")
    print(timing_table(rows, "len(())"))
    return {"rows": rows}


# --- limits ---------------------------------------------------------------------------------------


def limits(sections: Json) -> list[Limit]:
    rows = []
    if "step" in sections:
        for what in ("clock", "processor"):
            by_name = {row["name"]: row for row in sections["step"][what]}
            for rate, allowed in (("100 Hz", 1.0), ("1 kHz", 5.0)):
                row = by_name[f"native {rate}"]
                more = [100 * (row[key] - 1) for key in ("ratio_of_mins", "median_ratio")]
                rows.append(number_limit(f"a step beside {rate}, {what}", allowed, "%", *more))
    if "rate" in sections:
        for rate, allowed in (("100 Hz", 1.0), ("1 kHz", 5.0)):
            share = sections["rate"][f"native {rate}"]["cpu_percent"]
            rows.append(
                number_limit(f"of a core, {rate}", allowed, "%", share["min"], share["median"])
            )
    if "children" in sections:
        share = sections["children"]["cpu_percent"]
        rows.append(number_limit("of a core, children by the thousand", 5.0, "%", share, share))
    if "call" in sections:
        row = sections["call"]["rows"][0]
        rows.append(number_limit("step()", 100.0, "ns", row["min_ns"], row["median_ns"]))
    return rows


SECTIONS: dict[str, tuple[Callable[[float], Json], float]] = {
    "step": (step_section, 0.6),
    "rate": (rate_section, 0.25),
    "children": (children_section, 0.1),
    "call": (call_section, 0.05),
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

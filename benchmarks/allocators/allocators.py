"""The cost and the effect of glibc's thresholds, in a loop that frees large blocks.

`loop`: each step makes six tensors of 1 to 20 MiB, fills and adds them, drops them, and keeps one
of 4 KiB, as a log of metrics does. Every way is a process of its own; the ways take turns. `ms` is
a step, least / median, and the mean; `kept` is what is resident after the last step beyond what was
before the first. `read` is one call of allocator_settings().
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kit.harness import (
    Json,
    arguments,
    environment,
    interleave,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import finish

Settings = dict[str, str | int]
WAYS: dict[str, Settings] = {
    "glibc's own": {},
    "malloc_trim every 50 steps": {"every": 50},
    "mmap 1 MiB, trim 16 MiB": {"mmap_threshold": "1 MiB", "trim_threshold": "16 MiB"},
}
CHILD = """
import ctypes, json, os, random, sys, time
import torch
import memtools
torch.set_num_threads(1)
settings, steps = json.loads(sys.argv[1]), int(sys.argv[2])
every = settings.pop("every", 0)
if settings:
    memtools.allocator_settings().set(**settings)
libc = ctypes.CDLL(None)

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step(dice, kept):
    tensors = [torch.empty(dice.randrange(2**18, 20 * 2**18)).fill_(1) for _ in range(6)]
    kept.append(torch.empty(1024).fill_(float(sum(tensor[0] for tensor in tensors))))

step(random.Random(0), [])
before, kept, times, dice = rss(), [], [], random.Random(1)
for n in range(1, steps + 1):
    began = time.perf_counter_ns()
    step(dice, kept)
    if every and n % every == 0:
        libc.malloc_trim(0)
    times.append(time.perf_counter_ns() - began)
figures = {"kept": rss() - before, "mean": sum(times) // steps}
times.sort()
print(json.dumps({**figures, "min": times[0], "median": times[steps // 2]}))
"""


def run(settings: Settings, steps: int) -> dict[str, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUN"))}
    folder = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CHILD, json.dumps(settings), str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean, cwd=folder, check=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def loop_section(seconds: float) -> Json:
    rounds, steps = (3, 100) if seconds > 20 else (1, 50)
    found: dict[str, list[dict[str, int]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, settings in WAYS.items():
            found[name].append(run(settings, steps))
    rows: dict[str, Any] = {}
    for name, runs in found.items():
        kept = [one["kept"] / 2**20 for one in runs]
        rows[name] = {
            "ms_min": min(one["min"] for one in runs) / 1e6,
            "ms_mean": median(one["mean"] for one in runs) / 1e6,
            "ms_median": median(one["median"] for one in runs) / 1e6,
            "kept_mib_min": min(kept),
            "kept_mib_median": median(kept),
        }
    header = ["", "ms a step", "mean", "kept, MiB"]
    cells = [
        [name, f"{r['ms_min']:.2f} / {r['ms_median']:.2f}", f"{r['ms_mean']:.2f}",
         f"{r['kept_mib_min']:.1f} / {r['kept_mib_median']:.1f}"]
        for name, r in rows.items()
    ]  # fmt: skip
    print(table(header, cells))
    return {"rounds": rounds, "steps": steps, "rows": rows}


def read_section(seconds: float) -> Json:
    from memtools import allocator_settings

    runners = {
        "allocator_settings()": statement("f()", f=allocator_settings),
    }
    rows = interleave(runners, 5, seconds=seconds, warm=1).summary("allocator_settings()")
    print(timing_table("read", rows))
    return {"rows": rows}


def main() -> None:
    options = arguments(__doc__).parse_args()
    import torch

    torch.set_num_threads(options.threads)
    facts = environment(options.threads)
    seconds = options.seconds or (20 if options.quick else 110)
    sections: Json = {}
    for name, section in {"loop": loop_section, "read": read_section}.items():
        if name.startswith(options.only or ""):
            print(f"\n--- {name} ---")
            sections[name] = section(seconds if name == "loop" else 0.05 * seconds)
    finish("allocators", options, facts, sections, [])


if __name__ == "__main__":
    main()

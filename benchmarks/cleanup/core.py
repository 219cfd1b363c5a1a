"""What a policy's look at memory takes, and what malloc_trim gives back."""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import time

from benchmarks.kit.harness import (
    Json,
    as_module,
    interleave,
    resident_bytes,
    statement,
    table,
    timing_table,
)
from memtools import _core

MIB = 1 << 20
ALL = 1 | 2 | 4 | 8 | 16
LATER = (False, False, True, True, True)  # of each action, whether it is judged later
TICK, LOOK = "tick, nothing due", "look, reading included"


def deciding(seconds: float) -> Json:
    """The calls that `step()` makes."""
    usual = 0.85, 0.003, False, 0, 0, 0, "/"
    policy = _core.Policy(lambda mask, clock: None, *usual)
    policy.set_rule(0, (2**40,), 0, False)
    looking = _core.Policy(lambda mask, clock: None, *usual)
    for action, later in enumerate(LATER):
        looking.set_rule(action, (100,), ALL, later)
    runners = {
        TICK: statement("tick()", tick=policy.tick),
        LOOK: statement("look()", look=looking.look),
    }
    calls = {TICK: 20_000, LOOK: 500}
    samples = interleave(runners, calls, seconds=seconds, warm=100, first=1_000)
    rows = samples.summary(TICK)
    print(timing_table("deciding", rows), flush=True)
    return {"rows": rows}


def trim(seconds: float) -> Json:
    """300 MB of blocks in fresh processes, every second one freed, and malloc_trim twice."""
    command = as_module(__file__)
    rounds = [
        json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(max(2, int(seconds)))
    ]
    rows = [{"name": name, "turns": [one[name] for one in rounds]} for name in rounds[0]]
    header = ("trim: 300 MB, half of it freed", "min ms", "median ms", "given back")
    cells = []
    for row in rows:
        ms, freed = zip(*row["turns"], strict=True)
        back = f"{statistics.median(freed) / MIB:.1f} MiB"
        cells.append((row["name"], f"{min(ms):.3f}", f"{statistics.median(ms):.3f}", back))
    print(f"{table(header, cells)}\n", flush=True)
    return {"rows": rows}


def holes() -> Json:
    """(milliseconds, resident bytes given back) of each call."""
    libc, section = ctypes.CDLL(None), Json()
    kept = [bytes(20_000) for _ in range(15_000)]
    del kept[::2]
    for name in ("malloc_trim, half of it is holes", "malloc_trim again"):
        before, begin = resident_bytes(), time.perf_counter_ns()
        libc.malloc_trim(ctypes.c_size_t(0))
        took = time.perf_counter_ns() - begin
        section[name] = (took / 1e6, before - resident_bytes())
    return section


if __name__ == "__main__":
    print(json.dumps(holes()))

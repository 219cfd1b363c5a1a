"""What a policy's decisions take, and what malloc_trim gives back."""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable

from benchmarks.cleanup.loops_c import loops
from benchmarks.kit.harness import (
    Json,
    as_module,
    interleave,
    resident_bytes,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, number_limit
from memtools import _core

MIB = 1 << 20
CALLS = 20_000
ALL = 1 | 2 | 4 | 8 | 16
LATER = (False, False, True, True, True)  # of each action, whether it is judged later


# --- deciding ---


def deciding(seconds: float) -> Json:
    """In C, and from Python what `step()` calls. The reading is at hand but for the last one."""
    usual = 0.85, 0.003, False, 0, 0, 0, "/"
    policy = _core.Policy(lambda mask, clock: None, *usual)
    policy.set_rule(0, (2**40,), 0, False)
    looking = _core.Policy(lambda mask, clock: None, *usual)
    for action, later in enumerate(LATER):
        looking.set_rule(action, (100,), ALL, later)
    runners = {
        "tick, nothing due": statement("tick()", tick=policy.tick),
        "decide by cadence": in_c("by_cadence"),
        "decide by a look": in_c("by_looks_host"),
        "decide by a look, 1 device": in_c("by_looks_device"),
        "look, reading included": statement("look()", look=looking.look),
    }
    calls = {**dict.fromkeys(runners, CALLS), "look, reading included": 500}
    samples = interleave(runners, calls, seconds=seconds, warm=100, first=1_000)
    return {"rows": samples.summary("tick, nothing due")}


def in_c(name: str) -> Callable[[int], float]:
    """A loop of loops_c.py: n ticks, in nanoseconds."""

    def run(n: int) -> float:
        took: float = getattr(loops(), name)(n)
        if took < 0:
            raise SystemExit("the core did not decide as it was to")
        return took

    return run


def show_deciding(section: Json) -> None:
    print(f"deciding\n{timing_table(section['rows'], 'tick, nothing due')}\n", flush=True)


def deciding_limits(section: Json) -> list[Limit]:
    return [
        number_limit(row["name"], 200, "ns", row["min_ns"], row["median_ns"])
        for row in section["rows"]
        if row["name"] in ("decide by cadence", "decide by a look")
    ]


# --- trim ---


def trim(seconds: float) -> Json:
    """In fresh processes: 300 MB of blocks, every second one freed, and malloc_trim again and
    again."""
    command = as_module(__file__)
    rounds = [
        json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(max(2, int(seconds)))
    ]
    names = rounds[0]
    return {"rows": [{"name": n, "turns": [one[n] for one in rounds]} for n in names]}


def holes() -> Json:
    """(milliseconds, resident bytes given back) of each step."""
    libc = ctypes.CDLL(None)
    kept = [bytes(20_000) for _ in range(15_000)]
    section: Json = {}

    def did(name: str, work: object) -> None:
        before, begin = resident_bytes(), time.perf_counter_ns()
        work()  # type: ignore[operator]
        took = time.perf_counter_ns() - begin
        section[name] = (took / 1e6, before - resident_bytes())

    def trim() -> None:
        libc.malloc_trim(ctypes.c_size_t(0))

    probe = _core.Probe()
    did("malloc_trim, nothing freed yet", trim)
    del kept[::2]
    did("gc.collect() with the holes", gc.collect)
    did("reading malloc's counters", lambda: probe.read(32))
    did("malloc_trim, half of it is holes", trim)
    did("malloc_trim again", trim)
    did("reading malloc's counters after it", lambda: probe.read(32))
    section["idle bytes that malloc tells after it"] = (0.0, probe.read(32).heap_free or 0)
    return section


def show_trim(section: Json) -> None:
    header = ("trim: 300 MB, half of it freed", "min ms", "median ms", "given back")
    rows = []
    for row in section["rows"]:
        ms, freed = zip(*row["turns"], strict=True)
        back = f"{statistics.median(freed) / MIB:.1f} MiB"
        rows.append((row["name"], f"{min(ms):.3f}", f"{statistics.median(ms):.3f}", back))
    print(f"{table(header, rows)}\n", flush=True)


def trim_limits(section: Json) -> list[Limit]:
    return []


if __name__ == "__main__":
    print(json.dumps(holes()))

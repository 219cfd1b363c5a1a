"""What a policy's decisions take, what malloc_trim gives back, and an hour of decisions."""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import memtools
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
from memtools.monitor.run import columns

MIB, GIB, MS = 1 << 20, 1 << 30, 1_000_000
UNKNOWN = 2**64 - 1
CALLS = 20_000
# rss, private, cgroup_used, cgroup_limit, available, total, heap_free, children_private; a device
READING = (GIB, GIB, 2 * GIB, 8 * GIB, 9 * GIB, 16 * GIB, UNKNOWN, UNKNOWN)
DEVICE = (20 * GIB, 24 * GIB, 50 * GIB, 80 * GIB, GIB)
ALL = 1 | 2 | 4 | 8 | 16
RULES = [((100,), ALL, later) for later in (False, False, True, True, True)]


# --- deciding ---


def deciding(seconds: float) -> Json:
    """In C, and from Python what `step()` calls. The reading is at hand but for the last one."""
    policy = _core.Policy(lambda mask, clock: None, [((2**40,), 0, False)])
    looking = _core.Policy(lambda mask, clock: None, RULES)
    runners = {
        "tick, nothing due": statement("tick()", tick=policy.tick),
        "decide by cadence": by_cadence,
        "decide by a look": lambda n: by_looks(n, READING),
        "decide by a look, 1 device": lambda n: by_looks(n, READING + DEVICE),
        "look, reading included": statement("look()", look=looking.look),
    }
    calls = {**dict.fromkeys(runners, CALLS), "look, reading included": 500}
    samples = interleave(runners, calls, seconds=seconds, warm=100, first=1_000)
    return {"rows": samples.summary("tick, nothing due")}


def by_cadence(n: int) -> float:
    """n ticks at each of which something is due, and skipped because it did not pay and is dear."""
    core = _core.PolicyReplay([((1,), 0, False)])
    _, _, asked = core.advance(0, 1, 0, 0, READING)
    core.done(0, 0, 10**18, 0, 0, 1, 0, 0, 1)
    begin = time.perf_counter_ns()
    ticks, _, again = core.advance(0, n, 0, n * MS, READING)
    took = time.perf_counter_ns() - begin
    if (asked, ticks, again) != (1, n, 0):
        raise SystemExit("the core did not decide as it was to")
    return took


def by_looks(n: int, reading: tuple[int, ...]) -> float:
    """n ticks a second apart: a look, and so a decision with all triggers, at each."""
    core = _core.PolicyReplay([((2**40,), ALL, True)] * 5)
    core.advance(0, 50, 0, 50_000 * MS, reading)
    begin = time.perf_counter_ns()
    ticks, _, asked = core.advance(0, n, 50_000 * MS, (50 + n) * 1_000 * MS, reading)
    took = time.perf_counter_ns() - begin
    if (ticks, asked) != (n, 0):
        raise SystemExit("the core did not decide as it was to")
    return took


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


# --- an hour ---


def hour(seconds: float) -> Json:
    """An hour of updates of 10 ms by its record, where gc frees nothing: what policies ask for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.mem")
        names = columns(0)
        writer = _core.RecordWriter(path, names)
        begin = time.monotonic_ns()
        for second in range(3_600):
            values = {"step": 100 * second, "rss": GIB}
            writer.append(begin + second * 1_000 * MS, [values.get(name) for name, _ in names])
        writer.close()
        record = memtools.read_record(path)
        begin = time.perf_counter_ns()
        rows = []
        for cost in (0.06, 0.1, 0.6):
            told = memtools.CleanupPolicy().replay(record, costs={"gc": cost})
            times = sum(one.action == "gc" for one in told)
            rows.append({"cost": cost, "times": times, "share": times * cost / 3_600})
    took = (time.perf_counter_ns() - begin) / 3e9
    return {"rows": rows, "every_100": 3_600, "replay_seconds": took}


def show_hour(section: Json) -> None:
    header = (
        "an hour of 10 ms updates, gc frees nothing",
        "full collects",
        "of the time",
        "by hand",
    )
    rows = [
        (
            f"a collect takes {1e3 * row['cost']:.0f} ms",
            str(row["times"]),
            f"{100 * row['share']:.3f} %",
            f"{100 * row['cost']:.0f} %",
        )
        for row in section["rows"]
    ]
    took = 1e3 * section["replay_seconds"]
    print(f"{table(header, rows)}\na replay of its record takes {took:.0f} ms\n", flush=True)


def hour_limits(section: Json) -> list[Limit]:
    most = 100 * max(row["share"] for row in section["rows"])
    return [number_limit("full collects of an hour, of the time", 0.5, "%", most, most)]


if __name__ == "__main__":
    print(json.dumps(holes()))

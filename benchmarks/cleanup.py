"""What cleaning up costs a training loop, and what it keeps memory to: by hand and by a policy.

    python benchmarks/cleanup.py              # four minutes; writes results/cleanup.json
    python benchmarks/cleanup.py --quick      # one minute, to look at
    python benchmarks/cleanup.py --only leak

`update` trains the same steps of some 10 ms in processes that have imported torch and transformers:
by the usual decorator that collects and empties the cache at every 100th update; as torchtitan and
Megatron-LM do; by a default CleanupPolicy, its decorator alone and within `with policy:`. In each,
turns of it alternate with turns of the bare method. `leak` is a loop that leaves a cycle with a
tensor behind at every update. `decorator` is a call of a method when nothing is due, `deciding`
what a policy's core takes for a decision, `trim` malloc_trim on a heap full of holes, and `hour`
what a policy would have asked for in a recorded hour.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import _cleanup_core
import _cleanup_decorator
from _harness import HERE, Json, arguments, environment, table, timing_table
from _limits import Limit, finish, number_limit

MIB = 1 << 20
BY_HAND = ("every 100", "torchtitan", "Megatron")
POLICY = ("decorator", "with policy")
WAYS = ("bare", *BY_HAND, *POLICY)
FIRST, UPDATES, LEAKS = 100, 25, 1_000  # updates: with what is done once, and of a turn


class Loop:
    """A process of _cleanup_loop.py, and all that it answered."""

    def __init__(self, way: str, kind: str) -> None:
        command = [sys.executable, str(HERE / "_cleanup_loop.py"), way, kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.way = way
        self.turns: list[Json] = []

    def __call__(self, n: int, bare: bool = False) -> Json:
        """Trains n updates; what that took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("bare" if bare else "", n, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the loop {self.way!r} ended early")
        self.turns.append(json.loads(line))
        return self.turns[-1]

    def end(self) -> None:
        self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"the loop {self.way!r} failed")


def update(rounds: int) -> Json:
    """Each way's turns beside bare ones of the same process; ways take turns with each other."""
    loops = {way: Loop(way, "update") for way in WAYS}
    firsts = {way: loop(FIRST) for way, loop in loops.items()}
    turns: dict[str, list[tuple[Json, Json]]] = {way: [] for way in WAYS}
    for i in range(rounds):
        for way, loop in loops.items():
            pair = [loop(UPDATES, bare) for bare in ((False, True) if i % 2 else (True, False))]
            turns[way].append((pair[0], pair[1]) if i % 2 else (pair[1], pair[0]))
    for loop in loops.values():
        loop.end()
    if len({loop.turns[-1]["losses"] for loop in loops.values()}) > 1:
        raise SystemExit("the ways of cleaning up trained to other losses")
    return {
        "objects": firsts["bare"]["objects"],
        "updates": FIRST + 2 * rounds * UPDATES,
        "ways": [facts(loops[way], firsts[way], turns[way]) for way in WAYS],
    }


def facts(loop: Loop, first: Json, pairs: list[tuple[Json, Json]]) -> Json:
    """What gc takes is timed exactly, wherever it falls; all else is compared turn by turn."""

    def times(which: int, key: str = "cpu_ns") -> list[float]:
        return [(pair[which][key] - pair[which]["gc_ns"]) / UPDATES for pair in pairs]

    own, bare = times(0), times(1)
    gc = sum(pair[0]["gc_ns"] for pair in pairs) / sum(pair[1]["cpu_ns"] for pair in pairs)
    last = loop.turns[-1]
    return {
        "name": loop.way,
        "bare_ns": statistics.median(bare),
        "gc_share": gc,
        "loss_by_min": min(own) / min(bare) - 1 + gc,
        "loss_by_median": statistics.median(a / b for a, b in zip(own, bare, strict=True)) - 1 + gc,
        "first_gc_ms": first["gc_ns"] / 1e6,
        "full_collects": last["full_collects"] - first["full_collects"],
        "peak": last["peak"],
        "report": last.get("report"),
    }


def show_update(section: Json) -> None:
    print(f"update: {section['updates']:,} in each, {section['objects']:,} objects, same losses")
    header = (
        "processor time",
        "bare",
        "gc",
        "loss by min",
        "by median",
        "gc, first 100",
        "peak RSS",
    )
    rows = [
        (
            way["name"],
            f"{way['bare_ns'] / 1e6:.1f} ms",
            f"{100 * way['gc_share']:.3f} %",
            f"{100 * way['loss_by_min']:+.2f} %",
            f"{100 * way['loss_by_median']:+.2f} %",
            f"{way['first_gc_ms']:.0f} ms",
            f"{way['peak'] / MIB:.0f} MiB",
        )
        for way in section["ways"]
    ]
    print(table(header, rows))
    for way in section["ways"]:
        if way["report"]:
            print(f"\n{way['name']}:\n{way['report']}")
    print(flush=True)


def leak(turns: int) -> Json:
    """Each way after the other: what leaves cycles behind takes memory from the others too."""
    rows = []
    for way in WAYS:
        loop = Loop(way, "leak")
        for _ in range(turns):
            loop(LEAKS)
        loop.end()
        marks = [turn["peak"] - turn["began"] for turn in loop.turns]
        later = loop.turns[1:]
        rows.append(
            {
                "name": way,
                "above_bytes": marks[-1],
                "half_way_bytes": marks[len(marks) // 2 - 1],
                "update_ns": statistics.median(turn["cpu_ns"] / LEAKS for turn in later),
                "least_update_ns": min(turn["cpu_ns"] / LEAKS for turn in later),
                "report": loop.turns[-1].get("report"),
            }
        )
    return {"updates": turns * LEAKS, "leaked_bytes": turns * LEAKS * (256 << 10), "ways": rows}


def show_leak(section: Json) -> None:
    leaked = section["leaked_bytes"] / MIB
    print(f"leak: {section['updates']:,} updates leave cycles with {leaked:,.0f} MiB behind")
    header = ("", "peak above start", "half way", "update, min", "median")
    rows = [
        (
            way["name"],
            f"{way['above_bytes'] / MIB:.1f} MiB",
            f"{way['half_way_bytes'] / MIB:.1f} MiB",
            f"{way['least_update_ns'] / 1e3:.0f} us",
            f"{way['update_ns'] / 1e3:.0f} us",
        )
        for way in section["ways"]
    ]
    print(f"{table(header, rows)}\n", flush=True)


def update_limits(section: Json) -> list[Limit]:
    rows = []
    named = {way["name"]: way for way in section["ways"]}
    losses = {
        name: (100 * way["loss_by_min"], 100 * way["loss_by_median"]) for name, way in named.items()
    }
    least, median = losses["every 100"]
    text = f"{least:.3g} %", f"{median:.3g} %"
    rows.append(Limit("every 100: an update loses", "> 5 %", *text, least > 5, median > 5))
    for name in POLICY:
        rows.append(number_limit(f"{name}: an update loses", 0.5, "%", *losses[name]))
        share = 100 * named[name]["gc_share"]
        rows.append(number_limit(f"{name}: of that gc", 0.5, "%", share, share))
        for other in ("bare", "every 100"):
            over = 100 * (named[name]["peak"] / named[other]["peak"] - 1)
            rows.append(number_limit(f"{name}: peak above that of {other}", 5, "%", over, over))
    return rows


def leak_limits(section: Json) -> list[Limit]:
    """Bounded: it neither grows with what is leaked nor goes on growing."""
    rows = []
    named = {way["name"]: way for way in section["ways"]}
    for name in POLICY:
        above, half = named[name]["above_bytes"], named[name]["half_way_bytes"]
        share = 100 * above / section["leaked_bytes"]
        rows.append(number_limit(f"{name}: peak, of the bytes leaked", 10, "%", share, share))
        grown = (above - half) / MIB
        rows.append(number_limit(f"{name}: the leak's second half", 8, "MiB", grown, grown))
    return rows


def decorator_limits(rows: list[Json]) -> list[Limit]:
    row = next(row for row in rows if row["name"] == "ours")
    added = row["difference_of_mins_ns"], row["median_difference_ns"]
    return [number_limit("the decorator adds to a call", 40, "ns", *added)]


def main() -> int:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    info = environment(options.threads)
    sections: Json = {}
    held: list[Limit] = []
    quick, wanted = options.quick, options.only or ""

    def asked(name: str) -> bool:
        return name.startswith(wanted)

    if asked("decorator"):
        rows = _cleanup_decorator.costs(2 if quick else 8).summary("bare")
        print(f"decorator: a call of a method, nothing due\n{timing_table(rows, 'bare')}\n")
        sections["decorator"] = rows
        held += decorator_limits(rows)
    for name in ("deciding", "trim", "hour"):
        if asked(name):
            sections[name] = getattr(_cleanup_core, name)(2 if quick else 5)
            getattr(_cleanup_core, f"show_{name}")(sections[name])
            held += getattr(_cleanup_core, f"{name}_limits")(sections[name])
    if asked("leak"):
        sections["leak"] = leak(2 if quick else 4)
        show_leak(sections["leak"])
        held += leak_limits(sections["leak"])
    if asked("update"):
        sections["update"] = update(6 if quick else 24)
        show_update(sections["update"])
        held += update_limits(sections["update"])
    finish("cleanup", options, info, sections, held)
    return 0 if all(row.reached_by_min or row.reached_by_median for row in held) else 1


if __name__ == "__main__":
    raise SystemExit(main())

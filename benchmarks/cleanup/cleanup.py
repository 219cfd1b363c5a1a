"""What cleaning up costs a training loop, and what it keeps memory to: by hand and by a policy.

    python -m benchmarks.cleanup.cleanup           # four minutes; writes results/cleanup.json
    python -m benchmarks.cleanup.cleanup --quick   # one minute; writes no JSON
    python -m benchmarks.cleanup.cleanup --only leak

`update` trains the same steps of some 10 ms in processes that have imported torch and transformers:
by the usual decorator that collects and empties the cache at every 100th update; as torchtitan and
Megatron-LM do; by a default CleanupPolicy, its decorator alone and within `with policy:`. In each,
its updates alternate with those of the bare method, one by one. `leak` is a loop that leaves a
cycle with a tensor behind at every update. `decorator` is a call of a method when nothing is due,
`deciding` a policy's look at memory, `trim` malloc_trim on a heap full of holes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from benchmarks.cleanup import core, decorator
from benchmarks.kit.harness import HERE, Json, arguments, environment, table, timing_table
from benchmarks.kit.limits import Limit, finish, number_limit

MIB = 1 << 20
BY_HAND = ("every 100", "torchtitan", "Megatron")
POLICY = ("decorator", "with policy")
WAYS = ("bare", *BY_HAND, *POLICY)
FIRST, LEAKS = 100, 1_000  # updates: with what is done once, and of a turn


class Loop:
    """A process of loop.py, and its answers."""

    def __init__(self, way: str, kind: str) -> None:
        command = [sys.executable, str(HERE / "cleanup/loop.py"), way, kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.way = way
        self.turns: list[Json] = []

    def __call__(self, n: int, pairs: bool = False) -> Json:
        """Trains n updates, or pairs of one that way and a bare one; returns what that took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("pairs" if pairs else "", n, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the loop {self.way!r} ended early")
        self.turns.append(json.loads(line))
        return self.turns[-1]

    def end(self) -> None:
        self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"the loop {self.way!r} failed")


def update(alone: int, pairs: int) -> Json:
    """Each way by itself, for what gc and decisions take; then in pairs with bare updates."""
    found = [train(way, alone, pairs) for way in WAYS]
    if len({way["losses"] for way in found}) > 1:
        raise SystemExit("the ways of cleaning up trained to other losses")
    return {
        "objects": found[0]["objects"],
        "updates": FIRST + alone + 2 * pairs,
        "alone": alone,
        "pairs": pairs,
        "ways": found,
    }


def train(way: str, alone: int, pairs: int) -> Json:
    """The time of gc, and of a policy's looks and decisions, is measured exactly; everything else
    is compared with the neighbour. The error is that of the median, by the spread of the middle
    half of the pairs."""
    loop = Loop(way, "update")
    first, long, last = loop(FIRST), loop(alone), loop(pairs, pairs=True)
    loop.end()
    own, bare = last["own_ns"], last["bare_ns"]
    usual = statistics.median(bare)
    low, middle, high = statistics.quantiles([a - b for a, b in zip(own, bare, strict=True)], n=4)
    policy = long.get("policy_ns", 0) - first.get("policy_ns", 0)
    gc, policy = long["gc_ns"] / long["cpu_ns"], policy / long["cpu_ns"]
    return {
        "name": way,
        "bare_ns": usual,
        "gc_share": gc,
        "policy_share": policy,
        "loss_by_middle_half": trimmed(own) / trimmed(bare) - 1 + gc + policy,
        "loss_by_median": middle / usual + gc + policy,
        "error": 0.93 * (high - low) / usual / len(own) ** 0.5,
        "first_gc_ms": first["gc_ns"] / 1e6,
        "peak": last["peak"],
        "losses": last["losses"],
        "objects": first["objects"],
    }


def trimmed(values: list[int]) -> float:
    """The mean of the middle half."""
    part = len(values) // 4
    return statistics.mean(sorted(values)[part : len(values) - part])


def show_update(section: Json) -> None:
    print(f"update: {section['updates']:,} in each, {section['objects']:,} objects, same losses")
    header = (
        "processor time",
        "bare",
        "gc",
        "deciding",
        "loss by median",
        "error",
        "by middle half",
        "gc, first 100",
        "peak RSS",
    )
    rows = [
        (
            way["name"],
            f"{way['bare_ns'] / 1e6:.1f} ms",
            f"{100 * way['gc_share']:.3f} %",
            f"{100 * way['policy_share']:.3f} %",
            f"{100 * way['loss_by_median']:+.2f} %",
            f"{100 * way['error']:.2f} %",
            f"{100 * way['loss_by_middle_half']:+.2f} %",
            f"{way['first_gc_ms']:.0f} ms",
            f"{way['peak'] / MIB:.0f} MiB",
        )
        for way in section["ways"]
    ]
    print(table(header, rows))
    print(flush=True)


def leak(turns: int) -> Json:
    """One way after the other, because a loop that leaks takes memory from the others too."""
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
        name: (100 * way["loss_by_middle_half"], 100 * way["loss_by_median"])
        for name, way in named.items()
    }
    middle, median = losses["every 100"]
    text = f"{middle:.3g} %", f"{median:.3g} %"
    rows.append(Limit("every 100: an update loses", "> 5 %", *text, middle > 5, median > 5))
    for name in POLICY:
        rows.append(number_limit(f"{name}: an update loses", 0.5, "%", *losses[name]))
        share = 100 * named[name]["gc_share"]
        rows.append(number_limit(f"{name}: of that gc", 0.5, "%", share, share))
        for other in ("bare", "every 100"):
            over = 100 * (named[name]["peak"] / named[other]["peak"] - 1)
            rows.append(number_limit(f"{name}: peak above that of {other}", 5, "%", over, over))
    return rows


def leak_limits(section: Json) -> list[Limit]:
    """The peak is a small part of what was leaked, and does not rise in the second half."""
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


def main() -> None:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    info = environment(options.threads)
    sections: Json = {}
    held: list[Limit] = []
    quick, wanted = options.quick, options.only or ""

    def asked(name: str) -> bool:
        return name.startswith(wanted)

    if asked("decorator"):
        rows = decorator.costs(2 if quick else 8).summary("bare")
        print(timing_table("decorator: a call of a method, nothing due", rows))
        sections["decorator"] = rows
        held += decorator_limits(rows)
    for name, run in {"deciding": core.deciding, "trim": core.trim}.items():
        if asked(name):
            sections[name] = run(2 if quick else 5)
    if asked("leak"):
        sections["leak"] = leak(2 if quick else 4)
        show_leak(sections["leak"])
        held += leak_limits(sections["leak"])
    if asked("update"):
        sections["update"] = update(*((200, 100) if quick else (1_000, 1_000)))
        show_update(sections["update"])
        held += update_limits(sections["update"])
    finish("cleanup", options, info, sections, held)


if __name__ == "__main__":
    main()

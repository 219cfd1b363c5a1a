"""How often the leak test is right, beside rules that people use, and what a reading costs.

    python -m benchmarks.leak.leaks           # some minutes; writes results/leaks.json
    python -m benchmarks.leak.leaks --quick   # a quarter of the series
    python -m benchmarks.leak.leaks --only cost

The series are those of tests/traces, made up from a seed that nothing was tuned on.
docs/guides/leaks.md says what the figures mean.
"""

from __future__ import annotations

import time
import timeit
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.kit.harness import (
    Json,
    Runner,
    arguments,
    environment,
    interleave,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from benchmarks.leak.early import first_words, over
from benchmarks.leak.rules import BAR, all_rules, moments
from memtools import LeakDetector
from tests.traces import synthetic

SEED = 90210  # tuned on 101 and 202
EACH, EACH_LEAK = 400, 12
BUCKETS = (3, 6, 12, 30, 100, np.inf)
UNCHANGING = ("flat", "warm", "saw", "spikes", "walk")  # the program does not change later


def percent(flags: Sequence[bool]) -> float:
    return 100 * float(np.mean(flags)) if len(flags) else float("nan")


def leak_free(each: int) -> Json:
    """By family and rule: % of series called a leak at any moment, and at the last one."""
    ever: dict[str, dict[str, list[bool]]] = {}
    at_end: dict[str, dict[str, list[bool]]] = {}
    for s in synthetic.leak_free_library(SEED, each):
        counted = moments(len(s.bytes)) > s.settled
        for rule, flags in all_rules(s.bytes).items():
            for where, value in ((ever, (flags & counted).any()), (at_end, flags[-1])):
                where.setdefault(rule, {}).setdefault(s.family, []).append(bool(value))
    return {
        "series": each * len(synthetic.FAMILIES),
        "ever_percent": {rule: means(families) for rule, families in ever.items()},
        "at_end_percent": {rule: means(families) for rule, families in at_end.items()},
    }


def means(families: dict[str, list[bool]]) -> dict[str, float]:
    every = [flag for flags in families.values() for flag in flags]
    return {**{name: percent(flags) for name, flags in families.items()}, "all": percent(every)}


def bucket(ratio: float) -> str:
    """ "3-6" for a leaked total of 3 to 6 times the noise of the floor."""
    low = 0.0
    for high in BUCKETS:
        if ratio < high:
            return f"{low:g}-{high:g}" if high < np.inf else f">{low:g}"
        low = high
    raise AssertionError(ratio)


def leaking(each: int) -> Json:
    """% found from the onset to the end of the run, by bucket and rule."""
    found: dict[str, dict[str, list[bool]]] = {}
    count = 0
    for s in synthetic.leaking_library(SEED, each):
        name, at = bucket(s.leaked / s.floor_noise), moments(len(s.bytes))
        for rule, flags in all_rules(s.bytes).items():
            hits = flags & (at >= s.onset)
            found.setdefault(name, {}).setdefault(rule, []).append(bool(hits.any()))
        count += 1
    order = [name for name in map(bucket, (0.0, *BUCKETS[:-1])) if name in found]
    return {
        "series": count,
        "by_bucket": {b: len(found[b]["leak"]) for b in order},
        "found_percent": {b: {r: percent(f) for r, f in found[b].items()} for b in order},
    }


def interval_is(s: synthetic.Series, step: int, rng: np.random.Generator) -> str | None:
    """The forecast at `step` of when a level above the highest peak so far is reached."""
    peak, later = s.bytes[: step + 1].max(), s.bytes[step + 1 :]
    if len(later) == 0 or later.max() <= peak:
        return None
    limit = int(peak + rng.uniform(0, 1) * (later.max() - peak))
    truth = 1 + int(np.argmax(later >= limit))
    detector = LeakDetector(bar_bytes=BAR)
    detector.update_many(0, rss=s.bytes[: step + 1])
    left = detector.forecast(limit)
    assert left is not None
    return "before lo" if truth < left.lo else "after hi" if truth > left.hi else "covered"


def forecasts(each: int) -> Json:
    """Of the intervals made at the first `leak`: % that cover the truth."""
    rng = np.random.default_rng(SEED)
    said: dict[str, list[str]] = {"the program does not change": [], "it may change": []}
    for s in synthetic.leaking_library(SEED + 1, each):
        changes = LeakDetector(bar_bytes=BAR).update_many(0, rss=s.bytes)
        step = next((step for step, kind in changes if kind == "leak"), None)
        answer = None if step is None else interval_is(s, step, rng)
        if answer is not None:
            said[list(said)[s.family not in UNCHANGING]].append(answer)
    return {
        "leak": {
            which: {
                "intervals": len(answers),
                **{
                    f"{answer}_percent": percent([a == answer for a in answers])
                    for answer in ("covered", "before lo", "after hi")
                },
            }
            for which, answers in said.items()
        }
    }


RAMP = "update, an exact signal that rises at each step"
QUIET, RSS = "update, an exact signal, quiet", "update, rss, a leak"
FITTED = "polyfit, each 100th"

FIT = """
window = deque(maxlen=1000)
for t, size in enumerate(sizes):
    window.append(size)
    if t % 100 == 99:
        np.polyfit(np.arange(len(window)), window, 1)
"""
UPDATES = """
update = LeakDetector().update
for t, size in enumerate(sizes):
    update(t, {signal}=size)
"""


def cost(seconds: float) -> list[Json]:
    """Nanoseconds of processor time a reading, all in; each turn is a new detector and 8,000
    readings of a signal."""
    leak = synthetic.leaking("saw", "step", 50, SEED, 0).bytes.astype(np.int64)
    quiet = synthetic.leak_free("flat", SEED, 0).bytes.astype(np.int64)
    ramp = [10**9 + 10_000 * step for step in range(len(leak))]

    def times(code: str, sizes: Any) -> Runner:
        names = {"LeakDetector": LeakDetector, "sizes": sizes, "deque": deque, "np": np}
        timer = timeit.Timer(code, timer=time.process_time, globals=names)
        return lambda n: timer.timeit(n) * 1e9

    samples = interleave(
        {
            RAMP: times(UPDATES.format(signal="heap"), ramp),
            QUIET: times(UPDATES.format(signal="heap"), quiet.tolist()),
            RSS: times(UPDATES.format(signal="rss"), leak.tolist()),
            FITTED: times(FIT, leak.tolist()),
        },
        1,
        seconds=seconds,
    )
    for name, turns in samples.turns.items():
        samples.turns[name] = [turn / len(leak) for turn in turns]
    return samples.summary(RAMP)


# --- limits ---------------------------------------------------------------------------------------


def limit(what: str, bound: float, value: float, unit: str = "%", *, least: bool = False) -> Limit:
    """A figure that has one value: at most `bound`, or at least."""
    reached = value >= bound if least else value <= bound
    text = f"{value:.3g} {unit}"
    return Limit(what, f"{'>=' if least else '<='} {bound:g} {unit}", text, text, reached, reached)


def limits(sections: Json) -> list[Limit]:
    found = list[Limit]()
    if free := sections.get("leak free"):
        ever, end = free["ever_percent"]["leak"]["all"], free["at_end_percent"]["leak"]["all"]
        found.append(limit("leak-free series called a leak, ever", 0.5, ever))
        found.append(limit("leak-free series called a leak, at the end", 0.1, end))
    if leaks := sections.get("leaking"):
        shares = leaks["found_percent"]
        for kind, name, bound in (
            *[("leak", "30-100", 75), ("leak", ">100", 89)],
            *[("growing", "3-6", 80), ("growing", "6-12", 90), ("growing", "12-30", 99)],
            *[("growing", "30-100", 99), ("growing", ">100", 99)],
        ):
            what = f"{kind} on leaks of {name} times the floor noise"
            found.append(limit(what, bound, shares[name][kind], least=True))
    for row in sections.get("over", ()):
        what = f"{row['family']}, suspect or above after the last rise"
        found.append(limit(what, 1, row["suspect"]))
    for row in sections.get("first words", ()):
        for rate, most in row["wanted"].items():
            what = f"suspect: {rate} a step in {row['signal']}, {row['noise']}, {row['read']}"
            found.append(limit(what, most, row[rate], "steps"))
    if told := sections.get("forecasts"):
        share = told["leak"]["the program does not change"]["covered_percent"]
        found.append(limit("forecasts that cover, no later change", 90, share, least=True))
    if rows := sections.get("cost"):
        times = rows[0]["min_ns"] / 1e3, rows[0]["median_ns"] / 1e3
        found.append(number_limit("a reading that rises, all in", 5, "us", *times))
    return found


# --- all of it ------------------------------------------------------------------------------------


def shown(name: str, content: Json | list[Json]) -> str:
    if name == "cost":
        return timing_table(name, content)  # type: ignore[arg-type]
    if isinstance(content, list):
        names = [name for name in content[0] if name != "wanted"]
        return table(names, ([str(row[name]) for name in names] for row in content))
    if name == "forecasts":
        rows = [
            [kind, which, *map(figure, row.values())]
            for kind, c in content.items()
            for which, row in c.items()
        ]
        return table(("at", "", "intervals", "covered", "before lo", "after hi"), rows)
    parts = []
    for part in ("ever_percent", "at_end_percent", "found_percent"):
        if shares := content.get(part):
            # by rule and family, or by bucket and rule
            columns = [*next(iter(shares.values()))]
            rows = [[r, *(figure(cells[c]) for c in columns)] for r, cells in shares.items()]
            parts.append(table((part, *columns), rows))
    return "\n".join(parts)


def figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def main() -> None:
    options = arguments(__doc__).parse_args()
    share = 4 if options.quick else 1
    sections: dict[str, Callable[[], Json | list[Json]]] = {
        "leak free": lambda: leak_free(EACH // share),
        "leaking": lambda: leaking(EACH_LEAK // share),
        "over": lambda: over(SEED, EACH // share),
        "first words": lambda: first_words(SEED, 100 // share),
        "forecasts": lambda: forecasts(EACH_LEAK // share),
        "cost": lambda: cost(10 / share),
    }
    facts = environment(options.threads) | {"seed": SEED}
    found: Json = {}
    for name, run in sections.items():
        if name.startswith(options.only or ""):
            found[name] = run()
            print(f"{name}\n{shown(name, found[name])}\n", flush=True)
    finish("leaks", options, facts, found, limits(found))


if __name__ == "__main__":
    main()

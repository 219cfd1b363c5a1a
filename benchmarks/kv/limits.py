"""The limits that the pool's figures are held against."""

from __future__ import annotations

from statistics import mean

from benchmarks.kit.harness import Json
from benchmarks.kit.limits import Limit, at_least, number_limit
from benchmarks.kv.attention import OURS as VIEWS
from benchmarks.kv.common import MIB, NANO, PAGE
from benchmarks.kv.rollout import OURS as GROUP
from benchmarks.kv.rollout import PLAIN
from benchmarks.kv.update import COPY, OURS, SLICE


def limits(sections: Json) -> list[Limit]:
    """Every limit of the plan whose sections have run."""
    return [
        *update_limits(sections),
        *attention_limits(sections),
        *fork_limits(sections),
        *page_limits(sections),
        *cycle_limits(sections),
        *rollout_limits(sections),
    ]


def named(rows: list[Json]) -> dict[str, Json]:
    return {row["name"]: row for row in rows}


def ratio_limit(what: str, allowed: float, row: Json) -> Limit:
    return number_limit(what, allowed, "x", row["ratio_of_mins"], row["median_ratio"])


def update_limits(sections: Json) -> list[Limit]:
    result = []
    for name, content in sections.items():
        if not name.startswith("update"):
            continue
        rows = named(content)
        ours, copy = rows[OURS], rows[COPY]
        result.append(ratio_limit(f"{name}: beside a {SLICE}", 1.0, ours))
        over_us = [(ours[key] - copy[key]) / 1e3 for key in ("min_ns", "median_ns")]
        result.append(number_limit(f"{name}: beyond the rows alone (goal)", 60.0, "us", *over_us))
    return result


def attention_limits(sections: Json) -> list[Limit]:
    result = []
    for name, content in sections.items():
        if name.endswith(("by matmul", "only read")):  # no limit: they explain the others
            continue
        if name.startswith("attention"):
            result.append(ratio_limit(f"{name}: beside contiguous", 1.05, named(content)[VIEWS]))
        if name.startswith("fork attention"):
            row = named(content)["fork(8)"]
            result.append(ratio_limit(f"{name}: beside 8 copies", 0.6, row))
    return result


def fork_limits(sections: Json) -> list[Limit]:
    if "forks" not in sections:
        return []
    rows = named(sections["forks"]["rows"])
    return [
        number_limit(
            f"fork(8) of 2,048 tokens{again}",
            5.0,
            "ms",
            *(rows[f"fork(8){again}"][key] / 1e6 for key in ("min_ns", "median_ns")),
        )
        for again in ("", ", again", ", other prompt before")
    ]


def page_limits(sections: Json) -> list[Limit]:
    result = []
    if held := sections.get("footprint: KVPool, fork(16)"):
        after = {row["new_tokens"]: row for row in held["at"]}
        for new, row in after.items():
            # the prompt once, every sample's tokens, and a page of each range of each sample
            payload = held["prompt_bytes"] + 16 * new * NANO.token_bytes
            allowed = (payload + 16 * NANO.ranges * PAGE) / MIB
            both = row["own_count_bytes"] / MIB, row["physical_bytes"] / MIB
            what = f"physical, 128 + {new} tokens x 16 (stats(), then the system's count)"
            result.append(number_limit(what, allowed, "MiB", *both))
    for kind in ("plain", "fork"):
        if run := sections.get(f"generations: {kind}"):
            what = "later generations take pages" + (", forked" if kind == "fork" else "")
            both = run["later_blocks_taken"], run["later_most_blocks_taken"]
            result.append(number_limit(what, 0, "blocks", *both))
    if run := sections.get("generations: plain"):
        both = run["later_map_calls"], run["later_most_map_calls"]
        result.append(number_limit("later generations map", 0, "calls", *both))
        both = run["later_minor_faults"], run["later_most_minor_faults"]
        result.append(number_limit("later generations fault", 100, "faults", *both))
    return result


def cycle_limits(sections: Json) -> list[Limit]:
    if not (run := sections.get("cycles")):
        return []
    marks = run["marks"]
    half = len(marks) // 2
    grown = {
        key: mean(m[key] for m in marks[1 + half :]) - mean(m[key] for m in marks[1 : 1 + half])
        for key in ("resident_bytes", "anonymous_bytes", "map_lines")
    }
    over = run["most_physical_bytes"] / run["most_live_bytes"]
    peak = run["peak_by_stats_bytes"] / run["most_live_bytes"]
    resident, anonymous = grown["resident_bytes"] / MIB, grown["anonymous_bytes"] / MIB
    lines = grown["map_lines"]
    what = "cycles: growth from the first five marks to the last five"
    return [
        number_limit("cycles: physical beside the largest live blocks", 1.05, "x", over, peak),
        number_limit(f"{what}, resident", 1, "MiB", resident, resident),
        number_limit(f"{what}, anonymous", 1, "MiB", anonymous, anonymous),
        number_limit(f"{what}, lines of maps", 100, "lines", lines, lines),
    ]


def rollout_limits(sections: Json) -> list[Limit]:
    if not (rows := named(sections.get("rollout", []))):
        return []
    plain, ours = rows[PLAIN], rows[GROUP]
    times = [plain[key] / ours[key] for key in ("min_ns", "median_ns")]
    smaller = [
        plain[least] / ours[most]
        for least, most in (("least_above_bytes", "above_bytes"), ("above_bytes", "above_bytes"))
    ]
    alike = ours["answers"] == plain["answers"]
    same = "the same" if alike else "others"
    return [
        at_least("rollout: CPU time, times less", 3, *times),
        at_least("rollout: peak memory, times less", 6, *smaller),
        Limit("rollout: answers, float32", "the same", same, same, alike, alike),
    ]

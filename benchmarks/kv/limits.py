"""The limits that the pool's figures are compared with."""

from __future__ import annotations

from benchmarks.kit.harness import Json
from benchmarks.kit.limits import Limit, number_limit
from benchmarks.kv.common import MIB, NANO, PAGE
from benchmarks.kv.update import OURS, SLICE


def limits(sections: Json) -> list[Limit]:
    """The limits of all sections that have run."""
    result = []
    for name, content in sections.items():
        if name.startswith("update"):
            row = _row(content, OURS)
            result.append(_ratio_limit(f"{name}: beside a {SLICE}", 1.0, row))
        elif name == "fork attention, bfloat16":
            row = _row(content, "fork(8)")
            result.append(_ratio_limit(f"{name}: beside 8 copies", 0.6, row))
        elif name == "forks":
            for again in ("", ", again", ", other prompt before"):
                row = _row(content, f"fork(8){again}")
                times = row["min_ns"] / 1e6, row["median_ns"] / 1e6
                result.append(number_limit(f"fork(8) of 2,048 tokens{again}", 5.0, "ms", *times))
        elif name == "footprint: KVPool, fork(16)":
            result += _footprint_limits(content)
    return result


def _row(rows: list[Json], name: str) -> Json:
    return next(row for row in rows if row["name"] == name)


def _ratio_limit(what: str, allowed: float, row: Json) -> Limit:
    return number_limit(what, allowed, "x", row["ratio_of_mins"], row["median_ratio"])


def _footprint_limits(content: Json) -> list[Limit]:
    """The prompt once, the tokens of every sample, and a page of each range of each sample."""
    result = []
    for row in content["at"]:
        new = row["new_tokens"]
        payload = content["prompt_bytes"] + 16 * new * NANO.token_bytes
        allowed = (payload + 16 * NANO.ranges * PAGE) / MIB
        both = row["own_count_bytes"] / MIB, row["physical_bytes"] / MIB
        what = f"physical, 128 + {new} tokens x 16 (stats(), then the system's count)"
        result.append(number_limit(what, allowed, "MiB", *both))
    return result

"""The limits that the figures are compared with."""

from __future__ import annotations

from benchmarks.gate.common import MEMCPY, MIB, OURS
from benchmarks.gate.process import MEMORY
from benchmarks.kit.harness import Json
from benchmarks.kit.limits import Limit, number_limit


def limits(sections: Json) -> list[Limit]:
    """The limits of all sections that have run."""
    result = []
    if content := sections.get("record_512x8"):
        result.append(_record_limit(content))
    if content := sections.get("statistics_512x8"):
        times = content[0]["added_min_ns"] / 1e3, content[0]["added_median_ns"] / 1e3
        result.append(number_limit("statistics add, 512x8", 3.0, "us", *times))
    if content := sections.get("statistics_2048x64"):
        least, median = content[0]["times_faster_min"], content[0]["times_faster_median"]
        text = f"{least:.1f} x", f"{median:.1f} x"
        what = "statistics against torch's, 2048x64"
        result.append(Limit(what, ">= 12 x faster", *text, least >= 12, median >= 12))
    for variant in list(MEMORY)[:2]:
        if row := sections.get(f"memory: {variant}"):
            result += _memory_limits(variant, row)
    if content := sections.get("update_1"):
        row = content[-1]
        share = row["share_min_percent"], row["share_median_percent"]
        what = f"share of a 10 ms update, 1 x [512, 8], {row['name']}"
        result.append(number_limit(what, 0.1, "%", *share))
    if row := sections.get("import"):
        result.append(
            number_limit("import memtools", 30.0, "ms", row["min_ns"] / 1e6, row["median_ns"] / 1e6)
        )
        pulled, clean = ", ".join(row["pulls_in"]) or "neither", not row["pulls_in"]
        result.append(Limit("it pulls in torch, numpy", "neither", pulled, pulled, clean, clean))
    return result


def _record_limit(content: list[Json]) -> Limit:
    rows = {row["name"]: row for row in content}
    ours, extra = rows[OURS], 100.0
    over = ours["min_ns"] - 1.1 * rows[MEMCPY]["min_ns"], ours["median_excess_ns"]
    return Limit(
        f"{OURS} [512x8]",
        f"1.1 x memcpy + {extra:.0f} ns",
        f"{ours['ratio_of_mins']:.2f} x = 1.1 x {over[0]:+.0f} ns",
        f"{ours['median_ratio']:.2f} x = 1.1 x {over[1]:+.0f} ns",
        over[0] <= extra,
        over[1] <= extra,
    )


def _memory_limits(variant: str, row: Json) -> list[Limit]:
    grown = row["resident_growth_bytes"] / MIB
    inside = row["most_nbytes"] <= row["max_bytes"]
    most = f"{row['most_nbytes'] / row['max_bytes']:.3f} of it"
    return [
        number_limit(f"growth over 100,000 appends, {variant}", 1.0, "MiB", grown, grown),
        Limit(f"nbytes at every step, {variant}", "<= max_bytes", most, most, inside, inside),
    ]

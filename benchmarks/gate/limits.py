"""The limits that the figures are held against."""

from __future__ import annotations

from benchmarks.gate.common import MEMCPY, MIB, OURS, OURS_BARE
from benchmarks.gate.process import LAYERS, MEMORY
from benchmarks.kit.harness import Json
from benchmarks.kit.limits import Limit, number_limit


def record_limit(sections: Json, shape: str, name: str, extra: float) -> Limit:
    rows = {row["name"]: row for row in sections[f"record_{shape}"]}
    ours, memcpy = rows[name], rows[MEMCPY]
    over = ours["min_ns"] - 1.1 * memcpy["min_ns"], ours["median_excess_ns"]
    allowed = "1.1 x memcpy" + (f" + {extra:.0f} ns" if extra else "")
    return Limit(
        f"{name} [{shape}]",
        allowed,
        f"{ours['ratio_of_mins']:.2f} x = 1.1 x {over[0]:+.0f} ns",
        f"{ours['median_ratio']:.2f} x = 1.1 x {over[1]:+.0f} ns",
        over[0] <= extra,
        over[1] <= extra,
    )


def limits(sections: Json) -> list[Limit]:
    """Every limit of the plan whose sections have run."""
    result = []
    for shape, extra in (("512x8", 100.0), ("512x8_cached", 100.0), ("2048x64", 0.0)):
        if f"record_{shape}" in sections:
            result += [record_limit(sections, shape, name, extra) for name in (OURS, OURS_BARE)]
    if "statistics_512x8" in sections:
        row = sections["statistics_512x8"][0]
        added_us = (row["added_min_ns"] / 1e3, row["added_median_ns"] / 1e3)
        result.append(number_limit("statistics add, 512x8", 3.0, "us", *added_us))
    if "statistics_2048x64" in sections:
        row = sections["statistics_2048x64"][0]
        least, median = row["times_faster_min"], row["times_faster_median"]
        text = f"{least:.1f} x", f"{median:.1f} x"
        what = "statistics against torch's, 2048x64"
        result.append(Limit(what, ">= 12 x faster", *text, least >= 12, median >= 12))
    return result + memory_limits(sections) + share_limits(sections)


def memory_limits(sections: Json) -> list[Limit]:
    result = []
    for variant in MEMORY[:2]:
        if row := sections.get(f"memory: {variant}"):
            grown_mib = row["resident_growth_bytes"] / MIB
            what = f"growth over 100,000 appends, {variant}"
            result.append(number_limit(what, 1.0, "MiB", grown_mib, grown_mib))
            inside = row["most_nbytes"] <= row["max_bytes"]
            most = f"{row['most_nbytes'] / row['max_bytes']:.3f} of it"
            result.append(
                Limit(
                    f"nbytes at every step, {variant}", "<= max_bytes", most, most, inside, inside
                )
            )
    return result


def share_limits(sections: Json) -> list[Limit]:
    result = []
    for layers in LAYERS:
        for row in sections.get(f"update_{layers}", [])[2:4]:
            what = f"share of a 10 ms update, {layers} x [512, 8], {row['name']}"
            share = row["share_min_percent"], row["share_median_percent"]
            result.append(number_limit(what, 0.1, "%", *share))
    if took := sections.get("import"):
        times = took["min_ns"] / 1e6, took["median_ns"] / 1e6
        result.append(number_limit("import memtools", 30.0, "ms", *times))
        pulled = ", ".join(took["pulls_in"]) or "neither"
        clean = not took["pulls_in"]
        result.append(Limit("it pulls in torch, numpy", "neither", pulled, pulled, clean, clean))
    return result

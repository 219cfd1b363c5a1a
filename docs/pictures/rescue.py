"""Draw the README's picture: one training loop, twice under one memory limit.

    python examples/demo.py --only moe_world_model -o made
    python docs/pictures/rescue.py made/moe_world_model-{list,memtools}.mem    # into rescue.json
    python docs/pictures/rescue.py                      # draw rescue-light.svg, rescue-dark.svg

The records are of runs in a control group with a limit of 640 MiB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
POINTS = 200
COLOURS = {
    "light": {"text": "#24292f", "grid": "#d0d7de", "list": "#cf222e", "memtools": "#0969da"},
    "dark": {"text": "#e6edf3", "grid": "#30363d", "list": "#ff7b72", "memtools": "#58a6ff"},
}


def series_of(path: str) -> dict[str, Any]:
    """Read the memory of the control group by step, and what was found, from a record."""
    import memtools
    from memtools._record.figures import figures_of

    record = memtools.read_record(path)
    buckets = record.buckets
    points: dict[int, float] = {}
    for step, used in zip(buckets.last["step"], buckets.most["cgroup_used"], strict=True):
        if step < 1 << 62 and used < 1 << 62:
            points[step] = round(used / MIB, 1)
    every = max(1, len(points) // POINTS)
    found = [
        (event.step, event.data.holder)
        for event in record.events
        if isinstance(event.data, memtools.LeakFinding) and event.data.holder
    ]
    return {
        "steps": list(points)[::every] + list(points)[-1:],
        "mib": list(points.values())[::every] + list(points.values())[-1:],
        "first_step": found[0][0] if found else None,
        "found": found[-1][1] if found else "",
        "limit_mib": buckets.last["cgroup_limit"][-1] / MIB,
        "end": figures_of(record).ending.text,
    }


def draw(data: dict[str, Any], theme: str) -> None:
    """Draw the picture for a light or a dark page."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    colour = COLOURS[theme]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rescue", "font.size": 10,
                         "font.family": "sans-serif",
                         "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
                         "text.color": colour["text"], "axes.labelcolor": colour["text"],
                         "xtick.color": colour["text"], "ytick.color": colour["text"]})  # fmt: skip
    figure, axes = plt.subplots(figsize=(8.8, 3.4), layout="constrained")
    limit = data["list"]["limit_mib"]
    axes.axhline(limit, color=colour["text"], linewidth=1, linestyle=(0, (4, 3)))
    axes.text(0, limit + 12, f"limit of the container: {limit:.0f} MiB", va="bottom")
    for name in ("list", "memtools"):
        axes.plot(data[name]["steps"], data[name]["mib"], color=colour[name], linewidth=2)
    bad, good = data["list"], data["memtools"]
    axes.plot(bad["steps"][-1], bad["mib"][-1], "X", color=colour["list"], markersize=11)
    axes.annotate("gates in a list", (bad["steps"][150], bad["mib"][150]), (4, -20), ha="left",
                  textcoords="offset points", color=colour["list"])  # fmt: skip
    axes.annotate(f"killed in update {bad['steps'][-1] + 1:,}", (bad["steps"][-1], bad["mib"][-1]),
                    (-2, -24), textcoords="offset points", color=colour["list"],
                  ha="center")  # fmt: skip
    holder = bad["found"]
    first = next(n for n, step in enumerate(bad["steps"]) if step >= bad["first_step"])
    axes.annotate(f"named at update {bad['first_step']}: {holder}",
                  (bad["steps"][first], bad["mib"][first]), (24, 74), textcoords="offset points",
                  color=colour["list"],
                  arrowprops={"arrowstyle": "-", "color": colour["list"]})  # fmt: skip
    middle = len(good["steps"]) * 11 // 20
    axes.annotate("the same losses with memtools.GateHistory",
                  (good["steps"][middle], good["mib"][middle]), (0, -22),
                  textcoords="offset points", color=colour["memtools"])  # fmt: skip
    axes.set(xlabel="updates", ylabel="memory, MiB", ylim=(0, limit * 1.18), xlim=(0, None))
    axes.grid(axis="y", color=colour["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    figure.savefig(HERE / f"rescue-{theme}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    facts = HERE / "rescue.json"
    if len(sys.argv) == 3:
        data = {"list": series_of(sys.argv[1]), "memtools": series_of(sys.argv[2])}
        facts.write_text(json.dumps(data) + "\n")
    data = json.loads(facts.read_text())
    for theme in COLOURS:
        draw(data, theme)


if __name__ == "__main__":
    main()

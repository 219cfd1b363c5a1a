"""The heat map of GateHistory.plot(): experts over time."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools.gate.stats import GateStats


def draw_load(windows: list[GateStats], path: str | os.PathLike[str]) -> None:
    """Draw the load of experts over time to an image file.

    Each window is a column, as wide as its entries; a load of 1 is that of a balanced router.

    Args:
        windows: consecutive windows, oldest first.
        path: the file to write.

    Raises ImportError if matplotlib is not installed, ValueError if there is nothing to draw.
    """
    path = os.fspath(path)
    try:
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib; run python -m pip install matplotlib"
        ) from error
    if not windows or not windows[0].n_experts:
        raise ValueError("nothing to plot: no gates were appended yet")
    columns = [[share * w.n_experts for share in w.load_fraction] for w in windows]
    image = [list(row) for row in zip(*columns, strict=True)]
    edges = [0, *accumulate(window.entries for window in windows)]
    top = max(2.0, *(max(column) for column in columns))

    # A Figure of its own, not pyplot's: no global state, no display, safe in any thread.
    figure = Figure(figsize=(9, 1.8 + 0.22 * min(len(image), 32)), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.pcolormesh(
        edges,
        [expert - 0.5 for expert in range(len(image) + 1)],
        image,
        cmap="RdBu_r",
        norm=TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top),
    )
    axes.set_xlabel("entries appended")
    axes.set_ylabel("expert")
    axes.set_yticks(range(0, len(image), max(1, len(image) // 16)))
    tokens = sum(window.tokens for window in windows)
    axes.set_title(f"Expert load over {tokens:,} tokens", loc="left")
    figure.colorbar(shown, ax=axes, label="load, 1 = balanced")
    figure.savefig(path, dpi=150)

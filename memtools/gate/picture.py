"""The still picture of a GateHistory, which a notebook shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtools._base import picture
from memtools._base.picture import Part

if TYPE_CHECKING:
    from memtools.gate.history import GateHistory
    from memtools.gate.stats import GateStats

EXPERTS = 128  # columns that are drawn; of more of them the first


def picture_of_history(history: GateHistory) -> str:
    """The picture as HTML without a script."""
    head = picture.heading(repr(history))
    if history.closed:
        return picture.card(head)
    held = [picture.bar([Part("records", history.nbytes, "s0")], history.max_bytes)]
    try:
        stats = history.stats()
    except ValueError:  # made with statistics=False
        return picture.card(head, *held)
    if not stats.n_experts:
        return picture.card(head, *held)
    return picture.card(head, *held, picture.line(str(stats)), *_load(stats))


def _load(stats: GateStats) -> list[str]:
    """A column for each expert: its load, where 1 is that of a balanced router."""
    loads = [share * stats.n_experts for share in stats.load_fraction[:EXPERTS]]
    names = [f"expert {i}: {load:.2f} of a balanced load" for i, load in enumerate(loads)]
    first = "" if stats.n_experts <= EXPERTS else f", the first {EXPERTS} of {stats.n_experts:,}"
    return [
        picture.title(f"load of each expert{first}; the line is that of a balanced router"),
        picture.columns(list(zip(names, loads, strict=True)), 1.0),
    ]

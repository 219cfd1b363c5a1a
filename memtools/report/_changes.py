"""The traced step over time as it is, and after each change of the program, for the page.

    TracedPeak.kept ──► restored ──► replay(trace, [change]) ──► stacked ──► a drawing

Nothing runs: the changes are replayed on the text that the record keeps.
"""

from __future__ import annotations

from typing import NamedTuple

from memtools._base.size import format_bytes
from memtools._base.text import shown
from memtools._record.kinds import Peak
from memtools._record.peaks import Stack, stack_from

DRAWN = 8  # changes, at most


class Drawing(NamedTuple):
    """A stack, and its title."""

    title: str
    stack: Stack


def drawings(peak: Peak) -> tuple[Drawing, list[Drawing]]:
    """The traced step as it is, and after each change that lowers its peak, the best first; without
    changes if the record has no trace, or none that can be read."""
    from memtools._blocks.changes import known_changes
    from memtools._blocks.kept import restored
    from memtools._blocks.replay import replay
    from memtools._blocks.stacked import stacked

    found, traced = list[Drawing](), peak.traced
    nothing = Drawing("", Stack((), (), 0))
    if traced is None or not traced.kept:
        return nothing, found
    try:
        trace, deaths = restored(traced.kept)
        known = known_changes(trace, deaths)
        before = stack_from(*stacked(trace))
        for change in [one for one in traced.changes if one.name in known][:DRAWN]:
            after = stack_from(*stacked(replay(trace, [known[change.name]])))
            title = f"{change.name}: {format_bytes(change.peak_bytes)}"
            found += [] if after is None else [Drawing(shown(title), after)]
    except ValueError:
        return nothing, []
    if before is None or not found:
        return nothing, []
    return Drawing(f"Unchanged: {format_bytes(traced.peak_bytes)}", before), found

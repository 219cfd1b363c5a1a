"""TracedTensors: the lines that make the tensors which stay, of a test in which tensors grow.

    a point at which tensors have grown ──► torch's reports note the line of each block
    the points after it ──► mark(): bytes by line of what lives
    the end ──► what lines gained from the first mark to the last ──► made_at of what grows

What each step makes anew lives at all marks alike, and is no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memtools._leak.finding import LeakFinding
from memtools._monitor.places import Living, Place, Site, name_of, place_of, places_of
from memtools._monitor.tracewindow import OF_A_BLOCK, BlocksLike


class TracedTensors:
    """Torch's blocks on the host by the line that made them, from now on.

    It ends with the reports.

    Args:
        blocks: torch's reports, which are on.
    """

    __slots__ = ("_blocks", "_first", "_marks")

    def __init__(self, blocks: BlocksLike) -> None:
        self._blocks = blocks
        blocks.trace(True)
        self._first = blocks.turn()
        #: (step, bytes by line): the first mark and the newest
        self._marks: list[tuple[int, Living]] = []

    def mark(self, step: int) -> None:
        """Note what lives of what was made since."""
        if not self._blocks.is_on:
            return
        living: Living = {}
        for site, size, blocks in self._blocks.sites(self._first, self._blocks.turn()):
            place = place_of(Place(*frame) for frame in self._blocks.frames(site))
            if place is not None:
                living[place] = living.get(place, 0.0) + size + OF_A_BLOCK * blocks
        self._marks = [*self._marks[:1], (step, living)]

    def with_lines(self, findings: Sequence[LeakFinding]) -> list[LeakFinding]:
        """The findings, each with the line that made it where one explains its rate."""
        if len(self._marks) < 2:
            return list(findings)
        (since, before), (until, now) = self._marks
        gained = {place: size - before.get(place, 0.0) for place, size in now.items()}
        sites = [Site(place, size / (until - since)) for place, size in gained.items() if size > 0]
        found = places_of(findings, sorted(sites, key=lambda site: -site.rate))
        return [
            replace(one, made_at=" and ".join(map(name_of, found[one.key])))
            if one.key in found
            else one
            for one in findings
        ]

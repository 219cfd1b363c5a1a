"""One verdict about growth for a whole record: kind, rate, start, forecast and holders agree.

The run's own test saw signals that a record has no column of (Python's blocks, tensors), and knows
who holds what; the record's series go on to the end of the run. Where both speak of one signal, the
series have the newer figures and the higher of both grades stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memtools._base.size import format_bytes
from memtools._base.text import duration, shown
from memtools.record.growth import Growth, Judged, Late, Rise, judge, rounded
from memtools.record.holdings import Holding
from memtools.record.kinds import Leak

if TYPE_CHECKING:
    from memtools.record.figures import Figures
    from memtools.record.record import Record

_RANK = {"quiet": 0, "growing": 1, "fragmentation": 2, "likely": 3, "leak": 4}
#: Bytes a second, where no steps were made: less growth that no container explains is told by
#: `explain` alone, as one quiet line.
LEAST_WITHOUT_STEPS = 10 * 1024
#: without steps nobody knows where a program's start ends: a rise shorter than this is its start
SHORTEST_SECONDS = 10.0


@dataclass(frozen=True)
class Verdict:
    """What is known of growth at the end of a record, or now.

    `growth`: what the test says, the worst first; `rises`: what rose without a test; `short`: why
    there was none, or not of all; None where each signal was tested. `forecast`: the only one.
    """

    growth: tuple[Growth, ...]
    rises: tuple[Rise, ...]
    short: str | None
    holders: tuple[Holding, ...]
    forecast: str | None
    #: "the process does not grow" and so on, where each signal was tested and nothing was found;
    #: or that memory rose at the very end
    nothing: str
    late: Late | None
    #: whether what the process takes was tested; of its workers that may not be known
    tested: bool
    #: how long a step is; None where that is not known
    step_seconds: float | None

    @property
    def leaking(self) -> bool:
        return any(one.kind in ("leak", "likely") for one in self.growth)

    @property
    def significant(self) -> tuple[Growth, ...]:
        """Those that matter: not a few bytes now and then that no container explains."""
        named = any(holder.collects and holder.named for holder in self.holders)
        return tuple(g for g in self.growth if named or self._matters(g))

    def _matters(self, growth: Growth) -> bool:
        from memtools.leak.detector import matters

        if growth.per == "s":
            return growth.rate_bytes >= LEAST_WITHOUT_STEPS
        return matters(growth.rate_bytes, 1 / self.step_seconds if self.step_seconds else 0.0)

    @property
    def grows(self) -> bool:
        return bool(self.significant or self.rises)

    def lines(self, *, quiet: bool = False) -> list[str]:
        """What is known of growth, then who holds what grows, one line each. `quiet`: also what is
        too little to matter, and that nothing grows."""
        found = [str(one) for one in (*self.significant, *self.rises)]
        if found:
            found[0] += f"; {self.forecast}" if self.forecast else ""
            found += [one.text for one in self.holders]
        if not quiet:
            return found
        little = [one for one in self.growth if one not in self.significant]
        found += [
            f"{one.signal} grows by {format_bytes(one.rate_bytes)} a "
            f"{'step' if one.per == 'step' else 'second'}, too little to matter; no container that "
            "grows explains it"
            for one in little[:1]
        ]
        return found or [self.short or self.nothing]

    def as_json(self) -> dict[str, Any]:
        from memtools.record.figures import plain

        growth = [{**plain(g), "text": str(g), "forecast": g.forecast()} for g in self.growth]
        return {
            "growth": growth,
            "rises": [{**plain(rise), "text": str(rise)} for rise in self.rises],
            "not_judged": self.short,
            "forecast": self.forecast,
            "growth_text": self.lines(quiet=True),
        }


def _nothing(figures: Figures) -> str:
    """Who does not grow: files in /dev/shm and other programs are no part of it."""
    if figures.outside:
        return "the process tree does not grow"
    workers = figures.workers is not None
    return "neither the process nor its workers grow" if workers else "the process does not grow"


def verdict_of(figures: Figures) -> Verdict:
    """The verdict; takes some 40 ms for a record of the usual size."""
    room = figures.room_bytes
    in_use = 0 if figures.together is None else figures.together.last_bytes
    limit = None if room is None else in_use + room
    judged = judge(figures.line, limit, list(figures.devices))
    live, taken_back = _live(figures.record)
    growth = _merged(live, judged, taken_back)
    growth = [_forecast(figures, one, room) for one in growth]
    growth.sort(key=lambda one: (-_RANK[one.kind], -one.rate_bytes))
    enough = SHORTEST_SECONDS if not figures.ending.by_memory(near=figures.near_limit) else 0.0
    rises = [rise for rise in judged.rises if rise.per == "step" or rise.over >= enough]
    if live is not None and live.signal != "children":
        rises = [rise for rise in rises if rise.signal == "children"]
    verdict = Verdict(
        tuple(growth),
        tuple(rises),
        judged.short,
        figures.holders,
        None,
        _nothing(figures) if judged.late is None else str(judged.late),
        judged.late,
        judged.enough,
        judged.step_seconds,
    )
    if figures.ending.by_memory(near=figures.near_limit):
        return replace(verdict, forecast="the limit was reached" if verdict.grows else None)
    texts = [text for text in (one.forecast() for one in verdict.significant) if text]
    texts += [text for text in (_until(rise, room) for rise in rises) if text]
    return replace(verdict, forecast=texts[0] if texts else None)


def _live(record: Record) -> tuple[Growth | None, bool]:
    """(the newest verdict of the run itself; whether the newest took all back)."""
    said = [event.data for event in record.events if isinstance(event.data, Leak)]
    if not said or said[-1].over:
        return None, bool(said)
    last, rate = said[-1], said[-1].rate_bytes_per_step
    if last.signal is None or last.kind not in _RANK or rate < 0.5:
        return None, False
    kind = "growing" if last.filling else last.kind
    grade = "fair" if kind == "likely" else "good" if kind == "leak" else "low"
    rate, filling = (rate if rate >= 1 else 0), shown(last.filling)
    live = Growth(
        kind, last.signal, "step", rate, None, grade, last.since_step, None, None, None, filling
    )
    return live, False


def _merged(live: Growth | None, judged: Judged, taken_back: bool) -> list[Growth]:
    if taken_back:  # by the exact signals: resident memory alone says less
        return [one for one in judged.growth if one.signal != "rss" or _RANK[one.kind] > 2]
    if live is None:
        return judged.growth
    of = {g.signal: g for g in judged.growth if g.per == "step"}
    same = of.get(live.signal) or (of.get("heap") if live.signal == "rss" else None)
    rest = [g for g in judged.growth if g is not same]
    if same is None:
        live = _newest(live, judged.rises)
        if live.signal not in ("rss", "children", "device"):
            rest = [g for g in rest if g.signal != "rss"]  # its own cost, told by an exact signal
        return [live, *rest]
    kind = max(live.kind, same.kind, key=_RANK.__getitem__)
    if live.filling:
        kind = "growing"
    return [replace(same, kind=kind, filling=live.filling), *rest]


def _newest(live: Growth, rises: list[Rise]) -> Growth:
    """With the rate and the start of the series, which go on to the end of the run."""
    own = ("heap", "rss")
    line = next((r for r in rises if r.signal == live.signal and r.per == "step"), None)
    if line is None and live.signal in own:
        line = next((r for r in rises if r.signal in own and r.per == "step"), None)
    if line is None:
        return live
    return replace(
        live,
        signal=line.signal,
        rate_bytes=line.rate_bytes,
        since=line.since,
        since_seconds=line.since_seconds,
    )


def _forecast(figures: Figures, growth: Growth, room: int | None) -> Growth:
    """With what is left until the limit, hardly later than the growing signal itself allows."""
    if growth.filling or growth.shared or growth.rate_bytes < 1:
        return replace(growth, left=None, seconds_left=None)
    if growth.signal.startswith("cuda"):
        return growth
    if room is None:
        return replace(growth, left=None, seconds_left=None)
    own = room / growth.rate_bytes
    low = min(own, room / max(growth.rate_bytes, growth.rss_bytes or 0))
    before = growth.left or (math.inf, math.inf)
    left = min(before[0], low * 0.9), min(max(before[1], low), own * 1.25)
    pace = 1.0
    if growth.per == "step":
        pace = figures.seconds / max(1, figures.steps or 1)
        if growth.left and growth.seconds_left and 0 < growth.left[0] < math.inf:
            pace = growth.seconds_left[0] / growth.left[0]
    return replace(growth, left=left, seconds_left=(left[0] * pace, left[1] * pace))


def _until(rise: Rise, room: int | None) -> str | None:
    if room is None or rise.signal.startswith("cuda"):
        return None
    left = room / rise.rate_bytes
    if rise.per == "step":
        return f"the limit in about {rounded(left)} steps if it goes on" if left >= 1 else None
    return f"the limit in about {duration(left)} if it goes on" if left >= 0.1 else None

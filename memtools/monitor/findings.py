"""The findings that stand, from one look to the next.

findings_of(Evidence) ──► Standing.add: first_step, grades that a repetition raises, withdrawal
Points ──► Standing.repace, end: rates between two walks, and what no longer grows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memtools.leak.finding import RANK, Key, LeakFinding
from memtools.leak.judge import C_HEAP, CYCLES, THRESHOLDS
from memtools.monitor.evidence import OF_CENSUS
from memtools.monitor.signals import Points

_EXPLAINS = (C_HEAP, CYCLES)  # kinds of findings that say more than that something grows


@dataclass
class Stand:
    """A finding that stands, and how often looks have shown it."""

    finding: LeakFinding
    looks: int = 1
    missed: int = 0
    #: bytes a step by which its part of memory grew when it was first said; 0: not known yet
    pace: float = 0.0
    #: its bytes a step as the newest walk has found them; 0 until there is one
    rate: float = 0.0

    def confirmed(self, grade: str, steps: int) -> str:
        """What was suspected for so many steps, and was seen again and again, is growing."""
        if grade != "suspect" or not self.finding.kind or self.looks < THRESHOLDS.confirmed_looks:
            return grade
        return "growing" if steps >= THRESHOLDS.confirmed_steps else grade


class Standing:
    """The findings that stand. Grades rise and stay, until growth has ended."""

    def __init__(self) -> None:
        self._all: dict[Key, Stand] = {}
        self._paces: dict[str, float] = {}  # of each part, when the rates were made

    def findings(self) -> tuple[LeakFinding, ...]:
        """The worst first: by the grade, then by the rate."""
        found = [stand.finding for stand in self._all.values()]
        return tuple(sorted(found, key=lambda f: (-RANK[f.grade], -f.rate_bytes)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def has_holders(self) -> bool:
        """Whether a holder of this process's memory is among them, as a census names it."""
        return any(one.holder and one.part in OF_CENSUS for one in self.findings())

    def add(
        self, step: int, found: Sequence[LeakFinding], *, walked: bool = True
    ) -> tuple[list[LeakFinding], list[LeakFinding]]:
        """What a look has shown. Returns those of which a word is due, new ones and those of a
        higher grade; and those that end: what nobody was known to hold, now that somebody is, and
        what was the C heap's as long as it grew evenly."""
        news, named = [], {one.key: one for one in found if walked or not self._is_held(one)}
        for key, one in named.items():
            old = self._all.get(key)
            if old is None:
                made_at = one.made_at or self._made_at(one)
                stand = self._all[key] = Stand(replace(one, first_step=step, made_at=made_at))
                news.append(stand.finding)
                continue
            before, old.looks, old.missed = old.finding, old.looks + 1, 0
            first = before.first_step if before.first_step is not None else step
            grade = one.grade if "fills" in (one.grade, before.grade) else _higher(before, one)
            grade = old.confirmed(grade, step - first)
            since = before.since_step if before.since_step is not None else one.since_step
            old.finding = replace(
                one, grade=grade, first_step=first, since_step=since,
                made_at=one.made_at or before.made_at,
            )  # fmt: skip
            if grade != before.grade:
                news.append(old.finding)
        replaced = []
        explained = {one.part for one in found if one.holder or one.kind in _EXPLAINS}
        nameless = {one.part for one in found if _is_nameless(one)}
        for key, stand in list(self._all.items()):
            if key in named:
                continue
            if not walked and stand.finding.part in OF_CENSUS:
                continue  # nobody has looked
            stand.missed += 1
            others = nameless if stand.finding.kind == C_HEAP else explained
            if _is_nobodys(stand.finding) and stand.finding.part in others:
                replaced.append(self._end(key))
        return news, replaced

    def _is_held(self, one: LeakFinding) -> bool:
        """Whether it says that a part grows which somebody is known to hold: where nobody has
        looked, that still holds."""
        if one.key in self._all or not _is_nameless(one) or one.part not in OF_CENSUS:
            return False
        return any(
            stand.finding.holder and stand.finding.part == one.part for stand in self._all.values()
        )

    def _made_at(self, one: LeakFinding) -> str:
        """Where growth was made that nobody was known to hold, and that is as fast as what has got
        a name now: it is the same."""
        for stand in self._all.values():
            other = stand.finding
            if _is_nobodys(other) and other.part == one.part and not one.process:
                slower, faster = sorted((other.rate_bytes, one.rate_bytes))
                if faster <= THRESHOLDS.alike * slower:
                    return other.made_at
        return ""

    def go_on(self, points: Points, step: int) -> list[LeakFinding]:
        """A look without a walk: what was named goes on where memory does. Returns those of a
        higher grade."""
        news = []
        for stand in self._all.values():
            finding = stand.finding
            if not finding.holder or finding.part not in OF_CENSUS or finding.first_step is None:
                continue
            recent = points.recent(finding.part, THRESHOLDS.confirmed_steps)
            if (
                stand.missed
                or recent is None
                or recent < THRESHOLDS.explained * self._seen_of(finding)
            ):
                continue
            stand.looks += 1
            grade = stand.confirmed(finding.grade, step - (finding.first_step or 0))
            if grade != finding.grade:
                stand.finding = replace(finding, grade=grade)
                news.append(stand.finding)
        return news

    def rated(self, paces: Mapping[str, float]) -> None:
        """Rates were made while the parts of memory grew by so many bytes a step."""
        self._paces.update(paces)
        for stand in self._all.values():
            if stand.finding.part in paces:
                stand.pace = stand.pace or paces[stand.finding.part]
                stand.rate = stand.finding.rate_bytes

    def repace(self, paces: Mapping[str, float]) -> bool:
        """Between two walks: what was named grows as much faster or slower as its part of memory
        does since the newest of them. What a worker holds keeps the rate that the worker itself has
        measured: the memory of children has in it what they take for their own looks, and give
        back. Returns whether something has become so much faster that somebody else may hold it."""
        is_another = False
        for part, now in paces.items():
            before = self._paces.get(part, 0.0)
            if before < THRESHOLDS.least_rate:
                continue
            is_another |= now > before / THRESHOLDS.explained**0.5
            if now > THRESHOLDS.faster * before:
                continue  # somebody else: the next walk tells
            share = (
                now / before if now >= before / THRESHOLDS.faster else 1.0
            )  # what ends is judged by end()
            for stand in self._all.values():
                one = stand.finding
                if _is_of_worker(one) or one.part != part or not stand.rate:
                    continue  # one without a rate of a walk keeps what its own look has measured
                if one.holder and stand.rate < THRESHOLDS.explained * before:
                    continue  # the rest of its part tells nothing of it
                if not stand.missed and one.grade != "fills":
                    stand.finding = replace(one, rate_bytes=stand.rate * share)
        return is_another

    def _seen_of(self, finding: LeakFinding) -> float:
        """Bytes a step of it that its part of memory shows: what C code costs may be more."""
        if finding.kind != C_HEAP:
            return finding.rate_bytes
        return min(finding.rate_bytes, self._paces.get(finding.part, math.inf))

    def end(self, points: Points, step: int) -> list[LeakFinding]:
        """The findings that no longer grow, which stand no more."""
        over = []
        for key, stand in list(self._all.items()):
            if self._has_ended(stand, points, step):
                over.append(self._end(key))
        return over

    def _has_ended(self, stand: Stand, points: Points, step: int) -> bool:
        finding = stand.finding
        if _is_of_worker(finding):
            return stand.missed >= 2
        name = finding.part
        rises = points.rises(name)
        apart = [b - a for a, b in pairwise(rises)]
        window = max(
            THRESHOLDS.ended_steps,
            THRESHOLDS.ended_share_of_run * step,
            2 * max(apart[-4:], default=0),
        )
        known = points.steps[-1] - points.steps[0]
        if known < THRESHOLDS.confirmed_steps:
            return False
        is_held = bool(finding.holder) and not stand.missed  # as the newest walk has seen
        since = finding.since_step if finding.since_step is not None else points.steps[0]
        garbage = THRESHOLDS.cleared * finding.rate_bytes * (step - since) if is_held else 0
        recent = points.recent(name, min(int(window), known), but_a_fall=garbage)
        if recent is None:
            return False
        least = max(THRESHOLDS.least_rate / 4, THRESHOLDS.ended * self._seen_of(finding))
        if is_held and self._is_lost_in_noise(finding, points, step):
            return False  # the next walk tells
        if recent < least or (
            finding.kind == C_HEAP and recent < THRESHOLDS.ended_c_heap * stand.pace
        ):
            return True
        return stand.missed >= 2 or (stand.missed == 1 and recent < 2 * least)

    @staticmethod
    def _is_lost_in_noise(finding: LeakFinding, points: Points, step: int) -> bool:
        """Whether its part of memory varies so much that it may go on at its rate unseen."""
        pace = points.pace(finding.part, max(points.steps[0], step // 4))
        if not math.isfinite(pace.error) or pace.error <= THRESHOLDS.exact * finding.rate_bytes:
            return False
        return abs(pace.rate - finding.rate_bytes) <= THRESHOLDS.certain_errors * pace.error

    def _end(self, key: Key) -> LeakFinding:
        return replace(self._all.pop(key).finding, over=True)

    def present(self) -> tuple[LeakFinding, ...]:
        """Those that the newest look has shown, without those that may be about to end."""
        return tuple(stand.finding for stand in self._all.values() if stand.missed == 0)

    def each(self, change: Mapping[Key, LeakFinding]) -> None:
        """Take the place of findings that stand by others of the same key."""
        for key, finding in change.items():
            if key in self._all:
                self._all[key].finding = finding


def _is_nameless(finding: LeakFinding) -> bool:
    """Whether it says that something grows, and not what."""
    return not finding.holder and finding.kind in ("", "children", "shared memory")


def _is_nobodys(finding: LeakFinding) -> bool:
    """Whether nobody is known to hold it."""
    return _is_nameless(finding) or finding.kind == C_HEAP


def _is_of_worker(finding: LeakFinding) -> bool:
    """Whether a worker has looked for itself, and found it; else it is seen from outside."""
    return bool(finding.process and finding.holder)


def _higher(a: LeakFinding, b: LeakFinding) -> str:
    return max(a.grade, b.grade, key=RANK.__getitem__)

"""The ledger: which findings stand, from one look to the next, and which have ended.

    findings_of(Evidence) ──► Ledger.look ───► what is new or more certain, what is withdrawn
    growth of each part ────► Ledger.follow ─► rates between two walks of the heap
    points of the looks ────► Ledger.end ────► what no longer grows

A finding has one rate. A walk of the heap measures it, and the ledger keeps which share of the
growth of its part of memory that was. Until the next walk the rate is this share of what the part
grows by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memtools._leak.finding import FIRST_WRITES, RANK, WORKERS, Key, LeakFinding, is_little
from memtools._leak.judge import C_HEAP, CYCLES, OF_CENSUS, PYTHON, THRESHOLDS
from memtools._leak.jumps import LATE
from memtools._leak.series import Points, since_of


@dataclass
class Entry:
    """A finding that stands.

    Attributes:
        finding: as of now.
        looks: how many looks have shown it.
        missed: how many looks since then have not.
        share: of the growth of its part of memory, at the newest walk; None before the first.
        first_pace: bytes a step by which the part grew when the finding was first measured.
        walked: the step of the newest walk that has found its holder; -1 before the first.
        before: bytes a step of its part and of itself, as of a walk when the part was slower.
        is_steady: whether it came as fast since then, while its part became faster.
        grade_before: its grade before the newest look that has shown it; "" before the second.
    """

    finding: LeakFinding
    looks: int = 1
    missed: int = 0
    share: float | None = None
    first_pace: float | None = None
    walked: int = -1
    before: tuple[float, float] | None = None
    is_steady: bool = False
    grade_before: str = ""

    def confirmed(self, grade: str, step: int) -> str:
        """A suspect that was seen again and again for long enough is growing; but not what may be
        garbage that is collected later."""
        kind, cause = self.finding.kind, self.finding.cause
        is_suspect = grade == "suspect" and bool(cause if kind == CYCLES else kind)
        if not is_suspect or self.looks < THRESHOLDS.confirmed_looks:
            return grade
        steps = step - (step if self.finding.first_step is None else self.finding.first_step)
        return "growing" if steps >= THRESHOLDS.confirmed_steps else grade


class Ledger:
    """The findings that stand. Grades rise and stay, until growth has ended."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._paces: dict[str, float] = {}  # of each part of memory, at the newest walk

    def __bool__(self) -> bool:
        return bool(self._entries)

    def findings(self) -> tuple[LeakFinding, ...]:
        """The worst first: by the grade, then by the rate."""
        found = [entry.finding for entry in self._entries.values()]
        return tuple(sorted(found, key=lambda f: (-RANK[f.grade], -f.rate_bytes)))

    def present(self) -> tuple[LeakFinding, ...]:
        """Those that the newest look has shown, without those that may be about to end."""
        return tuple(entry.finding for entry in self._entries.values() if entry.missed == 0)

    def has_holders(self) -> bool:
        """Whether a holder of this process's memory is among them, as a census names it."""
        return any(one.holder and one.part in OF_CENSUS for one in self.findings())

    def renew(self, found: Sequence[LeakFinding]) -> None:
        """Enter the newest figures of what workers have found, where it stands."""
        for one in found:
            entry = self._entries.get(one.key)
            if entry is not None and _is_of_worker(one) and one.grade != "fills":
                entry.finding = replace(
                    entry.finding, process=one.process, rate_bytes=one.rate_bytes, what=one.what
                )

    def update(self, findings: Sequence[LeakFinding]) -> None:
        """Replace findings that stand by those of the same key."""
        for one in findings:
            if one.key in self._entries:
                self._entries[one.key].finding = one

    # --- a look ---

    def look(
        self,
        step: int,
        found: Sequence[LeakFinding],
        paces: Mapping[str, float],
        points: Points,
        *,
        walked: bool = True,
        rising: Collection[str] = (),
    ) -> tuple[list[LeakFinding], list[LeakFinding]]:
        """Enter what a look has shown.

        Args:
            step: of the look.
            found: its findings.
            paces: bytes a step by which each part of memory grows now.
            points: the parts of memory at all looks.
            walked: whether the heap was walked. Otherwise who was named goes on where memory does.
            rising: as for `follow`.

        Returns those to report, which are new or have a higher grade, and those that are withdrawn:
        growth without a holder that has one now, and growth of the C heap that is no longer even.
        """
        named = {one.key: one for one in found if walked or not self._is_held(one)}
        news = [one for one in map(lambda one: self._enter(step, one), named.values()) if one]
        taken_back = self._miss(found, named, paces, walked=walked)
        if walked:
            self._measure(paces)
            for key in named:
                self._entries[key].walked = step
        else:
            news += self._go_on(points, step)
            kept = {one.finding.part for key, one in self._entries.items() if key not in named}
            kept.intersection_update(OF_CENSUS)
            self.follow({part: pace for part, pace in paces.items() if part in kept}, rising)
            self._measure({part: pace for part, pace in paces.items() if part not in kept})
        return self._without_over(news, points, step), taken_back

    def _without_over(
        self, news: Sequence[LeakFinding], points: Points, step: int
    ) -> list[LeakFinding]:
        """What is new, without what no longer grows at this look: a container that has stopped
        growing only lately has gained since the first look all the same. What stood before keeps
        its grade of before, until `end` takes it out."""
        over = [one.key for one in news if self._has_ended(self._entries[one.key], points, step)]
        for key in over:
            entry = self._entries[key]
            if entry.finding.first_step == step:
                self._end(key)
            else:
                entry.finding = replace(entry.finding, grade=entry.grade_before)
        return [one for one in news if one.key not in over]

    def _enter(self, step: int, one: LeakFinding) -> LeakFinding | None:
        """The finding as it stands from now on; None where nothing about it is to be reported."""
        entry = self._entries.get(one.key)
        if entry is None:
            made_at = one.made_at or self._made_at(one)
            entry = Entry(replace(one, first_step=step, made_at=made_at))
            self._entries[one.key] = entry
            return entry.finding
        before, entry.looks, entry.missed = entry.finding, entry.looks + 1, 0
        entry.grade_before = before.grade
        grade = one.grade
        if "fills" not in (one.grade, before.grade):
            grade = max(before.grade, one.grade, key=RANK.__getitem__)
        since = one.since_step if before.since_step is None else before.since_step
        entry.finding = replace(
            one,
            grade=entry.confirmed(grade, step),
            first_step=step if before.first_step is None else before.first_step,
            since_step=since,
            made_at=one.made_at or before.made_at,
            kept_at=one.kept_at or before.kept_at,
        )
        is_new = entry.finding.grade != before.grade
        is_new |= is_little(before) and not is_little(entry.finding)
        return entry.finding if is_new else None

    def _miss(
        self,
        found: Sequence[LeakFinding],
        named: Mapping[Key, LeakFinding],
        paces: Mapping[str, float],
        *,
        walked: bool,
    ) -> list[LeakFinding]:
        """Note which findings the look has not shown. Returns those that another one replaces: all
        of what C code seemed to keep may be that of objects which a container keeps."""
        explained = {
            one.part for one in found if one.holder or one.kind in (C_HEAP, PYTHON, CYCLES)
        }
        nameless = {one.part for one in found if _is_nameless(one)}
        replaced = []
        for key, entry in list(self._entries.items()):
            one = entry.finding
            if key in named or (not walked and one.part in OF_CENSUS):
                continue  # The look has shown it, or the heap was not walked.
            entry.missed += 1
            held = sum(
                other.rate_bytes for other in found if other.holder and other.part == one.part
            )
            is_held = held >= (1 - THRESHOLDS.near) * paces.get(one.part, math.inf)
            others = nameless if one.kind == C_HEAP and not is_held else explained
            if _has_no_holder(one) and one.part in others:
                replaced.append(self._end(key))
        return replaced

    def _is_held(self, one: LeakFinding) -> bool:
        """Whether it says that a part grows whose holder is known, or that C code holds it or
        garbage: without a new walk of the heap that stays."""
        if one.key in self._entries or not _is_nameless(one) or one.part not in OF_CENSUS:
            return False
        standing = (entry.finding for entry in self._entries.values())
        return any(not _is_nameless(other) and other.part == one.part for other in standing)

    def _made_at(self, one: LeakFinding) -> str:
        """The line that makes growth without a holder, if it is as fast as the finding, which has a
        holder now: then they are the same."""
        for entry in self._entries.values():
            other = entry.finding
            if _has_no_holder(other) and other.part == one.part and not one.process:
                slower, faster = sorted((other.rate_bytes, one.rate_bytes))
                if faster <= THRESHOLDS.alike * slower:
                    return other.made_at
        return ""

    def _go_on(self, points: Points, step: int) -> list[LeakFinding]:
        """Count a look for those who were named, if their part of memory still grows. Returns those
        of a higher grade."""
        news = []
        for entry in self._entries.values():
            one = entry.finding
            if not one.holder or one.part not in OF_CENSUS or entry.missed:
                continue
            recent = points.recent(one.part, THRESHOLDS.confirmed_steps)
            if recent is None or recent < THRESHOLDS.explained * self._rate_in_part(one):
                continue
            entry.looks, entry.grade_before = entry.looks + 1, one.grade
            grade = entry.confirmed(one.grade, step)
            if grade != one.grade:
                entry.finding = replace(one, grade=grade)
                news.append(entry.finding)
        return news

    # --- rates ---

    def _measure(self, paces: Mapping[str, float]) -> None:
        """Rates were measured while the parts of memory grew by so many bytes a step."""
        self._paces.update(paces)
        for entry in self._entries.values():
            pace, rate = paces.get(entry.finding.part), entry.finding.rate_bytes
            if pace is not None:
                entry.first_pace = entry.first_pace or pace
                entry.share = rate / pace if pace > 0 else None
                slower, before = entry.before or (pace, rate)
                if pace > THRESHOLDS.alike * slower:
                    entry.is_steady = abs(rate - before) <= THRESHOLDS.near * before
                if not slower <= pace <= THRESHOLDS.alike * slower or entry.before is None:
                    entry.before = pace, rate

    def follow(self, paces: Mapping[str, float], rising: Collection[str] = ()) -> bool:
        """Between two walks, a finding grows as much faster or slower as its part of memory does.
        Where the part becomes slower, what has no holder does so first: a walk has measured what
        holders gain, and the rest is what it could not explain.

        What a worker holds keeps the rate that the worker has measured: in the memory of children
        is what they take for their own looks, and give back.

        Args:
            paces: bytes a step by which each part of memory grows now.
            rising: the parts that become faster evenly, as steps do that become longer: what was
                found does so, and no other.

        Returns whether something has become so much faster that another object may hold it.
        """
        is_another = False
        for part, now in paces.items():
            before = self._paces.get(part, 0.0)
            if before < THRESHOLDS.least_rate:
                continue
            is_another |= now > before / THRESHOLDS.explained**0.5 and part not in rising
            if now > THRESHOLDS.faster * before and part not in rising:
                continue  # Something else grows: the next walk finds it.
            pace = (
                now if now >= before / THRESHOLDS.faster else before
            )  # end() decides what has ended.
            found = [one for one in self._entries.values() if self._follows(one, part)]
            steady = [one for one in found if one.is_steady and part in rising]
            if len(steady) == len(found):
                steady = []  # One of them becomes faster.
            shares = sum(one.share or 0.0 for one in found)
            held = [one for one in found if not _has_no_holder(one.finding)]
            is_enough = sum(map(self._measured, held)) <= shares * pace
            if pace < before and len(held) < len(found) and is_enough:
                steady = held
                for entry in held:
                    entry.finding = replace(entry.finding, rate_bytes=self._measured(entry))
            others = shares - sum(one.share or 0.0 for one in steady)
            rest = max(0.0, shares * pace - sum(one.finding.rate_bytes for one in steady))
            for entry in found:
                if entry not in steady:
                    rate = (entry.share or 0.0) / others * rest
                    entry.finding = replace(entry.finding, rate_bytes=rate)
        return is_another

    def _measured(self, entry: Entry) -> float:
        """The rate that the newest walk has measured."""
        return (entry.share or 0.0) * self._paces.get(entry.finding.part, 0.0)

    def _follows(self, entry: Entry, part: str) -> bool:
        """Whether the rate of a finding is a share of the pace of this part."""
        one = entry.finding
        is_known = one.part == part and bool(entry.share) and not entry.missed
        return is_known and one.grade != "fills" and not _is_of_worker(one)

    def _rate_in_part(self, one: LeakFinding) -> float:
        """Bytes a step of it that its part of memory shows: what C code costs may be more."""
        if one.kind != C_HEAP:
            return one.rate_bytes
        return min(one.rate_bytes, self._paces.get(one.part, math.inf))

    # --- the end ---

    def end(self, points: Points, step: int) -> list[LeakFinding]:
        """Take out the findings that no longer grow, and return them."""
        over = [key for key, entry in self._entries.items() if self._has_ended(entry, points, step)]
        for key in over:
            self._leave_out(self._entries[key])
        return [replace(one, freed_bytes=_freed(one, points)) for one in map(self._end, over)]

    def end_freed(self, points: Points) -> list[LeakFinding]:
        """Take out the findings of which most was freed at once, and return them."""
        freed = {one.key: _fall(one, points) for one in self.findings() if one.part in OF_CENSUS}
        gone = [key for key, size in freed.items() if size > 0]
        return [replace(self._end(key), freed_bytes=freed[key]) for key in gone]

    def _leave_out(self, gone: Entry) -> None:
        """Without what this one has gained, the others have a larger share of their part."""
        part = gone.finding.part
        before = self._paces.get(part, 0.0)
        rest = before - self._measured(gone)
        if rest < THRESHOLDS.least_rate or _is_of_worker(gone.finding):
            return
        self._paces[part] = rest
        for entry in self._entries.values():
            if entry.finding.part == part and entry.share is not None:
                entry.share *= before / rest

    def _end(self, key: Key) -> LeakFinding:
        return replace(self._entries.pop(key).finding, over=True)

    def _has_ended(self, entry: Entry, points: Points, step: int) -> bool:
        one = entry.finding
        if _is_of_worker(one):
            return entry.missed >= 2 or has_stopped(one, points, step)
        known = points.steps[-1] - points.steps[0] if points.steps else 0
        if known < THRESHOLDS.confirmed_steps:
            return False
        if one.kind == FIRST_WRITES:
            return entry.missed >= 2  # It is full, or is no longer written.
        if one.part == "resident" and points.kept(since_of(points.steps, step)) is not None:
            return False
        apart = [b - a for a, b in pairwise(points.rises(one.part))]
        window = max(
            THRESHOLDS.ended_steps,
            THRESHOLDS.ended_share_of_run * step,
            2 * max(apart[-4:], default=0),
            LATE * stairs.pause if (stairs := points.stairs(one.part)) else 0,
        )
        is_held = bool(one.holder) and not entry.missed  # as the newest walk has seen
        since = points.steps[0] if one.since_step is None else one.since_step
        window = min(window, max(1, step - since))  # What has just begun has not ended.
        if points.is_shared:
            window *= 2
        garbage = THRESHOLDS.cleared * one.rate_bytes * (step - since) if is_held else 0
        recent = points.recent(
            one.part, min(int(window), known), but_a_fall=garbage,
            freed_until=entry.walked if is_held else -1,
        )  # fmt: skip
        newer = points.steps[-1] - min(int(window), known) if points.is_shared else 0
        if recent is None or (is_held and _is_lost_in_noise(one, points, step, newer)):
            return False  # The next walk decides.
        if _has_no_holder(one) and one.rate_bytes < THRESHOLDS.ended * self._measured(entry):
            return True  # What holders gain is all that is left.
        if one.kind == C_HEAP and recent < THRESHOLDS.ended_c_heap * (entry.first_pace or 0.0):
            return True
        least = max(THRESHOLDS.least_rate / 4, THRESHOLDS.ended * self._rate_in_part(one))
        if recent < least or entry.missed >= 2:
            return True
        return entry.missed == 1 and recent < 2 * least


def _freed(one: LeakFinding, points: Points) -> int:
    """Bytes that went at once of what a likely leak had gained, if that was most of it, and not as
    little as a buffer has that is emptied again and again; otherwise 0."""
    if RANK[one.grade] < RANK["likely"] or one.kind == CYCLES or _is_of_worker(one):
        return 0
    return _fall(one, points)


def _fall(one: LeakFinding, points: Points) -> int:
    series = points.series(one.part, one.since_step or 0)
    falls = [(a - b, a - series[0][1]) for (_, a), (_, b) in pairwise(series)]
    fall, gained = max(falls, default=(0, 0))
    least = max(THRESHOLDS.least_gain, THRESHOLDS.cleared * gained)
    return fall if fall >= least else 0


def of_late(step: int) -> int:
    """In how many steps before this one growth shows that it goes on."""
    return int(max(THRESHOLDS.ended_steps, THRESHOLDS.ended_share_of_run * step))


def has_stopped(one: LeakFinding, points: Points, step: int) -> bool:
    """Whether the worker that has found it has stopped growing, by what it has in use. What a
    worker reports may be older than that. A worker that follows it goes on from its last reading:
    what came until then is not in the readings, so it has stopped if the newest ones show that too.
    False if the points do not have it, and of cycles that are collected from time to time."""
    if one.kind == CYCLES and not one.cause:
        return False
    least = max(THRESHOLDS.least_rate / 4, THRESHOLDS.ended * one.rate_bytes)
    name = WORKERS if one.process.endswith(f" {WORKERS}") else one.process
    recent = [points.recent(name, steps) for steps in (of_late(step), THRESHOLDS.confirmed_steps)]
    known = [each for each in recent if each is not None and one.per == "step"]
    return bool(known) and max(known) < least


def as_of_now(one: LeakFinding, points: Points, step: int) -> LeakFinding:
    """What a worker has found, at the rate of now. A worker reports what a holder has gained a step
    since it was first seen, and looks rarely. Where all that the worker has in use has grown unlike
    that of late, the holder is taken to have done so too."""
    recent = points.recent(one.process, of_late(step)) if one.per == "step" else None
    series = points.series(one.process, one.since_step or 0)
    if recent is None or len(series) < 2 or one.grade == "fills":
        return one
    (begin, first), (end, last) = series[0], series[-1]
    average = (last - first) / (end - begin)
    slower, faster = sorted((average, recent))
    if slower <= 0 or faster <= THRESHOLDS.alike * slower:
        return one
    return replace(one, rate_bytes=one.rate_bytes * recent / average)


def _is_lost_in_noise(one: LeakFinding, points: Points, step: int, since: int) -> bool:
    """Whether its part of memory varies so much, from a step on, that it may go on at its rate
    unseen."""
    pace = points.pace(one.part, max(since, since_of(points.steps, step)))
    if not math.isfinite(pace.error) or pace.error <= THRESHOLDS.exact * one.rate_bytes:
        return False
    return abs(pace.rate - one.rate_bytes) <= THRESHOLDS.certain_errors * pace.error


def _is_nameless(one: LeakFinding) -> bool:
    """Whether it says that something grows, and not what."""
    return not one.holder and one.kind in ("", "children", "shared memory")


def _has_no_holder(one: LeakFinding) -> bool:
    """Whether no holder of it is known."""
    return _is_nameless(one) or one.kind in (C_HEAP, PYTHON)


def _is_of_worker(one: LeakFinding) -> bool:
    """Whether a worker has found it itself; other findings are seen from outside."""
    return bool(one.process and (one.holder or one.kind == CYCLES))

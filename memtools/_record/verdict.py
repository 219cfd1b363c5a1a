"""The verdict about growth for a whole record: its findings, each with one rate, and one forecast.

    "finding" events ──────────► standing() ──┐   made by the run itself
    series ──► growth.judge() ──► made_of() ──┴──► order, forecast ──► Verdict.findings
                                                                          │
                       run, watch, explain, report: shown(), notes(), as_json() ◄┘

A monitor makes its findings while the program runs. They are not judged again: the record has the
newest state of each. A command that is watched from outside is judged here, by its series.

All that grows on the host fills the same room until the limit, which is that at the end of the
record. So all findings of the host have one forecast, and all findings of devices have another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._base.text import duration, shown
from memtools._leak.advice import advice_for
from memtools._leak.detector import STEPS_NEEDED, matters
from memtools._leak.finding import (
    FIRST_WRITES,
    FITS,
    RANK,
    TOO_LARGE,
    Key,
    LeakFinding,
    is_call,
    is_little,
    is_reported,
    with_forecast,
)
from memtools._leak.forecast import Course, joint_of, width_of
from memtools._leak.judge import C_HEAP, CYCLES, PYTHON, THRESHOLDS, Part, of_part
from memtools._leak.shown import added_in, terminal_lines
from memtools._record.events import start_of
from memtools._record.growth import Growth, Late, judge, kept, late_of, step_seconds
from memtools._record.kinds import Finding
from memtools._record.record import UNKNOWN
from memtools._record.series import own_column

if TYPE_CHECKING:
    from memtools._record.figures import Figures
    from memtools._record.record import Record

SHOWN = 8  # findings, at most
INDENT = "  "
#: A forecast by time is as certain as one of so many steps for each second.
READINGS_A_SECOND = 5


@dataclass(frozen=True)
class Verdict:
    """What is known about growth at the end of a record, or now.

    Attributes:
        findings: what grows and matters, the worst first, then the fastest.
        little: what grows too little to matter, without a known holder.
        short: why growth could not be judged, or not in each signal; None if each was tested.
        nothing: what to print if each signal was tested and nothing was found: "the process does
            not grow", for example, or that memory rose at the very end.
        late: memory that rose at the very end, too suddenly for a line; None if it did not.
        tested: whether the process was tested. Its workers may not have been.
        untested: why the run did not test itself for leaks although it was meant to; "" if it did,
            or was not meant to.
        limit: the limit that the forecasts of the host refer to, like `the machine's 23.5 GiB`; ""
            without one.
        freed: what grew, the newest last, until it was freed at once, and how often what is in use
            fell so.
    """

    findings: tuple[LeakFinding, ...]
    little: tuple[LeakFinding, ...]
    short: str | None
    nothing: str
    late: Late | None
    tested: bool
    untested: str = ""
    limit: str = ""
    freed: tuple[tuple[LeakFinding, int], ...] = ()

    @property
    def leaking(self) -> bool:
        """Whether one of the findings is called a leak."""
        return any(is_call(one.grade) for one in self.findings)

    @property
    def in_phases(self) -> list[LeakFinding]:
        """What grew in a phase with steps of its own, and was freed as that ended."""
        return [one for one, _ in self.freed if one.phase]

    def lines(
        self, width: int | None = None, *, colour: bool = False, made: bool = False
    ) -> list[str]:
        """The two lines of each finding, of so many characters, the second one indented; with
        `made`, also what is added and the line that makes it."""
        lines = list[str]()
        for one in self.with_one_forecast()[:SHOWN]:
            head, rest = terminal_lines(one, width and width - len(INDENT), colour=colour)
            added = added_in(one) if made else ""
            lines += [*head, *(INDENT + line for line in [*rest, *([added] if added else [])])]
        left_out = len(self.findings) - SHOWN
        return [*lines, f"and {left_out:,} more"] if left_out > 0 else lines

    def with_one_forecast(self) -> list[LeakFinding]:
        """The findings, with a forecast that several share on the first of them alone."""
        found: list[LeakFinding] = []
        seen: set[object] = set()
        for one in self.findings:
            forecast = one.per, one.steps_left or one.seconds_left
            found.append(one.without_forecast() if forecast in seen else one)
            seen.add(forecast)
        return found

    def notes(self) -> list[str]:
        """What there is to say next to the findings: the forecast in time, growth that is too
        little to matter, that nothing grows or that it is too early to say, and why the run did not
        test itself."""
        found = self._forecast_lines()
        found += [
            f"{one.signal} grows by {format_bytes(one.rate_bytes)} a "
            f"{'step' if one.per == 'step' else 'second'}, too little to matter, and no growing "
            "container explains it"
            for one in self.little[:1]
        ]
        if not found and not self.findings and not (self.short and self.in_phases):
            found = [self.short or self.nothing]
        for one, times in self.freed:
            often = f"; memory in use fell like this at least {times:,} times" if times > 1 else ""
            fix = f"; fix: {one.advice}" if one.phase and one.advice else ""
            found.append(f"before: {one.line()}; {one.freed()}{often}{fix}")
        return [*found, self.untested] if self.untested else found

    def _forecast_lines(self) -> list[str]:
        """A line that converts the steps of a forecast to time, and names the limit: `at 45.2 ms a
        step that is 57 min 18 s to 1 h 45 min; the limit is the machine's 23.5 GiB`."""
        forecasts = [one for one in self.findings if one.steps_left or one.seconds_left]
        parts = []
        first = next((one for one in forecasts if one.per == "step"), None)
        if first is not None and first.steps_left is not None and first.seconds_left is not None:
            (low, high), steps = first.seconds_left, first.steps_left[1]
            if 0 < high < math.inf and 0 < steps < math.inf:
                pace = duration(high / steps)
                parts.append(f"at {pace} a step that is {duration(low)} to {duration(high)}")
        if self.limit and any(_is_of_host(one) for one in forecasts):
            parts.append(f"the limit is {self.limit}")
        return ["; ".join(parts)] if parts else []

    def as_json(self) -> dict[str, Any]:
        return {
            "leaks": [one.as_json() for one in self.findings],
            "not_judged": self.short,
            "growth_notes": self.notes(),
        }


def verdict_of(figures: Figures) -> Verdict:
    """Return the verdict. Takes some 40 ms for a record of the usual size."""
    record = figures.record
    tested = start_of(record).tests_leaks
    tested = tested or any(isinstance(event.data, Finding) for event in record.events)
    of_run = tested and bool(figures.steps)
    if of_run:
        found, little, short, tested, late = _by_the_run(figures)
    else:  # A run without steps tests itself by time. Its own findings replace those of the series.
        found, little, short, tested, late = _by_the_series(figures)
        own = standing(record)
        parts = {one.part for one in own}
        if "resident" in parts:  # The series of resident memory shows the same.
            found = [one for one in found if one.signal != "rss"]
        found = [*own, *(one for one in found if one.part not in parts)]
    pace = pace_of(figures)
    found = _with_forecasts(figures, found, pace, of_run=of_run)
    found.sort(key=lambda one: (-RANK[one.grade], -_a_second(one, pace)))
    nothing = _nothing(figures) if late is None else str(late)
    untested = shown(start_of(record).untested)
    limit = _limit_of(figures)
    freed = [(one, _falls(figures, one)) for one in _freed(record, {one.key for one in found})]
    return Verdict(
        tuple(found), tuple(little), short, nothing, late, tested, untested, limit, tuple(freed)
    )


def _is_of_host(finding: LeakFinding) -> bool:
    """Whether it grows towards the host's limit and has not reached it."""
    left = finding.steps_left or finding.seconds_left
    return finding.signal != "device" and left is not None and 0 < left[1] < math.inf


def _limit_of(figures: Figures) -> str:
    """The limit of the host's memory, with its size; "" without one."""
    if figures.limit_source == "machine" and figures.machine is not None:
        return f"the machine's {format_bytes(figures.machine.total_bytes)}"
    if figures.limit_bytes is None or figures.limit_source == "none":
        return ""
    size = format_bytes(figures.limit_bytes)
    return f"the {size} given" if figures.limit_source == "given" else f"the control group's {size}"


def pace_of(figures: Figures) -> float | None:
    """Seconds a step: the median, or the mean over the run if too few steps have a reading. None
    without steps."""
    pace = figures.step_seconds
    if pace is None and figures.steps:
        pace = figures.seconds / figures.steps
    return pace


_Found = tuple[list[LeakFinding], list[LeakFinding], str | None, bool, Late | None]


def _by_the_run(figures: Figures) -> _Found:
    """The run's own findings. The run needs some steps to make them."""
    steps, short, found = figures.steps or 0, None, standing(figures.record)
    steps -= start_of(figures.record).origin
    if steps < STEPS_NEEDED and not found:
        short = sentences.of_early(steps)
    ended = figures.ending.by_memory(near=figures.near_limit)
    late = late_of(figures.line) if ended else None
    little = [one for one in found if is_little(one)]
    found = [one for one in found if one not in little]
    return found, little, short, short is None, late


def _by_the_series(figures: Figures) -> _Found:
    """Findings that are made of the record's series."""
    judged = judge(figures.line, figures.devices)
    enough = 0.0 if figures.ending.by_memory(near=figures.near_limit) else THRESHOLDS.start_seconds
    growth = [one for one in judged.growth if one.per == "step" or not 0 < one.over < enough]
    room, found = figures.room_bytes, made_of(growth)
    if room is not None:
        found = [_fitted(one, room) if one.left_bytes else one for one in found]
    pace = step_seconds(figures.line)
    kept = [one for one in found if _matters(one, pace)]
    little = [one for one in found if one not in kept]
    return kept, little, judged.short, judged.tested, judged.late


def _fitted(one: LeakFinding, room: int) -> LeakFinding:
    """What fills, marked by whether all of it fits into what is left."""
    marked = replace(one, cause=TOO_LARGE if one.left_bytes > room else FITS)
    return replace(marked, advice=advice_for(marked))


def _matters(finding: LeakFinding, pace: float | None) -> bool:
    if finding.per == "s":
        return finding.rate_bytes >= THRESHOLDS.least_rate_by_time
    return matters(finding.rate_bytes, 1 / pace if pace else 0.0)


def _nothing(figures: Figures) -> str:
    """A sentence that nothing grows, without files in /dev/shm and other programs. While resident
    memory rises it is said of what is in use alone."""
    if figures.outside:
        return "the process tree does not grow"
    rise, of_all = _rise(figures, "private"), _rise(figures, own_column(figures.line))
    if rise > 0:
        return (
            f"memory in use does not grow; resident memory has grown by {format_bytes(rise)} a "
            "step over the last three quarters of the run"
        )
    workers = figures.workers is not None
    copied = _rise(figures, "children_private") if workers else 0.0
    if copied > 0:
        return (
            "the process does not grow; the private memory of its workers has grown by "
            f"{format_bytes(copied)} a step over the last half of the run: pages copied from the "
            "process, or freed memory that malloc keeps"
        )
    nothing = "neither the process nor its workers grow" if workers else "the process does not grow"
    if of_all > 0 and figures.line.known("private"):
        return (
            f"{nothing}, except for mapped file pages: {format_bytes(of_all)} a step, which the "
            "system reclaims when memory is short"
        )
    return nothing


def _rise(figures: Figures, column: str) -> float:
    """Bytes a step by which what a column never gives back rises over the newer three quarters of
    the run; 0 where it does not, or by too little to matter."""
    rise = kept(figures.line, column)
    if rise is None or rise.rate <= THRESHOLDS.least_rate:
        return 0.0
    size = figures.process.last_bytes if figures.process else 0
    least = max(THRESHOLDS.least_gain, THRESHOLDS.least_gain_share * size)
    return rise.rate if rise.gain >= least else 0.0


# --- findings ------------------------------------------------------------------------------------


def standing(record: Record) -> list[LeakFinding]:
    """The findings of the run itself: the newest state of each, without those that are over."""
    found: dict[tuple[str, str], LeakFinding] = {}
    for event in record.events:
        if not isinstance(event.data, Finding) or event.data.grade not in RANK:
            continue
        one = _harmless(event.data)
        found.pop(one.key, None)
        if not one.over and RANK[one.grade] > RANK["quiet"]:
            found[one.key] = one
    return list(found.values())


def _freed(record: Record, standing: set[Key]) -> tuple[LeakFinding, ...]:
    """Leaks that ended as what had grown was freed at once, and that no finding is about."""
    found: dict[Key, LeakFinding] = {}
    for event in record.events:
        if isinstance(event.data, Finding) and event.data.over and event.data.freed_bytes > 0:
            one = _harmless(event.data).without_forecast()
            found[one.key] = one
    return tuple(one for key, one in found.items() if key not in standing)


def _falls(figures: Figures, one: LeakFinding) -> int:
    """How often what is in use fell by half of what was freed, or more, since the finding began to
    grow, as far as it was read; 0 if that is not known. The end of each epoch does that, also if
    the finding was taken back before."""
    line, column = figures.line, "heap_used"
    if one.part != "use" or one.phase or not line.known(column):
        return 0
    falls, top = 0, -1
    for step, least, most in zip(
        line.most["step"], line.least[column], line.most[column], strict=True
    ):
        if UNKNOWN in (step, least, most) or step < (one.since_step or 0):
            continue
        top = max(top, most)
        if top - least >= THRESHOLDS.cleared * one.freed_bytes:
            falls, top = falls + 1, least
    return falls


def _harmless(event: Finding) -> LeakFinding:
    """Escape its texts: a record may come from anywhere."""
    given: dict[str, Any] = {one.name: getattr(event, one.name) for one in fields(LeakFinding)}
    texts = {name: shown(value) for name, value in given.items() if isinstance(value, str)}
    return LeakFinding(**{**given, **texts})


def made_of(growth: Sequence[Growth]) -> list[LeakFinding]:
    """Convert growth of the series to findings, as a run makes them."""
    return [replace(one, advice=advice_for(one)) for one in map(_of_growth, growth)]


def _of_growth(growth: Growth) -> LeakFinding:
    over = f"{growth.over:,.0f} steps" if growth.per == "step" else duration(growth.over)
    what = [f"over the last {over}"] if growth.over and not growth.shared else []
    what += [f"on {growth.device}"] if growth.device else []
    if growth.unwritten:
        what.append(f"{format_bytes(growth.unwritten)} more are allocated and not written yet")
    grade = "fills" if growth.shared or growth.unwritten else growth.grade
    part = Part(growth.signal, growth.rate_bytes, grade=grade, since_step=growth.since)
    kind = "mapped files" if growth.shared else FIRST_WRITES if growth.unwritten else None
    found = of_part(part, per=growth.per, kind=kind, what=", ".join(what))
    return replace(found, left_bytes=growth.unwritten)


# --- one forecast ---------------------------------------------------------------------------------


def _with_forecasts(
    figures: Figures, found: Sequence[LeakFinding], pace: float | None, *, of_run: bool
) -> list[LeakFinding]:
    """Add to findings what is left until the limit, for all that grows together. Where the findings
    are those of the run, it has judged whether that is known, and how well."""
    ended = figures.ending.by_memory(near=figures.near_limit)
    host = [one for one in found if one.signal != "device"]
    devices = [one for one in found if one.signal == "device"]
    known: list[LeakFinding] = []
    for several, room in ((host, figures.room_bytes), (devices, _room_of_devices(figures))):
        left = seconds = None
        readings = READINGS_A_SECOND * figures.seconds
        if any(one.per == "step" for one in several):
            readings = grown_for(figures, several)
        if any(one.per == "step" for one in several) or pace is not None:
            joint = _joint_rate(several, pace, "step")
            most = joint * (_times_wider(several, readings) if of_run else 1.0)
            left = joint_of(room, Course(joint, most, steps=readings)).left
            seconds = None if left is None or pace is None else (left[0] * pace, left[1] * pace)
        else:
            joint = _joint_rate(several, None, "s")
            seconds = joint_of(room, Course(joint, joint, steps=readings)).left
        if ended and several is host:
            left = seconds = (0.0, 0.0)
        ends = [one for one in several if RANK[one.grade] <= RANK["fills"] and not is_reported(one)]
        known += [one.without_forecast() for one in ends]
        known += with_forecast([one for one in several if one not in ends], left, seconds, joint)
    return known


def _times_wider(several: Sequence[LeakFinding], steps: float) -> float:
    """How many times wider the interval of the run itself was than that of even growth; infinite
    where it had none."""
    lefts = [one.steps_left for one in several if one.steps_left is not None]
    wider = [high / max(1.0, low) / width_of(steps) ** 2 for low, high in lefts]
    return max(1.0, *wider) if wider else math.inf


def _joint_rate(several: Sequence[LeakFinding], pace: float | None, per: str) -> float:
    """Bytes a step or a second by which all grows together, as the run has measured it for what the
    limit counts, and at least by which all findings do."""
    measured = (one.joint_bytes for one in several if one.per == per)
    return max(total_rate(several, pace, per), *measured, 0.0)


def grown_for(figures: Figures, several: Sequence[LeakFinding]) -> float:
    """For how many steps the findings have grown."""
    first = [one.since_step for one in several if one.since_step is not None]
    return (figures.steps or 0) - min(first, default=0)


def total_rate(several: Sequence[LeakFinding], pace: float | None, per: str) -> float:
    """Bytes a step, or a second (`per` is "step" or "s"), by which all findings grow together. A
    finding without a holder may be the same growth as those with one: the larger sum of the two
    counts. What fills up and ends by itself does not count."""
    parts: dict[str, tuple[float, float]] = {}
    for one in several:
        if RANK[one.grade] <= RANK["fills"] and one.cause != TOO_LARGE:
            continue
        rate = one.rate_bytes if one.per == per else _a_second(one, pace) * (pace or 0.0)
        named, whole = parts.get(one.part, (0.0, 0.0))
        if one.holder or one.kind in (C_HEAP, PYTHON, CYCLES):
            named += rate
        else:
            whole = max(whole, rate)
        parts[one.part] = named, whole
    return sum(max(pair) for pair in parts.values())


def _a_second(finding: LeakFinding, pace: float | None) -> float:
    """Its rate in bytes a second. If the time of a step is not known, one second is assumed."""
    return finding.rate_bytes / (pace or 1.0) if finding.per == "step" else finding.rate_bytes


def _room_of_devices(figures: Figures) -> int | None:
    """The memory that is left on all watched devices; None if it is not known of one of them."""
    room = 0
    for device in figures.devices:
        last = figures.line.last
        free, total = last(f"cuda{device}_free"), last(f"cuda{device}_total")
        reserved, allocated = last(f"cuda{device}_reserved"), last(f"cuda{device}_allocated")
        if allocated is None or (free is None and total is None):
            return None
        if free is None or reserved is None:
            room += max(0, (total or 0) - allocated)
        else:
            room += free + max(0, reserved - allocated)
    return room if figures.devices else None

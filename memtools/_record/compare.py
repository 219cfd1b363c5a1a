"""Compare two records: which figures differ by more than those of two runs of one script do.

    Figures of base ──┐                 ┌──► rows: a value in each, the difference, the noise
                      ├──► compare() ───┼──► leaks: new, worse, same, better, gone
    Figures of new ───┘                 └──► notes: what the reader must know about the runs

All values come from Figures and its Verdict, as `explain` and the report print them. A value that a
record does not have is None, with the reason in words. It is never taken for zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._base.text import count, duration, shown
from memtools._leak.detector import STEPS_NEEDED
from memtools._leak.finding import RANK, LeakFinding, is_call
from memtools._leak.forecast import width_of
from memtools._record.events import start_of
from memtools._record.figures import Figures, script_of
from memtools._record.growth import slope
from memtools._record.series import own_column
from memtools._record.verdict import grown_for, pace_of, total_rate

if TYPE_CHECKING:
    from memtools._record.figures import Use, Used

#: Peaks of two runs of one script differ by less than a share or a size, whichever is larger. With
#: workers they differ by more, because the workers' order varies. docs/guides/compare.md says how
#: this was measured.
PEAK_SHARE, WORKERS_SHARE, PEAK_BYTES = 0.03, 0.3, 8 * 2**20
#: Times of a step differ by a factor of two if other programs run at the same time.
SECONDS_SHARE = 0.5
#: Growth with a holder in one run and without one in the other is the same growth if the rates
#: differ by at most this factor.
NAMED = 2.0

NONE_FOUND = "none found"
NO_STEPS, NO_READING = "no steps", "the record has no reading of it"
FEW_STEPS = "too few steps"
#: Units of rows. The keys of the JSON end in them.
BYTES, RATE, SECONDS, STEPS = "bytes", "bytes_per_step", "seconds", "steps"


@dataclass(frozen=True)
class Value:
    """One figure of one run, in the unit of its row.

    `number` is None if it is not known, and `why` is the reason. A rate lies between `low` and
    `high`; for all other figures, both are the number itself. A rate of 0 with a `why` means that
    the run's own test has found nothing, and that there are too few readings for an interval.
    """

    number: float | None
    low: float = 0.0
    high: float = 0.0
    why: str = ""

    @classmethod
    def known(cls, number: float) -> Value:
        return cls(number, number, number)

    @classmethod
    def unknown(cls, why: str) -> Value:
        return cls(None, why=why)


@dataclass(frozen=True)
class Row:
    """One figure of both runs.

    Attributes:
        name: the name in --fail: peak, process, device, growth, seconds, phase:NAME; or "steps".
        label: the name in the table.
        unit: one of BYTES, RATE, SECONDS, STEPS.
        base, new: the values.
        noise: two runs of one script differ by up to this much, in the unit. For a rate it follows
            from the intervals of both.
        exact: whether both peaks are the kernel's own marks, and not the largest samples.
    """

    name: str
    label: str
    unit: str
    base: Value
    new: Value
    noise: float
    exact: bool = False

    @property
    def difference(self) -> float | None:
        """New minus base; None if one is not known. A rate that is shown as none counts as 0."""
        if self.base.number is None or self.new.number is None:
            return None
        base, new = (
            0.0 if self.unit == RATE and is_none(value) else value.number or 0.0
            for value in (self.base, self.new)
        )
        return new - base

    @property
    def share(self) -> float | None:
        """The difference as a share of base; None if one is not known, and for rates: the rate of a
        run that does not grow is near zero."""
        if self.difference is None or not self.base.number or self.unit == RATE:
            return None
        return self.difference / self.base.number

    @property
    def same(self) -> bool | None:
        """Whether two runs of one script may differ as much; None if one is not known."""
        if self.base.number is None or self.new.number is None:
            return None
        return abs(self.new.number - self.base.number) <= self.noise

    @property
    def rise(self) -> tuple[float, float] | None:
        """The smallest and the largest possible rise from base to new; None if one is not known.
        They differ for rates only. What shrinks in base does not allow new to grow."""
        if self.base.number is None or self.new.number is None:
            return None
        base, new = self.base.number, self.new.number
        rise = new - (max(0.0, base) if self.unit == RATE else base)
        least = math.hypot(new - self.new.low, self.base.high - base)
        most = math.hypot(self.new.high - new, base - self.base.low)
        return rise - least, rise + most

    def as_json(self) -> dict[str, Any]:
        """Plain types. Each key of a figure ends in its unit."""
        found: dict[str, Any] = {"name": self.name, "label": self.label}
        for side, value in (("base", self.base), ("new", self.new)):
            found[f"{side}_{self.unit}"] = value.number
            if self.unit == RATE:
                known = value.number is not None and not value.why
                found[f"{side}_low_{self.unit}"] = value.low if known else None
                found[f"{side}_high_{self.unit}"] = value.high if known else None
            if value.why:
                found[f"{side}_remark"] = value.why
        found[f"difference_{self.unit}"] = self.difference
        found["difference_percent"] = None if self.share is None else 100 * self.share
        found[f"noise_{self.unit}"] = None if self.difference is None else self.noise
        exact = {"exact": self.exact} if self.unit == BYTES else {}
        return {**found, "same": self.same, **exact}


@dataclass(frozen=True)
class LeakChange:
    """A finding of one run or of both. `change`: "new", "worse", "same", "better" or "gone"."""

    change: str
    base: LeakFinding | None
    new: LeakFinding | None

    @property
    def fails(self) -> bool:
        """Whether `--fail leak` fails: it is new, and its grade is growing or above."""
        return self.change == "new" and self.new is not None and is_call(self.new.grade)

    def as_json(self) -> dict[str, Any]:
        sides = {"base": self.base, "new": self.new}
        found = {name: side and side.as_json() for name, side in sides.items()}
        return {"change": self.change, **found}


@dataclass(frozen=True)
class Comparison:
    """The comparison of two records. `same_script` is None if a record has no command."""

    base: Figures
    new: Figures
    rows: tuple[Row, ...]
    leaks: tuple[LeakChange, ...]
    same_script: bool | None
    notes: tuple[str, ...] = field(default=())

    def row(self, name: str) -> list[Row]:
        """The rows of a name of --fail: several for device and for growth."""
        return [row for row in self.rows if row.name == name]

    def as_json(self) -> dict[str, Any]:
        """Plain types with stable keys; null is not known."""
        return {
            "base": _run(self.base),
            "new": _run(self.new),
            "same_script": self.same_script,
            "figures": [row.as_json() for row in self.rows],
            "leaks": [change.as_json() for change in self.leaks],
            "notes": list(self.notes),
        }


def compare(base: Figures, new: Figures) -> Comparison:
    """Compare the figures of two records. Takes some 100 ms for records of the usual size, mostly
    to judge growth."""
    scripts = [shown(script_of(figures.record)) for figures in (base, new)]
    same = scripts[0] == scripts[1] if all(scripts) else None
    rows = (
        *_host(base, new),
        *_devices(base, new),
        *_phases(base, new),
        *_growth(base, new),
        *_time(base, new),
    )
    notes = tuple(_notes(base, new, scripts, same))
    return Comparison(base, new, rows, tuple(_leaks(base, new)), same, notes)


def _run(figures: Figures) -> dict[str, Any]:
    return {
        "record": figures.path,
        "command": figures.command,
        "pid": figures.pid,
        "seconds": figures.seconds,
        "steps": figures.steps,
        "samples": figures.samples,
        "ending": figures.ending.kind,
        "ended": figures.ending.text,
        "limit_bytes": figures.limit_bytes,
        "limit_source": figures.limit_source,
        "workers_most": None if figures.workers is None else figures.workers.most,
        "not_judged": figures.verdict.short,
    }


# --- rows -----------------------------------------------------------------------------------------


def _peak(
    name: str, label: str, base: Value, new: Value, *, exact: bool, share: float = PEAK_SHARE
) -> Row:
    noise = max(PEAK_BYTES, share * max(base.number or 0, new.number or 0))
    return Row(name, label, BYTES, base, new, noise, exact)


def _each(base: Figures, new: Figures, read: Callable[[Figures], Value]) -> tuple[Value, Value]:
    return read(base), read(new)


def _of(use: Use | Used | None) -> Value:
    return Value.unknown(NO_READING) if use is None else Value.known(use.peak_bytes)


def _host(base: Figures, new: Figures) -> Iterator[Row]:
    """What counts against the limit, and the process. If a control group counts in only one run,
    the job is compared, because a group holds pages of files as well."""
    of = _counted(base, new)
    share = WORKERS_SHARE if base.workers or new.workers else PEAK_SHARE
    values = _each(base, new, lambda own: _of(own.used if of == "control group" else own.job))
    yield _peak("peak", f"peak ({of})", *values, exact=False, share=share)
    exact = all(own.process and own.process.peak_seconds is None for own in (base, new))
    label = "process tree" if base.outside and new.outside else "process"
    label += ", exact peak" if exact else ", largest sample"
    values = _each(base, new, lambda own: _of(own.process))
    yield _peak("process", label, *values, exact=exact, share=share)


def _counted(base: Figures, new: Figures) -> str:
    counted = {used.of for used in (base.used, new.used) if used is not None}
    if counted == {"control group"}:
        return "control group"
    return "process" if counted == {"process"} else "job"


def _devices(base: Figures, new: Figures) -> Iterator[Row]:
    """The memory that torch has allocated and reserved on each device of either run."""
    for device in _either(base, new):
        for tier in ("allocated", "reserved"):
            column = f"cuda{device}_{tier}"
            values = _tier(base, column), _tier(new, column)
            if any(value.number is not None for value in values):
                yield _peak("device", f"cuda:{device} {tier}", *values, exact=False)


def _either(base: Figures, new: Figures) -> list[int]:
    return sorted({*base.devices, *new.devices})


def _tier(figures: Figures, column: str) -> Value:
    found = next((tier.peak for tier in figures.tiers if tier.name == column), None)
    return Value.unknown(NO_READING) if found is None else Value.known(found)


def _phases(base: Figures, new: Figures) -> Iterator[Row]:
    """The phases of either run, the largest first."""
    for name in dict.fromkeys(phase.name for own in (base, new) for phase in own.phases):
        values = _phase(base, name), _phase(new, name)
        yield _peak(f"phase:{name}", f"phase {shown(name)}", *values, exact=True)


def _phase(figures: Figures, name: str) -> Value:
    phase = next((phase for phase in figures.phases if phase.name == name), None)
    if phase is None:
        return Value.unknown("the run has no such phase")
    peak = phase.peak_bytes
    return Value.unknown("no peak was read in it") if peak is None else Value.known(peak)


def _growth(base: Figures, new: Figures) -> Iterator[Row]:
    yield _rates("growth", host_growth(base), host_growth(new))
    for device in _either(base, new):
        values = device_growth(base, device), device_growth(new, device)
        if any(value.number is not None for value in values):
            yield _rates(f"growth on cuda:{device}", *values)


def _rates(label: str, base: Value, new: Value) -> Row:
    noise = math.hypot(base.high - base.low, new.high - new.low) / 2
    return Row("growth", label, RATE, base, new, noise)


def host_growth(figures: Figures) -> Value:
    """How much the host's memory grows a step: by the run's own findings, or if it has found
    nothing, by the slope of the process's resident memory."""
    findings = [one for one in figures.verdict.findings if one.signal != "device"]
    return _rate(figures, findings, own_column(figures.line))


def device_growth(figures: Figures, device: int) -> Value:
    """The same for a device. Findings do not name their device, so they count if there is only
    one."""
    alone = figures.devices == (device,)
    findings = [one for one in figures.verdict.findings if one.signal == "device" and alone]
    return _rate(figures, findings, f"cuda{device}_allocated")


def _rate(figures: Figures, findings: Sequence[LeakFinding], column: str) -> Value:
    steps = figures.steps or 0
    if not steps:
        return Value.unknown(NO_STEPS)
    rate = total_rate(findings, pace_of(figures), "step")
    if rate > 0:
        width = width_of(grown_for(figures, findings))
        return Value(rate, rate / width, rate * width)
    if steps < STEPS_NEEDED:
        return Value.unknown(sentences.of_early(steps))
    line = slope(figures.line, column)
    if line is None:
        tested = start_of(figures.record).tests_leaks and figures.verdict.tested
        known = tested and figures.line.known(column)
        return Value(0.0, why=NONE_FOUND) if known else Value.unknown("too few readings to say")
    low, high = line.rate_bytes - line.within_bytes, line.rate_bytes + line.within_bytes
    return Value(line.rate_bytes, low, high)


def _time(base: Figures, new: Figures) -> Iterator[Row]:
    steps = _each(base, new, lambda own: _counted_as(own.steps))
    yield Row("steps", "steps", STEPS, *steps, noise=0.0)
    paces = _each(base, new, _pace)
    noise = SECONDS_SHARE * max(pace.number or 0.0 for pace in paces)
    yield Row("seconds", "time of a step, median", SECONDS, *paces, noise=noise)


def _counted_as(number: float | None) -> Value:
    return Value.known(number) if number else Value.unknown(NO_STEPS)


def _pace(figures: Figures) -> Value:
    seconds = figures.step_seconds
    why = FEW_STEPS if figures.steps else NO_STEPS
    return Value.unknown(why) if seconds is None else Value.known(seconds)


# --- leaks ----------------------------------------------------------------------------------------


def _leaks(base: Figures, new: Figures) -> Iterator[LeakChange]:
    """The findings of both runs by their keys: new ones first, then those that are worse."""
    before = {one.key: one for one in base.verdict.findings}
    after = {one.key: one for one in new.verdict.findings}
    for key, one in after.items():
        if key not in before:
            named = next((k for k, b in before.items() if k not in after and _named(b, one)), None)
            if named is not None:
                before[key] = before.pop(named)
    found = [LeakChange("gone", one, None) for key, one in before.items() if key not in after]
    for key, one in after.items():
        old = before.get(key)
        change = "new" if old is None else _change(base, old, new, one)
        found.append(LeakChange(change, old, one))
    order = ("new", "worse", "same", "better", "gone")
    yield from sorted(found, key=lambda change: order.index(change.change))


def _named(base: LeakFinding, new: LeakFinding) -> bool:
    """Whether it is the same growth, and only one of the runs knows its holder."""
    if bool(base.holder) == bool(new.holder):
        return False
    same = (base.process, base.part, base.per) == (new.process, new.part, new.per)
    slow, fast = sorted((base.rate_bytes, new.rate_bytes))
    return same and 0 < fast <= NAMED * slow


def _change(base: Figures, old: LeakFinding, new: Figures, one: LeakFinding) -> str:
    """Compare the rates, if they differ by more than their intervals, or else the grades. A grade
    rises when more steps are seen, so it counts only if one of them is called a leak."""
    if old.per == one.per and old.rate_bytes > 0 and one.rate_bytes > 0:
        width = width_of(grown_for(base, [old])) * width_of(grown_for(new, [one]))
        if one.rate_bytes > old.rate_bytes * width:
            return "worse"
        if one.rate_bytes * width < old.rate_bytes:
            return "better"
    if is_call(old.grade) != is_call(one.grade):
        return "worse" if RANK[one.grade] > RANK[old.grade] else "better"
    return "same"


# --- notes ----------------------------------------------------------------------------------------


def _notes(base: Figures, new: Figures, scripts: Sequence[str], same: bool | None) -> Iterator[str]:
    if same is False:
        yield f"the runs are of different programs: {scripts[0]} and {scripts[1]}"
    for figures in (base, new):
        if figures.ending.kind == "running":
            yield f"{figures.path}: still running; these are its figures so far"
        elif figures.ending.kind != "clean":
            yield f"{figures.path}: {figures.ending.text}; it may have needed more"
        if not figures.samples:
            yield f"{figures.path}: the record has no sample"
    if base.steps and new.steps and base.steps != new.steps:
        lengths = f"{count(base.steps, 'step')} and {count(new.steps, 'step')}"
        yield f"runs of different length: {lengths}; growing memory peaks higher in the longer one"
    if base.outside != new.outside:
        yield (
            "one run was watched from outside, as a command; the other includes memtools' own "
            "memory"
        )
    groups = [use.of == "control group" for use in (base.used, new.used) if use is not None]
    if len(set(groups)) > 1:
        yield "only one run has the figures of a control group, so the job is compared"
    machines = {used.source for used in (base.used, new.used) if used is not None}
    limits = [own.limit_bytes for own in (base, new)]
    if machines != {"machine"} and None not in limits and limits[0] != limits[1]:
        sizes = " and ".join(format_bytes(limit or 0) for limit in limits)
        yield f"the limits differ: {sizes}"


# --- words ----------------------------------------------------------------------------------------


def in_words(value: Value, unit: str) -> str:
    """A value with its unit. A rate has its interval."""
    if value.number is None:
        return f"not known: {value.why}"
    if value.why:
        return value.why
    if unit == RATE and is_none(value):
        return f"none (within {number_in_words(max(-value.low, value.high), unit)})"
    if unit == RATE:
        return f"{_signed(value.number)}/step ({_signed(value.low)} to {_signed(value.high)})"
    return number_in_words(value.number, unit)


def is_none(value: Value) -> bool:
    """Whether a rate may be 0."""
    return value.number is not None and value.low <= 0 <= value.high


def number_in_words(number: float, unit: str) -> str:
    """`351.0 MiB`, `1.0 KiB/step`, `12.3 ms`, `300`."""
    if unit == BYTES:
        return format_bytes(number)
    if unit == RATE:
        return f"{format_bytes(number)}/step"
    if unit == SECONDS:
        return duration(number)
    return f"{number:,.0f}"


def difference_in_words(row: Row) -> str:
    """`same`, `within noise (+1.2 %)` or `+18.8 MiB (+5.7 %)`."""
    change = row.difference
    if change is None:
        return "not known"
    if row.same:
        share = f"{100 * (row.share or 0.0):+.1f} %"
        return "same" if share[1:] == "0.0 %" else f"within noise ({share})"
    text = f"{'-' if change < 0 else '+'}{number_in_words(abs(change), row.unit)}"
    return text if row.share is None else f"{text} ({100 * row.share:+.1f} %)"


def _signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'}{format_bytes(abs(number))}"

"""The overview of a record: how the run ended, in a word and in a sentence, its figures, and its
growth.

Figures ──► badge, headline, tiles, growth ──► report/_view.py, _record/picture.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools._base.place import line_of
from memtools._base.size import format_bytes
from memtools._base.text import count, duration, percent, sentence, tight
from memtools._leak.finding import is_reported
from memtools._record.figures import Use, Used, of
from memtools._record.source import source_of

if TYPE_CHECKING:
    from memtools._leak.finding import LeakFinding
    from memtools._record.events import Ending
    from memtools._record.figures import Figures
    from memtools._record.record import Record

ENDINGS = {
    "clean": "Finished",
    "ended": "Ended",
    "failed": "Failed",
    "gone": "No end mark",
    "killed": "Killed",
    "running": "Still running",
}


@dataclass(frozen=True)
class Tile:
    """A figure at the top of a report. `share` is its share of a limit, in percent."""

    name: str
    value: str
    remark: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Growth:
    """A finding in the parts in which it is shown.

    Attributes:
        grade: its grade, and `colour` that of the grade: "bad", "warn" or "".
        subject: the holder; `rate` how fast it grows, and `left` how long until the limit.
        places: `kept at train.py:17` and the text of that line; "" where that is not known.
        advice: what to do.
        remark: what is added, and since when it is reported.
    """

    grade: str
    colour: str
    subject: str
    rate: str
    left: str
    places: list[tuple[str, str]]
    advice: str
    remark: str


def badge(ending: Ending) -> str:
    """How the run ended, in one or two words. A process that the kernel killed leaves no mark; the
    kernel's counters may show it."""
    if ending.kind == "gone" and ending.cause is not None and ending.cause.is_memory:
        return ENDINGS["killed"]
    return ENDINGS[ending.kind]


def headline(figures: Figures) -> str:
    """What ended the run, and how much memory was in use; "" if neither is known."""
    text = figures.headline()
    if figures.ending.kind == "clean":  # The badge has it already.
        text = figures.standing()
    return tight(sentence(text)) if text else ""


def tiles(figures: Figures) -> list[Tile]:
    """The tiles of a record, the most important first."""
    found = [*_used_tiles(figures), growth_tile(figures)]
    for device in figures.devices:
        tiers = {tier.name: tier for tier in figures.tiers}
        allocated = tiers.get(f"cuda{device}_allocated")
        reserved = tiers.get(f"cuda{device}_reserved")
        if allocated is not None:
            remark = f"reserved {format_bytes(reserved.peak)}" if reserved else ""
            found.append(Tile(f"Peak of cuda:{device}", format_bytes(allocated.peak), remark))
    if figures.steps:
        each = figures.step_seconds
        remark = "" if each is None else f"{duration(each)} each (median)"
        found.append(Tile("Steps", f"{figures.steps:,}", remark))
    found.append(Tile("Duration", duration(figures.seconds), count(figures.samples, "sample")))
    return found


def _used_tiles(figures: Figures) -> list[Tile]:
    """The process, the job and the machine: three figures with three names. The one that counts
    against the limit has its share."""
    used, name = figures.used, "process tree" if figures.outside else "process"
    found = []
    if figures.process is not None:
        found.append(_peak_tile(f"Peak of the {name}", figures.process, figures, "process"))
    if figures.job is not None and (figures.workers or figures.shared):
        found.append(_peak_tile("Peak of the job", figures.job, figures, "job"))
    if figures.workers is not None:
        peak = format_bytes(figures.workers.peak_bytes)
        theirs = f"private memory of up to {count(figures.workers.most, 'worker')}"
        found.append(Tile("Peak of the workers", peak, theirs))
    if figures.shared is not None:
        now = f"{format_bytes(figures.shared.last_bytes)} at the end"
        found.append(Tile("Shared memory", format_bytes(figures.shared.peak_bytes), now))
    if used is not None and used.of == "control group":
        found.append(_peak_tile("Peak of the control group", used, figures, "control group"))
    if used is not None and used.limit_bytes is not None and used.source != "machine":
        remark = f"{percent(used.last_bytes, used.limit_bytes)} of the limit"
        share = _share(used.last_bytes, used.limit_bytes)
        found.append(Tile("At the end", format_bytes(used.last_bytes), remark, share))
    if figures.machine is not None and (used is None or used.source == "machine"):
        machine = figures.machine
        share = _share(machine.last_bytes, machine.total_bytes)
        remark = tight(f"{of(machine.last_bytes, machine.total_bytes)} in use at the end")
        found.append(Tile("Machine, all programs", format_bytes(machine.last_bytes), remark, share))
    return found


def _peak_tile(name: str, use: Use | Used, figures: Figures, counted: str) -> Tile:
    used = figures.used
    at = "" if use.peak_seconds is None else f"at {duration(use.peak_seconds)}"
    if used is None or used.limit_bytes is None:
        return Tile(
            name, format_bytes(use.peak_bytes), at + ("" if used is None else ", no limit recorded")
        )
    if used.of != counted or used.source == "machine":
        return Tile(name, format_bytes(use.peak_bytes), at)
    limit = f"of {format_bytes(used.limit_bytes)} ({used.source} limit)"
    remark = f"{percent(use.peak_bytes, used.limit_bytes)} {limit}" + (f", {at}" if at else "")
    return Tile(
        name, format_bytes(use.peak_bytes), tight(remark), _share(use.peak_bytes, used.limit_bytes)
    )


def _share(part: int, whole: int) -> float:
    return min(100.0, 100 * part / whole)


def growth(figures: Figures) -> list[Growth]:
    """The findings, the worst first."""
    return [
        Growth(
            one.grade,
            "bad" if one.grade in ("likely", "leak") else "warn" if is_reported(one) else "",
            one.subject,
            tight(one.rate()),
            tight(one.forecast()),
            _places(figures.record, one),
            tight(one.advice),
            tight("; ".join(filter(None, (one.what, _first_reported(one))))),
        )
        for one in figures.verdict.with_one_forecast()
    ]


def _places(record: Record, finding: LeakFinding) -> list[tuple[str, str]]:
    """The lines that keep it and that make it, with their texts. The finding has that of the first,
    as it was when it was found."""
    kept, made = finding.kept_at, finding.made_at
    named = {"made and kept": kept} if kept == made else {"kept": kept, "made": made}
    found: list[tuple[str, str]] = []
    for verb, names in named.items():
        for name in filter(None, names.split(" and ")):
            text = ("" if found else finding.source) or source_of(record, name)
            found.append((f"{verb} at {line_of(name) if text else name}", text))
    return found


def _first_reported(finding: LeakFinding) -> str:
    return "" if finding.first_step is None else f"first reported at step {finding.first_step:,}"


def growth_tile(figures: Figures) -> Tile:
    """The growth at the end of the run."""
    verdict = figures.verdict
    if verdict.findings:
        worst = verdict.findings[0]
        more = len(verdict.findings) - 1
        others = f", and {more:,} more" if more else ""
        return Tile(
            "Growth at the end", worst.rate() or "yes", f"{worst.grade}: {worst.subject}{others}"
        )
    if verdict.late is not None and verdict.short is None:
        gain, last = format_bytes(verdict.late.gain_bytes), verdict.late.last
        return Tile("Growth at the end", f"+{gain}", f"in the last {last}")
    why = (verdict.short or "none").partition(":")[0]  # "too early to say", or "too few readings"
    return Tile("Growth at the end", why)

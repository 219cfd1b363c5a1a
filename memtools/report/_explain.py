"""What happened, as plain text: what `memtools explain` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memtools._base.size import format_bytes
from memtools._base.text import aligned, count, duration, sentence, shown
from memtools._record.figures import is_bytes
from memtools._record.peaks import lines, why_not
from memtools.report._advice import advise

if TYPE_CHECKING:
    from memtools._record.figures import Figures, Tier

PHASES = 10
#: Limits and free memory have no peak, and the job is shown by its parts.
NOT_USED = ("limit", "_total", "available", "_free", "job")


def explain(figures: Figures, width: int | None = None, *, colour: bool = False) -> str:
    """The whole text, a few dozen lines. It may be printed as it is, whoever has made the record.

    Args:
        figures: of the record.
        width: of the lines of findings, in characters; None: as long as they are.
        colour: whether the grades of findings are coloured.
    """
    verdict = figures.verdict
    found = verdict.lines(width and width - 2, colour=colour, made=True)
    parts = [
        [shown(sentence(figures.headline()))],
        _about(figures),
        _section("Memory", _memory(figures)),
        _section("Growth", verdict.notes(), found),
        _section("Peak of a step", _peak(figures)),
        _section("Phases by peak", _phases(figures)),
        _section("Cleanups", _cleanups(figures)),
        _section("What to do next", [f"- {line}" for line in advise(figures)]),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _section(title: str, lines: list[str], findings: Sequence[str] = ()) -> list[str]:
    """A title and its lines; nothing without lines. Those of findings have colours, and names that
    are harmless already."""
    lines = [*findings, *map(shown, lines)]
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _about(figures: Figures) -> list[str]:
    run = f"{figures.path}: {figures.command or 'no command recorded'}, process {figures.pid}"
    length = f"{duration(figures.seconds)}, {count(figures.samples, 'sample')}"
    if figures.steps:
        length += f", {count(figures.steps, 'step')}"
    if figures.unreadable:
        length += f"; {count(figures.unreadable, 'row')} in flight or damaged, left out"
    return [shown(run), length]


def _memory(figures: Figures) -> list[str]:
    lines = []
    if figures.process is not None or figures.used is not None:
        seconds = None if figures.used is None else figures.used.peak_seconds
        lines.append(figures.peaks() + ("" if seconds is None else f", at {duration(seconds)}"))
    if figures.workers is not None:
        lines.append(f"workers: {figures.workers.most:,} at most")
    for name, limit in figures.process_limits.items():
        lines.append(f"limit of the process: {name} {format_bytes(limit)}")
    guard = figures.guard_words()
    lines += [guard] if guard else []
    shown_tiers = [tier for tier in figures.tiers if is_bytes(tier.unit) and tier.peak > 0]
    shown_tiers = [tier for tier in shown_tiers if not tier.name.endswith(NOT_USED)]
    shown_tiers = [tier for tier in shown_tiers if not _is_rss(tier, figures)]
    if figures.shared is None:  # There is only a page of memtools.
        shown_tiers = [tier for tier in shown_tiers if tier.name != "shm"]
    rows = [["", "first", "peak", "last", "peak at"]]
    for tier in shown_tiers:
        sizes = map(format_bytes, (tier.first, tier.peak, tier.last))
        rows.append([tier.name, *sizes, duration(tier.peak_seconds)])
    return lines + (list(aligned(rows, right=(1, 2, 3), indent="")) if shown_tiers else [])


def _is_rss(tier: Tier, figures: Figures) -> bool:
    """Whether it is the process's own column and equals rss, because no page is mapped twice."""
    rss = next((other for other in figures.tiers if other.name == "rss"), None)
    return tier.name == "process" and rss is not None and tier.peak == rss.peak


def _peak(figures: Figures) -> list[str]:
    why = why_not(figures.record)
    if why:
        return [f"the tensors at the peak are unknown: nothing was recorded, because {why}"]
    return lines(figures)


def _phases(figures: Figures) -> list[str]:
    rows = [
        (
            shown(phase.name),
            "" if phase.peak_bytes is None else format_bytes(phase.peak_bytes),
            f"{phase.count:,} x, {duration(phase.seconds)}",
        )
        for phase in figures.phases[:PHASES]
    ]
    lines = list(aligned(rows, right=(1,), indent=""))
    more = len(figures.phases) - PHASES
    return lines + ([f"and {more:,} more"] if more > 0 else [])


def _cleanups(figures: Figures) -> list[str]:
    return [
        f"{cleanup.what}: {cleanup.count:,} x, {duration(cleanup.seconds)}"
        + ("" if cleanup.freed_bytes is None else f", freed {format_bytes(cleanup.freed_bytes)}")
        for cleanup in figures.cleanups
    ]

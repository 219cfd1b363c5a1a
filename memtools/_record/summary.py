"""The summary that `memtools run` prints on stderr when the program has ended: text or JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memtools._base.oom import remedy
from memtools._base.size import format_bytes
from memtools._base.terminal import ERROR, has_colours, width, write_bytes, write_text
from memtools._base.text import count, duration, shown
from memtools._leak.shown import terminal_lines
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import GuardAct
from memtools._record.peaks import WORTH, as_json, headline, in_vain, peak_of, to_do
from memtools._record.reader import read_record

_DEVICE = re.compile(r"cuda\d+_reserved")
ACTS = 3  # lines, at most


def summary_lines(
    figures: Figures, width: int | None = None, *, colour: bool = False
) -> Iterator[str]:
    """The last lines of a run: how it ended, if not properly, and the figures of its record. The
    lines of a finding, of so many characters, come together."""
    yield from _end(figures)
    took = duration(figures.seconds)
    took += f", {count(figures.steps, 'step')}" if figures.steps else ""
    yield f"{took}; {figures.peaks()}"
    if figures.children_most:
        name = "other processes" if figures.outside else "workers"
        yield f"{name}: {figures.children_most:,} at most"
    for device, peak in _devices(figures).items():
        yield f"{device}: peak {format_bytes(peak)} reserved"
    for one in figures.verdict.with_one_forecast():
        head, rest = terminal_lines(one, width, colour=colour)
        yield "\n".join(head + rest)
    yield from figures.verdict.notes()
    yield from _peak(figures)
    yield from _acts(figures)
    guard = figures.guard_words()
    if guard is not None:
        yield guard
    path = figures.path
    wrote = f"Wrote {path} ({format_bytes(figures.record.nbytes)})"
    yield f"{wrote}; for details: memtools explain {shlex.quote(path)}"


def _end(figures: Figures) -> Iterator[str]:
    """How the run ended; nothing if it ended properly, or, as its exit code is not known before, if
    it is about to end."""
    end = figures.ending
    if end.kind in ("clean", "running"):
        return
    acted = None if end.cause else figures.limit_acted  # the cause names the limit
    yield end.text[:1].upper() + end.text[1:] + ("" if acted is None else f"; {acted} was in force")
    if figures.idle_heap is not None:
        yield remedy(figures.idle_heap)


def _peak(figures: Figures) -> list[str]:
    """What lived at the peak of a step, and what to do about it; empty for a small peak."""
    peak = peak_of(figures.record)
    if peak is None or peak.peak_bytes < WORTH:
        return []
    vain = in_vain(peak) if peak.traced is not None and peak.traced.held else []
    return [headline(figures, peak), *vain, *(f"fix: {line}" for line in to_do(figures))]


def _acts(figures: Figures) -> list[str]:
    """Guards that acted and devices that ran out, without what the end says already."""
    acts = []
    for event in figures.record.events:
        act = event.data
        if event.kind == "oom":
            acts.append(shown(event.text))
        elif isinstance(act, GuardAct) and shown(act.pressure()) not in figures.ending.text:
            acts.append(f"the guard acted: {shown(act.clause())}")
    return acts[-ACTS:]


def _devices(figures: Figures) -> dict[str, int]:
    """The peak of the memory that torch reserved on each device."""
    return {
        tier.name.partition("_")[0]: tier.peak
        for tier in figures.tiers
        if _DEVICE.fullmatch(tier.name)
    }


def summary_json(figures: Figures) -> dict[str, Any]:
    """The summary as JSON. Sizes are bytes; None is not known."""
    return {
        "record": figures.record.path,
        "record_bytes": figures.record.nbytes,
        "seconds": figures.seconds,
        "samples": figures.samples,
        "steps": figures.steps,
        "ended": figures.ending.text,
        "peak_bytes": figures.peak_bytes,
        "job_peak_bytes": figures.job_peak_bytes,
        "used_peak_bytes": figures.used_peak_bytes,
        "limit_bytes": figures.limit_bytes,
        "limit_source": figures.limit_source,
        "limit_acted": figures.limit_acted,
        "machine_peak_bytes": None if figures.machine is None else figures.machine.peak_bytes,
        "children_most": figures.children_most,
        "children_peak_bytes": None if figures.workers is None else figures.workers.peak_bytes,
        "devices_peak_bytes": _devices(figures),
        **figures.verdict.as_json(),
        "peak_of_step": as_json(figures),
        "acts": _acts(figures),
        "guard": figures.guard_words(),
    }


def print_summary(path: str, name: str, *, as_json: bool) -> None:
    """Print the summary of a record to the standard error. It is not an error that this is closed,
    or that its reader has gone.

    Args:
        path: of the record.
        name: what the record is called in the summary.
        as_json: as one line of JSON.
    """
    figures = figures_of(replace(read_record(path), path=name))
    if as_json:
        write_bytes(f"{json.dumps(summary_json(figures))}\n".encode())
        return
    for line in summary_lines(figures, width(), colour=has_colours(ERROR)):
        write_text(line.replace("\0", "\\0"))

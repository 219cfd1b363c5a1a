"""What `memtools run` says when the program has ended: lines of text or one of JSON, on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from memtools._base.oom import remedy
from memtools._base.size import format_bytes as size
from memtools._base.text import count, duration, shown
from memtools.record.figures import Figures, figures_of
from memtools.record.kinds import GuardAct
from memtools.record.record import Record, read_record

_DEVICE = re.compile(r"cuda\d+_reserved")
HOLDERS, ACTS = 1, 3  # lines of each


@dataclass(frozen=True)
class Summary:
    """A record's figures as the last lines of a run."""

    path: str
    nbytes: int
    figures: Figures = field(repr=False)

    @classmethod
    def of_record(cls, path: str) -> Summary:
        """Reads the record at `path`, complete or not.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        return cls.of(read_record(path))

    @classmethod
    def of(cls, record: Record) -> Summary:
        return cls(record.path, record.nbytes, figures_of(record))

    def lines(self) -> Iterable[str]:
        figures = self.figures
        took = duration(figures.seconds)
        took += f", {count(figures.steps, 'step')}" if figures.steps else ""
        yield f"{took}; {figures.peaks()}"
        if figures.children_most:
            name = "other processes" if figures.outside else "workers"
            yield f"{name}: {figures.children_most:,} at most"
        for device, peak in self._devices().items():
            yield f"{device}: peak {size(peak)} reserved"
        yield from self._growth()
        yield from self._acts()
        guard = figures.guard_words()
        if guard is not None:
            yield guard
        # Of a program that is about to end by itself nobody knows the exit code yet.
        if figures.ending.kind not in ("clean", "running"):
            acted = figures.limit_acted
            text = figures.ending.text[:1].upper() + figures.ending.text[1:]
            yield f"{text}{'' if acted is None else f'; {acted} was in force'}"
            if figures.idle_heap is not None:
                yield remedy(figures.idle_heap)
        record = f"Wrote {self.path} ({size(self.nbytes)})"
        yield f"{record}; for details: memtools explain {shlex.quote(self.path)}"

    def _growth(self) -> list[str]:
        """What grows, and the first who holds it."""
        verdict = self.figures.verdict
        told = len(verdict.said) + len(verdict.rises)
        return self.figures.growth_lines()[: told + HOLDERS]

    def _acts(self) -> list[str]:
        """What memtools did about memory; not what the end tells already."""
        ended, acts = self.figures.ending.text, []
        for event in self.figures.record.events:
            act = event.data
            if event.kind == "oom":
                acts.append(shown(event.text))
            elif isinstance(act, GuardAct) and shown(act.pressure()) not in ended:
                acts.append(f"the guard acted: {shown(act.clause())}")
        return acts[-ACTS:]

    def _devices(self) -> dict[str, int]:
        return {
            tier.name.partition("_")[0]: tier.peak
            for tier in self.figures.tiers
            if _DEVICE.fullmatch(tier.name)
        }

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes, None for what was not to be had."""
        figures = self.figures
        return {
            "record": self.path,
            "record_bytes": self.nbytes,
            "seconds": figures.seconds,
            "samples": figures.samples,
            "steps": figures.steps,
            "ended": figures.ending.text,
            "peak_bytes": figures.peak_bytes,
            "peak_with_workers_bytes": figures.peak_with_workers_bytes,
            "used_peak_bytes": figures.used_peak_bytes,
            "limit_bytes": figures.limit_bytes,
            "limit_source": figures.limit_source,
            "limit_acted": figures.limit_acted,
            "machine_peak_bytes": None if figures.machine is None else figures.machine.peak_bytes,
            "children_most": figures.children_most,
            "children_peak_bytes": None if figures.workers is None else figures.workers.peak_bytes,
            "devices_peak_bytes": self._devices(),
            "growth": figures.verdict.as_json()["growth"],
            "forecast": figures.verdict.forecast,
            "leaks": self._growth(),
            "acts": self._acts(),
            "guard": figures.guard_words(),
        }


def summary_text(summary: Summary, as_json: bool) -> str:
    if as_json:
        return json.dumps(summary.as_json()) + "\n"
    return "".join(f"memtools: {line}\n" for line in summary.lines())


def write_summary(summary: Summary, as_json: bool) -> None:
    """To file descriptor 2, past whatever the program made of sys.stderr; one that is closed, or
    whose reader has gone, is no error."""
    with contextlib.suppress(OSError):
        os.write(2, summary_text(summary, as_json).encode(errors="backslashreplace"))

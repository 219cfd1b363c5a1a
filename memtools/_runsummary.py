"""What `memtools run` says when the program has ended: lines of text or one of JSON, on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from memtools._record import UNKNOWN, Record, read_record
from memtools._size import format_bytes

_DEVICE = re.compile(r"cuda\d+_reserved")


def most(record: Record, column: str) -> int | None:
    """The largest reading of the whole run; None where there is none, or no such column."""
    known = (value for value in record.buckets.most.get(column, ()) if value != UNKNOWN)
    return max(known, default=None)


def last(record: Record, column: str) -> int | None:
    """The newest reading."""
    for values in (record.samples.values.get(column, ()), record.buckets.last.get(column, ())):
        for value in reversed(values):
            if value != UNKNOWN:
                return int(value)
    return None


def event_texts(record: Record, *kinds: str) -> list[str]:
    return [event.text for event in record.events if event.kind in kinds]


def leak_lines(record: Record) -> list[str]:
    """The newest verdict and its holders, unless it was taken back, and the newest forecast. A
    holder is told once, maybe with an earlier, lower grade than the newest."""
    verdict: list[str] = []
    holders: list[str] = []
    forecast: list[str] = []
    for event in record.events:
        if event.kind == "leak" and event.text.startswith("no longer"):
            verdict, holders, forecast = [], [], []
        elif event.kind == "leak":
            verdict = [event.text]
        elif event.kind == "holder" and verdict:
            holders.append(event.text)
        elif event.kind == "pressure" and event.text.startswith("forecast: "):
            forecast = [event.text]
    return verdict + holders + forecast


@dataclass(frozen=True)
class Summary:
    """The figures of one run; sizes in bytes, None where it was not to be had."""

    record: str
    record_bytes: int
    seconds: float
    samples: int
    steps: int | None
    ended: str | None
    peak_bytes: int | None
    limit_bytes: int | None
    children_most: int | None
    children_peak_bytes: int | None
    devices_peak_bytes: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)

    @classmethod
    def of_record(cls, path: str, limit: int | None) -> Summary:
        """Reads the record at `path`, complete or not. `limit` is what counts as full.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        return cls.of(read_record(path), limit)

    @classmethod
    def of(cls, record: Record, limit: int | None) -> Summary:
        peaks = [most(record, "rss"), *(phase.peak_bytes for phase in record.phases)]
        columns = [c.name for c in record.columns if _DEVICE.fullmatch(c.name)]
        devices = {name.partition("_")[0]: most(record, name) for name in columns}
        return cls(
            record=record.path,
            record_bytes=record.nbytes,
            seconds=record.seconds,
            samples=record.total,
            steps=last(record, "step"),
            ended=next(reversed(event_texts(record, "end")), None),
            peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
            limit_bytes=limit,
            children_most=most(record, "children"),
            children_peak_bytes=most(record, "children_private"),
            devices_peak_bytes={name: peak for name, peak in devices.items() if peak is not None},
            leaks=leak_lines(record)[:2],
            acts=event_texts(record, "guard", "oom")[-3:],
        )

    def lines(self) -> Iterable[str]:
        took = f"{self.seconds:,.1f} s" + (f", {self.steps:,} steps" if self.steps else "")
        yield f"{took}, {_peak(self.peak_bytes, self.limit_bytes)}"
        if self.children_most:
            private = self.children_peak_bytes
            own = "" if private is None else f", {format_bytes(private)} of their own"
            yield f"children: {self.children_most:,} at most{own}"
        for device, peak in self.devices_peak_bytes.items():
            yield f"{device}: peak {format_bytes(peak)} reserved"
        yield from self.leaks
        yield from self.acts
        if self.ended not in (None, "exit: code 0"):
            yield f"ended: {self.ended.removeprefix('exit: ')}"


def _known(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


def _peak(peak: int | None, limit: int | None) -> str:
    if peak is None or limit is None:
        return f"peak {_known(peak)}"
    share = 100 * peak / limit
    return f"peak {format_bytes(peak)} of {format_bytes(limit)} ({share:.1f}%)"


def summary_text(summary: Summary, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(summary)) + "\n"
    text = "".join(f"memtools: {line}\n" for line in summary.lines())
    return text + f"memtools: Wrote {summary.record} ({format_bytes(summary.record_bytes)})\n"


def write_summary(summary: Summary, as_json: bool) -> None:
    """To file descriptor 2, past whatever the program made of sys.stderr; one that is closed, or
    whose reader has gone, is no error."""
    with contextlib.suppress(OSError):
        os.write(2, summary_text(summary, as_json).encode(errors="backslashreplace"))

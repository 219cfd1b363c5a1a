"""A record whose content follows from numbers: what is written k-th is a function of k, so that
whoever reads it can tell a wrong word from a right one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memtools import _core
from memtools._record.record import UNKNOWN, Record

COLUMNS = 3
SIZES = {"rows": 50, "buckets": 8, "events": 7, "phases": 2, "payloads": 2048}


def value(k: int, column: int) -> int | None:
    return None if (k + column) % 5 == 0 else (k * 7919 + column * 104729) % 10007


def writer_at(path: str, **sizes: int) -> _core.RecordWriter:
    return _core.RecordWriter(path, [f"c{i}" for i in range(COLUMNS)], **(SIZES | sizes))


def append(writer: _core.RecordWriter, k: int) -> None:
    writer.append(k, [value(k, c) for c in range(COLUMNS)])


def acts(writer: _core.RecordWriter, k: int) -> list[Callable[[], None]]:
    """A row, an event (of which every other has a payload that does not fit into its slot), and a
    passage of a phase."""
    text = f"event {k} " + "-" * (k % 100)
    body: str | bytes = (5 * text).encode() if k % 2 else text
    row = [value(k, c) for c in range(COLUMNS)]
    return [
        partial(writer.append, k, row),
        partial(writer.event, "k", body, step=k, time_ns=k),
        partial(writer.phase, "round", k, k),
    ]


def write(writer: _core.RecordWriter, k: int) -> None:
    for act in acts(writer, k):
        act()


def wrong(record: Record, rows: int = SIZES["rows"]) -> str | None:
    """What is in the record that no instant of the writer explains; None when all is right."""
    if len(record.samples) < min(record.total, rows) - 1 or record.unreadable > 2:
        return f"{len(record.samples)} samples of {record.total}, {record.unreadable} unreadable"
    for event in record.events:
        text = f"event {event.step} " + "-" * (event.time_ns % 100)
        if event.text != (5 * text if event.time_ns % 2 else text):
            return f"event {event}"
    for phase in record.phases:
        if round(phase.seconds * 1e9) != sum(range(phase.count)):
            return f"phase {phase}"
    counts = [record.total, record.events_total, *(phase.count for phase in record.phases)]
    if max(counts) - min(counts) > 1:
        return f"counts {counts}"
    return wrong_samples(record) or wrong_buckets(record)


def wrong_samples(record: Record) -> str | None:
    samples = record.samples
    for i, k in enumerate(samples.numbers):
        expected = [v if (v := value(k, c)) is not None else UNKNOWN for c in range(COLUMNS)]
        found = [samples.values[f"c{c}"][i] for c in range(COLUMNS)]
        if samples.time_ns[i] != k or found != expected:
            return f"row {k}: {found}"
    return None


def wrong_buckets(record: Record) -> str | None:
    buckets, start = record.buckets, 0
    if sum(buckets.counts) != record.total:
        return f"{sum(buckets.counts)} samples in buckets, {record.total} in all"
    for i, count in enumerate(buckets.counts):
        if (buckets.first_ns[i], buckets.last_ns[i]) != (start, start + count - 1):
            return f"bucket {i}: {buckets.first_ns[i]} to {buckets.last_ns[i]}"
        for c in range(COLUMNS):
            known = [v for k in range(start, start + count) if (v := value(k, c)) is not None]
            found = [of[f"c{c}"][i] for of in (buckets.least, buckets.most, buckets.last)]
            if found != ([min(known), max(known), known[-1]] if known else [UNKNOWN] * 3):
                return f"bucket {i}: {found}"
        start += count
    return None

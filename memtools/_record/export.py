"""A Record as lines of JSON, and as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from memtools._record.figures import figures_of, plain
from memtools._record.record import UNKNOWN
from memtools._record.series import whole_buckets

if TYPE_CHECKING:
    from memtools._record.record import Record

Json = dict[str, Any]


def _reading(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _check_file(file: object) -> None:
    """Raise TypeError for an object without write(), such as the name of a file."""
    if not callable(getattr(file, "write", None)):
        raise TypeError(
            f"a file that is open for writing text is needed, got {type(file).__name__}; "
            'pass open("name", "w")'
        )


def to_jsonl(record: Record, file: IO[str]) -> None:
    """Write one object a line, its "type" first: record, figures, buckets, samples, events,
    phases."""
    _check_file(file)
    for line in _lines(record):
        file.write(json.dumps(line) + "\n")


def _lines(record: Record) -> Iterator[Json]:
    yield {
        "type": "record",
        "command": record.command,
        "pid": record.pid,
        "start_ns": record.start_ns,
        "clock_ns": record.clock_ns,
        "closed_ns": record.closed_ns,
        "complete": record.complete,
        "columns": [{"name": c.name, "unit": c.unit} for c in record.columns],
        "samples": record.total,
        "events": record.events_total,
    }
    yield {"type": "figures", **figures_of(record).as_json()}
    buckets, samples = record.buckets, record.samples
    for i, count in enumerate(buckets.counts):
        kinds = {"least": buckets.least, "most": buckets.most, "last": buckets.last}
        yield {
            "type": "bucket",
            "first_ns": buckets.first_ns[i],
            "last_ns": buckets.last_ns[i],
            "samples": count,
            **{k: {n: _reading(v[i]) for n, v in of.items()} for k, of in kinds.items()},
        }
    for i, number in enumerate(samples.numbers):
        values = {name: _reading(column[i]) for name, column in samples.values.items()}
        yield {
            "type": "sample",
            "number": number,
            "time_ns": samples.time_ns[i],
            "values": values,
        }
    for event in record.events:
        one = {"type": "event", **vars(event)}
        data = one.pop("data")
        yield one if data is None else {**one, "data": plain(data)}
    for phase in record.phases:
        yield {"type": "phase", **vars(phase)}


def to_chrome_trace(record: Record, file: IO[str]) -> None:
    """Write the JSON object format piece by piece. Times are microseconds since the start.

    Columns are counters ("C"): the largest readings of buckets until single samples begin, and then
    the samples. Events with a duration are spans ("X"), the others are instants ("i").
    """
    _check_file(file)
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for i, event in enumerate(_trace_events(record)):
        file.write((",\n" if i else "") + json.dumps(event))
    figures = json.dumps(figures_of(record).as_json())
    file.write(f'\n], "otherData": {figures}}}\n')


def _trace_events(record: Record) -> Iterator[Json]:
    def at(time_ns: int) -> float:
        return (time_ns - record.clock_ns) / 1e3

    pid = record.pid
    title = " ".join(record.command)
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}}
    for time_ns, values in _counters(record):
        for column in record.columns:
            value = _reading(values[column.name])
            if value is not None:
                args = {column.unit or "value": value}
                yield {
                    "ph": "C",
                    "name": column.name,
                    "pid": pid,
                    "ts": at(time_ns),
                    "args": args,
                }
    for event in record.events:
        shared = {"name": event.text, "cat": event.kind, "pid": pid, "tid": 0}
        shared |= {"ts": at(event.time_ns), "args": {"kind": event.kind, "step": event.step}}
        if event.duration_ns:
            yield {"ph": "X", **shared, "dur": event.duration_ns / 1e3}
        else:
            yield {"ph": "i", "s": "p", **shared}


def _counters(record: Record) -> Iterator[tuple[int, dict[str, int]]]:
    """(time, value of each column) of the buckets that end before the first sample, then of
    samples."""
    buckets, samples = record.buckets, record.samples
    for i in range(whole_buckets(record)):
        yield buckets.first_ns[i], {name: column[i] for name, column in buckets.most.items()}
    for i, time_ns in enumerate(samples.time_ns):
        yield time_ns, {name: column[i] for name, column in samples.values.items()}

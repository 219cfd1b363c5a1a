"""Kills writers of a record at random instants and reads what they left: test_record.py runs it.

python tests/record/recordkiller.py FOLDER KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import memtools
from memtools import _core
from memtools.record.record import UNKNOWN, Record

COLUMNS = 3


def value(k: int, column: int) -> int | None:
    return None if (k + column) % 5 == 0 else (k * 7919 + column * 104729) % 10007


def write_for_ever(path: str, ready: int) -> None:
    names = [f"c{i}" for i in range(COLUMNS)]
    writer = _core.RecordWriter(path, names, rows=50, buckets=8, events=7, phases=2, payloads=2048)
    os.write(ready, b"x")
    k = 0
    while True:
        writer.append(k, [value(k, c) for c in range(COLUMNS)])
        text = f"event {k} " + "-" * (k % 100)
        writer.event("k", (5 * text).encode() if k % 2 else text, step=k, time_ns=k)
        writer.phase("round", k, k)
        k += 1


def wrong(record: Record) -> str | None:
    """What is in the record that no instant of the writer explains; None when all is right."""
    samples, buckets = record.samples, record.buckets
    for i, k in enumerate(samples.numbers):
        expected = [v if (v := value(k, c)) is not None else UNKNOWN for c in range(COLUMNS)]
        found = [samples.values[f"c{c}"][i] for c in range(COLUMNS)]
        if samples.time_ns[i] != k or found != expected:
            return f"row {k}: {found}"
    if len(samples) < min(record.total, 50) - 1 or record.unreadable > 2:
        return f"{len(samples)} samples of {record.total}, {record.unreadable} unreadable"
    if sum(buckets.counts) != record.total:
        return f"{sum(buckets.counts)} samples in buckets, {record.total} in all"
    start = 0
    for i, count in enumerate(buckets.counts):
        known = [v for k in range(start, start + count) if (v := value(k, 0)) is not None]
        found = [buckets.least["c0"][i], buckets.most["c0"][i], buckets.last["c0"][i]]
        if found != ([min(known), max(known), known[-1]] if known else [UNKNOWN] * 3):
            return f"bucket {i}: {found}"
        start += count
    for event in record.events:
        text = f"event {event.step} " + "-" * (event.time_ns % 100)
        if event.text != (5 * text if event.time_ns % 2 else text):
            return f"event {event}"
    for phase in record.phases:
        if round(phase.seconds * 1e9) != sum(range(phase.count)):
            return f"phase {phase}"
    counts = [record.total, record.events_total, *(phase.count for phase in record.phases)]
    return None if max(counts) - min(counts) <= 1 else f"counts {counts}"


def kill_one(path: str, microseconds: float) -> Record:
    reading, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        write_for_ever(path, ready)
    os.close(ready)
    os.read(reading, 1)
    os.close(reading)
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return memtools.read_record(path)


def main() -> int:
    path, chance = str(Path(sys.argv[1], "run.mem")), random.Random(1)
    lengths, torn = set(), 0
    for i in range(int(sys.argv[2])):
        record = kill_one(path, chance.uniform(0, 4000))
        fault = wrong(record)
        if fault is not None or record.complete or record.written:
            print(f"kill {i}: {fault}, complete={record.complete}, written={record.written}")
            return 1
        lengths.add(record.total)
        torn += record.unreadable > 0
    print(len(lengths), torn)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

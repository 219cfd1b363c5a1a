"""Kills monitored loops at random instants and reads what they left, for test_faults.py.

python tests/monitor/killer.py FOLDER KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from memtools import MemoryMonitor, read_record
from memtools.record.record import UNKNOWN, Record


def train_for_ever(path: str, ready: int) -> None:
    """From before the start to deep in a run, all that a monitor writes."""
    os.write(ready, b"x")
    with MemoryMonitor(path, 0.1, device="cpu", limit="1 MiB") as monitor:
        monitor.on_pressure(0.5, lambda: monitor.mark("pressure"))
        kept = []
        while True:
            with monitor.phase("train"), monitor.phase("forward"):
                kept.append(bytearray(1000))
            monitor.step()
            monitor.mark(f"step {monitor.step_count} " + "-" * (monitor.step_count % 100))


def wrong(record: Record) -> str | None:
    """What is in the record that no instant of the program explains; None when all is right."""
    samples = record.samples
    if record.complete or record.written:
        return f"complete {record.complete}, written {record.written}"
    if record.unreadable > 4:
        return f"{record.unreadable} unreadable"
    times, steps = samples.time_ns.tolist(), samples.values["step"].tolist()
    if times != sorted(times) or steps != sorted(steps):
        return "samples out of order"
    if any(not 2**20 < rss < 2**40 for rss in samples.values["rss"] if rss != UNKNOWN):
        return "a size that cannot be"
    if sum(record.buckets.counts) != record.total:
        return f"{sum(record.buckets.counts)} samples in buckets, {record.total} in all"
    for event in record.events:
        if event.kind not in ("start", "mark", "phase", "pressure", "leak", "holder"):
            return f"event {event}"
        if event.text.startswith("step "):
            step = int(event.text.split()[1])
            if event.step != step or event.text != f"step {step} " + "-" * (step % 100):
                return f"event {event}"
    counts = {phase.name: phase.count for phase in record.phases}
    if not set(counts) <= {"train", "forward"}:
        return f"phases {counts}"
    return None if 0 <= counts.get("forward", 0) - counts.get("train", 0) <= 1 else f"{counts}"


def kill_one(path: Path, microseconds: float, *, early: bool) -> None:
    """So long after the fork, or after the record came."""
    reading, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        train_for_ever(str(path), ready)
    os.close(ready)
    os.read(reading, 1)
    os.close(reading)
    while not early and not path.exists():
        time.sleep(0.0002)
    time.sleep(microseconds / 1e6)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    """The numbers of different lengths seen, and of kills before there was a record."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(20)
    lengths, without = set(), 0
    for k in range(kills):
        path, early = folder / f"{k}.mem", k % 4 == 0
        kill_one(path, random.uniform(0, 1) ** 2 * (5_000 if early else 20_000), early=early)
        if not path.exists():
            without += 1
        else:
            record = read_record(path)
            if (fault := wrong(record)) is not None:
                print(f"kill {k}: {fault}")
                return 1
            lengths.add((record.total, record.events_total))
        for left in folder.iterdir():  # a record, or what was to become one
            left.unlink()
    print(len(lengths), without)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Kills monitored loops at random instants and reads what they left, for test_faults.py.

A loop counts its steps where its killer sees them, so that how far they get is drawn by lot and not
by how fast the machine is.

    of four kills   a random time after
    one             the fork: before there is a record, as a rule
    one             the record came: mostly in the first look at the heap, the longest of the steps
    two             the begin of a random one of the first 300 steps

python tests/monitor/killer.py FOLDER KILLS
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

from memtools import MemoryMonitor, read_record
from memtools._record.record import UNKNOWN, Record

STEPS = 300  # of which one is chosen


def train_for_ever(path: str, ready: int, begun: memoryview) -> None:
    """From before the start to deep in a run, all that a monitor writes. `begun[0]`: steps."""
    os.write(ready, b"x")
    with MemoryMonitor(path, 0.1, device="cpu", limit="1 MiB") as monitor:
        monitor.on_pressure(0.5, lambda: monitor.mark("pressure"))
        kept = []
        while True:
            begun[0] += 1
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
        usual = ("start", "counters", "shm_room", "mark", "phase", "pressure", "finding", "trace",
                 "peak")  # fmt: skip
        if event.kind not in usual:
            return f"event {event}"
        if event.text.startswith("step "):
            step = int(event.text.split()[1])
            if event.step != step or event.text != f"step {step} " + "-" * (step % 100):
                return f"event {event}"
    counts = {phase.name: phase.count for phase in record.phases}
    if not set(counts) <= {"train", "forward"}:
        return f"phases {counts}"
    return None if 0 <= counts.get("forward", 0) - counts.get("train", 0) <= 1 else f"{counts}"


def kill_one(path: Path, begun: memoryview, steps: int | None, microseconds: float) -> None:
    """So long after it began so many steps; 0: after the record came; None: after the fork."""
    reading, ready = os.pipe()
    begun[0] = 0
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        train_for_ever(str(path), ready, begun)
    os.close(ready)
    os.read(reading, 1)
    os.close(reading)
    while steps is not None and (begun[0] < steps or not path.exists()):
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise ChildProcessError(f"{path} ended by itself")
        time.sleep(0.0002)
    time.sleep(microseconds / 1e6)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    """The numbers of different lengths seen, and of kills before there was a record."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(20)
    lengths, without = set(), 0
    begun = memoryview(mmap.mmap(-1, 8)).cast("Q")  # shared with the children
    for k in range(kills):
        path = folder / f"{k}.mem"
        steps = (None, 0, random.randint(1, STEPS), random.randint(1, STEPS))[k % 4]
        longest = {None: 5_000, 0: 80_000}.get(steps, 500)
        kill_one(path, begun, steps, random.uniform(0, 1) ** 2 * longest)
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

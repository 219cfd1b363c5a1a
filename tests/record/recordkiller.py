"""Kills writers of a record at random instants and reads what they left: test_record.py runs it.

python -m tests.record.recordkiller FOLDER KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import memtools
from memtools._record.record import Record
from tests.record.recordmodel import write, writer_at, wrong


def write_for_ever(path: str, ready: int) -> None:
    writer = writer_at(path)
    os.write(ready, b"x")
    k = 0
    while True:
        write(writer, k)
        k += 1


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

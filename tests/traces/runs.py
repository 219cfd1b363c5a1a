"""Records of real programs that leak, and of some that do not, as `memtools run` wrote them.

    python -m tests.traces.runs FOLDER     # packs each NAME.mem of a folder into runs.npz

The programs are ordinary training loops of 20 to 60 lines, rewritten from public threads about
memory. Kept are all samples (milliseconds, and each column's differences), and the times
of the events in EVENTS.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import memtools
from memtools import _core
from memtools._record.kinds import End, Fork, Start, payload

FILE = Path(__file__).resolve().parent / "recorded" / "runs.npz"
UNKNOWN = 2**64 - 1
UNITS = {"step": "", "children": ""}
EVENTS = {"start": Start("memtools run", machine_bytes=int(23.5 * 2**30)), "fork": Fork(1),
          "end": End(code=0)}  # fmt: skip
COLUMNS = ("step", "rss", "private", "available", "heap_used", "children", "children_private")


def pack(folder: Path) -> None:
    arrays: dict[str, NDArray[np.int64]] = {}
    about = {}
    for path in sorted(folder.glob("*.mem")):
        record, name = memtools.read_record(path), path.stem
        times = np.array(record.samples.time_ns) - record.clock_ns
        arrays[f"{name}/ms"] = np.diff(times.astype(np.int64) // 10**6, prepend=0)
        for column in COLUMNS:
            values = np.array(record.samples.values[column], dtype=np.uint64)
            known = np.flatnonzero(values != UNKNOWN)
            kept = values[known].astype(np.int64)
            if column not in UNITS:  # of a heap of 100 MiB, 256 bytes are nothing
                kept -= kept % 256
            arrays[f"{name}/{column}/at"] = np.diff(known, prepend=0)
            arrays[f"{name}/{column}"] = np.diff(kept, prepend=0)
        about[name] = [
            [(e.time_ns - record.clock_ns) // 10**6, e.step, e.kind, e.text]
            for e in record.events
            if e.kind in EVENTS
        ]
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(FILE, about=text, **arrays)  # type: ignore[arg-type]


@cache
def _loaded() -> dict[str, NDArray[np.int64]]:
    with np.load(FILE) as file:
        return {key: file[key] for key in file.files}


def events() -> dict[str, list[tuple[int, int | None, str, str]]]:
    """Of each program: milliseconds, step, kind and text."""
    found: dict[str, list[tuple[int, int | None, str, str]]]
    found = json.loads(_loaded()["about"].tobytes())
    return found


def write(name: str, path: str, command: tuple[str, ...] = ("python", "train.py")) -> str:
    """Writes the record of a program; returns the path."""
    data = _loaded()
    times = np.cumsum(data[f"{name}/ms"])
    rows: list[list[int | None]] = [[None] * len(COLUMNS) for _ in times]
    for i, column in enumerate(COLUMNS):
        at = np.cumsum(data[f"{name}/{column}/at"])
        for row, value in zip(at, np.cumsum(data[f"{name}/{column}"]), strict=True):
            rows[row][i] = int(value)
    columns = [(column, UNITS.get(column, "B")) for column in COLUMNS]
    with _core.RecordWriter(path, columns, command=list(command)) as writer:
        origin = memtools.read_record(path).clock_ns
        for ms, row in zip(times.tolist(), rows, strict=True):
            writer.append(origin + ms * 10**6, row)
        for ms, step, kind, _ in events()[name]:
            if kind in EVENTS:
                body = payload(kind, EVENTS[kind])
                writer.event(kind, body, step=step, time_ns=origin + ms * 10**6)
    return path


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
    print(f"{FILE.stat().st_size / 1000:.0f} KB")

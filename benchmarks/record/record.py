"""What a row of a record costs, beside the other ways to lose nothing at a SIGKILL.

    python -m benchmarks.record.record       # a minute; writes results/record.json
    python -m benchmarks.record.record --quick      # 15 seconds, to look at

docs/internals/record.md says what the figures mean.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from typing import Any

import memtools
from benchmarks.kit.harness import (
    Json,
    arguments,
    environment,
    interleave,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from benchmarks.record.loops_c import loops
from memtools import _core

COLUMNS = 16
ALLOWED_NS = 100.0


def from_c(folder: str, columns: int, seconds: float) -> list[Json]:
    """A row from C: the lock, the row, its bucket, and the folds that fall into the turn."""
    library = loops(columns, folder)
    runners = {
        "append": library.append,
        "values alone": library.only_values,
        "JSONL line + fflush": library.jsonl,
        "event": library.event,
        "phase": library.phase,
    }
    calls = {"append": 20000, "values alone": 20000, "JSONL line + fflush": 300}
    calls |= {"event": 5000, "phase": 10000}
    return interleave(runners, calls, seconds=seconds).summary("append")


def from_python(folder: str, seconds: float) -> list[Json]:
    """A row from Python. sqlite3 commits each, without waiting for the disk (synchronous=OFF): a
    killed process loses nothing, as with the others."""
    names = [f"column_{c}" for c in range(COLUMNS)]
    writer = _core.RecordWriter(os.path.join(folder, "python.mem"), names)
    base = sqlite3.connect(os.path.join(folder, "base.db"), isolation_level=None)
    base.execute("PRAGMA synchronous=OFF")
    base.execute("PRAGMA journal_mode=WAL")
    base.execute(f"CREATE TABLE samples (time_ns INTEGER, {', '.join(names)})")
    values = [2**32 + 4096 * c for c in range(COLUMNS)]
    row = [1, *values]
    given: dict[str, Any] = {"values": values, "row": row, "names": names, "dumps": json.dumps}
    given["insert"] = f"INSERT INTO samples VALUES ({', '.join('?' * (COLUMNS + 1))})"
    line = "lines.write(dumps(dict(zip(names, values))) + '\\n'); lines.flush()"
    with open(os.path.join(folder, "lines.jsonl"), "w") as lines:
        given |= {"append": writer.append, "lines": lines, "run": base.execute}
        runners = {
            "RecordWriter.append": statement("append(1, values)", **given),
            "JSONL line + flush": statement(line, **given),
            "sqlite3 insert": statement("run(insert, row)", **given),
            "RecordWriter.event": statement("event('k', 'some text')", event=writer.event),
            "RecordWriter.phase": statement("phase('train', 5, 6)", phase=writer.phase),
        }
        calls = dict.fromkeys(runners, 2000) | {"JSONL line + flush": 200, "sqlite3 insert": 200}
        rows = interleave(runners, calls, seconds=seconds).summary("RecordWriter.append")
    base.close()
    return rows


def sizes(folder: str) -> Json:
    """Bytes of the default record, before and after a million rows, and the time to read it."""
    path = os.path.join(folder, "million.mem")
    writer = _core.RecordWriter(path, [f"c{i}" for i in range(COLUMNS)])
    before, values = os.path.getsize(path), [7] * COLUMNS
    for k in range(1_000_000):
        writer.append(k, values)
    start = time.perf_counter()
    record = memtools.read_record(path)
    return {
        "bytes before": before,
        "bytes after 1,000,000 rows": os.path.getsize(path),
        "buckets": len(record.buckets),
        "samples a bucket": record.buckets.width,
        "read, ms": (time.perf_counter() - start) * 1e3,
    }


def limits(sections: Json) -> list[Limit]:
    rows = {row["name"]: row for row in sections[f"from C, {COLUMNS} columns"]}
    took = (rows["append"][key] for key in ("min_ns", "median_ns"))
    return [number_limit(f"append of {COLUMNS} columns from C", ALLOWED_NS, "ns", *took)]


def main() -> None:
    options = arguments(__doc__).parse_args()
    seconds = 3.0 if options.quick else 12.0
    facts = environment(options.threads)
    sections: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        for columns in (4, COLUMNS, 64):
            name = f"from C, {columns} columns"
            sections[name] = from_c(folder, columns, seconds)
            print(f"{name}\n{timing_table(sections[name], 'append')}\n", flush=True)
        sections["from Python"] = from_python(folder, seconds)
        print(timing_table(sections["from Python"], "RecordWriter.append"), "\n", flush=True)
        sections["size"] = sizes(folder)
        print(table(("", ""), ((k, f"{v:,.1f}") for k, v in sections["size"].items())))
    finish("record", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()

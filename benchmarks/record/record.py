"""What a row of a record costs, beside the other ways to lose nothing at a SIGKILL.

    python -m benchmarks.record.record           # a minute; writes results/record.json
    python -m benchmarks.record.record --quick   # 15 seconds; writes no JSON

docs/internals/record.md describes the file.
"""

from __future__ import annotations

import json
import os
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
        "JSONL line + fflush": library.jsonl,
        "event": library.event,
        "phase": library.phase,
    }
    calls = {"append": 20000, "JSONL line + fflush": 300, "event": 5000, "phase": 10000}
    return interleave(runners, calls, seconds=seconds).summary("append")


def from_python(folder: str, seconds: float) -> list[Json]:
    """A row from Python."""
    names = [f"column_{c}" for c in range(COLUMNS)]
    writer = _core.RecordWriter(os.path.join(folder, "python.mem"), names)
    given: dict[str, Any] = {"names": names, "values": [2**32 + 4096 * c for c in range(COLUMNS)]}
    line = "lines.write(dumps(dict(zip(names, values))) + '\\n'); lines.flush()"
    with open(os.path.join(folder, "lines.jsonl"), "w") as lines:
        runners = {
            "RecordWriter.append": statement("append(1, values)", append=writer.append, **given),
            "JSONL line + flush": statement(line, lines=lines, dumps=json.dumps, **given),
        }
        calls = {"RecordWriter.append": 2000, "JSONL line + flush": 200}
        return interleave(runners, calls, seconds=seconds).summary("RecordWriter.append")


def sizes(folder: str) -> Json:
    """Bytes of the default record after a million rows, and the time to read it."""
    path = os.path.join(folder, "million.mem")
    writer = _core.RecordWriter(path, [f"c{i}" for i in range(COLUMNS)])
    for k in range(1_000_000):
        writer.append(k, [7] * COLUMNS)
    start = time.perf_counter()
    memtools.read_record(path)
    took = time.perf_counter() - start
    return {"bytes after 1,000,000 rows": os.path.getsize(path), "read, ms": took * 1e3}


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
        for columns in (COLUMNS, 64):
            name = f"from C, {columns} columns"
            sections[name] = from_c(folder, columns, seconds)
            print(timing_table(name, sections[name]), flush=True)
        sections["from Python"] = from_python(folder, seconds)
        print(timing_table("from Python", sections["from Python"]), flush=True)
        sections["size"] = sizes(folder)
        print(table(("", ""), ((k, f"{v:,.1f}") for k, v in sections["size"].items())))
    finish("record", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()

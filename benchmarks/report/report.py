"""What a page of ten million samples costs: reading the record, rendering the page, bytes.

    python -m benchmarks.report.report           # a minute; writes results/report.json
    python -m benchmarks.report.report --quick   # 15 seconds; writes no JSON

`make test-pages` measures in a browser how soon the page is drawn.
"""

from __future__ import annotations

import os
import tempfile

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
from benchmarks.kit.limits import finish, number_limit
from memtools import _core
from memtools.report import render

TEN_MILLION = 10_000_000
PAGE_BYTES = 2 * 2**20
COLUMNS = ["step", "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available",
           "pressure", "heap_used", "children", "children_private"]  # fmt: skip


def rendering(folder: str, seconds: float) -> tuple[list[Json], Json]:
    """A default record of ten million samples and 11 columns."""
    path = os.path.join(folder, "run.mem")
    units = [(name, "" if name in ("step", "pressure", "children") else "B") for name in COLUMNS]
    with _core.RecordWriter(path, units) as writer:
        for i in range(TEN_MILLION):
            used = (i & 1023) << 20
            writer.append(i * 10**6, [i >> 4, used, used, 0, used, 2**31, 2**33, 0, used, 2, 2**20])
    record = memtools.read_record(path)
    runners = {
        "read_record": statement("run(path)", run=memtools.read_record, path=path),
        "render": statement("run(record)", run=render, record=record),
    }
    rows = interleave(runners, 1, seconds=seconds).summary("render")
    return rows, {"page, bytes": len(render(record)), "record, bytes": os.path.getsize(path)}


def main() -> None:
    options = arguments(__doc__).parse_args()
    seconds = 3.0 if options.quick else 12.0
    facts = environment(options.threads)
    sections: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        sections["rendering"], sections["sizes"] = rendering(folder, seconds)
    print(timing_table("rendering", sections["rendering"]))
    print(table(("", ""), ((name, f"{size:,}") for name, size in sections["sizes"].items())))
    size = sections["sizes"]["page, bytes"] / 2**20
    allowed = PAGE_BYTES / 2**20
    found = [number_limit("page of 10 million samples", allowed, "MiB", size, size)]
    finish("report", options, facts, sections, found)


if __name__ == "__main__":
    main()

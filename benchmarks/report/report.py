"""What a page of millions of samples costs: reducing, rendering, bytes.

    python -m benchmarks.report.report       # a minute; writes results/report.json
    python -m benchmarks.report.report --quick      # 15 seconds, to look at

Side by side: the report's reducer, numpy's on the same cuts, and a page that would hold all samples
as JSON. docs/guides/report.md says what the figures mean; how soon the page is drawn is measured by
`make test-pages`, which takes a browser.
"""

from __future__ import annotations

import array
import json
import os
import tempfile

import numpy

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
from memtools._record.record import UNKNOWN
from memtools._record.series import _reduce, cuts
from memtools.report import render

TEN_MILLION = 10_000_000
CELLS = 2_400
PAGE_BYTES = 2 * 2**20
COLUMNS = ["step", "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available",
           "pressure", "heap_used", "children", "children_private"]  # fmt: skip


def reducing(samples: int, seconds: float) -> list[Json]:
    """One column: least and most of 2,400 spans of time."""
    times = memoryview(array.array("Q", range(samples)))
    values = memoryview(array.array("Q", [i * 2654435761 % 2**32 for i in range(samples)]))
    many, at = numpy.asarray(values), numpy.array([0, *cuts(times, CELLS)[:-1]])

    def by_numpy() -> None:
        known = many != UNKNOWN
        numpy.minimum.reduceat(many, at)
        numpy.maximum.reduceat(numpy.where(known, many, 0), at)

    def ours() -> None:
        _reduce(times, times, None, {"x": values}, {"x": values}, CELLS)

    runners = {
        "report": statement("run()", run=ours),
        "numpy reduceat": statement("run()", run=by_numpy),
        "json.dumps of all": statement("dumps(values.tolist())", dumps=json.dumps, values=values),
    }
    return interleave(runners, 1, seconds=seconds).summary("report")


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
    samples = TEN_MILLION // 10 if options.quick else TEN_MILLION
    sections: Json = {"reducing one column": reducing(samples, seconds)}
    print(f"one column of {samples:,} samples")
    print(timing_table(sections["reducing one column"], "report"))
    with tempfile.TemporaryDirectory() as folder:
        sections["rendering"], sections["sizes"] = rendering(folder, seconds)
    print(timing_table(sections["rendering"], "render"))
    print(table(("", ""), ((name, f"{size:,}") for name, size in sections["sizes"].items())))
    size = sections["sizes"]["page, bytes"] / 2**20
    allowed = PAGE_BYTES / 2**20
    found = [number_limit("page of 10 million samples", allowed, "MiB", size, size)]
    finish("report", options, facts, sections, found)


if __name__ == "__main__":
    main()

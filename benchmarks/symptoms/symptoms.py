"""The effect of the usual remedies for each symptom of docs/symptoms: memory and processor time.

    python -m benchmarks.symptoms.symptoms            # measures all, writes the JSON and the pages
    python -m benchmarks.symptoms.symptoms --only freed
    python -m benchmarks.symptoms.symptoms --pages    # only puts the JSON's figures into the pages

Every way is a forked process of its own, on one thread of torch; the ways take turns, three times.
Memory is the median of the three. Processor time is the least of the three, and the pages show it
as a ratio to the first way's: a busy machine changes the elapsed time of a program, and its
processor time much less.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.kit.harness import RESULTS, Json, arguments, environment, table
from benchmarks.kit.limits import finish

PROJECT = Path(__file__).resolve().parents[2]
PAGES = PROJECT / "docs" / "symptoms"
TIMES = 3

#: Imports torch once, and forks a process for each line on stdin: [program, way].
SERVER = """
import json, os, sys, torch
torch.set_num_threads(1)
from benchmarks.symptoms.programs import PROGRAMS
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        program, way = json.loads(line)
        print(json.dumps(PROGRAMS[program](way)), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""


@dataclass(frozen=True)
class Way:
    """One way of doing it: the program is called with `name`, `label` is the first cell of its row
    in a page, and `env` has variables that are set before it starts."""

    name: str
    label: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A table of a page: the headings of its columns of figures, its rows, and the variables that
    are set for all of them."""

    columns: dict[str, str]
    ways: tuple[Way, ...]
    env: dict[str, str] = field(default_factory=dict)


TIME = {"cpu": "processor time"}
#: Each freed block goes back to the system at once, so that resident memory is memory in use.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
SECTIONS = {
    "step": Section(
        {"peak_mib": "peak, MiB"} | TIME,
        (
            Way("no change", "no change"),
            Way("half the batch", "half the batch"),
            Way("loss / 4", "four micro-batches, `loss / 4`"),
            Way("acc.step", "`acc.step(batch, loss_fn)` of memtools"),
            Way("checkpointing", "checkpointing of each layer"),
            Way("autocast", "`torch.autocast`, bfloat16"),
            Way("fused optimizer", "`AdamW(..., fused=True)`"),
            Way("gc.collect", "`gc.collect()` at each update"),
        ),
        MAPPED,
    ),
    "kept": Section(
        {"per_1000_mib": "MiB in 1,000 updates"} | TIME,
        (
            Way("output", "`outputs.append(output)`"),
            Way("gc.collect", "the same and `gc.collect()` each 10 updates"),
            Way("detach", "`outputs.append(output.detach())`"),
            Way("half", "`outputs.append(output.detach().half())`"),
            Way("clear", "`outputs.clear()` each 50 updates"),
            Way("deque", "`outputs = deque(maxlen=20)`"),
            Way("item", "`outputs.append(output.mean().item())`"),
            Way("losses", "`losses.append(loss)`"),
            Way("losses.item", "`losses.append(loss.item())`"),
        ),
    ),
    "shapes": Section(
        {"grown_mib": "MiB more after 200 widths"} | TIME,
        (
            Way("no change", "no change"),
            Way("gc.collect", "`gc.collect()` each 10 updates"),
            Way("pad", "pad to a multiple of 64 points"),
            Way(
                "capacity 16",
                "`ONEDNN_PRIMITIVE_CACHE_CAPACITY=16`",
                {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"},
            ),
            Way(
                "capacity 0",
                "`ONEDNN_PRIMITIVE_CACHE_CAPACITY=0`",
                {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"},
            ),
            Way("lru", "`LRU_CACHE_CAPACITY=1`", {"LRU_CACHE_CAPACITY": "1"}),
            Way("off", "`torch.backends.mkldnn.flags(enabled=False)`"),
        ),
    ),
    "shared": Section(
        {"shm_mib": "/dev/shm, MiB"},
        (
            Way("no change", "4 workers, `prefetch_factor` 2 (the default), float32"),
            Way("2 workers", "`num_workers=2`"),
            Way("prefetch_factor=1", "`prefetch_factor=1`"),
            Way("half the batch", "half the batch"),
            Way("uint8", "batches of `uint8`, made floats on the device"),
            Way("file_system", '`set_sharing_strategy("file_system")`'),
            Way("no workers", "`num_workers=0`"),
            Way("bounded", '`bounded(loader, "12 MiB")` of memtools'),
        ),
    ),
    "workers": Section(
        {"workers_mib": "private, all workers, MiB"} | TIME,
        (
            Way("list", "a list of 1,000,000 strings, 4 workers"),
            Way("gc.freeze", "the same after `gc.freeze()`"),
            Way("array", "the same texts in one NumPy array"),
            Way("no workers", "`num_workers=0`"),
        ),
    ),
    "freed": Section(
        {
            "made_mib": "made",
            "after_del_mib": "after `del`",
            "after_collect_mib": "and `gc.collect()`",
            "after_trim_mib": "and `malloc_trim(0)`",
        },
        (
            Way("large", "4 tensors of 100 MiB"),
            Way("small between", "4,096 of 96 KiB, small ones that live on between them"),
            Way("threads", "the same, made by 8 threads"),
            Way("cycle", "in a list that contains itself"),
            Way("another name", "a view of one, a slice of another live on"),
            Way("traceback", "locals of a function whose exception is kept"),
            Way("traceback=None", "the same, kept as `error.with_traceback(None)`"),
        ),
    ),
    "heap": Section(
        {"peak_mib": "peak, MiB", "grown_mib": "resident, MiB"} | TIME,
        (
            Way("no change", "no change"),
            Way("malloc_trim", "`malloc_trim(0)` each 25 steps"),
            Way("CleanupPolicy", "`CleanupPolicy(trim_every=25)` of memtools"),
            Way("strict", "the same with `strict=True`"),
            Way("arenas", "`MALLOC_ARENA_MAX=2`", {"MALLOC_ARENA_MAX": "2"}),
            Way(
                "trim threshold",
                "`MALLOC_TRIM_THRESHOLD_=131072`",
                {"MALLOC_TRIM_THRESHOLD_": "131072"},
            ),
            Way(
                "mmap threshold",
                "`MALLOC_MMAP_THRESHOLD_=131072`",
                {"MALLOC_MMAP_THRESHOLD_": "131072"},
            ),
            Way("settings", '`allocator_settings().set(mmap_threshold="1 MiB", ...)`'),
        ),
    ),
    "collector": Section(
        {
            "slower": "last 100 updates to first 100",
            "longest_ms": "longest, ms",
            "peak_mib": "peak, MiB",
        }
        | TIME,
        (
            Way("no change", "no change"),
            Way("gc.collect", "`gc.collect()` each 10 updates"),
            Way("deque", "the same, and `log = deque(maxlen=60_000)`"),
            Way("disable", "`gc.disable()`"),
            Way("freeze", "`gc.freeze()` before the loop"),
            Way("freeze each", "`gc.freeze()` each 100 updates"),
            Way("torchtitan", "`gc.disable()`, `gc.collect(1)` each 50 updates"),
            Way("CleanupPolicy", "`with memtools.CleanupPolicy():`"),
        ),
    ),
}

# --- measuring ------------------------------------------------------------------------------------


class Servers:
    """Processes that have imported torch and fork a process for each program. Each set of
    environment variables has its own process, because malloc and oneDNN read theirs when it begins.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[tuple[str, str], ...], subprocess.Popen[str]] = {}
        self._env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MALLOC_", "GLIBC_TUN", "ONEDNN_", "DNNL_", "LRU_CACHE"))
        }

    def run(self, program: str, way: Way) -> dict[str, float]:
        """The figures of one process."""
        env = SECTIONS[program].env | way.env
        key = tuple(sorted(env.items()))
        if key not in self._started:
            self._started[key] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._env | env,
                cwd=PROJECT,
            )
        server = self._started[key]
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps([program, way.name]), file=server.stdin, flush=True)
        found: dict[str, float] | None = json.loads(server.stdout.readline() or "null")
        if found is None:
            raise SystemExit(f"{program}, {way.name}: it failed; its error is above")
        return found

    def close(self) -> None:
        for server in self._started.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


def measure(name: str, times: int, servers: Servers) -> Json:
    """All ways of a section, in turns."""
    section = SECTIONS[name]
    runs: dict[str, list[dict[str, float]]] = {way.label: [] for way in section.ways}
    for _ in range(times):
        for way in section.ways:
            runs[way.label].append(servers.run(name, way))
    rows = []
    for label, found in runs.items():
        row = {key: median(one[key] for one in found) for key in found[0]}
        if "cpu_s" in row:
            row["cpu_s"] = min(one["cpu_s"] for one in found)
        rows.append({"label": label, **{key: round(value, 4) for key, value in row.items()}})
    content = {"times": times, "rows": rows}
    print(
        table(
            ["", *section.columns.values()],
            [[label, *cells] for label, cells in cells_of(name, content)],
        )
    )
    return content


# --- the pages ------------------------------------------------------------------------------------


def cells_of(name: str, content: Json) -> Iterator[tuple[str, list[str]]]:
    """The label and the cells of each row, as a page has them."""
    rows = content["rows"]
    for row in rows:
        cells = []
        for column in SECTIONS[name].columns:
            if column == "cpu":
                cells.append(f"{row['cpu_s'] / rows[0]['cpu_s']:.2f} x")
            elif column == "slower":
                cells.append(f"{row[column]:.1f} x")
            else:
                value = row[column]
                cells.append(f"{value:,.0f}" if abs(value) >= 9.95 else f"{abs(value):.1f}")
        yield row["label"], cells


def with_figures(text: str, sections: Json) -> str:
    """A page's text with the figures of `sections` in its tables.

    A table begins below a line `<!-- figures: NAME -->`. Its first column has labels, and the next
    ones are the section's; others are kept. Rows that a page does not show are left out. Raises
    ValueError for a table or a row that was not measured.
    """
    lines = text.split("\n")
    name = None
    for number, line in enumerate(lines):
        if mark := re.fullmatch(r"<!-- figures: (\w+) -->", line):
            name = mark[1]
            if name not in sections:
                raise ValueError(f"nothing was measured for a table of {name}")
            figures = dict(cells_of(name, sections[name]))
            head = list(SECTIONS[name].columns.values())
        elif name is not None and line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if "-" in line and set(line) <= set("|- "):
                continue
            if not cells[0] or lines[number + 1].startswith("| ---"):
                cells[1 : 1 + len(head)] = head
            elif cells[0] in figures:
                cells[1 : 1 + len(head)] = figures[cells[0]]
            else:
                raise ValueError(f"nothing was measured for {cells[0]!r} of {name}")
            lines[number] = "| " + " | ".join(cells) + " |"
        elif name is not None:
            name = None
    return "\n".join(lines)


def write_pages(sections: Json) -> None:
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        new = with_figures(text, sections)
        if new != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(PROJECT)}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--pages",
        action="store_true",
        help="measure nothing; put the JSON's figures into the pages",
    )
    options = parser.parse_args()
    results = RESULTS / "symptoms.json"
    if options.pages:
        write_pages(json.loads(results.read_text())["sections"])
        return
    facts = environment(1)
    sections: Json = {}
    servers = Servers()
    for name in SECTIONS:
        if name.startswith(options.only or ""):
            print(f"\n--- {name} ---", flush=True)
            sections[name] = measure(name, 1 if options.quick else TIMES, servers)
    servers.close()
    finish("symptoms", options, facts, sections, [])
    if not (options.only or options.quick or options.out):
        write_pages(sections)


if __name__ == "__main__":
    main()

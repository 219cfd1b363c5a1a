"""What the benchmarks share: interleaved timing, facts about the machine, tables, JSON.

Every way of doing a thing is timed in the same process, in turns of a few milliseconds in random
order, so that a busy neighbour or a clock change affects all alike. The least and the median of
many turns are reported; ratios and differences are taken turn by turn before their median is. A
figure from one run says little: `repeated` runs everything again in fresh processes, whose
addresses and pages differ, and `pooled` combines them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtools._base.text import aligned

# Runs an operation n times and returns the nanoseconds that took.
Runner = Callable[[int], float]
Json = dict[str, Any]

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results"
#: A benchmark writes its figures into these pages.
WRITTEN = "docs/symptoms"
CSRC = HERE.parent / "csrc"
UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1))
CFLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
#: The flags of the extension, for loops that call its C code.
CORE_FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-flto", "-fvisibility=default", "-DNDEBUG",
              "-pthread", f"-I{CSRC}", f"-I{CSRC}/core", "-lm")  # fmt: skip


def statement(code: str, setup: str = "pass", **names: Any) -> Runner:
    """Times a line of Python with its loop; `setup` runs before each turn and is not timed."""
    timer = timeit.Timer(code, setup, globals=names)
    return lambda n: timer.timeit(n) * 1e9


@dataclass
class Samples:
    """Nanoseconds per operation of each runner, one number a turn; turn i of all is one round."""

    turns: dict[str, list[float]] = field(default_factory=dict)

    def least(self, name: str) -> float:
        return min(self.turns[name])

    def median(self, name: str) -> float:
        return statistics.median(self.turns[name])

    def ratios(self, name: str, baseline: str) -> list[float]:
        return [a / b for a, b in zip(self.turns[name], self.turns[baseline], strict=True)]

    def differences(self, name: str, baseline: str) -> list[float]:
        return [a - b for a, b in zip(self.turns[name], self.turns[baseline], strict=True)]

    def extend(self, other: Samples) -> None:
        for name, turns in other.turns.items():
            self.turns.setdefault(name, []).extend(turns)

    def summary(self, baseline: str) -> list[Json]:
        """A row for each runner: least, median, spread, and these beside `baseline`."""
        return [
            {
                "name": name,
                "turns": len(turns),
                "min_ns": self.least(name),
                "median_ns": self.median(name),
                "p90_ns": quantile(turns, 0.9),
                "ratio_of_mins": self.least(name) / self.least(baseline),
                "median_ratio": statistics.median(self.ratios(name, baseline)),
                "difference_of_mins_ns": self.least(name) - self.least(baseline),
                "median_difference_ns": statistics.median(self.differences(name, baseline)),
            }
            for name, turns in self.turns.items()
        ]


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interleave(
    runners: Mapping[str, Runner],
    calls: int | Mapping[str, int],
    *,
    seconds: float,
    warm: int = 0,
    first: int = 1,
    least: int = 5,
) -> Samples:
    """Rounds of one turn each until the time is up, and at least `least` of them.

    A turn is `warm` operations that are not timed, so that the caches are as without the others,
    and then `calls` that are. Before all turns come `first` operations of each, which touch all
    memory and set up what is set up lazily. The cyclic garbage collector is off.
    """
    number = {name: calls if isinstance(calls, int) else calls[name] for name in runners}
    samples = Samples({name: [] for name in runners})
    order, shuffle = list(runners), random.Random(0).shuffle
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for name in order:
            runners[name](first)
        start, rounds = time.perf_counter(), 0
        while rounds < least or time.perf_counter() - start < seconds:
            shuffle(order)
            for name in order:
                if warm:
                    runners[name](warm)
                samples.turns[name].append(runners[name](number[name]) / number[name])
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return samples


def as_module(script: str) -> list[str]:
    """The command that runs a file of this package as a module."""
    path = Path(script).resolve().relative_to(HERE.parent).with_suffix("")
    return [sys.executable, "-m", ".".join(path.parts)]


def repeated(script: str, section: str, options: Sequence[str], times: int) -> list[Json]:
    """Runs `script --child section` in `times` fresh processes; what each wrote, parsed."""
    results = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "part.json")
            command = [*as_module(script), "--child", section, "--out", str(out), *options]
            subprocess.run(command, cwd=HERE.parent, check=True)
            results.append(json.loads(out.read_text()))
    return results


def pooled(results: Iterable[Mapping[str, list[float]]]) -> Samples:
    """The turns of several processes as one."""
    samples = Samples()
    for turns in results:
        samples.extend(Samples(dict(turns)))
    return samples


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """A C baseline as a library, one for each source."""
    return _library(source, [], CFLAGS)


def compiled_with(source: str, files: Iterable[Path]) -> ctypes.CDLL:
    """C source that calls these files of csrc, as a library of its own at each call."""
    return _library(source, files, CORE_FLAGS)


def _library(source: str, files: Iterable[Path], flags: Sequence[str]) -> ctypes.CDLL:
    """Compiled in a folder that is removed once the library is loaded."""
    compiler = os.environ.get("CC", "cc").split()  # such as "ccache gcc"
    if shutil.which(compiler[0]) is None:
        raise SystemExit("loops in C need a C compiler: cc, or the one that CC names")
    with tempfile.TemporaryDirectory() as folder:
        loops, library = Path(folder, "loops.c"), Path(folder, "loops.so")
        loops.write_text(source)
        command = [*compiler, str(loops), *map(str, files), *flags, "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The peak of this process. getrusage() would begin with the peak of its parent, if that forked
    it by vfork()."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def environment(threads: int) -> Json:
    """The machine and the versions that the figures are from."""
    import numpy
    import torch

    import memtools
    from memtools._base import torch as bridge

    shim, reason = bridge.shim_status()
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "system": platform.platform(),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "memtools": memtools.__version__,
        "shim": "loaded" if shim else reason,
        "revision": _revision(),
        "threads": threads,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The revision, with "-dirty" if files are changed that no benchmark writes."""
    written = [f":(exclude){path}" for path in (RESULTS, HERE.parent / WRITTEN)]
    try:
        revision = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    except OSError:
        return None
    return revision + ("-dirty" if changed else "") if revision else None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(aligned(lines, range(1, len(header)), indent=""))


def timing_table(title: str, rows: Sequence[Json]) -> str:
    """The times of each way, and their ratios to the baseline if there is one, in Markdown. The
    baseline has the ratio 1."""
    base = next((row["name"] for row in rows if row.get("median_ratio") == 1), "")
    lines = [
        f"| {title} | least / median |" + (f" beside {base} |" if base else ""),
        "| --- | --- |" + (" --- |" if base else ""),
    ]
    for row in rows:
        line = f"| {row['name']} | {_time(row['min_ns'], row['median_ns'])} |"
        if row["name"] == base:
            line += " |"
        elif base:
            line += f" {_digits(row['ratio_of_mins'])} / {_digits(row['median_ratio'])} x |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _time(least: float, median: float) -> str:
    """Both in the unit of the first."""
    unit, size = next((u, s) for u, s in UNITS if least >= s or s == 1)
    return f"{_digits(least / size)} / {_digits(median / size)} {unit}"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="20 s instead of 3 minutes; noisier; writes no JSON"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: 1)")
    parser.add_argument("--only", help="only the sections whose names start so; writes no JSON")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what repeated() passes
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser


def write_json(path: Path, content: Json) -> None:
    """Writes results; paths of this project are written from its folder on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1).replace(f"{HERE.parent}/", "") + "\n")

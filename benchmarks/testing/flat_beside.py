"""assert_flat beside what else is written into tests for the same purpose, on the same loops.

    python -m benchmarks.testing.flat_beside [--quick] [--only WAY] [--out FILE]

    plain         the loop alone: what the others are compared with
    assert_flat   memtools.testing.assert_flat(step, growth=allowed)
    rss           resident memory after the warm-up and at the end
    tracemalloc   two snapshots at the same points, each after gc.collect(), compared
    memray        @pytest.mark.limit_leaks of pytest-memray, by location; pip install pytest-memray

Each way is a session of pytest of its own, with a test for each loop, seed and leak; all but the
first allow the same bytes a step. The cost of a way is the processor time of its session beyond
that of the plain one, divided by the tests.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import resource
import subprocess
import sys
import tempfile
import tracemalloc
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.harness import Json, arguments, environment, table
from benchmarks.kit.limits import finish
from memtools import _core
from memtools.testing import assert_flat

STEPS, WARMUP, ALLOWED = 200, 25, 1024
WAYS = ("plain", "assert_flat", "rss", "tracemalloc", "memray")
NOT_INSTALLED = "pytest-memray is not installed"
Case = tuple[str, int, str, int]  # loop, seed, what is leaked at each step, bytes allowed
#: what is leaked, and how much is allowed
LEAKS = (("2 KiB of bytes", 1024), ("1 KiB of bytes", 512), ("a tensor of 2 KiB", 1024))
#: of each loop without a leak, and with one of each kind
RUNS = (5, 2)

#: the file that pytest runs, in a folder of its own
TESTS = """
import pytest
from benchmarks.testing import flat_beside

def limited(allowed):
    return pytest.mark.limit_leaks(f"{allowed * flat_beside.STEPS / 1024:.0f} KB") if MEMRAY else ()

@pytest.mark.parametrize("case", [
    pytest.param(case, id="-".join(map(str, case)), marks=limited(case[3]))
    for case in flat_beside.cases(FLAT, LEAKING)
])
def test_loop(case):
    flat_beside.run(WAY, case)
"""


def loops(rng: random.Random) -> dict[str, Callable[[], object]]:
    """Steps that leak nothing: of the interpreter, of NumPy and of torch."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    adam = torch.optim.AdamW(net.parameters())
    ring: dict[int, bytes] = {}
    batch, calls = [bytearray()], iter(range(1 << 30))

    def train(rows: int = 16) -> None:
        x = torch.randn(rows, 32)
        (net(x) - x).square().mean().backward()
        adam.step()
        adam.zero_grad()

    def cycles() -> None:
        cycle: list[object] = [bytes(rng.randrange(20_000))]
        cycle.append(cycle)

    def fills() -> None:
        ring[next(calls) % 60] = bytes(4000)

    def newest() -> None:
        batch[0] = bytearray(rng.randrange(4 << 20))

    return {
        "objects": lambda: [{"a": [n], "b": str(n)} for n in range(rng.randrange(300))],
        "arrays": lambda: np.ones(rng.randrange(1, 50_000)).sum(),
        "cycles": cycles,
        "fills": fills,
        "train": train,
        "batches": lambda: train(rng.randrange(1, 400)),
        "newest": newest,
    }


def cases(runs: int, leaking: int) -> list[Case]:
    """So many runs of each loop without a leak, and with one of each kind."""
    names = list(loops(random.Random(0)))
    flat = [(name, seed, "", ALLOWED) for name in names for seed in range(runs)]
    return flat + [
        (name, seed, leak, allowed)
        for leak, allowed in LEAKS
        for name in names
        for seed in range(leaking)
    ]


def run(way: str, case: Case) -> None:
    """One test. Raises AssertionError where it finds growth; memray's plugin looks by itself."""
    import torch

    name, seed, leak, allowed = case
    plain, kept = loops(random.Random(seed))[name], list[object]()
    HELD.append(kept)  # a leak outlives its test
    made: dict[str, Callable[[], object]] = {
        "2 KiB of bytes": lambda: bytes(2048),
        "1 KiB of bytes": lambda: bytes(1024),
        "a tensor of 2 KiB": lambda: torch.zeros(512),
    }

    def step() -> None:
        plain()
        if leak:
            kept.append(made[leak]())

    if way == "assert_flat":
        assert_flat(step, STEPS, allowed)
        return
    reads: dict[str, Callable[[], Any]] = {
        "rss": resident,
        "tracemalloc": tracemalloc.take_snapshot,
    }
    read = reads.get(way, lambda: None)
    if way == "tracemalloc":
        tracemalloc.start()
    try:
        before, after = _readings(step, read, collects=way == "tracemalloc")
    finally:
        tracemalloc.stop()
    if way == "rss":
        assert after - before <= allowed * (STEPS - WARMUP)
    elif way == "tracemalloc":
        grown = sum(one.size_diff for one in after.compare_to(before, "lineno"))
        assert grown <= allowed * (STEPS - WARMUP)


HELD: list[list[object]] = []


def resident() -> int:
    """Resident bytes of this process."""
    return _core.Probe().rss() or 0


def _readings(step: Callable[[], object], read: Callable[[], Any], *, collects: bool) -> list[Any]:
    """What is read after the warm-up, and at the end."""
    found = []
    for count in (WARMUP, STEPS - WARMUP):
        for _ in range(count):
            step()
        if collects:
            gc.collect()
        found.append(read())
    return found


def session(way: str, runs: int, leaking: int) -> Json:
    """What a way finds in a session of pytest, and the processor's seconds of it."""
    with tempfile.TemporaryDirectory() as folder:
        code = TESTS.replace("FLAT", str(runs)).replace("LEAKING", str(leaking))
        code = code.replace("MEMRAY", str(way == "memray")).replace("WAY", repr(way))
        Path(folder, "test_loops.py").write_text(code)
        report = Path(folder, "report.xml")
        before = _seconds()
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider",
             f"--junitxml={report}", f"--rootdir={folder}", folder],
            stdout=subprocess.DEVNULL, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1",
                 "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        spent = _seconds() - before
        fails = {one.get("name", "").partition("[")[2]: one.find("failure") is not None
                 for one in Xml.parse(report).iter("testcase")}  # fmt: skip
    row: Json = {"way": way}
    for leak, _ in (*LEAKS, ("", 0)):
        of = [case for case in cases(runs, leaking) if case[2] == leak]
        said = [case[0] for case in of if fails["-".join(map(str, case)) + "]"]]
        row |= {leak or "false": f"{len(said)} of {len(of)}"}
        row |= {f"{leak or 'false'}, by loop": dict(Counter(said))}
    return row | {"seconds": round(spent, 1), "tests": len(fails)}


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = arguments(__doc__).parse_args()
    facts = environment(1)
    rows = []
    for way in WAYS if options.only is None else ("plain", options.only):
        if way == "memray" and importlib.util.find_spec("pytest_memray") is None:
            print(NOT_INSTALLED)
            continue
        rows.append(session(way, *((2, 1) if options.quick else RUNS)))
        plain = rows[0]["seconds"] / rows[0]["tests"]
        beyond = rows[-1]["seconds"] / rows[-1]["tests"] - plain
        rows[-1]["ms a test beyond the plain one"] = round(1000 * beyond)
    told = [{key: row[key] for key in row if "by loop" not in key} for row in rows]
    print(table(tuple(told[0]), (tuple(map(str, row.values())) for row in told)))
    finish("flat_beside", options, facts, {"beside": rows}, [])


if __name__ == "__main__":
    main()

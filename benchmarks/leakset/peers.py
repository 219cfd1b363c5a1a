"""The line that another tool blames for what grows in a loop of the set.

    traced()   tracemalloc: the lines that gained most from the half of the steps to the end
    memray()   memray: the lines of the loop below which most was allocated after the half of the
               recording, and is still there at its end

The first two lines of each count, because memtools reports two at most.

Memory that an import allocates is left out, as a reader of such a list would do. Both name where
memory is made, which is compared with `made` of index.json. Each takes one more run of the loop,
without memtools. memray is installed by hand (pip install memray); its column says if it is not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.leakset import running

NOT_INSTALLED = "memray is not installed"
NOTHING = "nothing"
LONGEST = 10 * running.LONGEST  # of a run under a tool that traces each allocation
MOST = 2  # lines that are reported

#: the first look is taken when half of the steps are over; the second one at the end
_TRACED = """
import runpy, sys, tracemalloc
tracemalloc.start(1)
from torch.optim.optimizer import register_optimizer_step_post_hook
script, half, steps, looks = sys.argv[1], int(sys.argv[2]), 0, []
def stepped(*_):
    global steps
    steps += 1
    if steps == half:
        looks.append(tracemalloc.take_snapshot())
register_optimizer_step_post_hook(stepped)
def told():
    last = tracemalloc.take_snapshot()
    grown = last.compare_to(looks[0], "lineno") if looks else ()
    lines = [(top.traceback[0].filename, top.traceback[0].lineno) for top in grown]
    lines = [one for one in lines if not one[0].startswith("<frozen importlib")]
    for file, line in lines[:most]:
        print(f"blamed: {file}:{line}", file=sys.stderr)
most, sys.argv = int(sys.argv[3]), [script]
try:
    runpy.run_path(script, run_name="__main__")
finally:
    told()
"""

#: reads a recording of memray; in a process of its own, since memray loads what it reads whole
_READ = """
import collections, memray, sys
recording, script, by = sys.argv[1], sys.argv[2], collections.Counter()
records = list(memray.FileReader(recording).get_temporal_allocation_records(merge_threads=True))
stayed = [(record, i.allocated_before_snapshot, i.n_bytes) for record in records
          for i in record.intervals if i.deallocated_before_snapshot is None]
half = max((at for _, at, _ in stayed), default=0) // 2
for record, at, nbytes in stayed:
    if at > half:
        stack = record.stack_trace()
        if any(name.startswith("<frozen importlib") for _, name, _ in stack):
            continue
        lines = [line for _, name, line in stack if name == script]
        by[lines[0] if lines else 0] += nbytes
for line, _ in by.most_common(int(sys.argv[3])):
    print(f"blamed: {script}:{line}", file=sys.stderr)
"""


def traced(name: str, steps: int, out: Path) -> str:
    """What tracemalloc blames in a loop of so many steps, as `file.py:line file.py:line`, the most
    first."""
    script = running.script_of(name)
    return _blamed(["-c", _TRACED, str(script), str(steps // 2), str(MOST)], out)


def memray(name: str, out: Path) -> str:
    """What memray blames in a loop, as `file.py:line file.py:line`; line 0 is none of the loop's
    own."""
    if importlib.util.find_spec("memray") is None:
        return NOT_INSTALLED
    script, recording = running.script_of(name), out / f"{name}.memray"
    try:
        _run(["-m", "memray", "run", "-q", "-f", "-o", str(recording), str(script)], out)
        return _blamed(["-c", _READ, str(recording), str(script), str(MOST)], out)
    finally:
        recording.unlink(missing_ok=True)


def _blamed(arguments: list[str], out: Path) -> str:
    found = re.findall(r"^blamed: (.*)$", _run(arguments, out), re.M)
    return " ".join(Path(line).name for line in found) if found else NOTHING


def _run(arguments: list[str], out: Path) -> str:
    """What it writes to standard error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(out)}
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=work,
                          env=env, check=False, timeout=LONGEST)  # fmt: skip
    return done.stderr

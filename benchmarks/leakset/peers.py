"""The line that another tool blames for what grows in a loop of the set.

    traced()   tracemalloc: the line that gained most from the half of the run to its end
    memray()   memray: the line of the loop below which most was allocated after the half of the
               recording, and is still there at its end

What an import makes is left out, as whoever reads such a list leaves it out: on a busy machine the
half of a run may lie among its imports. Both name where memory is made: index.json has the lines
that are right, in `made` (where it is made) and `kept` (where it is put away). Each takes one more
run of the loop, without memtools. memray is installed by hand (pip install memray); where it is
not, its column says so.
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
NOTHING = "nothing"  # that stayed
LONGEST = 10 * running.LONGEST  # of a run under a tool that traces each allocation

#: a thread takes the first look when the half of the time is over; the second one is at the end
_TRACED = """
import atexit, runpy, sys, threading, tracemalloc
tracemalloc.start(1)
script, half, looks = sys.argv[1], float(sys.argv[2]), []
timer = threading.Timer(half, lambda: looks.append(tracemalloc.take_snapshot()))
timer.daemon = True
timer.start()
def told():
    last = tracemalloc.take_snapshot()
    for top in last.compare_to(looks[0], "lineno") if looks else ():
        if not top.traceback[0].filename.startswith("<frozen importlib"):
            print(f"blamed: {top.traceback[0].filename}:{top.traceback[0].lineno}", file=sys.stderr)
            break
sys.argv = [script]
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
if by:
    print(f"blamed: {script}:{by.most_common(1)[0][0]}", file=sys.stderr)
"""


def traced(name: str, seconds: float, out: Path) -> str:
    """What tracemalloc blames in a loop that takes so many seconds, as `file.py:line`."""
    script = running.SCRIPTS / f"{name}.py"
    return _blamed(["-c", _TRACED, str(script), str(seconds / 2)], out)


def memray(name: str, out: Path) -> str:
    """What memray blames in a loop, as `file.py:line`; line 0 is none of the loop's own."""
    if importlib.util.find_spec("memray") is None:
        return NOT_INSTALLED
    script, recording = running.SCRIPTS / f"{name}.py", out / f"{name}.memray"
    try:
        _run(["-m", "memray", "run", "-q", "-f", "-o", str(recording), str(script)], out)
        return _blamed(["-c", _READ, str(recording), str(script)], out)
    finally:
        recording.unlink(missing_ok=True)


def _blamed(arguments: list[str], out: Path) -> str:
    found = re.findall(r"^blamed: (.*)$", _run(arguments, out), re.M)
    return Path(found[-1]).name if found else NOTHING


def _run(arguments: list[str], out: Path) -> str:
    """What it writes to standard error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(out)}
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=work,
                          env=env, check=False, timeout=LONGEST)  # fmt: skip
    return done.stderr

"""Runs a loop of the set under `memtools run`, with an independent look at its memory beside it.

    scripts/NAME.py ──► memtools run ──► NAME.mem, NAME.log (what the run said), NAME.json (explain)
          └── polled from outside, by /proc alone ──► NAME.poll.json

The poller's readings are the truth where index.json has no figure. `psutil` in a thread and
`check_memory_leak` with its two points would read the same.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import memtools

SCRIPTS = Path(__file__).resolve().parent / "scripts"
PAGE = os.sysconf("SC_PAGE_SIZE")
LIMIT_BYTES = 16 * 2**30  # the limit of each run, so that each forecast has a truth
EVERY = 0.2  # seconds between two looks
LONGEST = 300.0  # seconds that a loop may take
COUNTED = 2**62  # A step with a larger number is unknown: the record has none yet.


class Poll(NamedTuple):
    """One look: seconds of the monotonic clock; bytes of the process, of its descendants and of its
    shared memory, each without what it shares with files; how many `processes`
    descend from it."""

    seconds: float
    own: int
    children: int
    shared: int
    processes: int

    @property
    def all(self) -> int:
        return self.own + self.children + self.shared


def descendants(pid: int) -> list[int]:
    found, todo = list[int](), [pid]
    while todo:
        folder = Path(f"/proc/{todo.pop()}/task")
        try:
            for thread in folder.iterdir():
                children = [int(n) for n in (thread / "children").read_text().split()]
                todo += children
                found += children
        except OSError:
            pass
    return found


def poll(pid: int, files: frozenset[str]) -> Poll:
    """A look at a process. `files`: those that lay in /dev/shm before it began."""
    own = children = shared = 0
    below = descendants(pid)
    for process in (pid, *below):
        try:
            statm = Path(f"/proc/{process}/statm").read_text().split()
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        private = (int(statm[1]) - int(statm[2])) * PAGE
        if process == pid:
            own = private
            shmem = re.search(r"^RssShmem:\s+(\d+) kB", status, re.M)  # none once it has ended
            shared = int(shmem[1]) * 1024 if shmem else 0
        else:
            children += private
    return Poll(time.monotonic(), own, children, max(shared, shm_bytes(files)), len(below))


def shm_bytes(but: frozenset[str] = frozenset()) -> int:
    """Bytes that files of /dev/shm take, mapped or not."""
    total = 0
    for name in shm_files() - but:
        with contextlib.suppress(OSError):
            total += os.stat(f"/dev/shm/{name}").st_blocks * 512
    return total


def shm_files() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def script_of(name: str) -> Path:
    """The program of that name: those with libraries of others lie in a folder of their own."""
    return next(SCRIPTS.rglob(f"{name}.py"))


def run(name: str, out: Path) -> float:
    """One loop; returns the seconds that it took."""
    record, log = out / f"{name}.mem", out / f"{name}.log"
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(work),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "memtools", "run", "--limit", f"{LIMIT_BYTES >> 30} GiB"]
    command += ["--log", str(record), str(script_of(name))]
    before, begin = shm_files(), time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=work, env=environment
        )
        polls = list[Poll]()
        while process.poll() is None:
            polls.append(poll(process.pid, before))
            time.sleep(EVERY)
            if time.monotonic() - begin > LONGEST:
                process.terminate()
                break
        process.wait()
    (out / f"{name}.poll.json").write_text(json.dumps(polls))
    explained = subprocess.run(
        [sys.executable, "-m", "memtools", "explain", "--json", str(record)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    (out / f"{name}.json").write_text(explained.stdout or json.dumps({"error": explained.stderr}))
    return time.monotonic() - begin


# --- what the poller says of a run ----------------------------------------------------------------


def polls_of(name: str, out: Path) -> list[Poll]:
    return [Poll(*one) for one in json.loads((out / f"{name}.poll.json").read_text())]


def step_times(record: memtools.Record) -> list[tuple[float, int]]:
    """(seconds of the monotonic clock, step) of each sample that knows its step."""
    samples = record.samples
    steps: Sequence[int] = samples.values.get("step", ())
    pairs = zip(samples.time_ns, steps, strict=False)
    return [(at / 1e9, int(step)) for at, step in pairs if 0 < step < COUNTED]


def used_at(record: memtools.Record, time_ns: int) -> int | None:
    """What the job used about then: some columns are not read with each sample."""
    samples = record.samples
    at = bisect.bisect_left(samples.time_ns, time_ns)
    for name in ("job", "process", "rss"):
        near = samples.values.get(name, ())[max(0, at - 20) : at + 20]
        known = [int(value) for value in near if value < COUNTED]
        if known:
            return max(known)
    return None


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """By least squares; None for fewer than five points."""
    n = len(points)
    if n < 5:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else None


def at_steps(polls: Sequence[Poll], times: Sequence[tuple[float, int]]) -> list[tuple[int, int]]:
    """(step, bytes of all) of each poll between the first step and the last."""
    found, at = list[tuple[int, int]](), 0
    end = next((second for second, step in times if step >= times[-1][1]), 0.0)
    for one in polls:
        while at + 1 < len(times) and times[at + 1][0] <= one.seconds:
            at += 1
        if times and times[0][0] <= one.seconds <= end + 0.05:
            found.append((times[at][1], one.all))
    return found


def rate_by_steps(polls: Sequence[Poll], times: Sequence[tuple[float, int]]) -> float | None:
    """Bytes a step by the poller, over the newer two thirds of the steps."""
    pairs = at_steps(polls, times)
    if not pairs:
        return None
    return slope([(step, size) for step, size in pairs if step >= 0.35 * pairs[-1][0]])


def rate_by_seconds(polls: Sequence[Poll]) -> float | None:
    """Bytes a second by the poller, over the newer half, without the very end."""
    known = [one for one in polls if one.own]
    if not known:
        return None
    begin, end = known[0].seconds, known[-1].seconds
    late = [one for one in known if begin + 0.45 * (end - begin) <= one.seconds <= end - 0.8]
    return slope([(one.seconds, one.all) for one in late])

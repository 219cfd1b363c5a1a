"""Records of made-up runs whose peak, growth, phases and leaks are known, to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import memtools
from memtools import _core
from memtools._leak.finding import LeakFinding
from memtools._monitor.run import columns
from memtools._record.kinds import End, Start, payload
from tests.report.reportcases import abandon

KIB, MIB, GIB = 2**10, 2**20, 2**30
KEPT = LeakFinding("likely", "heap", "step", 64.0 * KIB, 20, 16, "list Trainer.kept", "list")


def made(
    path: Path,
    *,
    steps: int = 300,
    step_by: int = 1,
    pace: float = 0.01,
    base: int = 300 * MIB,
    grows: int = 0,
    limit: int | None = None,
    group: int | None = None,
    workers: int = 0,
    devices: Sequence[tuple[int, int]] = (),
    phases: Mapping[str, int | None] | None = None,
    findings: Sequence[LeakFinding] = (),
    tests: bool = True,
    watched: str = "",
    command: Sequence[str] = ("python", "train.py"),
    end: End | None = End(code=0),  # noqa: B008  (a frozen value)
    left: bool = False,
) -> Path:
    """A run of one sample at each step.

    Args:
        steps: how many of them have a sample.
        step_by: so many steps from one sample to the next.
        pace: seconds between two samples.
        base, grows: what the process has at the first step, and gains at each.
        limit: one that was given; else it is the machine's, 24 GiB.
        group: the limit of its control group, which counts 40 MiB more than the process.
        workers: private bytes of two workers, from the first step on.
        devices: allocated and reserved on each.
        phases: the peaks by name.
        findings: what the run has said of itself at the end.
        tests: whether it tests itself for leaks.
        watched: the command that it was watched as, from outside.
        end: how it ended; None: no end event.
        left: as a SIGKILL leaves it.
    """
    names = [name for name, _ in columns(len(devices))]
    writer = _core.RecordWriter(path, columns(len(devices)), command=list(command))
    origin = memtools.read_record(path).clock_ns
    start = Start(
        name="memtools run",
        command=watched,
        interval_ms=10,
        given_bytes=limit,
        machine_bytes=None if limit else 24 * GIB,
        tests_leaks=tests,
    )
    writer.event("start", payload("start", start), time_ns=origin)
    length = int(pace * 1e9)
    for step in range(steps):
        used = base + grows * step
        row = {
            "step": (step + 1) * step_by,
            "rss": used,
            "process": used,
            "private": used,
            "children": 0,
        }
        row |= {"available": 20 * GIB, "job": used + workers}
        if workers:
            row |= {"children": 2, "children_private": workers}
        if group:
            row |= {"cgroup_limit": group, "cgroup_used": used + 40 * MIB}
        for i, (allocated, reserved) in enumerate(devices):
            row |= {f"cuda{i}_allocated": allocated, f"cuda{i}_reserved": reserved}
        writer.append(origin + step * length, [row.get(name) for name in names])
    last = origin + steps * length
    for found in findings:
        writer.event("finding", payload("finding", found), step=steps * step_by, time_ns=last)
    for name, peak in (phases or {}).items():
        writer.phase(name, 10**9, *([] if peak is None else [peak]))
    if end is not None:
        writer.event("end", payload("end", end), time_ns=last)
    if left:
        abandon(writer, str(path))
    else:
        writer.close()
    return path

"""The still picture of a monitor, which a notebook shows: that of its record, or what is in use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memtools._base import picture
from memtools._base.size import format_bytes
from memtools._base.text import duration, tight
from memtools.leak.finding import is_call
from memtools.monitor.host import LEAST_SAID
from memtools.record.picture import growth_lines, phase_table, picture_of
from memtools.record.record import Record, RecordPhase, read_record

if TYPE_CHECKING:
    from memtools._base.devices import DeviceMemory
    from memtools.monitor.monitor import MemoryMonitor
    from memtools.monitor.readings import HostTiers

NO_RECORD = 'no record is kept; of MemoryMonitor(log="run.mem") a time line is drawn'
LATER_NS = 10_000_000_000  # at most, from the record's first moment to the run's


def picture_of_monitor(monitor: MemoryMonitor) -> str:
    """The picture as HTML without a script: of its record where it has written one, else of what is
    in use now."""
    record = _record_of(monitor)
    if record is not None:
        return picture_of(record, name=repr(monitor))
    host, devices = monitor._in_use()
    state = "Running" if monitor.running else "Stopped" if monitor._last else "Not started"
    return picture.card(
        picture.heading(repr(monitor), state, "accent" if monitor.running else "s7"),
        picture.tiles(_tiles(monitor, host, devices)),
        *_use(host),
        *_growth(monitor),
        *phase_table(_phases(monitor)),
        picture.line(NO_RECORD if monitor.record_path is None else "", soft=True),
    )


def _record_of(monitor: MemoryMonitor) -> Record | None:
    """The record of the monitor's last run; None where it has written none, or the file is gone or
    is that of a later run."""
    run, path = monitor._last, monitor.record_path
    if run is None or path is None:
        return None
    try:
        record = read_record(path)
    except (OSError, ValueError):
        return None
    is_its_own = record.pid == os.getpid() and record.clock_ns <= run.clock_ns
    return record if is_its_own and run.clock_ns - record.clock_ns < LATER_NS else None


def _tiles(
    monitor: MemoryMonitor, host: HostTiers, devices: list[DeviceMemory]
) -> list[tuple[str, str, str]]:
    found = []
    peak, is_exact = monitor._peak()
    if host.process is not None:
        found.append(("The process", format_bytes(host.process), "now"))
    if peak is not None:
        found.append(("Peak of the process", format_bytes(peak), "" if is_exact else "at least"))
    if host.job is not None and host.process is not None and host.job - host.process >= LEAST_SAID:
        job = format_bytes(host.job)
        found.append(("The job", job, "with workers and shared memory"))
    peaks = {} if monitor._last is None else monitor._last.device_peaks()
    for device in devices:
        if device.allocated is not None:
            most = peaks.get(device.index)
            remark = "" if most is None else f"peak {format_bytes(most)}"
            found.append((f"cuda:{device.index}", format_bytes(device.allocated), tight(remark)))
    if monitor._last is not None:
        found.append(("Steps", f"{monitor.step_count:,}", duration(monitor._last.seconds)))
    return found


def _use(host: HostTiers) -> list[str]:
    """What counts against the limit, as a bar."""
    if host.used is None or not host.limit:
        return []
    of = {"given": "Limit that was given", "cgroup": "Limit of the control group"}
    name = of.get(host.limited_by, "Memory of the machine")
    colour = "bad" if host.used >= 0.9 * host.limit else "s0"
    return [
        picture.title(f"{name}: {format_bytes(host.limit)}"),
        picture.bar([picture.Part("in use", host.used, colour)], host.limit),
    ]


def _growth(monitor: MemoryMonitor) -> list[str]:
    run = monitor._last
    if run is None or run.watch is None:
        return []
    findings = run.watch.findings()
    if not findings:
        return [picture.line(line.strip()) for line in run.watch.lines(run.sampler.step_count)]
    advice = list(dict.fromkeys(one.advice for one in findings if one.advice))
    leaks = any(is_call(one.grade) for one in findings)
    return growth_lines([str(one) for one in findings], advice, leaks=leaks)


def _phases(monitor: MemoryMonitor) -> tuple[RecordPhase, ...]:
    phases = sorted(monitor.phases(), key=lambda phase: -(phase.peak_bytes or 0))
    return tuple(RecordPhase(one.name, one.count, one.seconds, one.peak_bytes) for one in phases)

"""What to do next: one line for each advice, the most useful first, with the names of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtools._base.oom import remedy
from memtools._base.size import format_bytes
from memtools._base.text import count, duration, percent, shown
from memtools._leak.finding import is_call
from memtools._record.events import last_guard_act, limits_that_acted
from memtools._record.peaks import peak_of, smaller_micro_batches, to_do

if TYPE_CHECKING:
    from memtools._record.figures import Figures
    from memtools._record.kills import Cause
    from memtools._record.series import Timeline

#: There is advice if this share of a device's reserved memory is not allocated.
IDLE = 0.25
#: what each limit of a process counts, and what to do if it acts
PROCESS_LIMITS = {
    "RLIMIT_AS": "counts address space, used or not: raise it (ulimit -v), or limit resident "
    "memory with a control group instead (systemd-run --scope -p MemoryMax=12G)",
    "RLIMIT_DATA": "counts private memory, including the freed heap: raise it (ulimit -d)",
}
#: limits that do not count memory
COUNTED = {
    "RLIMIT_NPROC": "RLIMIT_NPROC was reached, which counts the threads of all the user's "
    "processes: use fewer workers and threads (OMP_NUM_THREADS), or raise it "
    "(ulimit -u)",
    "RLIMIT_FSIZE": "RLIMIT_FSIZE was reached: no file may become larger (ulimit -f)",
}
SIGNALS = {
    "SIGTERM": "SIGTERM is a request to exit, sent by a scheduler (time limit, preemption), by "
    "kill or by a stopping container; memory is not the reason",
    "SIGINT": "SIGINT is Ctrl-C, or a launcher that stops its ranks; memory is not the reason",
    "SIGHUP": "SIGHUP is sent when a terminal closes: start the run under nohup, tmux or a "
    "scheduler",
    "SIGBUS": "SIGBUS means that a mapped file had no room: check whether /dev/shm (df -h "
    "/dev/shm; docker run --shm-size) or the disk is full",
    "SIGXCPU": "SIGXCPU means that the processor time of RLIMIT_CPU was used up (ulimit -t)",
    "SIGXFSZ": "SIGXFSZ means that a file grew beyond RLIMIT_FSIZE (ulimit -f)",
    "SIGSEGV": "SIGSEGV is a crash in native code: python -X faulthandler shows where",
    "SIGABRT": "SIGABRT means that native code aborted, for example after an uncaught "
    "std::bad_alloc: its last message is on stderr",
}


def advise(figures: Figures) -> list[str]:
    """The advice; empty if there is nothing to do. The fixes of findings stand next to them."""
    end = figures.ending
    lines = [] if end.code is None else [f"exit code {end.code} means {end.signal} in a shell"]
    lines += _about_the_end(figures) + _about_growth(figures) + to_do(figures)
    if figures.guard is not None and figures.guard_words() is not None:
        lines.append(
            "to stop in time, call monitor.step() in the program's own loop, or run it as a "
            "command, which gets SIGTERM: memtools run --guard 0.9 -- python ..."
        )
    elif end.kind in ("killed", "gone") and figures.near_limit and "guard" not in figures.kinds:
        how = (
            'set monitor.guard(0.90, action="raise")'
            if figures.own_monitor
            else "run it with memtools run --guard 0.9"
        )
        lines.append(
            f"to save a checkpoint before the limit, {how} and catch memtools.HostMemoryPressure"
        )
    for device in figures.devices:
        lines += _about_device(figures.line, device)
    return lines + _about_cleanups(figures)


# --- the end --------------------------------------------------------------------------------------


def _about_the_end(figures: Figures) -> list[str]:
    end = figures.ending
    if end.out_of_memory == "device" or "oom" in figures.kinds:
        lines = [
            "the device ran out of memory: the oom event shows the tiers and the largest holders; "
            "use smaller micro-batches, or release what grows"
        ]
        if "guard" not in figures.kinds and figures.own_monitor:
            lines.append(
                'to save a checkpoint before, set monitor.guard(0.90, device="cuda") and catch '
                "memtools.DeviceMemoryPressure"
            )
        return lines
    if end.out_of_memory == "budget":
        return ["a memtools.Budget was full: raise its limit, or close what uses it"]
    if end.cause is not None and end.cause.is_memory:
        return _about_the_cause(figures, end.cause)
    if end.out_of_memory == "host":
        return _about_host_memory(figures)
    if "guard" in figures.kinds and end.kind in ("killed", "gone", "failed"):
        return [f"the guard acted before the limit did: {last_guard_act(figures.record)}"]
    if end.kind not in ("killed", "gone"):
        return [
            COUNTED[limit.name]
            for limit in limits_that_acted(figures.record).values()
            if limit.name in COUNTED
        ]
    if end.signal in SIGNALS:
        return [SIGNALS[end.signal]]
    if end.by_memory(near=figures.near_limit):
        return _about_the_limit(figures)
    return _about_a_kill(figures)


def _about_host_memory(figures: Figures) -> list[str]:
    """The advice if the program's own error says that an allocation was refused."""
    lines = [
        f"{name} of {format_bytes(limit)} refused an allocation; it {PROCESS_LIMITS[name]}"
        for name, limit in figures.refusing.items()
        if name in PROCESS_LIMITS
    ]
    if not lines and figures.near_limit:
        lines = ["memory was at its limit when an allocation was refused"]
    elif not lines:
        lines = [
            "an allocation was refused and no limit of the process is recorded: look for one that "
            "the program sets itself, for a very large tensor, and at vm.overcommit_memory"
        ]
    if figures.idle_heap is not None:
        lines.append(remedy(figures.idle_heap))
    return lines + ([] if figures.verdict.findings else [_about_peak(figures)])


def _about_the_cause(figures: Figures, cause: Cause) -> list[str]:
    """The advice about a known cause, which the headline names."""
    if cause.by == "shm":
        return [
            "workers pass batches through /dev/shm: give it more room (docker run --shm-size=8g, "
            "an emptyDir of medium Memory), or use fewer workers and a smaller prefetch_factor"
        ]
    lines = []
    if cause.by == "machine":
        lines = [
            "that was the memory of the whole machine, or a limit that is not visible here: check "
            "which other programs run, and the limits of the control groups above (of a pod, a "
            "job or a slice)"
        ]
    return lines + ([] if figures.verdict.findings else [_about_peak(figures)])


def _about_the_limit(figures: Figures) -> list[str]:
    assert figures.used is not None
    lines = ["the out-of-memory killer most likely ended it: check the kernel's log (dmesg)"]
    if figures.used.source == "given":
        lines = ["whatever enforces the given limit most likely ended it"]
        if figures.ending.signal:
            lines = ["it was killed at the given limit, by whatever enforces that limit"]
    if not figures.verdict.findings:
        lines.append(_about_peak(figures))
    return lines


def _about_a_kill(figures: Figures) -> list[str]:
    room, cause = figures.room_bytes, figures.ending.cause
    if cause is not None and cause.by == "nobody":
        return [
            "the kernel did not kill it for memory: look for what sends SIGKILL (a scheduler at "
            "its time limit, a container that stops, systemd-oomd or earlyoom, kill -9), or check "
            "whether its processes had their own control group"
        ]
    if room is None:
        return [
            "no limit is recorded: check the kernel's log (dmesg) or the scheduler's for what "
            "ended it"
        ]
    return [
        f"memory does not explain the end: {format_bytes(room)} were free at the last sample; "
        "check the kernel's log (dmesg) or the scheduler's, and look for a single allocation "
        "larger than that"
    ]


def _about_peak(figures: Figures) -> str:
    peak = next((phase for phase in figures.phases if phase.peak_bytes is not None), None)
    where = f" in phase {shown(peak.name)}" if peak else ""
    recorded = peak_of(figures.record)
    batches = smaller_micro_batches("" if recorded is None else recorded.trainer)
    less = f"use {batches}, fewer workers"
    if figures.verdict.tested:
        return f"{figures.verdict.nothing}; its peak{where} is too high: {less}, or a higher limit"
    return (
        f"the run is too short to distinguish a leak from a peak{where} that is too high; for the "
        f"latter, {less}, or a higher limit"
    )


# --- growth ---------------------------------------------------------------------------------------


def _about_growth(figures: Figures) -> list[str]:
    """That a buffer that is meant to fill can be declared."""
    found = figures.verdict.findings
    meant = next((one for one in found if one.holder and not is_call(one.grade)), None)
    if meant is None or meant.grade == "fills" or not figures.own_monitor:
        return []
    return [
        "if it is meant to fill, declare it: "
        f'monitor.expect_growth("its name", bytes=...) with the size of {meant.holder}'
    ]


# --- devices and cleanups -------------------------------------------------------------------------


def _about_device(line: Timeline, device: int) -> list[str]:
    allocated = line.last(f"cuda{device}_allocated") or 0
    reserved = line.last(f"cuda{device}_reserved")
    if not reserved or reserved - allocated < IDLE * reserved:
        return []
    idle = reserved - allocated
    return [
        f"cuda:{device} keeps {format_bytes(idle)} reserved and unused ({percent(idle, reserved)} "
        "of what is reserved): PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True packs it better"
    ]


def _about_cleanups(figures: Figures) -> list[str]:
    """Cleanups that cost more than 1 % of the run and freed less than 1 % of the peak a call."""
    lines = []
    worth = (figures.used.peak_bytes if figures.used else 0) / 100
    for cleanup in figures.cleanups:
        share = cleanup.seconds / figures.seconds if figures.seconds else 0.0
        freed = cleanup.freed_bytes
        if share > 0.01 and (freed is None or freed < worth * cleanup.count):
            gain = "" if freed is None else f" and freed {format_bytes(freed)}"
            lines.append(
                f"cleanup by {cleanup.what} took {percent(share, 1)} of the run, "
                f"{duration(cleanup.seconds)} in {count(cleanup.count, 'call')}{gain}: "
                "do it less often"
            )
    return lines

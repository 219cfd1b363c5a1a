"""What to do next about a record: one line each, the most useful first, with the run's names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memtools.report._words import count, duration, percent, size

if TYPE_CHECKING:
    from memtools.report._facts import Facts
    from memtools.report._timeline import Timeline

#: reserved on a device and not allocated, as a share of reserved, that is worth a line
IDLE = 0.25


def advise(facts: Facts) -> list[str]:
    """The lines; empty when nothing is to be done."""
    lines = _about_the_end(facts) + _about_growth(facts)
    if facts.ending.kind == "killed" and near_limit(facts) and "guard" not in facts.kinds:
        lines.append(
            'to save a checkpoint before the limit, set monitor.guard(0.90, action="raise") and '
            "catch memtools.HostMemoryPressure"
        )
    for device in facts.devices:
        lines += _about_device(facts.line, device)
    return lines + _about_cleanups(facts)


def near_limit(facts: Facts) -> bool:
    used = facts.used
    return used is not None and used.near_since_seconds is not None


def newest_leak(facts: Facts) -> str:
    """The newest verdict that the run itself wrote; "" without one."""
    return max(facts.leaks, key=lambda said: said.seconds).text if facts.leaks else ""


def leaking(facts: Facts) -> bool:
    """By the record's newest verdict, or where it has none, by the one made here."""
    if facts.leaks:
        return newest_leak(facts).startswith(("leak", "likely"))
    return any(growth.kind in ("leak", "likely") for growth in facts.growth)


def _about_the_end(facts: Facts) -> list[str]:
    if "oom" in facts.kinds or "OutOfMemoryError" in facts.ending.text:
        return [
            "the device ran out of memory: the oom event has the three tiers and who held most; "
            "take smaller micro-batches, or let go of what grows"
        ]
    if facts.guards and facts.ending.kind in ("killed", "failed"):
        return [f"the guard acted before the limit did: {facts.guards[-1].text}"]
    if facts.ending.kind != "killed":
        return []
    if not near_limit(facts):
        used = facts.used
        if used is None or used.limit_bytes is None:
            return [
                "no limit is recorded: ask the kernel's log (dmesg) or the scheduler who killed it"
            ]
        room = size(max(0, used.limit_bytes - used.last_bytes))
        return [
            f"memory does not explain the kill, {room} were free at the last sample: ask the "
            "kernel's log (dmesg) or the scheduler, and look for one allocation larger than that"
        ]
    lines = ["the out-of-memory killer is the likely end: the kernel's log (dmesg) names it"]
    if facts.used is not None and facts.used.source == "given":
        lines = ["it was killed at the limit that was given: what enforces that limit ended it"]
    if not leaking(facts) and not facts.growth:
        lines.append(_about_peak(facts))
    return lines


def _about_peak(facts: Facts) -> str:
    peak = next((phase for phase in facts.phases if phase.peak_bytes is not None), None)
    where = f" in phase {_name(peak.name)}" if peak else ""
    return (
        f"nothing leaks, the peak{where} is too high: take smaller micro-batches "
        "(memtools accumulates the gradient), fewer workers, or a higher limit"
    )


def _name(text: str) -> str:
    from memtools.report._words import shown

    return shown(text)


def _about_growth(facts: Facts) -> list[str]:
    if facts.holders and (leaking(facts) or facts.growth):
        held = max((one.text for one in facts.holders), key=_rate)
        path = held.partition("held by ")[2] or held
        return [
            f"stop {path} from growing: keep numbers instead of tensors (loss.item(), detach), "
            "clear it each epoch, or bound it, as memtools.GateHistory does with gate records"
        ]
    if leaking(facts) and facts.leaks:
        said = re.match(r"(\w+): \+\S+ \S+ in (\w+)", newest_leak(facts))
        return _about_one(said[1], said[2]) if said else [_census_advice()]
    return [line for growth in facts.growth for line in _about_one(growth.kind, growth.signal)]


def _rate(holder: str) -> float:
    """Bytes a step of a line like `+64.0 KiB/step: ...`; 0 of one that says none."""
    match = re.match(r"\+(\d[\d,]{0,8}(?:\.\d)?) ([KMGT]?)i?B/step: ", holder)
    return 0 if match is None else float(match[1].replace(",", "")) * 1024 ** "_KMGT".find(match[2])


def _census_advice() -> str:
    return (
        "to learn who holds what grows: before = memtools.census(), some hundred steps later "
        "print(*memtools.census().diff(before).holders(), sep='\\n')"
    )


def _about_one(kind: str, signal: str) -> list[str]:
    if kind == "fragmentation":
        return [
            "what is in use does not grow, what is resident does: give it back with "
            "monitor.cleanup_memory(), or start with MALLOC_ARENA_MAX=2"
        ]
    if signal == "children" and kind in ("leak", "likely", "growing"):
        return [
            "the workers grow: look for what the dataset keeps from one item to the next, keep its "
            "records in one array, so that reading them copies no pages, or take fewer workers"
        ]
    if kind in ("leak", "likely"):
        return [_census_advice()]
    return [
        "it may be a buffer that still fills: declare it with "
        'monitor.expect_growth("its name", bytes=...), and only growth beside it counts'
    ]


def _about_device(line: Timeline, device: int) -> list[str]:
    allocated = line.last(f"cuda{device}_allocated") if line.known(f"cuda{device}_allocated") else 0
    name = f"cuda{device}_reserved"
    reserved = line.last(name) if line.known(name) else None
    if not reserved or allocated is None or reserved - allocated < IDLE * reserved:
        return []
    idle = reserved - allocated
    return [
        f"cuda:{device} keeps {size(idle)} reserved and unused ({percent(idle, reserved)} "
        "of what is reserved): PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True packs it better"
    ]


def _about_cleanups(facts: Facts) -> list[str]:
    """Those that cost more than 1 % of the run and gave back less than 1 % of the peak a call."""
    lines = []
    worth = (facts.used.peak_bytes if facts.used else 0) / 100
    for cleanup in facts.cleanups:
        share = cleanup.seconds / facts.seconds if facts.seconds else 0.0
        freed = cleanup.freed_bytes
        if share > 0.01 and (freed is None or freed < worth * cleanup.count):
            gain = "" if freed is None else f" and freed {size(freed)}"
            lines.append(
                f"cleanup by {cleanup.what} took {percent(share, 1)} of the run, "
                f"{duration(cleanup.seconds)} in {count(cleanup.count, 'call')}{gain}: "
                "do it more seldom"
            )
    return lines

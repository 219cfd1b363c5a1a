"""What `memtools explain` prints of a text and of an exit code: as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from memtools._base.size import format_bytes
from memtools._base.text import aligned, count, sentence
from memtools._oom.codes import LIKELY, NO, ExitCode
from memtools._oom.log import Log
from memtools._oom.message import DEVICE, HOST, SHM, OomMessage
from memtools._oom.verdict import UNKNOWN, Change, Verdict, verdict_of

#: columns of the bars; messages that are listed
WIDTH, LISTED = 36, 12
_PLACES: Final = {
    DEVICE: "a device ran out of memory",
    HOST: "the host ran out of memory",
    SHM: "/dev/shm ran out of room",
}
_LIKELY: Final = {
    DEVICE: "a device may have run out of memory",
    HOST: "the host most likely ran out of memory",
    SHM: "/dev/shm may have run out of room",
}
_CODES: Final = {
    LIKELY: "most likely out of memory",
    NO: "not out of memory",
}


def refusal(log: Log, name: str) -> str:
    """One sentence about a text without an out-of-memory."""
    if not log.readable:
        return f"{name} is neither a record nor a text"
    if log.size == 0:
        return f"{name} is empty"
    specific = log.not_memory
    if specific is not None and (log.exception is None or log.exception[1] <= specific[1] + 60):
        return f"{name}, line {specific[1]:,}: {specific[0]}; not out of memory"
    if log.mention is not None:
        return (
            f'{name} mentions "out of memory" in line {log.mention:,}, but in no message that '
            "memtools knows"
        )
    if log.exception is not None:
        what = "an" if log.exception[0][0] in "AEIOU" else "a"
        where = f"{name}, line {log.exception[1]:,}: {what} {log.exception[0]}"
        return f"{where} that does not mention memory"
    return f"{name} has no out-of-memory message in {count(log.lines, 'line')}"


def explained(log: Log, name: str) -> str:
    """The whole text about a text's messages."""
    message = log.main
    assert message is not None
    verdict = verdict_of(message, log.expandable)
    parts = [
        [sentence(_headline(message))],
        _about(log, message, name),
        _section("Figures", _figures(message, verdict)),
        _section("Size or fragmentation" if message.where == DEVICE else "Cause", _cause(verdict)),
        _section("Other messages", _others(log, message)),
        _section("What to change", _changes(verdict.changes)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def explained_code(code: ExitCode) -> str:
    name = "" if code.signal is None else f" means {code.signal}"
    lines = [
        f"Exit code {code.code}{name}: {_CODES.get(code.out_of_memory, 'perhaps out of memory')}."
    ]
    lines += [sentence(code.meaning)]
    if code.where:
        lines += ["", "What to do next"]
        lines += [f"  - {text}" for text in _next_of(code)]
    return "\n".join(lines)


def as_json(log: Log, name: str) -> dict[str, Any]:
    message = log.main
    assert message is not None
    verdict = verdict_of(message, log.expandable)
    return {
        "text": name,
        "lines": log.lines,
        "bytes": log.size,
        "message": asdict(message),
        "messages": [asdict(one) for one in log.messages],
        "count": log.count,
        "is_all": log.is_all,
        "expandable_segments": log.expandable,
        "cause": verdict.cause,
        "why": verdict.text,
        "missing_bytes": verdict.missing,
        "tiers": [asdict(tier) for tier in verdict.tiers],
        "notes": list(verdict.notes),
        "changes": [
            {"change": one.text, "most_bytes": one.most, "enough": one.enough}
            for one in verdict.changes
        ],
    }


def code_as_json(code: ExitCode) -> dict[str, Any]:
    return {**asdict(code), "changes": _next_of(code) if code.where else []}


# --- parts ----------------------------------------------------------------------------------------


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _headline(message: OomMessage) -> str:
    if message.where == DEVICE and message.certain:
        what = message.backend or "a device"
        if message.device is not None:
            what = f"{message.backend or 'device'} {message.device}"
        size = (
            "" if message.requested is None else f": {format_bytes(message.requested)} did not fit"
        )
        return f"{what} ran out of memory{size}"
    if message.certain and message.where == HOST and message.requested is not None:
        return f"the host ran out of memory: {format_bytes(message.requested)} were refused"
    words = _PLACES if message.certain else _LIKELY
    return words.get(message.where, "memory may have run out")


def _about(log: Log, message: OomMessage, name: str) -> list[str]:
    who = f", {message.rank}" if message.rank else ""
    where = f"{name}, line {message.line:,} of {log.lines:,}{who}: {message.quote}"
    lines = [where]
    if message.place:
        lines.append(f"the program was at {message.place}")
    return lines


def _figures(message: OomMessage, verdict: Verdict) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    at = 0
    scale = verdict.scale
    for tier in verdict.tiers:
        bar = "" if not scale else _bar(at, at + tier.bytes, scale)
        rows.append((tier.name, format_bytes(tier.bytes), bar))
        at += tier.bytes
    lead: list[tuple[str, str, str]] = []
    if message.requested is not None:
        bar = "" if not scale else _bar(0, message.requested, scale)
        lead.append(("requested", format_bytes(message.requested), bar))
    limits = (
        ("capacity", message.capacity),
        ("limit of this process", message.allowed),
        ("limit", message.limit),
        ("in use at the limit", message.used),
    )
    lead += [
        (name, format_bytes(size), _bar(0, size, scale) if scale and len(rows) else "")
        for name, size in limits
        if size is not None
    ]
    lines = list(aligned([*lead, *rows], right=(1,), indent="")) if lead or rows else []
    return lines + list(verdict.notes)


def _bar(begin: int, end: int, scale: int) -> str:
    """A bar from `begin` to `end` of `scale`; what is too small to be drawn is a dot."""
    left, right = (min(WIDTH, round(WIDTH * value / scale)) for value in (begin, end))
    left = min(left, WIDTH - 1)
    bar = "#" * (right - left) if right > left else "."
    return "|" + (" " * left + bar).ljust(WIDTH) + "|"


def _cause(verdict: Verdict) -> list[str]:
    if verdict.cause == UNKNOWN:
        return [f"the text cannot tell: {verdict.text}"]
    return [f"{verdict.cause}: {verdict.text}"]


def _others(log: Log, main: OomMessage) -> list[str]:
    others = [one for one in log.messages if one is not main]
    lines = [_line(one) for one in others[-LISTED:]]
    if log.count - 1 > len(lines):
        first = log.messages[0]
        many = f"{log.count:,} in all" if log.is_all else f"at least {log.count:,}"
        lines.insert(0, f"{many}, the first in line {first.line:,}")
    return lines


def _line(one: OomMessage) -> str:
    who = f" {one.rank}:" if one.rank else ""
    sizes = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in one.figures.items()
        if name in ("requested", "free", "allocated", "unallocated", "anonymous", "limit")
    )
    return f"line {one.line:,}:{who} {sizes or one.quote[:100]}"


def _changes(changes: tuple[Change, ...]) -> list[str]:
    return [
        f"- {one.text}" + ("" if one.most is None else f" (at most {format_bytes(one.most)})")
        for one in changes
    ]


def _next_of(code: ExitCode) -> list[str]:
    if code.where == SHM:
        return [
            "check how full it is: df -h /dev/shm; memtools doctor shows its size",
            "memtools explain LOG reads what the program and its workers wrote",
        ]
    return [
        "memtools explain LOG reads the log of the run; the kernel's: dmesg | memtools explain -",
        "run it again under memtools run: its record survives SIGKILL, and memtools explain shows "
        "what held the memory, and which limit it came near",
    ]

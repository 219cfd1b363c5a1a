"""What the texts of a record's events say: how the run ended, its limit, what a cleanup brought.

The texts are written for people, by the monitor and by `memtools run`, and a record may come from
anywhere: what is not understood is left unsaid, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools._size import parse_bytes
from memtools.report._words import shown

if TYPE_CHECKING:
    from memtools._record import Record, RecordEvent

_SIZE = r"(?<![\w.])(\d{1,18}(?:\.\d{1,9})?) ?(B|bytes|[KMGT]i?B)\b"
_TIME = r"(?<![\w.])(\d{1,12}(?:\.\d{1,9})?) ?(us|ms|s)\b"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Ending:
    """How the run ended: `kind` is "clean", "failed" (an exception or another exit code),
    "killed" (by a signal, or no end mark) or "running"; `text` is one clause about it."""

    kind: str
    text: str


def ending(record: Record) -> Ending:
    """By the newest end event, and by whether the record was closed."""
    said = next((e.text for e in reversed(record.events) if e.kind == "end"), None)
    if said is None and record.complete:
        return Ending("clean", "it ended properly")
    if said is None and record.written:
        return Ending("running", "the process is alive and still writes this record")
    if said is None:
        return Ending("killed", "no end mark: the process was killed")
    how = re.sub(r"^exit\b:? ?", "", shown(said).strip())
    code = re.fullmatch(r"(?:code )?(-?\d{1,9})(: .*)?", how)
    if code:
        by_code = _by_code(int(code[1]))
        return Ending(by_code.kind, by_code.text + (code[2] or ""))
    if re.match(r"killed\b", how):
        return Ending("killed", f"it was {how}")
    if re.match(r"exception\b", how):
        return Ending("failed", f"it ended by {how}")
    if re.match(r"not started\b", how):
        return Ending("failed", f"it was {how}")
    if how in ("", "normal", "stop()"):
        return Ending("clean", "it ended properly")
    return Ending("clean", how)


def _by_code(code: int) -> Ending:
    if code == 0:
        return Ending("clean", "it ended properly (exit code 0)")
    if 128 < code <= 128 + 64:
        return Ending("killed", f"it ended with exit code {code}: signal {code - 128}")
    return Ending("failed", f"it ended with exit code {code}")


def watched_from_outside(record: Record) -> bool:
    """By `memtools run -- command`, which goes on writing while the command ends."""
    start = next((event.text for event in record.events if event.kind == "start"), "")
    return start.startswith("process tree")


def started_with(text: str) -> tuple[int | None, int | None]:
    """(the limit that was given, the machine's memory) of a start event, each None without one."""
    given = re.search(rf"limit given,? {_SIZE}|limit {_SIZE} \(given\)", text)
    machine = re.search(rf"machine {_SIZE}|limit {_SIZE} \(machine\)", text)
    return _first_size(given), _first_size(machine)


def _first_size(found: re.Match[str] | None) -> int | None:
    parts = [part for part in found.groups() if part] if found else []
    return _bytes(*parts) or None if parts else None


def _bytes(number: str, unit: str) -> int:
    try:
        return parse_bytes(f"{number} {unit.replace('bytes', 'B')}")
    except ValueError:  # less than one byte
        return 0


def cleanup(event: RecordEvent) -> tuple[str, float, int | None]:
    """(what was done, seconds, bytes freed or None) of an event as
    "gc (12 objects) 3.1 ms, malloc_trim 0.2 ms: freed 4.0 MiB on the host"."""
    what, _, rest = event.text.partition(":")
    names = re.sub(rf"\([^()]*\)|{_TIME}|{_SIZE}", "", what)
    name = re.sub(r"\s+", " ", shown(names)).replace(" ,", ",").strip(" ,;") or "cleanup"
    times = [float(n) * _SECONDS[unit] for n, unit in re.findall(_TIME, event.text)]
    sizes = [_bytes(*found) for found in re.findall(_SIZE, rest or event.text)]
    seconds = event.duration_ns / 1e9 if event.duration_ns else sum(times)
    return name[:60], seconds, sum(sizes) if sizes else None

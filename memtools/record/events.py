"""What a record's events say: how the run ended, its limits, what a cleanup brought.

The start, the end and a cleanup are texts for people, written by the monitor and by `memtools run`,
and a record may come from anywhere: what is not understood is left unsaid, never guessed. The other
kinds have fields: see memtools/record/kinds.py.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools._base.oom import says_out_of_memory
from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools.record.kinds import GuardSet, Heap, Limit

if TYPE_CHECKING:
    from memtools.record.record import Record, RecordEvent

_SIZE = r"(?<![\w.])(\d{1,18}(?:\.\d{1,9})?) ?(B|bytes|[KMGT]i?B)\b"
_TIME = r"(?<![\w.])(\d{1,12}(?:\.\d{1,9})?) ?(us|ms|s)\b"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Ending:
    """How the run ended. `kind`: "clean", "failed" (an exception or another exit code), "killed"
    (by a signal), "gone" (no end mark), "ended" (an end mark that nobody here understands) or
    "running". `text`: one clause about it. `signal`: its name where one ended the run, "" where
    that is not known. `code`: the exit code by which a shell or a launcher tells of that signal.
    `out_of_memory`: "host", "device" or "budget" where an exception says that it ran out.
    """

    kind: str
    text: str
    signal: str | None = None
    out_of_memory: str | None = None
    code: int | None = None

    def by_memory(self, *, near: bool) -> bool:
        """Whether memory ended it: an exception says so, or what may have been a SIGKILL came near
        the limit."""
        return self.out_of_memory is not None or (self.signal in ("", "SIGKILL") and near)


def ending(record: Record) -> Ending:
    """By the newest end event, and by whether the record was closed."""
    said = next((e.text for e in reversed(record.events) if e.kind == "end"), None)
    if said is None and record.complete:
        return Ending("clean", "finished")
    if said is None and record.written:
        return Ending("running", "the process is alive and still writes this record")
    if said is None:
        return Ending(
            "gone", "no end mark: the process is gone (SIGKILL and os._exit() leave no mark)", ""
        )
    how = re.sub(r"^exit\b:? ?", "", shown(said).strip())
    code = re.fullmatch(r"(?:code )?(-?\d{1,9})(?:: (.*))?", how)
    if code:
        return _by_code(int(code[1]), code[2])
    by = re.match(r"(?:killed |ended |terminated )?(?:by )?(?:signal )?(SIG[A-Z0-9]{2,9})\b", how)
    if by:
        return Ending("killed", f"it was killed by {by[1]}", by[1])
    if re.match(r"killed\b", how):
        return Ending("killed", f"it was {how}", "")
    if re.match(r"exception\b", how):
        return _by_exception(how)
    if re.match(r"not started\b", how):
        return Ending("failed", f"it was {how}")
    if re.match(r"start\(\) was interrupted", how):
        return Ending("failed", "the monitor's start() was interrupted")
    if how in ("", "normal", "stop()"):
        return Ending("clean", "finished")
    if how == "the program ended without stop()":
        return Ending("clean", f"finished: {how}")
    return Ending("ended", f"it ended: {how}")


def _by_code(code: int, text: str | None) -> Ending:
    if code == 0:
        return Ending("clean", "finished (exit code 0)")
    number = -code if code < 0 else code - 128
    if 0 < number <= 64:
        name = _signal_name(number)
        return Ending("killed", f"it ended with exit code {code}", name, code=code)
    return Ending("failed", f"it ended with exit code {code}{f': {text}' if text else ''}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_exception(how: str) -> Ending:
    name, _, text = how.removeprefix("exception").strip().partition(":")
    if name == "KeyboardInterrupt":
        return Ending("failed", "it was interrupted (KeyboardInterrupt, Ctrl-C)", "SIGINT")
    if not says_out_of_memory(name, text):
        return Ending("failed", f"it ended by {how}")
    device = "OutOfMemoryError" in name or re.search(r"\b(CUDA|HIP|cu[A-Z]\w+|XPU)\b", text)
    where = "device" if device else "budget" if name == "BudgetError" else "host"
    return Ending("failed", f"it ran out of memory: {how}", None, where)


def guard_act(text: str) -> str:
    """A guard's event, "raise: 450 MiB of 500 MiB used", as a clause: what it did, and when."""
    name, _, pressure = text.partition(": ")
    if not re.match(rf"{_SIZE} of {_SIZE}", pressure):
        return text
    return f"it {'raised' if name == 'raise' else f'called {name}'} at {pressure}"


def process_limits(record: Record) -> dict[str, int]:
    """The limits of the process itself by name; one that was lifted later does not count."""
    found: dict[str, int] = {}
    for event in record.events:
        if isinstance(event.data, Limit):
            found.pop(event.data.name, None)
            if event.data.limit_bytes is not None:
                found[event.data.name] = event.data.limit_bytes
    return found


def idle_heap(record: Record) -> int | None:
    """Bytes of freed memory that malloc kept when the host's memory ran out."""
    kept = [event.data.kept_bytes for event in record.events if isinstance(event.data, Heap)]
    return kept[-1] if kept else None


def guard_set(record: Record) -> float | None:
    """The share of the limit at which a guard waits for the end of a step."""
    shares = [event.data.fraction for event in record.events if isinstance(event.data, GuardSet)]
    return shares[-1] if shares else None


def started_by_run(record: Record) -> bool:
    """By `memtools run`, so that the script has no monitor of its own to call."""
    start = next((event.text for event in record.events if event.kind == "start"), "")
    return start.startswith("memtools run: ")


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

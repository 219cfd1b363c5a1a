"""What the events of a record say about the whole run: how it began and ended, its limits, its
guard.

Only the fields of typed events (memtools/_record/kinds.py) are read here, never a sentence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from memtools._base.oom import says_out_of_memory
from memtools._base.text import shown
from memtools._record.kinds import End, Event, GuardAct, GuardSet, Heap, Limit, Start

if TYPE_CHECKING:
    from memtools._record.kills import Cause
    from memtools._record.record import Record

#: limits of a process that refuse an allocation
BYTES = ("RLIMIT_AS", "RLIMIT_DATA")
#: events of the start and the end of each run, from which it follows who ended it
_EVIDENCE = ("counters", "shm_room")
_Kind = TypeVar("_Kind", bound=Event)
#: endings of events that have neither a code nor a signal nor an exception
_HOW = {
    "": ("clean", "finished"),
    "normal": ("clean", "finished"),
    "stop()": ("clean", "finished"),
    "the program ended without stop()": (
        "clean",
        "finished: the program ended without stop()",
    ),
    "start() was interrupted": ("failed", "the monitor's start() was interrupted"),
}


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        kind: "clean", "failed" (an exception or another exit code), "killed" (by a signal), "gone"
            (no end mark), "ended" (an end mark of an unknown form) or "running".
        text: one clause about it.
        signal: the name of the signal that ended the run; "" if it is not known which one did, None
            if no signal did.
        out_of_memory: "host", "device" or "budget" if an exception says that it ran out; else None.
        code: the exit code by which a shell or a launcher reports that signal; else None.
        cause: who killed the run or a child of it, as far as the kernel's counters show it.
    """

    kind: str
    text: str
    signal: str | None = None
    out_of_memory: str | None = None
    code: int | None = None
    cause: Cause | None = None

    def shows(self, event: str) -> bool:
        """Whether a list of events shows those of this kind. Phases have a table of their own.
        Evidence of who ended a run is shown only if the run did not end well."""
        ended_well = self.kind in ("clean", "running")
        return event != "phase" and not (ended_well and event in _EVIDENCE)

    def by_memory(self, *, near: bool) -> bool:
        """Whether memory ended the run: an exception or the kernel's counters say so, or there are
        no counters, and what may have been a SIGKILL came near the limit (`near`)."""
        if self.cause is not None and self.cause.by != "unclear":
            return self.cause.is_memory
        return self.out_of_memory is not None or (self.signal in ("", "SIGKILL") and near)


def events_of(record: Record, kind: type[_Kind]) -> Iterator[_Kind]:
    """The typed events of one kind, the newest first."""
    return (event.data for event in reversed(record.events) if isinstance(event.data, kind))


def ending(record: Record) -> Ending:
    """How the run ended, by the newest end event and by whether the record was closed."""
    end = next((event for event in reversed(record.events) if event.kind == "end"), None)
    if end is None and record.complete:
        return Ending("clean", "finished")
    if end is None and record.written:
        return Ending("running", "still running")
    if end is None and any(start.command for start in events_of(record, Start)):
        why = "memtools, which watched the command, ended before it; the command may still run"
        return Ending("gone", why, "")
    if end is None:
        return Ending(
            "gone",
            "it was ended by SIGKILL or os._exit() (no end mark)",
            "",
        )
    if not isinstance(end.data, End):
        return Ending("ended", f"it ended: {shown(end.text)}")
    return _ending_of(end.data)


def _ending_of(end: End) -> Ending:
    text = shown(end.text)
    if end.code is not None:
        return _by_code(end.code, text)
    if end.signal:
        return Ending("killed", f"it was killed by {shown(end.signal)}", shown(end.signal))
    if end.signal is not None:
        return Ending("killed", f"it was {text}", "")
    if end.exception:
        return _by_exception(shown(end.exception), text)
    if end.how == "not started":
        return Ending("failed", f"it was {shown(end.clause())}")
    if end.how in _HOW and not end.text:
        return Ending(*_HOW[end.how])
    return Ending("ended", f"it ended: {shown(end.clause())}")


def _by_code(code: int, text: str) -> Ending:
    if code == 0:
        return Ending("clean", "finished (exit code 0)")
    number = -code if code < 0 else code - 128
    if 0 < number <= 64:
        name = signal_name(number)
        return Ending("killed", f"it ended with exit code {code}", name, code=code)
    return Ending("failed", f"it ended with exit code {code}{f': {text}' if text else ''}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_exception(name: str, text: str) -> Ending:
    if name == "KeyboardInterrupt":
        return Ending("failed", "it was interrupted (KeyboardInterrupt, Ctrl-C)", "SIGINT")
    how = End(exception=name, text=text).clause()
    if not says_out_of_memory(name, text):
        return Ending("failed", f"it ended by {how}")
    # These are the texts of torch.
    device = "OutOfMemoryError" in name or re.search(r"\b(CUDA|HIP|cu[A-Z]\w+|XPU)\b", text)
    where = "device" if device else "budget" if name == "BudgetError" else "host"
    return Ending("failed", f"it ran out of memory: {how}", None, where)


def start_of(record: Record) -> Start:
    """The start event; an empty one if the record has none that can be read."""
    return next(events_of(record, Start), Start())


def last_guard_act(record: Record) -> str:
    """What a guard did last, as a clause; "" if none acted."""
    return next((shown(act.clause()) for act in events_of(record, GuardAct)), "")


def process_limits(record: Record) -> dict[str, int]:
    """The limits of the process's memory by name, without those that were lifted later."""
    found: dict[str, int] = {}
    for limit in reversed(list(events_of(record, Limit))):
        if limit.name not in BYTES:
            continue
        found.pop(limit.name, None)
        if limit.limit_bytes is not None:
            found[limit.name] = limit.limit_bytes
    return found


def limits_that_acted(record: Record) -> dict[str, Limit]:
    """The limits of the process that refused a request at the end, by name."""
    acted = (limit for limit in events_of(record, Limit) if limit.used_bytes is not None)
    return {limit.name: limit for limit in acted}


def idle_heap(record: Record) -> int | None:
    """Bytes of freed memory that malloc kept when the host's memory ran out; None if not known."""
    return next((heap.kept_bytes for heap in events_of(record, Heap)), None)


def guard_set(record: Record) -> float | None:
    """The share of the limit at which a guard acts at the end of a step; None without a guard."""
    return next((guard.fraction for guard in events_of(record, GuardSet)), None)

"""What ran out of memory in a step, told and cleared away."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from memtools._base import malloc, reclaim
from memtools._base.oom import asked_bytes, first_line, is_of_host, remedy
from memtools._base.size import format_bytes

_CHANGED: Final = (
    "set glibc's mmap_threshold to 1.0 MiB and its trim_threshold to 16.0 MiB, so that freed "
    "memory goes back to the system"
)


@dataclass(frozen=True, slots=True)
class Retry:
    """One micro-batch that did not fit, and how the step went on. `str()` is a line."""

    #: windows before this one
    window: int
    #: which of this window's
    micro_batch: int
    #: it had, or the size that the split function cut it for; None for a whole batch of which only
    #: that function knows
    rows: int | None
    #: "forward", "backward", "another rank", "optimizer": its state did not fit before its first
    #: step, or "allocator": all fitted, but the device's allocator had to empty its cache again and
    #: again
    phase: str
    #: its type and the first line of its text
    error: str
    #: bytes that could not be had, where the error says so
    asked: int | None
    #: what was as before when it was tried again
    restored: str
    #: rows of the next try, those that failed where all idle memory was given back first; None: no
    #: try was left
    next_rows: int | None
    #: whether this was a step up, on trial
    probing: bool
    #: from the begin of what was done in vain until the next try
    ms: float
    #: what was set for the rest of the process, so that freed memory goes back to the system, or ""
    changed: str = ""

    def __str__(self) -> str:
        rows = "the whole batch" if self.rows is None else _rows(self.rows)
        where = f"micro-batch {self.micro_batch} of {rows}"
        if self.phase == "optimizer":
            where = f"after {self.micro_batch} micro-batches"
        asked = "" if self.asked is None else f" (asked {format_bytes(self.asked)})"
        trial = ", a step up on trial" if self.probing else ""
        changed = f"; {self.changed}" if self.changed else ""
        restored = f"restored {self.restored}; " if self.restored else ""
        return (
            f"window {self.window}, {where}{trial}, {self.phase}: "
            f"{self.error}{asked}; {restored}{self._way_on()}{changed}; {self.ms:.1f} ms lost"
        )

    def _way_on(self) -> str:
        if self.next_rows is None:
            return "gave up"
        if self.next_rows == (self.rows or 0):
            return "tried once more after all idle memory was given back"
        return f"went on with {_rows(self.next_rows)}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def prepare_host() -> str:
    """Where a limit counts what malloc keeps of freed memory, have it kept no more, before anything
    runs out: what oneDNN needs for a kernel fails first otherwise, and not all of it checks that.
    Returns what was set, or ""."""
    limit = malloc.lowest_limit()
    if limit is None or not malloc.map_large_blocks():
        return ""
    return f"{limit[1]} is {format_bytes(limit[0])}: {_CHANGED}"


class Failed:
    """A micro-batch's error, when its `except` block is left. The frames of its traceback are
    cleared: their variables are the tensors that filled the memory."""

    __slots__ = ("asked", "error", "line", "phase", "touched")

    def __init__(self, error: Exception | None, touched: bool, line: str = "") -> None:
        self.error, self.touched = error, touched
        self.asked, self.line, self.phase = None, line, "another rank"
        if error is not None:
            self.asked, self.line = asked_bytes(error), first_line(error)
            self.phase = "backward" if _in_backward(error.__traceback__) else "forward"

    def clear(self) -> None:
        """Lets go of what the failed pass held. What is young is most often enough: a collection
        of the whole heap takes half a second in a program that has imported much."""
        if self.error is not None:
            for one in _all(self.error, set()):
                traceback.clear_frames(one.__traceback__)
        gc.collect(1)

    def give_back(self, thorough: bool) -> str:
        """Give idle memory back to the device and the system. Returns what was set for that.

        Args:
            thorough: collect the whole heap first.
        """
        if thorough:
            gc.collect()
        reclaim.empty_cache()
        if self.error is None or not is_of_host(self.error):
            return ""
        changed = malloc.map_large_blocks()
        reclaim.trim()
        return _CHANGED if changed else ""

    def remedy(self) -> str:
        """What the program can do where no smaller micro-batch is left, in one clause."""
        if self.error is None or not is_of_host(self.error):
            return remedy(None)
        return remedy(*malloc.idle())


def _in_backward(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            return True
        trace = trace.tb_next
    return False


def _all(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """It, what it was raised from or while handling, and what it groups."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (error.__cause__, error.__context__, *inner):
        yield from _all(one, seen)

"""Takes smaller micro-batches before memory runs out, by the readings of a monitor.

An allocator at its limit raises an out-of-memory error. In a full control group, or on a full
machine, the kernel kills instead. So step() with a monitor keeps memory in use below a watermark:

    window begins      base: what this process holds without gradients and without malloc's idle
                       memory
    micro-batch        its exact peak minus the base is the rise for its number of rows
    before each        use of others + base + rise of the next rows  <  watermark?
                         if not: ask for idle memory, read again; then halve the rows until it is
    in a forward pass  if its size is new or close to the watermark, memory is read before each
                       module, and the pass is stopped like an OOM where the watermark is passed

It begins with few rows and doubles them while the forecast of the next size fits:

    rows  2 2 4 8 16 ...    | the largest that stays below, kept from window to window
                            | larger again only if the forecast is 5 % of the limit below the mark

The rise of rows that were not tried is on a line through the last two sizes. With one size, all of
its rise counts as due to its rows, which is the most that it can be. Rows of more bytes than those
of the first batch count as more rows:

    first batch     8 rows of  100 tokens    size 8
    a later one     8 rows of 1000 tokens    size 8 * 10.1; its forecast halves it before it runs

Any object with the attributes of `Monitor` will do, such as memtools.MemoryMonitor.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from memtools import _core
from memtools._base import environment, reclaim, running
from memtools._base import torch as bridge
from memtools._base.oom import Shortage
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    from memtools._grad.backoff import Runner

#: The watermark is this part of each limit.
LEVEL: Final = 0.9
#: BatchNorm refuses one row.
FIRST_ROWS: Final = 2
#: A larger size has to stay below the watermark by this part of the limit.
RISE: Final = 0.05
#: The slope of a line through two sizes is at least this part of the mean bytes per row.
FLATTEST: Final = 0.25
#: What a longer row counts for is rounded up, so that few sizes differ: so many steps a doubling.
STEPS: Final = 4
#: A measured rise is dropped after it refused a larger size so often.
FORGETS: Final = 8
#: A lower rise lowers the measured one by the difference divided by this.
SLOWLY: Final = 8
#: give_back() skips at most so many calls in a row.
MOST_SKIPS: Final = 63
#: Two readings in a forward pass are at least so many seconds apart.
LOOK_EVERY = 0.002
#: After so many windows malloc's figures are read less often: they take at most this share of the
#: time.
SETTLED: Final = 8
IDLE_SHARE: Final = 0.01
#: The name of the phase in the monitor's summary.
PHASE: Final = "micro-batch"


class Room(Protocol):
    """One memory of a monitor: what is in use, the limit, and what this process holds of it."""

    @property
    def memory(self) -> str: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def own_bytes(self) -> int: ...


class Passage(AbstractContextManager[Any], Protocol):
    """A measured part of the program, with its peaks once it has ended."""

    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def device_peak_bytes(self) -> dict[int, int]: ...


class Monitor(Protocol):
    """The attributes of a monitor that step() uses."""

    @property
    def running(self) -> bool: ...
    def headroom(self) -> Sequence[Room]: ...
    def phase(self, name: str) -> Passage: ...
    def cleanup_memory(self, aggressive: bool = False) -> dict[str, float]: ...


class WatermarkError(MemoryError):
    """Memory in use has passed the watermark in a micro-batch. step() catches it and takes fewer
    rows.

    Attributes:
        shortage: the facts for the back-off.
    """

    def __init__(self, text: str, of_host: bool) -> None:
        super().__init__(text)
        self.shortage = Shortage(text, None, of_host)


class Rises:
    """The bytes by which micro-batches of each size raise one memory above its base."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[float, float] = {}

    def see(self, rows: float, rise: int, *, restart: bool) -> None:
        """Count a micro-batch. A higher rise counts at once, a lower one little by little, because
        batches differ. `restart`: drop what was measured before, which was not typical."""
        before = None if restart else self._of.get(rows)
        low = float(rise) if before is None else before - (before - rise) / SLOWLY
        self._of[rows] = max(float(rise), low)

    def forget_from(self, rows: float) -> None:
        """Drop the rises of so many rows and more."""
        self._of = {size: rise for size, rise in self._of.items() if size < rows}

    def of(self, rows: float) -> float | None:
        """Return the rise of so many rows, measured or estimated; None before the first one."""
        if rows in self._of or not self._of:
            return self._of.get(rows)
        below = sorted(size for size in self._of if size < rows)
        near = below[-1] if below else min(self._of)
        others = [size for size in self._of if size != near]
        rise = self._of[near]
        mean = rise / near
        slope = mean
        if others:
            other = max((size for size in others if size < near), default=min(others))
            slope = (rise - self._of[other]) / (near - other)
        slope = min(max(slope, FLATTEST * mean), mean) if mean > 0 else max(slope, 0.0)
        return max(0.0, rise + slope * (rows - near))

    @property
    def sizes(self) -> int:
        """The number of sizes that were measured."""
        return len(self._of)


class Watermark:
    """Compares memory with the watermark, for the step() of one accumulator.

    Attributes:
        note: why sizes do not depend on the watermark, or "".
    """

    def __init__(self, monitor: Monitor, runner: Runner) -> None:
        self._monitor, self._runner = monitor, runner
        self.note = ""
        self._rises: dict[str, Rises] = {}
        self._base: dict[str, int] = {}  # bytes that this process held when the window began
        self._highest: dict[str, int] = {}  # bytes of this process seen within a micro-batch
        self._proven: float = 0.0  # the largest size that was measured
        self._row_bytes = 0.0  # of the first batch
        # What rows of this batch and of the one before count for.
        self._scale = self._scale_before = 1.0
        self._windows = self._refused = self._seen = 0
        self._wait = self._skips = 0  # calls of give_back() to skip
        self._answers = True  # False if the monitor was stopped or its last reading failed
        # How often malloc has given its idle pages back, and, since then, the least (without the
        # gradients of a window) and the most that this process held.
        self._trims, self._bare, self._top = 0, 0, math.inf
        self._idle_due = 0.0  # when malloc's figures are read again, by time.perf_counter()
        self._is_off = environment.is_off  # MEMTOOLS=0
        self._probe = _core.Probe()

    # --- a window ---

    def begin_window(self, row_bytes: float = 0.0) -> None:
        """Read the base before the first micro-batch of a window, whose batch has so many bytes for
        each row; 0, the default, if that is not known.

        Raises RuntimeError if the monitor does not run, ValueError if it does not watch a device of
        the model; both in the first window only. If the monitor stops later, a note says so.
        """
        self._windows += 1
        self._row_bytes = self._row_bytes or row_bytes
        self._scale_before = self._scale
        self._scale = _scale(row_bytes / self._row_bytes) if row_bytes else 1.0
        if self._is_off:
            return
        first = self._windows == 1
        self._answers = self._monitor.running
        if not self._answers:
            if first:
                self._windows = 0
                raise RuntimeError(
                    "step(): the monitor of this GradAccumulator is not running, so it cannot say "
                    "how much memory is left: call monitor.start(), or train in `with monitor:`"
                )
            self.note = (
                "the monitor no longer runs, so micro-batches shrink only after memory has run out"
            )
            self._base = {}
            return
        self.note = ""
        rooms = self._read()
        if first and rooms:
            try:
                self._check_devices(rooms)
            except ValueError:
                self._windows = 0
                raise
        if not rooms and not self.note:
            self.note = (
                "no memory limit is known here, so micro-batches shrink only after memory has run "
                "out: pass limit= to the monitor"
            )
        self._set_base(rooms, rarely=self._windows > SETTLED)

    def _set_base(self, rooms: Sequence[Room], *, rarely: bool = False) -> None:
        """Take what is held now as the base, without malloc's idle memory, which the next passes
        use again. `rarely`: on the host it stays as it was, if malloc's figures cost too much."""
        stays = rarely and time.perf_counter() < self._idle_due
        idle = self._idle() if rooms and not stays else 0
        now = {room.memory: room.own_bytes - idle * _is_host(room) for room in rooms}
        kept = {room.memory for room in rooms if stays and _is_host(room)} & self._base.keys()
        self._base = now | {memory: self._base[memory] for memory in kept}

    def _idle(self) -> int:
        """Return the freed resident bytes that malloc keeps; 0 if unknown. malloc also counts pages
        that it gave back. Of those, only what was used since is resident again. Takes milliseconds
        where malloc has many free blocks."""
        began = time.perf_counter()
        free = self._probe.read(_core.READ_HEAP).heap_free or 0
        ended = time.perf_counter()
        self._idle_due = ended + (ended - began) / IDLE_SHARE
        return int(max(0, min(free, self._top - self._bare)))

    def _check_devices(self, rooms: Sequence[Room]) -> None:
        """Raise ValueError if a CUDA device has parameters and is not watched."""
        watched = {room.memory for room in rooms}
        for parameter in self._runner.gradients.parameters:
            name = str(parameter.device)
            if parameter.device.type == "cuda" and name not in watched:
                seen = ", ".join(sorted(name for name in watched if name.startswith("cuda")))
                raise ValueError(
                    f"step(): the model has parameters on {name}, and the monitor watches "
                    f"{seen or 'no CUDA device'}: make it with device='auto', or leave monitor out"
                )

    @property
    def has_limits(self) -> bool:
        """Whether memory has a limit. True if the monitor does not answer."""
        return bool(self._base) or not self._answers

    @property
    def is_on(self) -> bool:
        """Whether there is a base to compare with."""
        return bool(self._base)

    def _read(self) -> Sequence[Room]:
        """Return the readings of the monitor. If it fails, return none and set a note, so that
        training goes on."""
        try:
            rooms = self._monitor.headroom()
        except Exception as error:
            self._base, self._answers = {}, False
            self.note = (
                f"the monitor failed with {type(error).__name__}: {error}; micro-batches shrink "
                "only after memory has run out"
            )
            return ()
        is_trimmed, self._trims = self._trims != reclaim.times_trimmed, reclaim.times_trimmed
        for room in filter(_is_host, rooms):
            own = room.own_bytes
            if is_trimmed:
                self._bare = min(own, self._base.get(room.memory, own))
            self._top = own if is_trimmed else max(self._top, own)
        return rooms

    # --- before a micro-batch ---

    def is_measured(self, rows: float) -> bool:
        """Whether this size was measured well enough to double it. The very first micro-batch is
        not typical: it opens libraries and makes kernels."""
        return self._seen > 1 and rows * self._scale <= self._proven

    def is_unusual(self, rows: float) -> bool:
        """Whether so many rows would fit if they were as long as those of the batch before."""
        scale, before = self._scale, self._scale_before
        return scale > before and not self.over(rows * before / scale)

    def over(self, rows: float, below: float = 0.0) -> str:
        """Return which memory a micro-batch of so many rows of this batch would take to the
        watermark, and how far; "" if all stay below it.

        Args:
            rows: the rows of the micro-batch.
            below: the part of the limit by which it has to stay below the watermark.
        """
        for room in self._read() if self._base else ():
            base, rises = self._base.get(room.memory), self._rises.get(room.memory)
            rise = None if rises is None else rises.of(rows * self._scale)
            if base is None or rise is None:
                continue
            high = room.used_bytes - room.own_bytes + base + rise
            if high >= (LEVEL - below) * room.limit_bytes:
                return (
                    f"{room.memory}: {rows:,.0f} rows would take it to {format_bytes(high)} of "
                    f"{format_bytes(room.limit_bytes)}; watermark {LEVEL:.0%}"
                )
        return ""

    def larger(self, rows: float, most: float) -> float:
        """Return a size above `rows` that is safe to try although `most`, its double, may not be.
        If only one size was measured, its rise may be one that any size has. The memory between the
        watermark and the limit is used for that. Returns `rows` if there is no such size.
        """
        found = most
        for room in self._read() if self._base else ():
            base, rises = self._base.get(room.memory), self._rises.get(room.memory)
            rise = None if rises is None else rises.of(rows * self._scale)
            if base is None or rises is None or not rise:
                continue
            if rises.sizes > 1:
                return rows
            left = room.limit_bytes - (room.used_bytes - room.own_bytes + base)
            found = min(found, int(rows * left / rise))
        return max(found, rows)

    def may_rise(self, rows: float) -> bool:
        """Whether a window may begin with more rows than the last one. Not while the monitor does
        not answer. A rise that refuses it again and again is dropped, as it may have been that of
        an unusual batch."""
        if self._base:  # The gradients are gone, and the optimizer may have made its state.
            self._set_base(self._read())
        why = self.over(rows, RISE)
        if not self._answers:
            return False
        if not why:
            self._refused = 0
            return True
        self._refused += 1
        if self._refused >= FORGETS:
            self._refused = 0
            for rises in self._rises.values():
                rises.forget_from(rows * self._scale)
        return False

    def give_back(self) -> None:
        """Give back the idle memory of pools, Python's cycles, torch's cache and malloc, of which
        5 % of a limit are worth it. It takes about 100 ms, and the next pass faults malloc's pages
        in again: if it lowers the base by less than 5 % of a limit, more and more calls are
        skipped."""
        if self._skips:
            self._skips -= 1
            return
        self._wait = self._skips = min(2 * self._wait + 1, MOST_SKIPS)
        rooms = self._read()
        before, idle = {room.memory: room.own_bytes for room in rooms}, self._idle()
        reclaim.ask()
        trims = any(_is_host(room) and idle >= RISE * room.limit_bytes for room in rooms)
        self._monitor.cleanup_memory(aggressive=trims)
        for room in self._read():
            freed = before.get(room.memory, 0) - room.own_bytes
            freed -= idle * _is_host(room)  # Idle memory is not a part of the base.
            if freed >= RISE * room.limit_bytes:
                self._wait = self._skips = 0
            if room.memory in self._base and freed > 0:
                self._base[room.memory] -= freed

    # --- a micro-batch ---

    @contextmanager
    def measured(self, rows: float, watched: bool) -> Iterator[None]:
        """Measure the peak of a micro-batch. If its size is new or close to the watermark, raise
        WatermarkError in its forward pass as soon as the watermark is passed.

        Args:
            rows: the rows of the micro-batch; 0 for a whole batch whose size only the split
                function knows.
            watched: whether it can be tried with fewer rows.
        """
        if not self._base:
            yield
            return
        self._highest = {}
        rows = rows or math.inf
        size = rows * self._scale
        passage = self._monitor.phase(PHASE)
        armed = watched and (size > self._proven or bool(self.over(rows, RISE)))
        with passage, self._looks(armed):
            yield
        rooms = self._read()
        if not self._base:  # The monitor failed, so that nothing was measured.
            return
        self._seen += 1
        measured = False
        for room in rooms:
            base = self._base.get(room.memory)
            peak = passage.peak_bytes
            if not _is_host(room):
                peak = passage.device_peak_bytes.get(int(room.memory[5:]))
            peak = max(peak or 0, self._highest.get(room.memory, 0))
            if _is_host(room):
                self._top = max(self._top, peak)
            # A whole batch of unknown size says nothing about another one.
            if base is not None and peak and size < math.inf:
                rises = self._rises.setdefault(room.memory, Rises())
                rises.see(size, max(0, peak - base), restart=self._seen == 2)
                measured = True
        if measured:
            self._proven = max(self._proven, size)

    @contextmanager
    def _looks(self, armed: bool) -> Iterator[None]:
        """Read memory before the forward pass of each module."""
        torch = bridge.connect().torch
        if not armed or self._is_compiled():
            yield
            return
        thread, asked, due = threading.get_ident(), False, 0.0

        def look(module: Any, args: Any) -> None:
            nonlocal asked, due
            if threading.get_ident() != thread or time.perf_counter() < due:
                return
            due = time.perf_counter() + LOOK_EVERY
            room = self._passed()
            if room is not None and not asked:
                asked = True
                self.give_back()
                room = self._passed()
            if room is not None:
                raise WatermarkError(
                    f"{room.memory}: {format_bytes(room.used_bytes)} of "
                    f"{format_bytes(room.limit_bytes)} used in a forward pass; watermark "
                    f"{LEVEL:.0%}",
                    _is_host(room),
                )

        handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def _passed(self) -> Room | None:
        """Return a memory in use up to the watermark or above it. Also records how much this
        process holds."""
        found = None
        for room in self._read():
            self._highest[room.memory] = max(self._highest.get(room.memory, 0), room.own_bytes)
            if room.used_bytes >= LEVEL * room.limit_bytes:
                found = found or room
        return found

    def _is_compiled(self) -> bool:
        """Whether a part of the model is compiled: a hook of all modules would compile it again."""
        return any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self._runner.model.modules()
        )


def _scale(ratio: float) -> float:
    """Return what a row counts for that is so many times as long as one of the first batch."""
    return 2.0 ** (math.ceil(STEPS * math.log2(ratio) - 1e-9) / STEPS) if ratio > 1 else 1.0


def _is_host(room: Room) -> bool:
    """Whether it is host memory, with any limit."""
    return not room.memory.startswith("cuda:")


def write_mark(text: str) -> None:
    """Write a line into the record of every running monitor."""
    running.event("mark", text)

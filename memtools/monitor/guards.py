"""What a monitor does when memory runs short: callbacks and guards, at safe points."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memtools import _core
from memtools._base import sentences
from memtools._base.decorate import name_of_callback
from memtools.errors import HostMemoryPressure
from memtools.monitor.host import percent
from memtools.monitor.log import Log
from memtools.monitor.readings import HostTiers

STALLED = 40.0  # percent of the last 10 s: below it, systemd-oomd's users saw false alarms
MOST_WATERMARKS = 32  # of a sampler


class Pressure(NamedTuple):
    """What a callback of `on_pressure` or `guard` gets."""

    #: the watermark that was passed, as a share of the limit
    fraction: float
    #: bytes that count against the limit, and the limit
    used_bytes: int
    limit_bytes: int
    #: where the limit comes from, in words
    limit_source: str
    step: int
    #: share of the last 10 s, 0 to 100, in which some task waited for memory; None when unknown
    stalled_percent: float | None

    def __str__(self) -> str:
        return sentences.of_pressure(self)


Callback = Callable[..., object]


class Handle:
    """A registered callback or guard. `cancel()` removes it, at any time, also from within it."""

    __slots__ = ("_bits", "_watermarks", "action", "fraction", "name", "safe")

    def __init__(self, watermarks: Watermarks, fraction: float, action: Callback | str, safe: bool):
        self._watermarks = watermarks
        self.fraction, self.action = fraction, action
        #: True for a guard; False for a callback of on_pressure, which runs before all guards
        self.safe = safe
        self.name = action if isinstance(action, str) else name_of_callback(action)
        self._bits: list[int] = []

    def cancel(self) -> None:
        """Remove the callback or guard. May be called twice."""
        self._watermarks._drop(self)

    def __repr__(self) -> str:
        kind = "guard" if self.safe else "on_pressure"
        return f"<{kind} {self.name} at {100 * self.fraction:g}%>"


class Watermarks:
    """The watermarks of a monitor; they outlast a run, the sampler's bits do not."""

    __slots__ = ("_handles", "_of_bit", "_sampler", "near")

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._of_bit: dict[int, tuple[Handle, bool]] = {}  # bit: whose, and whether it is "near"
        self._sampler: _core.Sampler | None = None
        #: guards whose second watermark was passed: they act when tasks stall, too; look again soon
        self.near: dict[Handle, None] = {}

    def add(self, fraction: float, action: Callback | str, safe: bool) -> Handle:
        """Raises ValueError for a fraction that is not in (0, 1] or too many watermarks."""
        what = "guard" if safe else "on_pressure"
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"{what}(): fraction is a number, got {type(fraction).__name__}")
        if not 0 < fraction <= 1:
            raise ValueError(f"{what}(): fraction is above 0 and at most 1, got {fraction}")
        handle = Handle(self, float(fraction), action, safe)
        if sum(map(_bits_of, self._handles)) + _bits_of(handle) > MOST_WATERMARKS:
            raise ValueError(
                f"{what}(): {len(self._handles)} callbacks and guards wait already; cancel some"
            )
        self._handles.append(handle)
        if self._sampler is not None:
            self._install(handle, self._sampler)
        return handle

    def begin(self, sampler: _core.Sampler) -> None:
        self._of_bit.clear()
        self._sampler = sampler
        for handle in self._handles:
            self._install(handle, sampler)

    def end(self) -> None:
        self._sampler = None
        self._of_bit.clear()
        self.near.clear()
        for handle in self._handles:
            handle._bits.clear()

    def _install(self, handle: Handle, sampler: _core.Sampler) -> None:
        """Watch its own fraction and, for a guard above 0.5, the one from which on it is near."""
        for near in (False, True)[: _bits_of(handle)]:
            bit = sampler.watch(2 * handle.fraction - 1 if near else handle.fraction)
            handle._bits.append(bit)
            self._of_bit[bit] = handle, near

    def _drop(self, handle: Handle) -> None:
        try:
            self._handles.remove(handle)
        except ValueError:
            return
        for bit in handle._bits:
            self._of_bit.pop(bit, None)
            if self._sampler is not None:
                self._sampler.unwatch(bit)
        handle._bits.clear()
        self.near.pop(handle, None)

    def waiting(self, fired: int) -> list[Handle]:
        """The handles whose own watermark is in the sampler's mask, the lowest first."""
        own = [handle for handle, near in self._passed(fired) if not near]
        return sorted(own, key=lambda h: h.fraction)

    def _passed(self, fired: int) -> list[tuple[Handle, bool]]:
        """Whose watermarks are in the mask; another thread may cancel one now."""
        return [pair for bit, pair in list(self._of_bit.items()) if fired >> bit & 1]

    @property
    def handles(self) -> tuple[Handle, ...]:
        return tuple(self._handles)

    def due(self, fired: int, host: Callable[[], HostTiers]) -> list[Handle]:
        """The handles that are to act now, callbacks before guards, the lowest watermark first.
        `fired` is the sampler's mask; `host` is called only if a guard is near."""
        self.near |= dict.fromkeys(handle for handle, near in self._passed(fired) if near)
        turn = self.waiting(fired)
        for handle in turn:
            self.near.pop(handle, None)
        if self.near:
            turn += self._stalled(host())
        return sorted(turn, key=lambda h: (h.safe, h.fraction))

    def _stalled(self, now: HostTiers) -> list[Handle]:
        """The near guards that are to act: little headroom alone may be a full cache, stalls alone
        another container's, so both count."""
        used, stalled = percent(now.used, now.limit), list[Handle]()
        for handle in list(self.near):
            if used is None or used < 100 * (2 * handle.fraction - 1) - 5:
                self.near.pop(handle, None)
            elif now.pressure is not None and now.pressure >= STALLED:
                self.near.pop(handle, None)
                stalled.append(handle)
        return stalled

    def act(self, handle: Handle, pressure: Pressure, log: Log) -> HostMemoryPressure | None:
        """Run a callback, or return what a guard is to raise. Of what a callback raises, only
        HostMemoryPressure and BaseExceptions such as KeyboardInterrupt propagate."""
        if handle not in self._handles:
            return None  # another callback has cancelled it
        if handle.safe:  # that a watermark was passed, the sampler has written
            log.event("guard", pressure, action=handle.name)
        if handle.action == "raise":
            return HostMemoryPressure(
                f"host memory runs out at step {pressure.step:,}: {pressure}; save a checkpoint "
                "and free memory, or raise the limit"
            )
        if callable(handle.action):
            try:
                handle.action(pressure)
            except HostMemoryPressure:
                raise
            except Exception as error:
                log.complain(
                    f"callback {handle.name}",
                    f"{handle.name}(), which waits for memory pressure, failed with "
                    f"{type(error).__name__}: {error}; training goes on, and this is said once",
                )
        return None


def _bits_of(handle: Handle) -> int:
    return 2 if handle.safe and handle.fraction > 0.5 else 1

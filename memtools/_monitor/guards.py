"""What a monitor does when memory runs short: callbacks and guards, at safe points.

Watermark 90 % ──► a bit of the sampler for each memory that it watches: the host, or each device
                               │ passed: the sampler's thread sees that also within a step
step() ── its mask ──► due ──► Pressure ──► act: a callback, or what a guard raises
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools._base import sentences
from memtools._base.decorate import name_of_callback
from memtools._base.number import number
from memtools._base.redact import harmless
from memtools._base.size import format_bytes
from memtools._monitor.host import percent
from memtools._monitor.log import Log
from memtools._monitor.readings import HostTiers
from memtools.errors import DeviceMemoryPressure, HostMemoryPressure, MemoryPressure

#: Tasks stall if they wait so many percent of the last 10 s: below that, users of systemd-oomd saw
#: false alarms.
STALLED = 40.0
MOST_WATERMARKS = 32  # A sampler has so many bits.


class Pressure(NamedTuple):
    """The argument of a callback of `on_pressure` or `guard`."""

    #: the watermark that was passed, as a share of the limit
    fraction: float
    #: bytes in use then; on a device with those of other programs
    used_bytes: int
    #: the limit, or the device's size
    limit_bytes: int
    #: where the limit comes from
    limit_source: str
    #: steps counted
    step: int
    #: share of the last 10 s, 0 to 100, in which some task waited for memory
    stalled_percent: float | None
    #: the device's number; None for the host
    device: int | None = None

    def __str__(self) -> str:
        return sentences.of_pressure(self)


Callback = Callable[..., object]


class Watermark:
    """A callback or a guard, and the share of a memory's limit at which it acts."""

    __slots__ = ("action", "bits", "device", "fraction", "name", "safe")

    def __init__(self, fraction: float, action: Callback | str, safe: bool, device: str | None):
        self.fraction = fraction
        #: the function that is called, or "raise" and the like for a guard
        self.action = action
        #: True for a guard; False for a callback of on_pressure, which runs before all guards
        self.safe = safe
        #: the memory that it watches: None is the host's, "cuda" that of all devices
        self.device = device
        #: what errors and events call it
        self.name = action if isinstance(action, str) else harmless(name_of_callback(action))
        #: its bits of the sampler's mask, while a run goes on
        self.bits: list[int] = []

    def __repr__(self) -> str:
        kind = "guard" if self.safe else "on_pressure"
        of = "" if self.device is None else f" of {self.device}"
        return f"<{kind} {self.name} at {100 * self.fraction:g}%{of}>"


class Passed(NamedTuple):
    """The watermark and the device (None: the host) of a bit of the sampler's mask. `near`: it is
    the earlier watermark of a guard, from which on stalls count."""

    watermark: Watermark
    device: int | None
    bit: int
    near: bool = False


class Watermarks:
    """The watermarks of a monitor; they outlast a run, the sampler's bits do not."""

    __slots__ = ("_all", "_devices", "_of_bit", "_sampler", "near")

    def __init__(self) -> None:
        self._all: list[Watermark] = []
        self._of_bit: dict[int, Passed] = {}
        self._sampler: _core.Sampler | None = None
        self._devices: Sequence[int] = ()  # the devices that the run watches
        #: guards whose earlier watermark was passed: they act when tasks stall, too
        self.near: dict[Watermark, None] = {}

    def add(
        self, fraction: float, action: Callback | str, safe: bool, device: object = None
    ) -> Watermark:
        """Add a watermark. Raises ValueError for a fraction that is not in (0, 1], too many
        watermarks, or a device that cannot exist."""
        what = "guard" if safe else "on_pressure"
        fraction = number(f"{what}(): fraction", fraction)
        if not 0 < fraction <= 1:
            raise ValueError(f"{what}(): fraction must be above 0 and at most 1, got {fraction}")
        watermark = Watermark(fraction, action, safe, _whose(device, what))
        if sum(map(self._bits_of, self._all)) + self._bits_of(watermark) > MOST_WATERMARKS:
            raise ValueError(
                f"{what}(): {len(self._all)} callbacks and guards are registered already; remove "
                "some"
            )
        self._all.append(watermark)
        if self._sampler is not None:
            self._install(watermark, self._sampler)
        return watermark

    def begin(self, sampler: _core.Sampler, devices: Sequence[int]) -> None:
        self._of_bit.clear()
        self._sampler, self._devices = sampler, devices
        for watermark in self._all:
            self._install(watermark, sampler)

    def end(self) -> None:
        self._sampler = None
        self._of_bit.clear()
        self.near.clear()
        for watermark in self._all:
            watermark.bits.clear()

    def _memories(self, watermark: Watermark) -> Sequence[int | None]:
        """The memories of this run that it watches."""
        if watermark.device is None:
            return (None,)
        if watermark.device == "cuda":
            return self._devices
        return [index for index in self._devices if watermark.device == f"cuda:{index}"]

    def _bits_of(self, watermark: Watermark) -> int:
        if watermark.device is None:
            return 2 if watermark.safe and watermark.fraction > 0.5 else 1
        return max(1, len(self._memories(watermark)))

    def _install(self, watermark: Watermark, sampler: _core.Sampler) -> None:
        """Watch its own fraction and, for a guard of the host above 0.5, the earlier one from which
        on stalls count."""
        for device in self._memories(watermark):
            self._watch(sampler, watermark, device)
        if watermark.device is None and self._bits_of(watermark) == 2:
            self._watch(sampler, watermark, None, near=True)

    def _watch(
        self, sampler: _core.Sampler, watermark: Watermark, device: int | None, near: bool = False
    ) -> None:
        if len(self._of_bit) == MOST_WATERMARKS:
            return  # a guard of "cuda" was added before the devices were counted
        bit = sampler.watch(2 * watermark.fraction - 1 if near else watermark.fraction, device)
        watermark.bits.append(bit)
        self._of_bit[bit] = Passed(watermark, device, bit, near)

    def drop(self, watermark: Watermark) -> None:
        try:
            self._all.remove(watermark)
        except ValueError:
            return
        for bit in watermark.bits:
            self._of_bit.pop(bit, None)
            if self._sampler is not None:
                self._sampler.unwatch(bit)
        watermark.bits.clear()
        self.near.pop(watermark, None)

    def waiting(self, fired: int) -> list[Passed]:
        """Those whose own watermark is in the sampler's mask, the lowest first."""
        own = [passed for passed in self._passed(fired) if not passed.near]
        return sorted(own, key=lambda p: p.watermark.fraction)

    def _passed(self, fired: int) -> list[Passed]:
        """Those whose watermarks are in the mask; another thread may remove one now."""
        return [passed for bit, passed in list(self._of_bit.items()) if fired >> bit & 1]

    @property
    def all(self) -> tuple[Watermark, ...]:
        return tuple(self._all)

    def inert(self) -> Iterator[tuple[Watermark, str]]:
        """The watermarks that cannot act in this run, and why."""
        for watermark in list(self._all):
            if self._sampler is not None and watermark.device is None:
                if self._sampler.limit() is None:
                    yield watermark, "no memory limit is known here: pass limit="
            elif not self._memories(watermark):
                watched = ", ".join(f"cuda:{index}" for index in self._devices)
                yield watermark, f"the monitor watches {watched or 'no CUDA device'}"
            elif not watermark.bits:
                yield watermark, f"{MOST_WATERMARKS} watermarks are set already"

    def unreadable(self) -> Iterator[tuple[Watermark, str]]:
        """The watermarks that could not act because a device's memory was not known although it is
        in use, and what was missing."""
        samples = [] if self._sampler is None else self._sampler.devices()
        for watermark in list(self._all):
            for index in self._memories(watermark):
                known = samples[index] if index is not None and index < len(samples) else None
                if known is None or index is None or None not in known[:4]:
                    continue
                if cuda_devices.tiers(index).allocated is not None:
                    missing = "torch's counters" if None in known[:2] else "the driver's figures"
                    yield watermark, f"{missing} of cuda:{index} could not be read by a thread"

    def due(self, fired: int, host: Callable[[], HostTiers]) -> list[Passed]:
        """Those that act now, callbacks before guards, the lowest watermark first. `fired` is the
        sampler's mask; `host` is called only if a guard is near."""
        self.near |= dict.fromkeys(p.watermark for p in self._passed(fired) if p.near)
        turn = self.waiting(fired)
        for passed in turn:
            self.near.pop(passed.watermark, None)
        if self.near:
            turn += [Passed(watermark, None, -1) for watermark in self._stalled(host())]
        return sorted(turn, key=lambda p: (p.watermark.safe, p.watermark.fraction))

    def _stalled(self, now: HostTiers) -> list[Watermark]:
        """The near guards that act now. Little headroom alone may be a full cache, and stalls alone
        may be another container's, so both must be seen."""
        used, stalled = percent(now.used, now.limit), list[Watermark]()
        for watermark in list(self.near):
            if used is None or used < 100 * (2 * watermark.fraction - 1) - 5:
                self.near.pop(watermark, None)
            elif now.pressure is not None and now.pressure >= STALLED:
                self.near.pop(watermark, None)
                stalled.append(watermark)
        return stalled

    def pressure(
        self, passed: Passed, host: Callable[[], HostTiers], source: str, step: int
    ) -> Pressure:
        """The argument of its callback, with the reading that passed the watermark, as memory may
        be free again by now. `source` says where the host's limit comes from."""
        fraction, used = passed.watermark.fraction, 0
        if self._sampler is not None and passed.bit >= 0:  # else tasks stall
            used = self._sampler.passed_at(passed.bit)
        if passed.device is None:
            now = host()
            used = used or now.used or 0
            return Pressure(fraction, used, now.limit or 0, source, step, now.pressure)
        device = cuda_devices.tiers(passed.device)
        words = f"cuda:{passed.device}"
        if device.others:
            words += f", {format_bytes(device.others)} of it held by others"
        return Pressure(
            fraction, used or device.used or 0, device.total or 0, words, step, None, passed.device
        )

    def act(self, watermark: Watermark, pressure: Pressure, log: Log) -> MemoryPressure | None:
        """Run a callback, or return what a guard raises. Of what a callback raises, only
        MemoryPressure and BaseExceptions such as KeyboardInterrupt propagate."""
        if watermark not in self._all:
            return None  # another callback has removed it
        if watermark.safe:  # the sampler has recorded that the watermark was passed
            log.event("guard", pressure, action=watermark.name)
        if watermark.action == "raise":
            return _error(pressure)
        if callable(watermark.action):
            try:
                watermark.action(pressure)
            except MemoryPressure:
                raise
            except Exception as error:
                log.complain(
                    f"callback {watermark.name}",
                    f"{watermark.name}(), registered for memory pressure, failed with "
                    f"{type(error).__name__}: {error}; training continues, and this is reported "
                    "once",
                )
        return None


def _whose(device: object, what: str) -> str | None:
    """The memory of a `device` argument: None is the host's, "cuda" that of every device."""
    if device is None or str(device) == "cpu":
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    kind, index = cuda_devices.parse_device(device)
    if kind != "cuda":
        raise ValueError(
            f'{what}(): device must be None, "cuda" or like "cuda:1", got {str(device)!r}'
        )
    return "cuda" if index is None else f"cuda:{index}"


def _error(pressure: Pressure) -> MemoryPressure:
    if pressure.device is None:
        return HostMemoryPressure(
            f"host memory runs out at step {pressure.step:,}: {pressure}; save a checkpoint "
            "and free memory, or raise the limit"
        )
    return DeviceMemoryPressure(
        f"device memory runs out at step {pressure.step:,}: {pressure}; save a checkpoint, "
        "release what is kept on the device, or use smaller micro-batches"
    )

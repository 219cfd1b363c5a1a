"""The readings of a leak test: at looks, and between them as often as they are cheap.

    at a look ──────► Points: each signal at the same point of a step ──► Looks, for the judge
    between looks ──► LeakDetector: even readings for the test that separates a leak from a warm-up

What memtools itself does to memory (walks, collections of garbage, traced steps) is not counted:
`with sensor.left_out():`.

Where several threads make steps, a reading at the end of one of them has in it what the others have
just then. Some of these moments are quieter than others, so the lowest of the readings at the ends
of the newest eight steps counts. What torch counts of its tensors is exact, so the heap without
them and the tensors have a lowest reading each.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memtools._base import process
from memtools._leak.detector import LeakDetector, add_known, part_of
from memtools._leak.finding import RANK
from memtools._leak.judge import THRESHOLDS
from memtools._leak.series import Looks, Points, since_of
from memtools._monitor.signals import BESIDE, COUNTED, Limits, Signal

#: Growth of this share of the limit, and so many bytes, causes a look at once.
LARGE_SHARE, LARGE = 0.01, 1 << 20
IN_USE = ("heap", "python")
LOWS = 8  # Where several threads make steps, the lowest of so many readings counts.
SLOW_NS = 1_000_000  # A reading that takes longer is taken once.

_paused: list[Sensor] = []  # those in whose `left_out` the garbage collector is off


class Sensor:
    """Reads the signals of a run, and keeps what they were.

    Args:
        signals: the signals to read.
        limits: the limits of what they read.
        noisy: whether readings are taken on a thread of their own, at any point of a step; False by
            default.
    """

    def __init__(self, signals: Sequence[Signal], limits: Limits, *, noisy: bool = False) -> None:
        self.signals = [signal for signal in signals if signal.name not in BESIDE]
        self._all, self._limits = list(signals), limits
        self._detector = LeakDetector()
        #: the leak test of each part of memory that may grow by itself, over the same readings
        self.parts = {
            name: part_of(self._detector, (name,)) for name in ("children", "shm", "device")
        }
        self.parts["use"] = part_of(self._detector, ("heap", "python", "tensors", "rss"))
        self._resident = part_of(self._detector, ("rss",))
        self.points = Points(noisy=noisy)
        #: where several threads make steps: (step, bytes by signal) at the ends of the newest
        self._lows: list[tuple[int, dict[str, int]]] = []
        #: steps of the looks, without those that only watch what stands
        self.looks: list[int] = []
        #: when to read what is cheap, on the monotonic clock
        self.due_ns = 0
        self._counted = [signal for signal in self.signals if signal.name in COUNTED]
        self._is_even = False  # readings are even in steps by now
        self._seen: dict[str, int] = {}  # what is watched between looks, as of the last look
        self._declared: dict[str, dict[str, Any]] = {}

    def share(self) -> None:
        """From here on several threads make the steps, each at any point of those of the others."""
        self.points.is_noisy = self.points.is_shared = True

    @property
    def is_shared(self) -> bool:
        """Whether several threads make the steps."""
        return self.points.is_shared

    # --- readings ---

    def read(self, step: int, *, skips: str = "") -> dict[str, int]:
        """Read each signal once, for the leak test. Returns the bytes by signal, which the caller
        adds to the points.

        Args:
            step: the step that ends now.
            skips: the name of a signal that must not be read now; "", the default: none.
        """
        known: dict[str, int] = {}
        lows = self._lowest(step) if self.is_shared else {}
        now = time.monotonic_ns()
        for signal in self._all:
            if signal.name == skips:
                size = None
            elif signal.name in lows:
                size = lows[signal.name]
            else:
                size = signal.read()
                then = time.monotonic_ns()
                signal.cost_ns, now = min(signal.cost_ns, then - now), then
            if signal.name not in BESIDE:
                self._feed(signal, step, size)
            if size is not None:
                known[signal.name] = size
        return {**known, "above": self._limits.above()}

    def read_lows(self, step: int) -> None:
        """Read what is in use at the end of one of the steps before a look."""
        signals = (*self.in_use(), *self._counted)
        sizes = {one.name: one.read() for one in signals if one.cost_ns <= SLOW_NS}
        known = {name: size for name, size in sizes.items() if size is not None}
        self._lows = [*self._lows[1 - LOWS :], (step, known)]

    def _lowest(self, step: int) -> dict[str, int]:
        """The lowest readings at the ends of the newest steps, of which this is the last."""
        self.read_lows(step)
        newest = [sizes for at, sizes in self._lows if at > step - LOWS]
        lows = {
            name: min(sizes[name] for sizes in newest if name in sizes)
            for name in {name for sizes in newest for name in sizes}
        }
        both = [sizes for sizes in newest if "heap" in sizes and "tensors" in sizes]
        if both:
            tensors = min(sizes["tensors"] for _, sizes in self._lows if "tensors" in sizes)
            lows["heap"] = tensors + min(sizes["heap"] - sizes["tensors"] for sizes in both)
        return lows

    def read_newest(self) -> int:
        """Add the newest readings to the points, as those of a look. Returns their step."""
        step = self.newest_step()
        newest = [signal for signal in self.signals if signal.newest[0] >= step]
        known = {one.name: one.newest[1] for one in newest}
        self.points.add(step, {name: size for name, size in known.items() if size is not None})
        return step

    def newest_step(self) -> int:
        """The step of the newest readings of what is in use."""
        return min(signal.newest[0] for signal in self.in_use() or self.signals)

    def read_counted(self, step: int) -> None:
        """Read the counters of torch, which costs next to nothing."""
        for signal in self._counted:
            self._feed(signal, step, signal.read())

    def read_cheap(self, step: int, now: int) -> None:
        """Read the signals that are due. In the first steps that is more often."""
        for signal in self.signals:
            if signal in self._counted and not self._is_even:
                continue
            if now >= signal.due and signal.cost_ns < 1 << 62:
                is_lowest = self.is_shared and signal.name == "heap"
                size = self._lowest(step).get("heap") if is_lowest else None
                self._feed(signal, step, signal.read() if size is None else size)
                then = time.monotonic_ns()
                signal.rest(then, then - now, self._pause)
                now = then
        self.due_ns = min(signal.due for signal in self.signals)

    def rest(self) -> None:
        """Read no signal for a while, because a look has read them all."""
        now = time.monotonic_ns()
        for signal in self.signals:
            signal.due = now + self._pause * signal.cost_ns

    def begin_units(self, step: int, step_ns: float) -> None:
        """Read at even distances in steps from this step on, whatever a reading costs."""
        if not self._is_even:
            self._is_even = True
            for signal in self.signals:
                signal.begin(step, step_ns)

    @property
    def _pause(self) -> int:
        """The pause after a reading. It is shorter in the first steps, as there are few."""
        return Signal.PAUSE if self._is_even else Signal.PAUSE // 8

    @property
    def every(self) -> int:
        """In the first steps something is read at every so many of them."""
        return 1 if any(signal.name == "device" for signal in self._counted) else 4

    def _feed(self, signal: Signal, step: int, size: int | None) -> None:
        if signal.name == "heap" and size is not None:
            self.points.jumps.add(step, size)
        if signal.name == "rss" and size is not None:
            self.points.resident.add(step, size)
        add_known(self._detector, signal.name, signal.feed(step, size))

    def room(self) -> int | None:
        """Bytes that are left until the nearest limit; None without one."""
        return min(self._limits.rooms().values(), default=None)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count what the block adds to memory, or frees. In it Python does not collect the
        garbage of the program by itself, because that would not be counted either.

        Where several threads make steps, what they do in the block would not be counted either, and
        is much more than that: there the block counts."""
        if self.is_shared:
            yield
            return
        is_on = gc.isenabled() and not self.points.is_noisy
        before = [signal.read() for signal in self._all]
        self._limits.above()  # A peak until here is the program's.
        if is_on:
            process.at_fork(_in_child)
            _paused.append(self)
            gc.disable()
        try:
            yield
        finally:
            try:
                for signal, size in zip(self._all, before, strict=True):
                    signal.leave_out(size, signal.read())
                self._limits.leave_out()
            finally:
                if is_on:
                    if self in _paused:
                        _paused.remove(self)
                    gc.enable()

    # --- growth ---

    def in_use(self) -> list[Signal]:
        """The signals of what the process has in use."""
        return [signal for signal in self.signals if signal.name in IN_USE]

    def use(self) -> int:
        """Bytes in use at the newest look."""
        points = self.points.series("use")
        return points[-1][1] if points else 0

    def known(self, step: int) -> Looks:
        """What the looks show after the look at this step."""
        tests = {**self.parts, "resident": self._resident}
        verdicts = {name: detector.verdict() for name, detector in tests.items()}
        grades = {name: verdict.kind for name, verdict in verdicts.items()}
        tested = {
            name: (verdict.since_step, verdict.rate_bytes_per_step)
            for name, verdict in verdicts.items()
            if verdict.since_step is not None and RANK[verdict.kind] >= RANK["suspect"]
        }
        return Looks(step, self.looks, self.points, grades, tested)

    def paces(self, step: int) -> dict[str, float]:
        """Bytes a step by which each part of memory grows now."""
        since = self.since(step)
        return {part: self.points.pace(part, since).rate for part in (*self.parts, "resident")}

    def rising(self, step: int) -> set[str]:
        """The parts of memory that become faster evenly."""
        since = self.since(step)
        return {part for part in (*self.parts, "resident") if self.points.pace(part, since).rising}

    def since(self, step: int) -> int:
        """The first step whose points count for a slope at this step."""
        return since_of(self.looks, step)

    def grows(self) -> bool:
        """Whether memory as a whole, or what is in use, grows since the first look or since one of
        the last."""
        since = (0, *self.looks[-3:-1])
        rates = [self.points.slope(name, step) for name in ("all", "use") for step in since]
        return max(rates) >= THRESHOLDS.least_rate

    def suspects(self) -> list[str]:
        """The parts of memory that the leak test sees grow, and resident memory if it rises."""
        found = [name for name, one in self.parts.items() if RANK[one.kind] >= RANK["suspect"]]
        step = self.newest_step()
        is_rising = self.looks and self.points.kept(self.since(step)) is not None
        return [*found, *(["resident"] if is_rising else [])]

    # --- growth that does not wait ---

    def note_seen(self) -> None:
        """Count growth until the next look from here on."""
        self._seen = self._glance()

    def _glance(self) -> dict[str, int]:
        """The counters of the sampler and of torch, which take some 0.3 us to read."""
        found = {"used": self._limits.used()}
        found |= {one.name: one.read() for one in self._counted if one.name == "device"}
        return {name: size for name, size in found.items() if size is not None}

    def is_large(self) -> bool:
        """Whether memory has grown by 1 % of the limit since the last look, and by 1 MiB."""
        now, part = self._glance(), self._limits.share(LARGE_SHARE)
        for name, size in now.items():
            least = max(LARGE, part or 0) if name == "used" else LARGE
            if size - self._seen.setdefault(name, size) >= least:
                return True
        return False

    def has_jumped(self) -> bool:
        """Whether large growth has begun since the look before."""
        points = self.points.series("all")
        if len(points) < 4:
            return False
        (a, first), (b, before), (c, last) = points[-3:]
        lately, earlier = (last - before) / (c - b), (before - first) / (b - a)
        part = self._limits.share(LARGE_SHARE) or LARGE
        is_large = last - before >= max(LARGE, min(part, 64 * LARGE))
        return is_large and lately > 4 * max(THRESHOLDS.least_rate, earlier)

    # --- what is declared ---

    def expect_growth(self, name: str, **growth: Any) -> None:
        """As LeakDetector.expect_growth."""
        self._detector.expect_growth(name, **growth)
        self._declared[name] = {**growth, "use": self.use() if self.points.steps else None}

    def declared(self, step: int) -> tuple[float, str]:
        """(bytes a step that are declared now, the names)."""
        rate, names = 0.0, []
        for name, growth in list(self._declared.items()):  # Another thread may declare one.
            until, size, given = growth.get("until"), growth.get("bytes"), growth.get("rate")
            if growth["use"] is None:
                growth["use"] = self.use()
            grown = self.use() - growth["use"]
            if (until is not None and step > until) or (isinstance(size, int) and grown > size):
                continue
            rate += math.inf if given is None else float(given)
            names.append(name)
        return rate, " and ".join(names)


def _in_child() -> None:
    """The child of a fork within `left_out`, on another thread, collects garbage as its parent."""
    if _paused:
        _paused.clear()
        gc.enable()

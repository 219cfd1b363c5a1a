"""The leak test of a monitor: what it reads at the end of a step, and whom it suspects.

    step() ──► LeakWatch.look ──► Signal.feed ──► LeakDetector ──► a grade: quiet, growing, leak ...
                     │                                   │ as long as something grows
                     │                                   ▼
                     └──────► events ◄── Suspicion.look: a census, and one some hundred steps later

Readings. The test wants readings that are even in steps: if they came closer at the beginning of a
run than at its end, a warm-up would look like a line. But what a reading costs changes by a factor
of fifty while a program runs (mallinfo2 counts every free chunk), and so does the time of a step.
So each signal has a unit of steps, set once; it is read as often as it is cheap, and the units in
between lie on the line from one reading to the next. Lows are kept by that, and no stairs are made.

    steps     | | | | | | | | | | | | |
    read      0       4           10
    unit 2    0   2   4   6   8   10          what the test sees
"""

from __future__ import annotations

import dataclasses
import gc
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._census.census import Census, Growth
from memtools._census.holders import Holder, graph_holder, largest_graph
from memtools.leak.detector import LeakDetector, LeakVerdict, StepsLeft, matters
from memtools.monitor.log import Log

VERDICT_EVERY_NS = 100_000_000
HASTE = 4  # how much more of the time readings may take while something grows
FIRST_STEPS = 32  # in which steps and readings are timed; they are not fed
FIRST_LOOKS = 4
EACH_READING = 16  # units from one reading to the next, as long as costs stay what they were
FIRST_GAP = 100  # steps between the first two censuses; doubles with each one
HURRIED_GAP = 25
GRACE_NS = 1_500_000_000  # that censuses may take in any run
SHARE = 0.01  # of a run that they may take beyond that
MOST_GROUPS = 3  # of tensors whose holders are looked for
MOST_HOLDERS = 64  # of which events are written
_RANK = {"quiet": 0, "growing": 0, "fragmentation": 1, "likely": 2, "leak": 3}
_UNNAMED = ("C code", "nobody")  # holders without a name in the program
_TENSORS = ("heap", "tensors", "device", "rss")
_DUE = operator.attrgetter("due")


# --- readings -------------------------------------------------------------------------------------


class Signal:
    """One series of readings."""

    __slots__ = (
        "_fed",
        "_newest",
        "_origin",
        "_own",
        "cost_ns",
        "due",
        "name",
        "pause",
        "read",
        "unit",
    )

    def __init__(self, name: str, read: Callable[[], int | None], pause: int) -> None:
        self.name, self.read = name, read
        #: after a reading it rests for so many times what the reading took
        self.pause = pause
        #: the least that a reading has taken
        self.cost_ns = 1 << 62
        #: when to read next, on the monotonic clock
        self.due = 0
        #: steps from one value that the test sees to the next
        self.unit = 1
        self._origin = self._fed = 0
        self._newest: tuple[int, int | None] = 0, None
        self._own = 0  # bytes that the monitor's own censuses have added

    def begin(self, step: int, steps: int, looks: int, ns: int) -> None:
        """Set the unit, after so many steps, looks and nanoseconds."""
        apart = max(steps / looks, self.pause * self.cost_ns * steps / max(1, ns))
        while self.unit < apart / EACH_READING:
            self.unit *= 2
        self._origin = step

    def leave_out(self, before: int | None, after: int | None) -> None:
        """Do not count what the monitor has added, or given back, between these two readings."""
        if before is not None and after is not None:
            self._own += after - before

    def feed(self, step: int) -> Iterator[tuple[int, int | None]]:
        """Take a reading at this step; (step, bytes) of each unit since the reading before."""
        size, (last_step, last_size) = self.read(), self._newest
        if size is not None:
            size = max(0, size - self._own)
        self._newest = step, size
        last = (step - self._origin) // self.unit
        for n in range(self._fed + 1, last + 1):
            at = self._origin + n * self.unit
            if size is None or last_size is None:
                yield at, size
            else:
                yield at, last_size + (size - last_size) * (at - last_step) // (step - last_step)
        self._fed = max(self._fed, last)


def signals_of(probe: _core.Probe, devices: Sequence[int]) -> list[Signal]:
    """The signals of a run. Reading each takes 0.13 to 0.5 % of the time at most, four times as
    much while something grows."""

    def figure(fields: int, name: str) -> Callable[[], int | None]:
        return lambda: getattr(probe.read(fields), name)

    signals = [
        # Resident bytes, less what pools map more than once: forks of a cache are no growth.
        Signal("rss", figure(_core.READ_RSS, "process"), 200),
        Signal("heap", figure(_core.READ_HEAP, "heap_used"), 800),
        Signal("children", figure(_core.READ_CHILDREN, "children_private"), 800),
        # Bytes of the interpreter's own blocks, about.
        Signal("python", lambda: 64 * sys.getallocatedblocks(), 800),
    ]
    if devices:
        signals.append(Signal("device", lambda: cuda_devices.allocated(devices), 800))
    return signals


class Limits:
    """Where the signals end: how much memory there is to grow into."""

    def __init__(self, sampler: _core.Sampler, probe: _core.Probe, devices: Sequence[int]) -> None:
        self._sampler, self._probe, self._devices = sampler, probe, devices

    def host(self) -> int | None:
        """Bytes at which this process with its children reaches the limit; None when unknown."""
        sample = self._sampler.latest() or self._probe.read()
        used, limit = self._sampler.used(), self._sampler.limit()
        if sample.process is None or used is None or limit is None:
            return None
        return sample.process + (sample.children_private or 0) + max(0, limit[0] - used)

    def device(self) -> int | None:
        """Bytes at which all watched devices are full; None when unknown."""
        total = 0
        for tiers in map(cuda_devices.tiers, self._devices):
            if tiers.reserved is None or tiers.free is None:
                return None
            total += tiers.reserved + tiers.free
        return total if self._devices else None


# --- the test -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FillVerdict(LeakVerdict):
    """Growth that a census has found to be a container with a bound that is filling up."""

    #: that container, and how full it is
    filling: str = ""

    def __str__(self) -> str:
        return sentences.of_verdict(self, self.filling)


class LeakWatch:
    """Feeds a LeakDetector, starts a census on suspicion, and writes what it finds as events.

    `look` is for the main thread, at the end of a step. All else may be asked at any time.
    """

    def __init__(
        self,
        signals: list[Signal],
        limits: Limits,
        log: Log,
        suspicion: Suspicion | None,
        *,
        declares: bool = True,
    ) -> None:
        self.detector = LeakDetector()
        self.suspicion = suspicion
        #: whether the program has the monitor in its hands, and so may call expect_growth()
        self.declares = declares
        #: the grade at the newest look
        self.kind = "quiet"
        self._signals, self._limits, self._log = signals, limits, log
        self._first_step = self._last_step = self._begun_ns = self._last_ns = 0
        self._looks = -1  # while steps and readings are timed
        self._is_timed = False
        self._next_verdict = 0
        self._written = "quiet"  # the highest kind of which an event was written
        self._is_pressing = False

    def look(self, step: int) -> int:
        """Read what is due. Returns when to look again, in ns of the monotonic clock."""
        now = time.monotonic_ns()
        if self._looks < 0:
            self._first_step, self._begun_ns, self._looks = step, now, 0
        elif step > self._last_step:
            self._last_step, self._last_ns = step, now
            read = self._read if self._is_timed else self._time
            now = read(step, now)
        kind = self.detector.kind
        if kind != self.kind or (kind != "quiet" and now >= self._next_verdict):
            self._grade(kind, step, now)
        if kind != "quiet" and self.suspicion is not None and self.suspicion.due(step, now):
            self._census(step)
        due: int = min(map(_DUE, self._signals))
        return due

    def _time(self, step: int, now: int) -> int:
        """Measure, in the first steps, how long they are without readings and what these cost."""
        begin = now
        for signal in self._signals:
            signal.read()
            then = time.monotonic_ns()
            signal.cost_ns, now = min(signal.cost_ns, then - now), then
        self._looks += 1
        self._begun_ns += now - begin
        steps = step - self._first_step
        if steps >= FIRST_STEPS and self._looks >= FIRST_LOOKS:
            for signal in self._signals:
                signal.begin(step, steps, self._looks, now - self._begun_ns)
            self._is_timed = True
        return now

    def _read(self, step: int, now: int) -> int:
        haste = 1 if self.kind == "quiet" else HASTE
        for signal in self._signals:
            if now >= signal.due:
                for at, size in signal.feed(step):
                    self.detector.update(at, **{signal.name: size})
                then = time.monotonic_ns()
                signal.due = then + signal.pause * (then - now) // haste
                now = then
        return now

    def _grade(self, kind: str, step: int, now: int) -> None:
        """Write what is new: at each change of the grade, and ten times a second while it grows.

        It is new if the grade is higher than it was written and matters, or if nothing is left of
        what was written."""
        has_changed, self.kind = kind != self.kind, kind
        self._next_verdict = now + VERDICT_EVERY_NS
        if self.suspicion is not None:
            if kind == "quiet":
                self.suspicion.end()
            elif has_changed:
                self.suspicion.hurry(step, urgent=_RANK[kind] > 0)
        verdict = self.verdict()
        rank, written = _RANK[verdict.kind], _RANK[self._written]
        if rank > written and self.matters(verdict):
            self._log.event("leak", verdict)
            self._written = verdict.kind
        elif rank == 0 and written > 0:
            self._log.event("leak", verdict, over=True)
            self._written = "quiet"
        if verdict.pressure and not self._is_pressing:
            self._log.event("pressure", verdict, what="forecast")
        self._is_pressing = verdict.pressure

    def matters(self, verdict: LeakVerdict) -> bool:
        """Whether growth is worth a word while the program runs: where it is a KiB a step or more,
        or much a second at the run's pace, or where a holder is known by its name in the program.
        """
        cost = max(verdict.rate_bytes_per_step, verdict.rss_bytes_per_step or 0.0)
        seconds = max(1, self._last_ns - self._begun_ns) / 1e9
        if matters(cost, (self._last_step - self._first_step) / seconds):
            return True
        return any(
            holder.kind not in _UNNAMED
            and (holder.new_objects > 0 or holder.kind == "autograd graph")
            for holder in self.holders()
        )

    def _census(self, step: int) -> None:
        """Look at the heap, and leave out what the look itself takes and keeps."""
        assert self.suspicion is not None
        before = [signal.read() for signal in self._signals]
        new_holders = self.suspicion.look(step, self.verdict())
        for signal, size in zip(self._signals, before, strict=True):
            signal.leave_out(size, signal.read())
        if self.suspicion.tensor_bytes is not None:
            self.detector.update(step, tensors=self.suspicion.tensor_bytes)
        if not new_holders:
            return
        verdict = self.verdict()
        if not self.matters(verdict):
            return
        if self._written == "quiet":
            self._log.event("leak", verdict)
            self._written = verdict.kind
        for holder in new_holders:
            self._log.event("holder", holder)

    def last_look(self, step: int) -> None:
        """Take the second census of a run that was too short for it, at its end."""
        if self.suspicion is not None and self.kind != "quiet" and self.suspicion.pending(step):
            self._census(step)

    def verdict(self) -> LeakVerdict:
        """The detector's verdict, or that a buffer fills where a census has found one."""
        detector = self.detector
        detector.limit_bytes, detector.device_limit_bytes = self._limits.host(), None
        verdict = detector.verdict()
        if verdict.signal == "device":  # only then is a device asked
            detector.device_limit_bytes = self._limits.device()
            verdict = detector.verdict()
        if self.suspicion is None:
            return dataclasses.replace(verdict, declarable=False)
        declarable = self.declares and self.suspicion.collects
        filling = self.suspicion.fill(verdict)
        if filling is None:
            return dataclasses.replace(verdict, declarable=declarable)
        values = vars(verdict) | {"kind": "growing", "confidence": "low", "declarable": declarable}
        left, rate = verdict.steps_left, max(verdict.rate_bytes_per_step, 1.0)
        if left is not None and filling.remaining_bytes < left.lo * rate:
            values |= {"steps_left": None, "pressure": False}  # it is full before the limit comes
        return FillVerdict(**values, filling=filling.text)

    def forecast(self) -> StepsLeft | None:
        """Steps until the host's or a device's limit, whichever may come first."""
        forecasts = [
            self.detector.forecast(limit, signal=signal)
            for limit, signal in ((self._limits.host(), None), (self._limits.device(), "device"))
            if limit is not None and limit > 0
        ]
        return min((left for left in forecasts if left is not None), default=None)

    def holders(self) -> tuple[Holder, ...]:
        return () if self.suspicion is None else self.suspicion.holders

    def lines(self) -> list[str]:
        """Lines of a summary: verdict, holders and forecast; none where there is no news."""
        verdict = self.verdict()
        if verdict.kind == "quiet" or not self.matters(verdict):
            return []
        lines = [f"Leak test: {verdict}", *(f"  {holder}" for holder in self.holders())]
        left = self.forecast()
        fills = isinstance(verdict, FillVerdict) and verdict.steps_left is None
        if left is not None and not math.isinf(left.lo) and not fills:
            lines.append(f"Forecast: {left}, if nothing else is loaded")
        return lines


# --- the search for holders -----------------------------------------------------------------------


class Fill(NamedTuple):
    """Containers with a bound that take what grows."""

    text: str
    remaining_bytes: int


class Suspicion:
    """Looks at the heap twice, some hundred steps apart, while the leak test sees growth.

    Each later look is twice as far from the first. All looks together take at most 1.5 s and 1 % of
    the run, so that a program with a very large heap gets fewer.
    """

    def __init__(self) -> None:
        self._base: Census | None = None  # the first look
        self._base_step = 0
        self._base_histories: dict[int, tuple[int, int]] = {}
        self._base_graph = 0  # nodes of the largest autograd graph
        self._began = time.monotonic_ns()
        self._spent = 0
        self._gap = FIRST_GAP
        self._next = 0
        self._written: set[str] = set()  # the paths of holders that look() has returned
        #: of the newest pair of looks, those that hold most first
        self.holders: tuple[Holder, ...] = ()
        #: whether a container is among them
        self.collects = False
        #: containers with a bound among them
        self.fills: tuple[Fill, ...] = ()
        #: bytes a step that the holders with a bound took
        self.rate = 0.0
        self.looks = 0
        #: bytes of all tensors at the newest look
        self.tensor_bytes: int | None = None

    def due(self, step: int, now: int) -> bool:
        """Whether to look now."""
        if step < self._next:
            return False
        return self._spent <= GRACE_NS + SHARE * (now - self._began)

    def pending(self, step: int) -> bool:
        """Whether the first look waits for a second that would show something."""
        return self._base is not None and step - self._base_step >= HURRIED_GAP and self.looks == 1

    def hurry(self, step: int, *, urgent: bool) -> None:
        """The grade has risen: the holders that are named with it are to be recent."""
        if self._base is not None and urgent:
            self._gap = FIRST_GAP
            self._next = min(self._next, max(step, self._base_step + HURRIED_GAP))

    def end(self) -> None:
        """Nothing grows any more: the next suspicion begins with a new first look."""
        self._base = None
        self._gap, self._next = FIRST_GAP, 0
        self.holders, self.collects, self.fills, self.rate = (), False, (), 0.0
        self.looks = 0

    def look(self, step: int, verdict: LeakVerdict) -> list[Holder]:
        """Take a census. From the second on, keep who holds what grows and how full the bounded
        containers are, and return the holders that no call returned before."""
        begin = time.monotonic_ns()
        try:
            census, histories = Census(), _gate_histories()
            self.looks += 1
            self.tensor_bytes = census.bytes
            if self._base is None:
                self._base, self._base_step, self._base_histories = census, step, histories
                graph = largest_graph()
                self._base_graph = 0 if graph is None else graph.nodes
                self._next = step + self._gap
                return []
            self._gap *= 2
            self._next = step + self._gap
            steps = max(1, step - self._base_step)
            found = suspects(Growth(self._base, census), verdict, steps, self._base_graph)
            fills, growth, new_holders = list[Fill](), 0, list[Holder]()
            self.collects = False
            for holder in found:
                if holder.capacity is not None:
                    fills.append(_fill(holder))
                    growth += holder.new_bytes
                self.collects |= holder.length is not None and holder.kind != "autograd graph"
                if holder.path not in self._written and len(self._written) < MOST_HOLDERS:
                    self._written.add(holder.path)
                    new_holders.append(holder)
            # Gate histories keep their bytes outside of what a census or malloc counts.
            size = most = count = 0
            for who, (now, bound) in histories.items():
                more = now - self._base_histories.get(who, (0, 0))[0]
                if more > 0 and now < bound:
                    size, most, growth, count = size + now, most + bound, growth + more, count + 1
            if count:
                name = "GateHistory" if count == 1 else f"{count} GateHistory objects"
                text = f"{name} with {format_bytes(size)} of at most {format_bytes(most)}"
                fills.append(Fill(text, most - size))
            self.holders, self.fills, self.rate = tuple(found), tuple(fills), growth / steps
            return new_holders
        finally:
            self._spent += time.monotonic_ns() - begin

    def fill(self, verdict: LeakVerdict) -> Fill | None:
        """The containers with a bound, where they account for most of what the leak test sees."""
        if not self.fills or verdict.signal not in (*_TENSORS, "python"):
            return None
        if self.rate < 0.7 * verdict.rate_bytes_per_step:
            return None
        text = " and ".join(fill.text for fill in self.fills)
        return Fill(text, sum(fill.remaining_bytes for fill in self.fills))


def _gate_histories() -> dict[int, tuple[int, int]]:
    """{id of a gate history: its bytes, the most that it may take}."""
    found: dict[int, tuple[int, int]] = {}
    for kind in _core.GateHistory.__subclasses__():  # memtools.GateHistory, where it is in use
        histories = [obj for obj in gc.get_objects() if type(obj) is kind and not obj.closed]
        found |= {id(obj): (obj.arena_bytes, obj.max_bytes) for obj in histories}
    return found


def _fill(holder: Holder) -> Fill:
    """How many bytes this container with a bound can still take; where its length is unknown, as
    if it were empty."""
    capacity, length, final = holder.capacity or 1, holder.length, holder.final_bytes or 0
    now = "" if length is None else f"{length:,} of "
    when_full = f", {format_bytes(final)} when full" if final else ""
    text = f"{holder.path} with {now}at most {capacity:,}{when_full}"
    return Fill(text, final * max(0, capacity - (length or 0)) // capacity)


def suspects(
    growth: Growth, verdict: LeakVerdict, steps: int, nodes_before: int = 0
) -> list[Holder]:
    """Who holds what is new and could be what the leak test sees: those with a name in the program
    first, the most bytes first.

    A variable that holds one object, as the loss of this step, collects nothing and is left out;
    so is an autograd graph that was as large, with `nodes_before`, at the first look.
    """
    wanted = verdict.rate_bytes_per_step * steps
    found: list[Holder] = []
    if verdict.signal in _TENSORS:
        often = max(2, steps // 500)  # groups that came again and again, and weigh something
        heavy = [g for g in growth.groups if g.count >= often and g.bytes >= 0.1 * wanted]
        for group in heavy[:MOST_GROUPS]:
            found += growth.holders(group, steps=steps)
    explained = sum(map(operator.attrgetter("new_bytes"), found))
    if verdict.signal != "children" and explained < 0.5 * wanted:
        often = max(2, steps // 4)  # every few steps leave an object
        for kind in [kind for kind in growth.types if kind.count >= often][:2]:
            found += growth.holders(kind, steps=steps)
        if all(holder.kind != "autograd graph" for holder in found):
            graph = largest_graph()
            if graph is not None and graph.nodes - nodes_before >= often:
                found.append(graph_holder(graph, steps))
    largest: dict[str, Holder] = {}  # by path
    for holder in found:
        if holder.kind == "variable" and holder.new_objects <= 1:
            continue
        if holder.path not in largest or holder.new_bytes > largest[holder.path].new_bytes:
            largest[holder.path] = holder
    return sorted(
        largest.values(), key=lambda h: (h.kind in _UNNAMED, -h.new_bytes, -h.new_objects)
    )

"""GrowthTest: reads what is in use at the end of each step, and says at the end whether it grows.

    step() ──► one reading of each part ──► Series        heap and Python's blocks, child processes,
      │                                       │           shared memory, devices
      └─ at four points of the run:           │
           grown by then?                     │
             ├─► gc.collect(): what it frees is garbage, not growth
             ├─► GrowthCensus.look: who holds more than before
             └─► TracedTensors.mark: which lines made the tensors that live
                                              ▼
    end() ──► growth_of(series) above what is allowed? ──► the sentence, with the holder and advice

The signals are those of a monitor's leak test (memtools._monitor.signals): exact, and read at the
same point of each step. Resident memory is read beside them: what rises there without being in use
and without falling back is a failure if a library has it from the system by itself, and a warning
if memory that was allocated before is written for the first time. Torch's host tensors are a part
of the heap that is known separately: if noise hides the growth of the whole, each of the two halves
is judged, and a holder must explain its growth. A flat run costs the readings and one collection, a
run that grows up to three collections and three looks more.
"""

from __future__ import annotations

import gc
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from memtools import _core
from memtools._base.size import format_bytes
from memtools._blocks.reports import HostBlocks
from memtools._census.arrays import owner_of
from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder
from memtools._leak.advice import advice_for
from memtools._leak.finding import FIRST_WRITES, LeakFinding
from memtools._leak.growth import kept_pace, line_through
from memtools._leak.judge import (
    C_HEAP,
    THRESHOLDS,
    Block,
    Children,
    Evidence,
    Part,
    Resident,
    findings_of,
)
from memtools._leak.jumps import Stairs, jumps_of
from memtools._monitor.places import Living, Place, Site, name_of, place_of, places_of
from memtools._monitor.signals import BESIDE, Signal, block_that_fills, signals_of
from memtools._monitor.tracewindow import OF_A_BLOCK, BlocksLike
from memtools.testing._trend import LEAST_READINGS, growth_of, growth_of_levels

LEAST_WARMUP = 4
LEAST_STEPS = LEAST_WARMUP + LEAST_READINGS
# A series has room for so many readings. When it is full, or when its readings have taken so long,
# every second one goes, and from then on only every second step is read. So many always stay.
_CAPACITY, _READINGS_NS, _FEWEST = 2048, 100_000_000, 20
_LOOKS_NS = 10_000_000_000  # Collections and looks of a run may take so long together.
_PARTS_OF_RUN = 3
_UNKNOWN_FIRST, _UNKNOWN_FACTOR = 8, 1.5  # The points of a run whose length is not known.
_SUSPECT = 0.5  # Growth of this share of the limit is looked into.
_GARBAGE = 0.25  # If garbage is this share of the growth, only levels after collections count.
_IN_USE = ("heap", "python")
#: The two parts of "use". Each is judged alone if the growth of both together is not known.
_WITHIN = {"tensors": "others", "others": "tensors"}
#: How messages name each part.
_PARTS = {
    "use": "memory",
    "tensors": "memory of tensors",
    "others": "memory outside tensors",
    "children": "memory of child processes",
    "shm": "shared memory",
    "device": "memory on the device",
}


class Series:
    """Readings of one part of memory at even distances, in buffers that are allocated once.

    Args:
        read: reads the bytes of the part.
        since: the last step that is not read; 0, the default, to read all steps.
    """

    __slots__ = ("_apart", "_since", "_sizes", "_spent_ns", "_steps", "count", "read")

    def __init__(self, read: Callable[[], int], since: int = 0) -> None:
        self.read = read
        self.count, self._since = 0, since
        self._apart, self._spent_ns = 1, 0
        self._steps, self._sizes = (array("q", bytes(8 * _CAPACITY)) for _ in range(2))

    def take(self, step: int) -> None:
        """Read at the end of a step, or only at some steps if readings are slow."""
        if step <= self._since or step % self._apart:
            return
        begin = time.thread_time_ns()
        self._steps[self.count], self._sizes[self.count] = step, self.read()
        self.count += 1
        self._spent_ns += time.thread_time_ns() - begin
        is_slow = self._spent_ns > _READINGS_NS and self.count >= 2 * _FEWEST
        if self.count == _CAPACITY or is_slow:
            self._thin()

    def _thin(self) -> None:
        self._apart *= 2
        self._spent_ns = kept = 0
        for n in range(self.count):
            if self._steps[n] % self._apart == 0:
                self._steps[kept], self._sizes[kept] = self._steps[n], self._sizes[n]
                kept += 1
        self.count = kept

    def lower(self, size: int) -> None:
        """Correct the newest reading after garbage was collected."""
        if self.count:
            self._sizes[self.count - 1] = min(size, self._sizes[self.count - 1])

    def after(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the steps and the bytes of the readings after a step."""
        begin = next((n for n in range(self.count) if self._steps[n] > step), self.count)
        return self._steps[begin : self.count], self._sizes[begin : self.count]


class TracedTensors:
    """The lines that make the tensors which stay: torch's blocks on the host by line, from now on.

    What each step makes again lives at all marks alike, and is not a gain.

    Args:
        blocks: torch's reports, which are on. The lines end with them.
    """

    __slots__ = ("_blocks", "_first", "_marks")

    def __init__(self, blocks: BlocksLike) -> None:
        self._blocks = blocks
        blocks.trace(True)
        self._first = blocks.turn()
        #: (step, bytes by line): the first mark and the newest
        self._marks: list[tuple[int, Living]] = []

    def mark(self, step: int) -> None:
        """Note the bytes by line of what lives now."""
        if not self._blocks.is_on:
            return
        living: Living = {}
        for site, size, blocks in self._blocks.sites(self._first, self._blocks.turn()):
            place = place_of(Place(*frame) for frame in self._blocks.frames(site))
            if place is not None:
                living[place] = living.get(place, 0.0) + size + OF_A_BLOCK * blocks
        self._marks = [*self._marks[:1], (step, living)]

    def with_lines(self, findings: Sequence[LeakFinding]) -> list[LeakFinding]:
        """Add the line that makes it to each finding whose rate a line explains."""
        if len(self._marks) < 2:
            return list(findings)
        (since, before), (until, now) = self._marks
        gained = {place: size - before.get(place, 0.0) for place, size in now.items()}
        sites = [Site(place, size / (until - since)) for place, size in gained.items() if size > 0]
        found = places_of(findings, sorted(sites, key=lambda site: -site.rate))
        return [
            replace(one, made_at=" and ".join(map(name_of, found[one.key])))
            if one.key in found
            else one
            for one in findings
        ]


class GrowthTest:
    """A test whether memory in use grows by more than the allowed bytes a step.

    Args:
        allowed: bytes a step, at least 1.
        text: the same as the caller has written it, for the message.
        devices: indexes of the CUDA devices to read.
        steps: the number of steps; None if it is not known yet.
        warmup: the number of steps at the beginning that are not judged; None: one of eight, at
            least 4.
        unit: what a step is, in the plural.
        looking: a context for collections and looks, whose own memory is not the program's.
    """

    def __init__(
        self,
        allowed: int,
        text: str,
        devices: Sequence[int] = (),
        *,
        steps: int | None = None,
        warmup: int | None = None,
        unit: str = "steps",
        looking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._looking = looking
        self._allowed, self._text, self._warmup, self._unit = allowed, text, warmup, unit
        self._blocks = HostBlocks()
        self._blocks.join()
        signals = {s.name: s for s in signals_of(_core.Probe(), devices, self._blocks)}
        self._signals = [s for name, s in signals.items() if name not in ("rss", *BESIDE)]
        self._beside = [signals[name] for name in ("rss", "idle", "VmData")]
        self._least_rate = max(1.0, THRESHOLDS.least_share * allowed)
        self._census = GrowthCensus(
            (GrowthTest, Series, Signal, TracedTensors), least_rate=self._least_rate
        )
        since = 0 if steps is None else self.warmup_of(steps)
        self._series = {"use": Series(self._use, since)}
        for signal in self._signals:
            if signal.name not in _IN_USE:
                self._series[signal.name] = Series(_known(signal), since)
        self._resident = Series(_known(signals["rss"]), since)
        self._points = [] if steps is None else _points(steps, since)
        self._is_open = steps is None
        self._next = _UNKNOWN_FIRST if steps is None else self._points.pop(0)
        #: (step, bytes) of each part at the points, after the collection if there was one
        self._levels: dict[str, list[tuple[int, int]]] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}  # of what malloc keeps, and is mapped
        self._first: dict[str, int] = {}  # heap and Python's blocks at the first point
        self._freed = dict.fromkeys(("use", "tensors"), 0)  # by collections
        self._spent_ns = self._gc_ns = self._look_ns = 0
        self._looked = -1  # the step of the newest look
        self._reached: list[tuple[int, int]] = []
        self._traced: TracedTensors | None = None  # if tensors grow
        self._has_garbage = True  # The next point collects it; the first one always does.
        self.steps = 0

    def warmup_of(self, steps: int) -> int:
        """The number of steps that are not judged, out of `steps`."""
        return max(LEAST_WARMUP, steps // 8) if self._warmup is None else self._warmup

    def step(self) -> None:
        """Read what is in use: a step has ended."""
        self.steps += 1
        for series in (*self._series.values(), self._resident):
            series.take(self.steps)
        if self.steps == self._next:
            with self._looking():
                self._point(is_last=not self._is_open and not self._points)
            if self._is_open:
                self._next = int(self._next * _UNKNOWN_FACTOR)
            else:
                self._next = self._points.pop(0) if self._points else 0

    def end(self) -> str:
        """Return a message if memory grows by more than is allowed, else ""."""
        if self._is_open and self._levels:
            self._point(is_last=True)
        warmup = self.warmup_of(self.steps)
        parts = [part for part in self._series if part not in _WITHIN]
        found = [self._said(part, self._rate(part, warmup), warmup) for part in parts]
        if self._rate("use", warmup) <= self._allowed:
            found += [self._said_within(part, warmup) for part in _WITHIN if part in self._levels]
        if not any(found):
            found = [self._said_resident(warmup)]
        return "\n".join(filter(None, found))

    def close(self) -> None:
        """Turn everything off. May be called twice."""
        self._blocks.leave()  # This ends the lines as well.

    # --- points ---

    def _use(self) -> int:
        return sum(signal.read() or 0 for signal in self._signals if signal.name in _IN_USE)

    def _read(self) -> dict[str, int]:
        """Bytes now, by part."""
        found = {part: series.read() for part, series in self._series.items()}
        if self._blocks.blocks.is_on:
            found["others"] = found["use"] - found["tensors"]
        return found

    def _point(self, *, is_last: bool) -> None:
        """Note the levels. Garbage is collected at the first point and, in a run that grows, at the
        last one and as long as there is any to speak of. A run that grows is looked at."""
        begin = time.thread_time_ns()
        now = self._read()
        grows = self._suspects(now)
        if not self._first or (grows and (is_last or self._has_garbage)):
            before, at = now, time.thread_time_ns()
            gc.collect()
            self._gc_ns = time.thread_time_ns() - at
            now = self._read()
            for part in self._freed:
                self._series[part].lower(now[part])
            if self._first:
                self._has_garbage = False
                for part in self._freed:
                    freed = max(0, before[part] - now[part])
                    grown = before[part] - self._levels[part][0][1]
                    self._freed[part] += freed
                    self._has_garbage |= freed > _GARBAGE * max(0, grown)
            else:
                self._first = {s.name: s.read() or 0 for s in self._signals if s.name in _IN_USE}
        for signal in self._beside:  # The heap has been read just now, with what malloc keeps.
            self._marks.setdefault(signal.name, []).append((self.steps, signal.read() or 0))
        for part, size in now.items():
            levels = self._levels.setdefault(part, [])
            if levels and levels[-1][0] == self.steps:
                levels.pop()  # of this step, before the collection
            levels.append((self.steps, size))
        self._spent_ns += time.thread_time_ns() - begin
        if grows and {"use", "device", *_WITHIN} & set(self._suspects(now)):
            self._look()

    def _suspects(self, now: Mapping[str, int], share: float = _SUSPECT) -> list[str]:
        """The parts that have grown since the first point by this share of the limit, by default
        half of it."""
        found = []
        for part, levels in self._levels.items():
            since, first = levels[0]
            if now[part] - first > share * self._allowed * max(1, self.steps - since):
                found.append(part)
        return found

    def _look(self) -> None:
        """Let the census look. Its own tables are not counted as growth of the program."""
        begin = time.thread_time_ns()
        if self._looked == self.steps or self._spent_ns + self._look_ns + self._gc_ns > _LOOKS_NS:
            return
        self._looked = self.steps
        signals = [*self._signals, *self._beside]
        before = [signal.read() for signal in signals]
        try:
            self._census.look(self.steps)
            self._trace()
        finally:
            for signal, size in zip(signals, before, strict=True):
                signal.leave_out(size, signal.read())
            self._look_ns = time.thread_time_ns() - begin
            self._spent_ns += self._look_ns
        if not self._census.cut:
            self._reached.append((self.steps, self._census.reached_bytes))

    def _trace(self) -> None:
        """Note the lines of tensors from the first look at which they have grown by too much: a
        table of lines takes some KiB."""
        if self._traced is not None:
            self._traced.mark(self.steps)
            return
        now = self._read()
        if "tensors" in self._suspects(now) and {"use", "tensors"} & set(self._suspects(now, 1.0)):
            self._traced = TracedTensors(self._blocks.blocks)

    # --- judgement ---

    def _series_of(self, part: str, warmup: int) -> tuple[Sequence[int], Sequence[int]]:
        """(steps, bytes) of the readings of a part after the warm-up."""
        if part != "others":
            return self._series[part].after(warmup)
        steps, sizes = self._series["use"].after(warmup)
        tensors = dict(zip(*self._series["tensors"].after(warmup), strict=True))
        common = [(step, size) for step, size in zip(steps, sizes, strict=True) if step in tensors]
        return [step for step, _ in common], [size - tensors[step] for step, size in common]

    def _rate(self, part: str, warmup: int) -> float:
        """Bytes a step by which a part grows."""
        steps, sizes = self._series_of(part, warmup)
        rate = growth_of(sizes, steps)
        if part == "use" and rate == 0 and (stairs := self._stairs(warmup)) is not None:
            return stairs.rate
        levels = [level for level in self._levels.get(part, ()) if level[0] >= warmup]
        freed = self._freed["use"] - self._freed["tensors"] if part == "others" else 0
        freed = self._freed.get(part, freed)
        if freed and rate == 0 and len(levels) > 1:
            grown = levels[-1][1] - levels[0][1]
            if freed > _GARBAGE * grown:
                return growth_of_levels(levels)
        return rate

    def _stairs(self, warmup: int) -> Stairs | None:
        """What is in use grows in few large jumps; None if it does not."""
        return jumps_of(zip(*self._series["use"].after(warmup), strict=True)).stairs()

    def _said_within(self, part: str, warmup: int) -> str:
        """The message about one part of what is in use, if the whole is not known to grow; else "".

        What the other part gives back is not growth: tensors of before the test are not counted,
        and new ones may replace them. So holders must explain what grows.
        """
        rate = self._rate(part, warmup)
        if rate <= self._allowed:
            return ""
        steps, sizes = self._series_of(_WITHIN[part], warmup)
        rate -= growth_of([-size for size in sizes], steps)
        held = sum(one.rate_bytes for one in self._census.holders())
        if held < THRESHOLDS.explained * rate:
            return ""
        return self._said(part, rate, warmup)

    def _said(self, part: str, rate: float, warmup: int) -> str:
        """The message about a part, with its holders; "" if it grows by no more than is allowed, or
        if containers that are full by now explain the growth."""
        if rate <= self._allowed:
            return ""
        holders = list(self._census.holders()) if part in ("use", "device", *_WITHIN) else []
        full = [one for one in holders if one.capacity is not None and one.length == one.capacity]
        if rate - sum(one.rate_bytes for one in full) <= self._allowed and full:
            return ""
        error = line_through(*self._series_of(part, warmup)).error
        findings = self._findings(part, rate, error, [one for one in holders if one not in full])
        if self._traced is not None and part in ("use", "tensors"):
            findings = self._traced.with_lines(findings)
        named = [one.line() if one.holder or one.kind else _UNKNOWN for one in findings]
        lines = [
            f"{_PARTS[part]} grows by {format_bytes(rate)} a step (allowed: {self._text}): "
            + "; ".join(named)
        ]
        lines += [f"  fix: {advice_for(one)}" for one in findings]
        count = self.steps - warmup
        garbage = self._freed["use"] / max(1, count)
        if part == "use" and garbage > self._allowed:
            lines.append(
                f"  note: cycles that waited for the garbage collector took {format_bytes(garbage)}"
                " a step, which is not counted"
            )
        lines.append(f"  seen over {count:,} {self._unit}, after {warmup:,} of warm-up")
        return "\n".join(lines)

    def _said_resident(self, warmup: int) -> str:
        """The message about resident memory, if it rises without falling back and that is neither
        in use nor kept by malloc. Memory that is written for the first time ends by itself: it is a
        warning. "" where nothing rises."""
        points = list(zip(*self._resident.after(warmup), strict=True))
        kept = kept_pace(points, THRESHOLDS.even)
        if kept is None or not kept.is_even or kept.rate <= self._allowed:
            return ""
        resident = Resident(
            Part("resident", kept.rate, 0.0, "growing"),
            _rise(self._levels["use"]),
            self.steps,
            points[-1][0] - points[0][0],
            is_even=True,
            idle_bytes=_rise(self._marks["idle"]),
            mapped_bytes=_rise(self._marks["VmData"]),
            allocated=sum(s.read() or 0 for s in self._signals if s.name == "heap"),
        )
        if resident.is_growth and resident.is_filling:
            resident = replace(resident, block=self._block(int(kept.gain)))
        seen = Evidence(Part("heap", 0.0), resident=resident, least_rate=self._least_rate)
        for one in findings_of(seen):
            text = (
                f"resident memory grows by {format_bytes(one.rate_bytes)} a step (allowed: "
                f"{self._text}): {one.line()}\n  fix: {advice_for(one)}\n"
                f"  seen over {self.steps - warmup:,} {self._unit}, after {warmup:,} of warm-up"
            )
            if one.kind != FIRST_WRITES:
                return text
            warnings.warn(f"not judged, because it ends when all is written: {text}", stacklevel=4)
        return ""

    def _block(self, written: int) -> Block | None:
        """The block of memory that fills, with the tensors or arrays that have it."""
        found = block_that_fills(written)
        if found is None:
            return None
        return found._replace(owner=owner_of(found.begin, found.begin + found.size))

    def _findings(
        self, part: str, rate: float, error: float, holders: list[Holder]
    ) -> list[LeakFinding]:
        """Who holds what grows, the largest first; one finding without a holder if none is known.
        `error` is the standard error of the rate."""
        grown = Part(part, rate, error, "growing")
        if part in ("children", "shm"):
            children = Children(grown) if part == "children" else None
            beside = {"shm": grown} if part == "shm" else {}
            seen = Evidence(Part("heap", 0.0), beside, children, least_rate=self._least_rate)
            return findings_of(seen)
        if part not in ("device", "tensors"):
            grown = replace(grown, signal=self._signal())
        least = THRESHOLDS.least_share * rate
        seen = Evidence(
            grown,
            holders=[one for one in holders if one.capacity is None or one.rate_bytes >= least],
            unheld=self._unheld(rate, sum(one.rate_bytes for one in holders)),
            c_heap_bytes=rate,
            stairs=self._stairs(self.warmup_of(self.steps)) if part == "use" else None,
            least_rate=self._least_rate,
        )
        return sorted(findings_of(seen), key=lambda one: (not one.holder, -one.rate_bytes))

    def _signal(self) -> str:
        """The signal of "use" that has grown more."""
        grown = {s.name: (s.read() or 0) - self._first.get(s.name, 0) for s in self._signals}
        return "python" if grown["python"] > grown["heap"] else "heap"

    def _unheld(self, rate: float, held: float) -> str:
        """C_HEAP if what Python objects reach has not grown, beside what holders gain; "" if that
        is not known."""
        if self._census.cut or len(self._reached) < THRESHOLDS.named_looks:
            return ""  # What a cut look left out may hold it.
        (since, first), (until, last) = self._reached[0], self._reached[-1]
        reached, rest = (last - first) / (until - since) - held, rate - held
        is_outside = reached < THRESHOLDS.explained * rest and self._signal() == "heap"
        return C_HEAP if is_outside else ""


_UNKNOWN = "its holder is not known"


def _points(steps: int, warmup: int) -> list[int]:
    """The end of the warm-up and of each third of the other steps."""
    begin = max(1, warmup)
    return [begin + (steps - begin) * part // _PARTS_OF_RUN for part in range(_PARTS_OF_RUN + 1)]


def _rise(levels: Sequence[tuple[int, int]]) -> float:
    """Bytes a step from the first level to the newest one."""
    (since, first), (until, last) = levels[0], levels[-1]
    return (last - first) / max(1, until - since)


def _known(signal: Signal) -> Callable[[], int]:
    """A function that reads a signal; 0 if it is not known."""
    return lambda: signal.read() or 0

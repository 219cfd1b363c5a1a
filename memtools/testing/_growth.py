"""GrowthTest: reads what is in use at the end of each step, and says at the end whether it grew.

    step() ──► one reading of each part ──► Series        heap and Python's blocks, child processes,
      │                                       │           shared memory, devices
      └─ at four points of the run:           │
           grew by then?                      │
             ├─► gc.collect(): what goes is garbage, and no growth
             └─► GrowthCensus.look: who holds more than before
                                              ▼
    end() ──► growth_of(series) above what is allowed? ──► the sentence, with the holder and advice

The signals are those of the leak test of a monitor (memtools._monitor.signals): exact, and read at
the same point of each step. What torch's host tensors take is a part of the heap and known by
itself: where noise hides the growth of both together, each of the two halves is judged, and has to
be held by somebody. Resident memory is not read. A flat run costs the readings and one
collection; a run that grows at most three collections and three looks more.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from memtools import _core
from memtools._base.size import format_bytes
from memtools._blocks.reports import HostBlocks
from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder
from memtools._leak.finding import LeakFinding, advice_for
from memtools._leak.growth import line_through
from memtools._leak.judge import C_HEAP, THRESHOLDS, Children, Evidence, Part, findings_of
from memtools._monitor.signals import Signal, signals_of
from memtools.testing._traced import TracedTensors
from memtools.testing._trend import LEAST_READINGS, growth_of, growth_of_levels

LEAST_WARMUP = 4
LEAST_STEPS = LEAST_WARMUP + LEAST_READINGS
_CAPACITY = 2048  # readings of a series; then every second one goes
_READINGS_NS = 100_000_000  # for as many readings as take so long; then every second one goes
_FEWEST = 20  # readings that are left, however dear they are
_LOOKS_NS = 10_000_000_000  # that collections and looks of a run that grows may take together
_PARTS_OF_RUN = 3
_UNKNOWN_FIRST, _UNKNOWN_FACTOR = 8, 1.5  # points of a run whose length is not known before
_SUSPECT = 0.5  # of what is allowed: growth that is looked into
_GARBAGE = 0.25  # of the growth between points: from there on only levels after collections tell
_IN_USE = ("heap", "python")
#: parts of "use", each without the noise of the other: one of them is said where all of it is not
_WITHIN = {"tensors": "others", "others": "tensors"}
#: what grows, by part
_PARTS = {
    "use": "memory",
    "tensors": "memory of tensors",
    "others": "memory beside tensors",
    "children": "memory of child processes",
    "shm": "shared memory",
    "device": "memory on the device",
}


class Series:
    """Readings of one part of memory, evenly apart, in room that was made before.

    Args:
        read: what reads it.
        since: a step; none up to it is read. 0, the default: all steps are.
    """

    __slots__ = ("_apart", "_since", "_sizes", "_spent_ns", "_steps", "count", "read")

    def __init__(self, read: Callable[[], int], since: int = 0) -> None:
        self.read = read
        self.count, self._since = 0, since
        self._apart, self._spent_ns = 1, 0
        self._steps, self._sizes = (array("q", bytes(8 * _CAPACITY)) for _ in range(2))

    def take(self, step: int) -> None:
        """The reading of a step; of some steps only where a reading is dear."""
        if step <= self._since or step % self._apart:
            return
        begin = time.thread_time_ns()
        self._steps[self.count], self._sizes[self.count] = step, self.read()
        self.count += 1
        self._spent_ns += time.thread_time_ns() - begin
        is_dear = self._spent_ns > _READINGS_NS and self.count >= 2 * _FEWEST
        if self.count == _CAPACITY or is_dear:
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
        """The newest reading, once garbage was collected."""
        if self.count:
            self._sizes[self.count - 1] = min(size, self._sizes[self.count - 1])

    def after(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """(steps, bytes) of the readings after a step."""
        begin = next((n for n in range(self.count) if self._steps[n] > step), self.count)
        return self._steps[begin : self.count], self._sizes[begin : self.count]


class GrowthTest:
    """Whether memory in use grows by more than so much a step.

    Args:
        allowed: bytes a step, at least 1.
        told: the same as the caller has written it, for the sentence.
        devices: indexes of the CUDA devices to read.
        steps: how many steps there will be; None where that is not known before.
        warmup: how many of them, from the first one on, are not judged; None: one of eight, at
            least 4.
        unit: what a step is, in the plural.
        looking: a context for collections and looks, whose own memory is not the program's.
    """

    def __init__(
        self,
        allowed: int,
        told: str,
        devices: Sequence[int] = (),
        *,
        steps: int | None = None,
        warmup: int | None = None,
        unit: str = "steps",
        looking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._looking = looking
        self._allowed, self._told, self._warmup, self._unit = allowed, told, warmup, unit
        self._blocks = HostBlocks()
        self._blocks.join()
        signals = signals_of(_core.Probe(), devices, self._blocks)
        self._signals = [s for s in signals if s.name != "rss"]
        self._least_rate = max(1.0, THRESHOLDS.least_share * allowed)
        self._census = GrowthCensus(
            (GrowthTest, Series, Signal, TracedTensors), least_rate=self._least_rate
        )
        since = 0 if steps is None else self.warmup_of(steps)
        self._series = {"use": Series(self._use, since)}
        for signal in self._signals:
            if signal.name not in _IN_USE:
                self._series[signal.name] = Series(_known(signal), since)
        self._points = [] if steps is None else _points(steps, since)
        self._is_open = steps is None
        self._next = _UNKNOWN_FIRST if steps is None else self._points.pop(0)
        #: bytes at the points, by part: (step, bytes), after a collection where there was one
        self._levels: dict[str, list[tuple[int, int]]] = {}
        self._first: dict[str, int] = {}  # heap and Python's blocks at the first point
        self._freed = dict.fromkeys(("use", "tensors"), 0)  # by collections
        self._spent_ns = self._gc_ns = self._look_ns = 0
        self._looked = -1  # the step of the newest look
        self._reached: list[tuple[int, int]] = []
        self._traced: TracedTensors | None = None  # of a run in which tensors grow
        self._has_garbage = True  # so that the next point collects it; not known before the first
        self.steps = 0

    def warmup_of(self, steps: int) -> int:
        """How many of so many steps are not judged."""
        return max(LEAST_WARMUP, steps // 8) if self._warmup is None else self._warmup

    def step(self) -> None:
        """Read what is in use: a step has ended."""
        self.steps += 1
        for series in self._series.values():
            series.take(self.steps)
        if self.steps == self._next:
            with self._looking():
                self._point(is_last=not self._is_open and not self._points)
            if self._is_open:
                self._next = int(self._next * _UNKNOWN_FACTOR)
            else:
                self._next = self._points.pop(0) if self._points else 0

    def end(self) -> str:
        """What to say of memory that grows by more than is allowed; "" where it does not."""
        if self._is_open and self._levels:
            self._point(is_last=True)
        warmup = self.warmup_of(self.steps)
        parts = [part for part in self._series if part not in _WITHIN]
        found = [self._said(part, self._rate(part, warmup), warmup) for part in parts]
        if self._rate("use", warmup) <= self._allowed:
            found += [self._said_within(part, warmup) for part in _WITHIN if part in self._levels]
        return "\n".join(filter(None, found))

    def close(self) -> None:
        """Leave nothing on. May be called twice."""
        self._blocks.leave()  # which notes no more lines either

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
        for part, size in now.items():
            levels = self._levels.setdefault(part, [])
            if levels and levels[-1][0] == self.steps:
                levels.pop()  # of this step, before the collection
            levels.append((self.steps, size))
        self._spent_ns += time.thread_time_ns() - begin
        if grows and {"use", "device", *_WITHIN} & set(self._suspects(now)):
            self._look()

    def _suspects(self, now: Mapping[str, int], share: float = _SUSPECT) -> list[str]:
        """The parts that have grown since the first point by this share of what is allowed, half of
        it by default."""
        found = []
        for part, levels in self._levels.items():
            since, first = levels[0]
            if now[part] - first > share * self._allowed * max(1, self.steps - since):
                found.append(part)
        return found

    def _look(self) -> None:
        """A look of the census, whose own tables are no growth of the program's."""
        begin = time.thread_time_ns()
        if self._looked == self.steps or self._spent_ns + self._look_ns + self._gc_ns > _LOOKS_NS:
            return
        self._looked = self.steps
        before = [signal.read() for signal in self._signals]
        try:
            self._census.look(self.steps)
            self._trace()
        finally:
            for signal, size in zip(self._signals, before, strict=True):
                signal.leave_out(size, signal.read())
            self._look_ns = time.thread_time_ns() - begin
            self._spent_ns += self._look_ns
        if not self._census.cut:
            self._reached.append((self.steps, self._census.reached_bytes))

    def _trace(self) -> None:
        """Note the lines of tensors from the first look on at which they have grown, in a run that
        fails: a table of lines takes some KiB."""
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
        levels = [level for level in self._levels.get(part, ()) if level[0] >= warmup]
        freed = self._freed["use"] - self._freed["tensors"] if part == "others" else 0
        freed = self._freed.get(part, freed)
        if freed and rate == 0 and len(levels) > 1:
            grown = levels[-1][1] - levels[0][1]
            if freed > _GARBAGE * grown:
                return growth_of_levels(levels)
        return rate

    def _said_within(self, part: str, warmup: int) -> str:
        """What to say of one part of what is in use, where all of it is not known to grow. What the
        other part gives back is no growth: tensors that were made before are not counted, and may
        make room for new ones. So somebody has to hold what grows."""
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
        """The sentence, with who holds it; "" where it grows by no more than is allowed, or where
        what is full by now explains the growth."""
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
        told = [one.line() if one.holder or one.kind else _UNKNOWN for one in findings]
        lines = [
            f"{_PARTS[part]} grows by {format_bytes(rate)} a step (allowed: {self._told}): "
            + "; ".join(told)
        ]
        lines += [f"  {advice_for(one)}" for one in findings]
        count = self.steps - warmup
        garbage = self._freed["use"] / max(1, count)
        if part == "use" and garbage > self._allowed:
            lines.append(
                f"  note: cycles that waited for the garbage collector took {format_bytes(garbage)}"
                " a step besides, which is not counted"
            )
        lines.append(f"  seen over {count:,} {self._unit}, after {warmup:,} of warm-up")
        return "\n".join(lines)

    def _findings(
        self, part: str, rate: float, error: float, holders: list[Holder]
    ) -> list[LeakFinding]:
        """Who holds what grows, the largest first; one without a holder where nobody is known.
        `error`: the standard error of the rate."""
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
            unheld=self._unheld(rate),
            c_heap_bytes=rate,
            least_rate=self._least_rate,
        )
        return sorted(findings_of(seen), key=lambda one: (not one.holder, -one.rate_bytes))

    def _signal(self) -> str:
        """Which of the two parts of use has grown more."""
        grown = {s.name: (s.read() or 0) - self._first.get(s.name, 0) for s in self._signals}
        return "python" if grown["python"] > grown["heap"] else "heap"

    def _unheld(self, rate: float) -> str:
        """Whose growth is that no container explains: the C heap's where all that Python objects
        reach has not grown."""
        if self._census.cut or len(self._reached) < THRESHOLDS.named_looks:
            return ""  # what was left out may hold it
        (since, first), (until, last) = self._reached[0], self._reached[-1]
        reached = (last - first) / (until - since)
        is_outside = reached < THRESHOLDS.explained * rate and self._signal() == "heap"
        return C_HEAP if is_outside else ""


_UNKNOWN = "who holds it is not known"


def _points(steps: int, warmup: int) -> list[int]:
    """The end of the warm-up and of each third of the other steps."""
    begin = max(1, warmup)
    return [begin + (steps - begin) * part // _PARTS_OF_RUN for part in range(_PARTS_OF_RUN + 1)]


def _known(signal: Signal) -> Callable[[], int]:
    """What a signal reads, 0 where it is not known."""
    return lambda: signal.read() or 0

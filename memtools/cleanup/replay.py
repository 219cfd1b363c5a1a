"""What a cleanup policy would have decided in a run that has left a record.

run.mem: samples and steps ──► one update after the other, each at its time and with the reading
         cleanup events    ──► before it ──► _core.PolicyReplay ──► Decision, Decision, ...

The record is of what happened: what a cleanup would have changed is not in it. What one frees and
costs is that of the record's own cleanup nearest in time, where it has any; else nothing, and what
the caller says. Nothing of this machine or of now goes in: same record, same decisions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools import _core
from memtools._base.size import parse_bytes
from memtools.cleanup.actions import (
    EMPTY_CACHE,
    GC_YOUNG,
    LATER,
    LEAST_TOTAL,
    ORDER,
    POOL_TRIM,
    REASONS,
    WARM_UP,
)
from memtools.cleanup.clocks import UPDATE
from memtools.cleanup.engine import NEVER
from memtools.record.record import UNKNOWN, Record
from memtools.record.series import whole_buckets

if TYPE_CHECKING:
    from memtools.cleanup.engine import Engine

#: Seconds that an action takes where neither the record nor the caller says: measured figures of
#: a torch process with a million objects; what an action not named here takes is 1 ms.
COSTS = {"gc": 0.1, "gc_young": 0.001, "empty_cache": 0.005, "trim": 0.005, "pool_trim": 0.001}
#: A record that counts more was damaged: 100 million updates of 1 ms are a day.
MOST_STEPS = 10**8
_IN_EVENTS = {"gc": "gc", "gc_young": "gc_young", "trim": "malloc_trim"}  # else as they are called
_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
_SIZE = r"(\d{1,18}(?:\.\d{1,9})? ?(?:bytes|B|[KMGT]i?B))"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Decision:
    """An action that the policy would have asked for.

    `seconds` are since the start of the record. `why` is "cadence", "host pressure" and so on,
    joined by ", ". What it cost and freed is assumed: the record's own where `recorded`.
    """

    step: int
    seconds: float
    action: str
    why: str
    ms: float
    freed_bytes: int
    recorded: bool


class Settings(NamedTuple):
    """What a policy was made with: rules by action, names by number, and the core's settings."""

    rules: Sequence[tuple[tuple[int, ...], int, bool]]
    actions: Mapping[int, str]
    clocks: Sequence[str]
    order: Sequence[int]
    pressure: float = 0.85
    max_cost: float = 0.003
    strict: bool = False
    together: int = 0
    limit: int | None = None


def settings_of(engine: Engine, given: Mapping[str, Any], record: Record) -> Settings:
    """Those of a policy, used by `with policy:`, for this record. What has nothing to work on is
    left out, and cleanups are not agreed with other ranks, whose records these are not."""
    if not isinstance(record, Record):
        raise TypeError(
            f"replay() takes a record, got {type(record).__name__}; read one by "
            "memtools.read_record(path)"
        )
    rules: dict[int, tuple[tuple[int, ...], int]] = dict(engine.rules)
    for action, handle in engine.callbacks.by_action.items():
        rules[action] = handle.every, handle.triggers
    if engine.young is not None:
        rules[GC_YOUNG] = engine.young, 0
    if not _known(record, "cuda0_reserved"):
        rules.pop(EMPTY_CACHE, None)
    if not engine.pools.alive():
        rules.pop(POOL_TRIM, None)
    return Settings(
        rules=[(*rules.get(action, (NEVER, 0)), action in LATER) for action in range(WARM_UP)],
        actions={action: engine.name(action) for action in rules},
        clocks=engine.clocks.names,
        order=ORDER,
        pressure=float(given["pressure"]),
        max_cost=float(given["max_cost"]),
        strict=given["strict"],
        limit=None if given["limit"] is None else parse_bytes(given["limit"]),
    )


class Replayed(list[Decision]):
    """The decisions in their order; as a string, what they come to."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        super().__init__(decisions)
        self.steps = 0  #: updates in the record
        self.seconds = 0.0  #: that it covers
        self.skipped: dict[str, int] = {}  #: cadences that the budget did not allow, by action
        self.notes: list[str] = []  #: what the record does not tell, a sentence each

    def __str__(self) -> str:
        lines = [f"{len(self):,} cleanups in {self.steps:,} updates ({self.seconds:,.1f} s)"]
        for action in dict.fromkeys([*(one.action for one in self), *self.skipped]):
            lines.append(f"  {self._line(action)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _line(self, action: str) -> str:
        mine = [one for one in self if one.action == action]
        ms = sum(one.ms for one in mine)
        share = ms / 10 / self.seconds if self.seconds else 0.0
        line = f"{action}: {len(mine):,} times, {ms:,.1f} ms ({share:.2f} % of the time)"
        if self.skipped.get(action):
            line += f", {self.skipped[action]:,} left out as too dear"
        if mine:
            reasons = ", ".join(dict.fromkeys(one.why for one in mine))
            line += f"; first at update {mine[0].step:,}, last at {mine[-1].step:,}: {reasons}"
        return line


def replay(
    record: Record, settings: Settings, costs: Mapping[str, float] | None = None
) -> Replayed:
    """The decisions of a policy with these settings over the record's run.

    Args:
        record: as `memtools.read_record` returns it. Where its single samples do not go back to
            the start, its buckets stand for what is older.
        settings: of the policy.
        costs: seconds that an action takes, by its name, in place of `COSTS`.

    Raises:
        ValueError: the record has no steps, or too many; or a cost is negative or of an unknown
            action.
    """
    taken = _costs(costs, settings)
    if not _known(record, "step"):
        raise ValueError(
            f"{record.path} has no steps to replay: record one with MemoryMonitor(log=...), whose "
            "step() is called at each update"
        )
    return _Run(record, settings, taken).go()


def _costs(costs: Mapping[str, float] | None, settings: Settings) -> dict[str, float]:
    names = set(settings.actions.values())
    if costs is not None and not isinstance(costs, Mapping):
        raise TypeError(
            f'costs is a dict of seconds by action, like {{"gc": 0.05}}, got {type(costs).__name__}'
        )
    for name, seconds in (costs or {}).items():
        if name not in names:
            known = ", ".join(sorted(names))
            raise ValueError(f"costs: the policy has no action {name!r}; it has {known}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ValueError(f"costs[{name!r}] is 0 seconds or more, got {seconds!r}")
    return {**COSTS, **(costs or {})}


def _known(record: Record, column: str) -> bool:
    values = record.buckets.last.get(column)
    return values is not None and any(value != UNKNOWN for value in values)


class _Point(NamedTuple):
    """A moment of the record: its time, the updates done by then, and the reading, which is of
    that moment or, `summed`, the most of all since the point before."""

    ns: int
    step: int
    reading: tuple[int, ...]
    rss: int
    summed: bool


class _Done(NamedTuple):
    """What a recorded cleanup says of one action."""

    ns: int
    host: int
    device: int


@dataclass
class _Run:
    record: Record
    settings: Settings
    costs: dict[str, float]
    out: Replayed = field(default_factory=Replayed)
    cleanups: dict[str, list[tuple[int, _Done]]] = field(default_factory=dict)

    def go(self) -> Replayed:
        points = list(_points(self.record, self._machine()))
        if points[-1].step > MOST_STEPS:
            raise ValueError(
                f"{self.record.path} counts {points[-1].step:,} updates; at most {MOST_STEPS:,} "
                "are replayed: it was damaged, or step() was given something else than updates"
            )
        self.cleanups = self._cleanups()
        s = self.settings
        given = self._given()
        core = _core.PolicyReplay(
            s.rules,
            pressure=s.pressure,
            max_cost=s.max_cost,
            strict=s.strict,
            together=s.together,
            limit=UNKNOWN - 1 if given is None else given,
            start_ns=self.record.clock_ns,
        )
        start = points[0]._replace(ns=self.record.clock_ns, step=0)
        for before, after in pairwise([start, *points]):
            reading = after if after.summed else before
            self._between(core, before, after, reading)
        self._finish(core, points)
        return self.out

    def _between(
        self, core: _core.PolicyReplay, before: _Point, after: _Point, seen: _Point
    ) -> None:
        """The updates from one reading to the next, evenly over that time."""
        left, at, step = max(0, after.step - before.step), before.ns, before.step
        while left:
            ticks, now, asked = core.advance(UPDATE, left, at, max(at, after.ns), seen.reading)
            left, at, step = left - ticks, now, step + ticks
            for action in self.settings.order:
                if asked >> action & 1:
                    self._act(core, action, step, now, seen)

    def _act(
        self, core: _core.PolicyReplay, action: int, step: int, now: int, point: _Point
    ) -> None:
        name = self.settings.actions[action]
        told = _nearest(self.cleanups.get(name, []), now)
        done = told or _Done(round(1e9 * self.costs.get(name, 0.001)), 0, 0)
        why = core.figures(action)[0]
        rss = 0 if point.rss == UNKNOWN else point.rss
        total = max(rss, LEAST_TOTAL)
        device = _devices(point.reading)
        core.done(action, now, done.ns, *_change(done.host, total), *_change(done.device, device))
        self.out.append(
            Decision(
                step=step,
                seconds=(now - self.record.clock_ns) / 1e9,
                action=name,
                why=", ".join(word for bit, word in REASONS.items() if why & bit),
                ms=done.ns / 1e6,
                freed_bytes=done.host + done.device,
                recorded=told is not None,
            )
        )

    def _finish(self, core: _core.PolicyReplay, points: Sequence[_Point]) -> None:
        out = self.out
        out.steps, out.seconds = points[-1].step, self.record.seconds
        for action, name in self.settings.actions.items():
            if skipped := core.figures(action)[3]:
                out.skipped[name] = skipped
        out.notes = list(self._notes(points))

    def _given(self) -> int | None:
        return self.settings.limit if self.settings.limit is not None else self._started()[0]

    def _machine(self) -> int | None:
        return self._started()[1]

    def _started(self) -> tuple[int | None, int | None]:
        from memtools.record.events import started_with

        text = next((event.text for event in self.record.events if event.kind == "start"), "")
        return started_with(text)

    def _cleanups(self) -> dict[str, list[tuple[int, _Done]]]:
        """What the record's cleanups say of each action, in their order."""
        found: dict[str, list[tuple[int, _Done]]] = {}
        for event in self.record.events:
            for name in self.settings.actions.values() if event.kind == "cleanup" else ():
                done = _parsed(event.text, _IN_EVENTS.get(name, name), event.duration_ns)
                if done is not None:
                    found.setdefault(name, []).append((event.time_ns, done))
        return found

    def _notes(self, points: Sequence[_Point]) -> Iterator[str]:
        used = 0
        for _, triggers, _ in self.settings.rules:
            used |= triggers
        limited = self._given() or self._machine() or _known(self.record, "cgroup_limit")
        if used & 1 and not limited:
            yield "the record tells no limit, so that nothing was host pressure; set one to try it"
        if used & 16:
            yield "a record has no idle bytes of malloc: what they trigger is not shown"
        if used & 4 and _known(self.record, "cuda0_reserved"):
            yield "a record does not tell fragmented caches: what they trigger is not shown"
        if self._other_clocks():
            yield f"cadences by {', '.join(self._other_clocks())} are not in a record"
        if not any(point.step for point in points):
            yield "no update was counted in it: call step() at each"

    def _other_clocks(self) -> list[str]:
        return [
            name
            for clock, name in enumerate(self.settings.clocks)
            if clock != UPDATE and any(every[clock] for every, _, _ in self.settings.rules)
        ]


def _points(record: Record, machine: int | None) -> Iterator[_Point]:
    """The buckets that are older than the first single sample, then the samples."""
    samples, buckets = record.samples, record.buckets
    step = 0
    for i in range(whole_buckets(record)):
        values = {name: buckets.most[name][i] for name in buckets.most}
        low = {name: buckets.least[name][i] for name in buckets.least}
        values |= {name: v for name, v in low.items() if name.endswith(("available", "_free"))}
        step = _grown(step, buckets.last["step"][i])
        yield _Point(buckets.last_ns[i], step, *_reading(values, machine), True)
    names = list(samples.values)
    for row in zip(samples.time_ns, *samples.values.values(), strict=True):
        values = dict(zip(names, row[1:], strict=True))
        step = _grown(step, values["step"])
        yield _Point(row[0], step, *_reading(values, machine), False)


def _grown(step: int, reading: int) -> int:
    return step if reading == UNKNOWN else max(step, reading)


def _reading(values: Mapping[str, int], machine: int | None) -> tuple[tuple[int, ...], int]:
    """As `_core.PolicyReplay.advance` takes it, and the rss."""

    def of(name: str) -> int:
        return values.get(name, UNKNOWN)

    own = "process" if values.get("process", UNKNOWN) != UNKNOWN else "rss"
    host = [of(name) for name in (own, "private", "cgroup_used", "cgroup_limit", "available")]
    host += [UNKNOWN if machine is None else machine, UNKNOWN, of("children_private")]
    index = 0
    while f"cuda{index}_total" in values:
        tiers = ("allocated", "reserved", "free", "total")
        host += [*(of(f"cuda{index}_{tier}") for tier in tiers), UNKNOWN]
        index += 1
    return tuple(host), of(own)


def _devices(reading: Sequence[int]) -> int:
    """Bytes that torch has reserved on all devices, and at least what counts as a process."""
    reserved = [value for value in reading[9::5] if value != UNKNOWN]
    return max(sum(reserved), LEAST_TOTAL)


def _change(freed: int, total: int) -> tuple[int, int, int]:
    """(before, after, total) of what freed so much."""
    before = max(freed, total)
    return before, before - freed, before


def _parsed(text: str, name: str, duration_ns: int) -> _Done | None:
    """What "gc (12 objects) 3.1 ms, malloc_trim 0.2 ms: freed 4.0 MiB on the host" says of one."""
    what, _, freed = text.partition(": freed")
    part = re.search(rf"(?:^|, ){re.escape(name)}(?: \([^()]*\))? {_NUMBER} (us|ms|s)\b", what)
    if part is None:
        return None
    alone = what.count(" ms") + what.count(" us") <= 1
    ns = duration_ns if alone and duration_ns else round(1e9 * float(part[1]) * _SECONDS[part[2]])
    return _Done(ns, _bytes(freed, "host"), _bytes(freed, "devices"))


def _bytes(text: str, where: str) -> int:
    size = re.search(rf"{_SIZE} on the {where}", text)
    try:
        return parse_bytes(size[1].replace("bytes", "B")) if size else 0
    except ValueError:  # less than one byte
        return 0


def _nearest(found: Sequence[tuple[int, _Done]], now: int) -> _Done | None:
    """Of the recorded ones the nearest in time; of two as near, the earlier."""
    if not found:
        return None
    i = bisect_left(found, now, key=lambda pair: pair[0])
    near = found[max(0, i - 1) : i + 1]
    return min(near, key=lambda pair: abs(pair[0] - now))[1]

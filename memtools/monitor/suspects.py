"""The census of a monitor: two looks when something grows, and who holds what is new."""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

from memtools._base.size import format_bytes
from memtools._census import graphs
from memtools._census import holders as census_holders
from memtools._census.census import Census, GroupGrowth, Growth, TypeGrowth
from memtools._census.holders import Holder
from memtools.gate.history import GateHistory
from memtools.leak.detector import LeakVerdict

FIRST_GAP = 100  # steps between the two looks, at first; doubles with each look
HURRIED_GAP = 25
GRACE_NS = 1_500_000_000  # that censuses may take in any run
SHARE = 0.01  # of a run that they may take beyond that
MOST_GROUPS = 3  # of tensors whose holders are looked for
MOST_TOLD = 64  # holders of which events are written
_TENSORS = ("heap", "tensors", "device", "rss")


class Fill(NamedTuple):
    """Containers with a bound that take what grows."""

    text: str
    remaining_bytes: int


class Suspicion:
    """Looks at the heap twice, some hundred steps apart, while the leak test sees growth.

    Each later look is twice as far from the first. All looks together take at most 1.5 s and 1 % of
    the run, so that a program with a very large heap gets fewer.
    """

    __slots__ = (
        "_base",
        "_base_graph",
        "_base_native",
        "_base_step",
        "_began",
        "_gap",
        "_next",
        "_spent",
        "_told",
        "fills",
        "holders",
        "looks",
        "rate",
        "tensor_bytes",
    )

    def __init__(self) -> None:
        self._base: Census | None = None
        self._base_step = 0
        self._base_native: dict[int, tuple[int, int]] = {}
        self._base_graph = 0  # nodes of the largest autograd graph
        self._began = time.monotonic_ns()
        self._spent = 0
        self._gap = FIRST_GAP
        self._next = 0
        self._told: set[str] = set()
        #: of the newest pair of looks, those that hold most first
        self.holders: tuple[Holder, ...] = ()
        #: containers with a bound among them
        self.fills: tuple[Fill, ...] = ()
        #: bytes a step that the holders with a bound took
        self.rate = 0.0
        self.looks = 0
        #: bytes of all tensors at the newest look
        self.tensor_bytes: int | None = None

    def due(self, step: int, now: int) -> bool:
        if step < self._next:
            return False
        return self._spent <= GRACE_NS + SHARE * (now - self._began)

    def pending(self, step: int) -> bool:
        """Whether the first look waits for a second that would tell something."""
        return self._base is not None and step - self._base_step >= HURRIED_GAP and self.looks == 1

    def hurry(self, step: int, *, urgent: bool) -> None:
        """The grade has risen: what is said with it is to be fresh."""
        if self._base is not None and urgent:
            self._gap = FIRST_GAP
            self._next = min(self._next, max(step, self._base_step + HURRIED_GAP))

    def end(self) -> None:
        """Nothing grows any more: the next suspicion begins with a new first look."""
        self._base = None
        self._gap, self._next = FIRST_GAP, 0
        self.holders, self.fills, self.rate = (), (), 0.0
        self.looks = 0

    def look(self, step: int, verdict: LeakVerdict) -> list[Holder]:
        """One look; from the second on, the holders of which nothing has been said before."""
        begin = time.monotonic_ns()
        try:
            return self._look(step, verdict)
        finally:
            self._spent += time.monotonic_ns() - begin

    def _look(self, step: int, verdict: LeakVerdict) -> list[Holder]:
        census = Census()
        self.looks += 1
        self.tensor_bytes = census.bytes
        if self._base is None:
            self._base, self._base_step, self._base_native = census, step, _native()
            graph = graphs.largest()
            self._base_graph = 0 if graph is None else graph.nodes
            self._next = step + self._gap
            return []
        self._gap *= 2
        self._next = step + self._gap
        steps = max(1, step - self._base_step)
        found = suspects(census.diff(self._base), verdict, steps, self._base_graph)
        fills = [_fill(h) for h in found if h.capacity is not None]
        bounded = sum(h.new_bytes for h in found if h.capacity is not None)
        native = self._native_fill()
        if native is not None:
            fills.append(native[0])
            bounded += native[1]
        self.holders, self.fills, self.rate = tuple(found), tuple(fills), bounded / steps
        fresh = [h for h in found if h.path not in self._told and len(self._told) < MOST_TOLD]
        self._told |= {h.path for h in fresh}
        return fresh

    def _native_fill(self) -> tuple[Fill, int] | None:
        """Gate histories keep their bytes outside of what a census or malloc counts."""
        was, grown = self._base_native, 0
        size = most = count = 0
        for who, (now, bound) in _native().items():
            more = now - was.get(who, (0, 0))[0]
            if more > 0 and now < bound:
                size, most, grown, count = size + now, most + bound, grown + more, count + 1
        if count == 0:
            return None
        name = "GateHistory" if count == 1 else f"{count} GateHistory objects"
        text = f"{name} with {format_bytes(size)} of at most {format_bytes(most)}"
        return Fill(text, most - size), grown

    def fill(self, verdict: LeakVerdict) -> Fill | None:
        """Where containers with a bound account for most of what the leak test sees."""
        told = verdict.kind in ("growing", "likely", "leak", "fragmentation")
        if not (self.fills and told and verdict.signal in (*_TENSORS, "python")):
            return None
        if self.rate < 0.7 * verdict.rate_bytes_per_step:
            return None
        text = " and ".join(fill.text for fill in self.fills)
        return Fill(text, sum(fill.remaining_bytes for fill in self.fills))


def _native() -> dict[int, tuple[int, int]]:
    """Bytes of each gate history, and the most that it may take."""
    found = [obj for obj in gc.get_objects() if type(obj) is GateHistory and not obj.closed]
    return {id(h): (h.arena_bytes, h.max_bytes) for h in found}


def _fill(holder: Holder) -> Fill:
    """Of a holder with a bound. Where nobody knows how full it is, it may be empty."""
    capacity, length, final = holder.capacity or 1, holder.length, holder.final_bytes or 0
    now = "" if length is None else f"{length:,} of "
    when_full = f", {format_bytes(final)} when full" if final else ""
    text = f"{holder.path} with {now}at most {capacity:,}{when_full}"
    return Fill(text, final * max(0, capacity - (length or 0)) // capacity)


def is_named(holder: Holder) -> bool:
    """Whether it has a name in the program, where somebody can do something about it."""
    return holder.kind not in ("C code", "nobody")


def holds_growth(holder: Holder) -> bool:
    """Whether it was found to hold more than before, and has a name in the program."""
    return is_named(holder) and (holder.new_objects > 0 or holder.kind == "autograd graph")


def is_container(holder: Holder) -> bool:
    return holder.length is not None and holder.kind != "autograd graph"


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
        for group in _grown(growth, wanted, steps):
            found += growth.holders(group, steps=steps)
    explained = sum(holder.new_bytes for holder in found)
    if verdict.signal != "children" and explained < 0.5 * wanted:
        for kind in _many(growth, steps):
            found += growth.holders(kind, steps=steps)
        graph = None if any(h.kind == "autograd graph" for h in found) else graphs.largest()
        if graph is not None and graph.nodes - nodes_before >= max(2, steps // 4):
            found.append(census_holders.graph_holder(graph, steps))
    found = [h for h in _distinct(found) if h.kind != "variable" or h.new_objects > 1]
    return sorted(found, key=lambda h: (not is_named(h), -h.new_bytes, -h.new_objects))


def _grown(growth: Growth, wanted: float, steps: int) -> list[GroupGrowth]:
    """Groups of tensors that came again and again and weigh something."""
    often = max(2, steps // 500)
    heavy = [g for g in growth.groups if g.count >= often and g.bytes >= 0.1 * wanted]
    return heavy[:MOST_GROUPS]


def _many(growth: Growth, steps: int) -> list[TypeGrowth]:
    """Types of which every few steps leave an object."""
    return [t for t in growth.types if t.count >= max(2, steps // 4)][:2]


def _distinct(holders: list[Holder]) -> list[Holder]:
    seen: dict[str, Holder] = {}
    for holder in holders:
        old = seen.get(holder.path)
        if old is None or holder.new_bytes > old.new_bytes:
            seen[holder.path] = holder
    return list(seen.values())

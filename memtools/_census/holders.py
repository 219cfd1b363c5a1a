"""Holders: which container, variable or graph keeps the new objects alive."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memtools._base import sentences
from memtools._base import torch as bridge
from memtools._census import graphs
from memtools._census.census import PARTS, SAMPLE, GroupGrowth, TypeGrowth
from memtools._census.facts import short_name, tensor_facts, type_name
from memtools._census.paths import (
    LEVELS,
    Local,
    Namer,
    Own,
    Seen,
    capacity_of,
    length_of,
    referrers,
    step_down,
)

if TYPE_CHECKING:
    from memtools._census.census import Growth

_NAMED = 4  # containers that are named in one call
_COMMON = 1 / 8  # of the sample: a container that holds so much is where things are collected


@dataclass(frozen=True)
class Holder:
    """Who keeps objects alive.

    Attributes:
        path: where it is in the program, like `list MoEBlock.gate_history`.
        kind: the container's type, or `variable`, `autograd graph`, `C code`, `function`.
        length: how many entries it has now; nodes of a graph. None where that has no meaning.
        capacity: how many it will have at most (`deque(maxlen=...)`, `lru_cache(maxsize)`); None
            without a bound.
        new_objects: of the objects asked about, how many are estimated to be there.
        new_bytes: their memory in bytes; 0 for other objects than tensors.
        containers: how many of this name there are.
        what: the objects in words, like `[2048, 64] float32 tensors`.
        steps: over which the objects came.
    """

    path: str
    kind: str
    length: int | None
    capacity: int | None
    new_objects: int
    new_bytes: int
    containers: int = 1
    what: str = "objects"
    steps: int = 1

    @property
    def final_bytes(self) -> int | None:
        """Bytes that a bounded container holds once it is full; None without a bound."""
        return sentences.final_bytes(self)

    def __str__(self) -> str:
        return sentences.of_holder(self)


def holder_of(objects: Sequence[Any], *, steps: int = 1) -> list[Holder]:
    """Who holds these objects (up to 64 of them are looked at), the one that holds most first.

    Takes some passes over the heap, about 0.15 us an object each. Runs none of the program's code.
    `objects` itself does not count, unless nobody else holds them and a container, an attribute or
    a module of the program holds it. Empty for no objects. Raises MemoryError.
    """
    sample, count = Own(objects[:SAMPLE]), len(objects)
    found = _named(sample, objects, count, None, steps)
    if any(holder.kind == "nobody" for holder in found) and _is_kept(objects):
        return _named(sample, None, count, None, steps)
    return found


def _is_kept(objects: Sequence[Any]) -> bool:
    """Whether others than the variables of running functions refer to it."""
    return any(type(holder) is not Local for holder in referrers(Own([objects])).holders[0])


def of_growth(growth: Growth, of: GroupGrowth | TypeGrowth | None, steps: int) -> list[Holder]:
    """What `Growth.holders` returns."""
    if steps < 1:
        raise ValueError(f"steps is at least 1, got {steps}; pass how many lie between the looks")
    if of is not None:
        return _of_one(growth, of, steps)
    grown: list[GroupGrowth | TypeGrowth] = [*growth.groups, *growth.types]
    found = _of_one(growth, grown[0], steps) if grown else []
    if all(holder.kind != "autograd graph" for holder in found):
        graph = graphs.largest()
        found += [] if graph is None else [_graph_holder(graph, 0, 0, "objects", steps)]
    return found


def _of_one(growth: Growth, of: GroupGrowth | TypeGrowth, steps: int) -> list[Holder]:
    sample = Own(growth.sample(of))
    size = of.bytes if isinstance(of, GroupGrowth) else 0
    return _named(sample, None, max(of.count, len(sample)), size, steps)


@dataclass
class _Place:
    """A container of some of the sample, and how it gets from there to an object."""

    container: Own  # the one, or a Local
    inner: str
    members: set[int]
    one: Own | None = None  # the sample, when it is one object


def _named(sample: Own, ignored: Any, count: int, size: int | None, steps: int) -> list[Holder]:
    if not sample:
        return []
    namer, found = Namer(), []
    places, orphans = _collect(sample, namer, ignored)
    what, total = _in_words(sample), _bytes(sample, count) if size is None else size
    for place in sorted(places, key=lambda p: -len(p.members))[:_NAMED]:
        share = len(place.members) / len(sample)
        found.append(_holder(namer, place, ignored, (share, count, total, what, steps)))
    if len(orphans) > len(sample) / 8:
        found.append(_orphans(sample, orphans, count, total, what, steps))
    return _joined(sorted(found, key=lambda h: -h.new_objects))


def _collect(sample: Own, namer: Namer, ignored: Any) -> tuple[list[_Place], dict[int, int]]:
    """Climbs from the objects until they meet: containers, {object without holder: references}.

    Those that meet in nothing are named only where nothing else is, or where they are many.
    """
    heads, inner = Own(sample), [""] * len(sample)
    members = [{i} for i in range(len(sample))]
    orphans: dict[int, int] = {}
    places, alone = list[_Place](), list[_Place]()
    for level in range(LEVELS):
        seen = referrers(heads, ignored)
        for i, holders in enumerate(seen.holders):
            if holders and all(map(_is_of_a_look, holders)):
                members[i] = set()
        if level == 0:
            orphans = {i: seen.unaccounted[i] for i, h in enumerate(seen.holders) if not h}
        common = _common(heads, seen, members, inner, len(sample))
        places += common
        done = set().union(*(p.members for p in common)) if common else set()
        climbed = _climb(heads, seen, members, inner, done)
        alone += _tops(namer, *climbed)
        heads, members, inner = climbed
        if not heads:
            break
    if len(sample) == 1:
        for place in places:
            place.one = sample
    alone += [_Place(Own([h]), how, who) for h, how, who in zip(heads, inner, members, strict=True)]
    least = 1 if not places else max(2, len(sample) * _COMMON)
    return places + [p for p in alone if len(p.members) >= least][:_NAMED], orphans


def _is_of_a_look(holder: Any) -> bool:
    """Whether it is part of a census, and so no holder: it is there because somebody looked."""
    kind = type(holder)
    return any(kind is part for part in (*PARTS, Holder))  # by identity: classes may redefine ==


def _tops(namer: Namer, heads: Own, members: list[set[int]], inner: list[str]) -> list[_Place]:
    """Takes out the namespaces of modules: nothing above them says more."""
    found = []
    for i in reversed(range(len(heads))):
        if namer.is_namespace(heads[i]):
            found.append(_Place(Own([heads.pop(i)]), inner.pop(i), members.pop(i)))
    return found


def _common(
    heads: Own, seen: Seen, members: list[set[int]], inner: list[str], n: int
) -> list[_Place]:
    """Containers that hold a good part of the sample, each object given to the fullest."""
    found: dict[Any, _Place] = {}
    for i, holders in enumerate(seen.holders):
        for holder in holders:
            key = holder if type(holder) is Local else id(holder)
            place = found.setdefault(key, _Place(Own([holder]), inner[i], set()))
            place.members |= members[i]
    least = max(2, n * _COMMON) if n > 1 else 1
    places, given = [], set[int]()
    for place in sorted(found.values(), key=lambda p: -len(p.members)):
        place.members -= given
        if len(place.members) >= least and _collects(place.container[0]):
            given |= place.members
            places.append(place)
    return places


def _collects(holder: Any) -> bool:
    """Whether many objects in it would be a finding: not a type that its instances refer to."""
    return not issubclass(type(holder), type)


def _climb(
    heads: Own, seen: Seen, members: list[set[int]], inner: list[str], done: set[int]
) -> tuple[Own, list[set[int]], list[str]]:
    """From each object that has not met others to its first holder, those that meet as one."""
    above, who, how, where = Own(), list[set[int]](), list[str](), dict[int, int]()
    for i, holders in enumerate(seen.holders):
        rest = members[i] - done
        nearest = [h for h in holders if type(h) is not Local and _collects(h)]
        if not rest or not nearest:
            continue
        holder = nearest[0]
        if id(holder) not in where:
            where[id(holder)] = len(above)
            above.append(holder)
            who.append(set())
            how.append(step_down(holder, heads[i]).text + inner[i])
        who[where[id(holder)]] |= rest
    return above, who, how


def _holder(namer: Namer, place: _Place, ignored: Any, scale: tuple[Any, ...]) -> Holder:
    share, count, total, what, steps = scale
    container = place.container[0]
    more = (round(share * count), round(share * total), 1, what, steps)
    if type(container) is Local:
        if len(place.members) == 1 and steps > 1:  # it refers to that one, whatever the sample
            more = (min(1, count), total // max(1, count), 1, what, steps)
        code = container.code.co_qualname.rpartition("<locals>.")[2]
        path = f"local {container.name!r} of {code}()" if container.name else f"values of {code}()"
        return Holder(path, "variable", None, None, *more)
    kind, capacity = short_name(type(container)), capacity_of(container)
    if place.one is not None and type(container) not in (list, set, collections.deque):
        path = namer.path(place.one[0], ignored)
        return Holder(path, kind, length_of(container), capacity, *more)
    text = namer.path(container, ignored) or "that only C code refers to"
    if not text.startswith("lru_cache"):
        text = f"{kind}{'' if capacity is None else f'(maxlen={capacity})'} {text}"
    inner = f", as {place.inner} of each entry" if place.inner else ""
    return Holder(text + inner, kind, length_of(container), capacity, *more)


def _orphans(
    sample: Own, orphans: dict[int, int], count: int, total: int, what: str, steps: int
) -> Holder:
    """Nobody on the Python heap holds them: autograd, or other C or C++ code."""
    share = len(orphans) / len(sample)
    new, size = round(share * count), round(share * total)
    graph = graphs.keeper([sample[i] for i in orphans])
    if graph is not None:
        return _graph_holder(graph, new, size, what, steps)
    references = sum(orphans.values())
    if references == 0:
        path = "nobody but who asks: they are free when that list goes"
        return Holder(path, "nobody", None, None, new, size, 1, what, steps)
    noun = "reference" if references == 1 else "references"
    path = f"C code ({references:,} {noun} nobody on the Python heap holds)"
    return Holder(path, "C code", None, None, new, size, 1, what, steps)


def _graph_holder(graph: graphs.Graph, new: int, size: int, what: str, steps: int) -> Holder:
    places, many = _collect(graph.roots, Namer(), None)[0], len(graph.roots)
    if many > 1 and places:
        best = max(places, key=lambda place: len(place.members))
        kept = _holder(Namer(), best, None, (1, 0, 0, what, 1)).path
        path = f"autograd graphs of some {graph.nodes // many:,} nodes each kept by {kept}"
    else:
        kept = Namer().path(graph.roots[0]) or "C code"
        path = f"autograd graph of {graph.nodes:,} nodes kept by {kept}"
    return Holder(path, "autograd graph", graph.nodes, None, new, size, 1, what, steps)


def _in_words(sample: Own) -> str:
    torch, names = bridge.loaded(), set()
    for obj in sample:
        if torch is not None and issubclass(type(obj), torch.Tensor):
            names.add(f"{tensor_facts(torch, obj).kind}s")
        else:
            names.add(f"{type_name(type(obj))} objects")
    return names.pop() if len(names) == 1 else "objects"


def _bytes(sample: Own, count: int) -> int:
    """Memory of all the objects, from that of the sample; a shared storage counts once."""
    torch, storages = bridge.loaded(), dict[int, int]()
    for obj in sample:
        if torch is not None and issubclass(type(obj), torch.Tensor):
            facts = tensor_facts(torch, obj)
            if facts.storage:
                storages[facts.storage] = facts.storage_bytes
    return sum(storages.values()) * count // len(sample)


def _joined(holders: list[Holder]) -> list[Holder]:
    """Holders of one name as one: twelve layers have each a list of that name."""
    joined: dict[tuple[str, str], Holder] = {}
    for h in holders:
        old = joined.get((h.path, h.kind))
        if old is None:
            joined[h.path, h.kind] = h
            continue
        length = None if h.length is None or old.length is None else h.length + old.length
        joined[h.path, h.kind] = Holder(
            h.path, h.kind, length, h.capacity, h.new_objects + old.new_objects,
            h.new_bytes + old.new_bytes, old.containers + 1, h.what, h.steps,
        )  # fmt: skip
    return list(joined.values())

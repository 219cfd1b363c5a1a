"""census: one look at the whole Python heap: live tensors by shape, and what grew since."""

from __future__ import annotations

import operator
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.number import whole_number
from memtools._base.size import format_bytes
from memtools._base.text import aligned, shown
from memtools._census.holders import (
    SAMPLE,
    Holder,
    Own,
    TensorFacts,
    TensorKind,
    find_holders,
    graph_holder,
    largest_graph,
    part_of_a_look,
    tensor_facts,
    tensor_kind,
    type_name,
)

_OWN = ("memtools._base.", "memtools._census.", "memtools._core.")  # types of memtools' records
_FRESH = 20_000  # So many new objects of a type are searched for those of one shape.
_ROWS = 12


@part_of_a_look
@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Live tensors of one kind; `bytes` counts each storage once."""

    #: the kind
    kind: TensorKind
    #: tensors
    count: int
    #: bytes of their storages
    bytes: int


@part_of_a_look
@dataclass(frozen=True, slots=True)
class GroupGrowth:
    """The growth of a kind of tensors."""

    #: the kind
    kind: TensorKind
    #: additional tensors
    count: int
    #: additional bytes
    bytes: int


@part_of_a_look
@dataclass(frozen=True, slots=True)
class TypeGrowth:
    """The growth of a type."""

    #: the type, with its module
    type: str
    #: additional objects
    count: int


@part_of_a_look
class _Part(list[Any]):
    """A list of a census."""

    __slots__ = ()


@part_of_a_look
class _Counts(Counter[str]):
    """The number of objects of each type: a class of its own, so that a later census does not take
    it for a counter of the program."""


@part_of_a_look
class Census:
    """What was alive at one moment, without keeping it alive. Takes two to four bytes per object.

    Attributes:
        groups: tensors by type, shape, dtype and device, the largest first.
        types: the number of tracked objects by type, with tensors.
        bytes: memory of all tensors that Python can see; shared storage counts once.
        objects: the number of tracked objects.
        seconds: the duration, in which other Python threads mostly waited.
    """

    __slots__ = (
        "__weakref__",
        "_names",
        "_seen",
        "_types",
        "bytes",
        "groups",
        "objects",
        "seconds",
        "types",
    )

    def __init__(self) -> None:
        begin = time.perf_counter()
        torch = bridge.loaded()
        tensor = None if torch is None else torch.Tensor
        try:
            has_shim = torch is not None and bridge.connect().shim is not None
        except ImportError:  # An older torch is read by its public attributes.
            has_shim = False
        rows, shown, tensors, self._seen, self.objects = _core._census(tensor, has_shim)
        if shown:
            groups = [TensorGroup(tensor_kind(torch, t), count, size) for t, count, size in shown]
        else:
            groups = _grouped(tensor_facts(torch, t) for t in tensors)
        del shown, tensors
        self.groups = _merged(groups)
        self.bytes = sum(map(operator.attrgetter("bytes"), self.groups))
        self.types: Counter[str] = _Counts()
        self._names, self._types = _Part(), _Part()
        for kind, count, _ in rows:
            self._names.append(type_name(kind))
            self._types.append(weakref.ref(kind))
            self.types[self._names[-1]] += count
        self.seconds = time.perf_counter() - begin

    def diff(self, earlier: Census) -> Growth:
        """Return what grew since an `earlier` census. Takes a millisecond."""
        return Growth(earlier, self)

    def __repr__(self) -> str:
        tensors = sum(group.count for group in self.groups)
        return (
            f"Census({tensors:,} tensors of {format_bytes(self.bytes)} in {len(self.groups):,} "
            f"groups, {self.objects:,} objects, {self.seconds * 1e3:.1f} ms)"
        )

    def __str__(self) -> str:
        rows = [(f"{g.count:,}", format_bytes(g.bytes), str(g.kind)) for g in self.groups[:_ROWS]]
        rest = self.groups[_ROWS:]
        if rest:
            count, size = sum(g.count for g in rest), sum(g.bytes for g in rest)
            rows.append((f"{count:,}", format_bytes(size), f"in {len(rest):,} other groups"))
        common = ", ".join(f"{count:,} {shown(name)}" for name, count in self.types.most_common(6))
        return "\n".join([repr(self), *aligned(rows, right=(0, 1)), f"  objects: {common}"])


@part_of_a_look
class Growth:
    """What grew since an earlier census.

    Attributes:
        groups: kinds of tensors with more tensors or bytes, the most bytes first.
        types: other types with more objects, the most first.
        bytes: the change in bytes of all tensors; may be negative.
    """

    __slots__ = ("_looks", "_names", "_seen", "_types", "bytes", "groups", "types")

    def __init__(self, earlier: Census, later: Census) -> None:
        for look in (earlier, later):
            if not isinstance(look, Census):
                raise TypeError(f"a growth needs two censuses, got {type(look).__name__}")
        before = {old.kind: old for old in earlier.groups}
        groups, tensors = list[GroupGrowth](), set[str]()
        for now in later.groups:
            tensors.add(now.kind.type)
            old = before.get(now.kind, TensorGroup(now.kind, 0, 0))
            more, size = now.count - old.count, now.bytes - old.bytes
            if more > 0 or size > 0:
                groups.append(GroupGrowth(now.kind, more, size))
        self.groups = tuple(sorted(groups, key=_most_first))
        types = list[TypeGrowth]()
        own = Counter({"tuple": 1})  # the groups of the earlier census
        for name, more in (later.types - earlier.types - own).items():
            # Tensors are in the groups, and objects of the census do not count.
            if name not in tensors and not name.startswith(_OWN):
                types.append(TypeGrowth(name, more))
        self.types = tuple(sorted(types, key=lambda one: (-one.count, one.type)))
        self.bytes = later.bytes - earlier.bytes
        self._seen, self._names, self._types = earlier._seen, later._names, later._types
        self._looks = earlier.groups, later.groups

    def sample(self, of: GroupGrowth | TypeGrowth | None = None, limit: int = SAMPLE) -> list[Any]:
        """Return live objects of a group that did not exist at the earlier census.

        Takes one pass over the heap. Misses about one new object in 300, and never returns old
        ones.

        Args:
            of: one of `groups` or `types`. None: the one that grew most.
            limit: the most objects to return.
        """
        limit = whole_number("limit", limit)
        if of is None:
            if not (self.groups or self.types):
                return []
            of = self.groups[0] if self.groups else self.types[0]
        if not isinstance(of, (GroupGrowth, TypeGrowth)):
            raise TypeError(
                f"`of` must be one of groups or types of a growth, got {type(of).__name__}"
            )
        name = of.type if isinstance(of, TypeGrowth) else of.kind.type
        torch = bridge.loaded()
        found: list[Any] = Own()  # A plain list would be found as a new list.
        for type_of, reference in zip(self._names, self._types, strict=True):
            kind = reference() if type_of == name else None
            if kind is None or len(found) >= limit:
                continue
            if isinstance(of, TypeGrowth):
                own = self._own_tuples() if kind is tuple else frozenset[int]()
                fresh = _core._fresh(kind, self._seen, limit + len(own))
                found += [obj for obj in fresh if id(obj) not in own]
            else:
                for tensor in _core._fresh(kind, self._seen, _FRESH):
                    if len(found) < limit and tensor_kind(torch, tensor) == of.kind:
                        found.append(tensor)
        del found[limit:]
        return found

    def _own_tuples(self) -> frozenset[int]:
        """The ids of the tuples of both censuses, which are newer than the first one."""
        shapes = (id(group.kind.shape) for groups in self._looks for group in groups)
        return frozenset(map(id, self._looks)).union(shapes)

    def holders(
        self, of: GroupGrowth | TypeGrowth | None = None, *, steps: int = 1
    ) -> list[Holder]:
        """Return the holders of a group's new objects, the one with the most first.

        Takes three to ten passes over the heap, about 50 ms each for 450,000 objects.

        Args:
            of: one of `groups` or `types`. None: the one that grew most, and also the holder of a
                large autograd graph.
            steps: the number of steps between the two censuses, for rates, at least 1.
        """
        steps = whole_number("steps", steps)
        found: list[Holder] = []
        grown = of
        if grown is None and self:
            grown = self.groups[0] if self.groups else self.types[0]
        if grown is not None:
            sample = Own(self.sample(grown))
            size = grown.bytes if isinstance(grown, GroupGrowth) else 0
            found = find_holders(sample, max(grown.count, len(sample)), size, steps)
        if of is None and all(holder.kind != "autograd graph" for holder in found):
            graph = largest_graph()
            found += [] if graph is None else [graph_holder(graph, steps)]
        return found

    def __bool__(self) -> bool:
        return bool(self.groups or self.types)

    def __repr__(self) -> str:
        return (
            f"Growth({self.bytes:+,} bytes of tensors, {len(self.groups)} groups and "
            f"{len(self.types)} types grew)"
        )

    def __str__(self) -> str:
        rows = [(f"{g.count:+,}", _signed(g.bytes), str(g.kind)) for g in self.groups[:_ROWS]]
        types = self.types[: max(3, _ROWS - len(rows))]
        rows += [(f"{t.count:+,}", "", shown(t.type)) for t in types]
        return "\n".join([f"{_signed(self.bytes)} of tensors", *aligned(rows, right=(0, 1))])


def census() -> Census:
    """Count live tensors by type, shape, dtype and device, and objects by type, in one pass.

    Runs none of the program's code and keeps nothing alive. Takes about 0.1 us per tracked object;
    other Python threads wait. Raises MemoryError if there is no memory for its tables.
    """
    return Census()


def _grouped(tensors: Iterable[TensorFacts]) -> list[TensorGroup]:
    """Group tensors as csrc/py/census/census.c does: the largest one over a storage answers for all
    of it."""
    counts: Counter[TensorKind] = Counter()
    claims: dict[int, tuple[int, tuple[int, ...], TensorKind]] = {}
    whole: dict[int, int] = {}
    for facts in tensors:
        counts[facts.kind] += 1
        if facts.storage == 0:
            continue
        whole[facts.storage] = max(whole.get(facts.storage, 0), facts.storage_bytes)
        old = claims.get(facts.storage)
        if old is None or (-facts.bytes, facts.key) < (-old[0], old[1]):
            claims[facts.storage] = facts.bytes, facts.key, facts.kind
    sizes: Counter[TensorKind] = Counter()
    for storage, (_, _, kind) in claims.items():
        sizes[kind] += whole[storage]
    return [TensorGroup(kind, count, sizes[kind]) for kind, count in counts.items()]


def _merged(groups: list[TensorGroup]) -> tuple[TensorGroup, ...]:
    """Join groups of one name, which different classes may share; the largest first."""
    merged: dict[TensorKind, TensorGroup] = {}
    for group in groups:
        old = merged.get(group.kind, TensorGroup(group.kind, 0, 0))
        total = TensorGroup(group.kind, old.count + group.count, old.bytes + group.bytes)
        merged[group.kind] = total
    return tuple(sorted(merged.values(), key=_most_first))


def _most_first(group: TensorGroup | GroupGrowth) -> tuple[int, int, str]:
    return -group.bytes, -group.count, str(group.kind)


def _signed(size: int) -> str:
    return ("+" if size >= 0 else "") + format_bytes(size)

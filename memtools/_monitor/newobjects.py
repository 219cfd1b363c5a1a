"""Objects that become more while no walk of the heap finds who holds them.

    begin() ── Census ──┐
                        ├─ diff ─► types with more objects ─► who refers to a sample of them?
    found() ── Census ──┘                                     nobody but C code, or a container

An extension may keep Python objects in memory of its own: then the memory that grows is Python's,
though no Python object holds it.
"""

from __future__ import annotations

import gc
import types
import weakref
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from memtools._base.sentences import of_new
from memtools._census.census import Census, Growth, TypeGrowth
from memtools._census.holders import Own, referrers, type_name

#: Objects of these types come with modules that are imported, or with functions that run.
_OF_MODULES = frozenset(
    type_name(kind)
    for kind in (
        *(type, property, classmethod, staticmethod, weakref.ref, types.FunctionType),
        *(types.BuiltinFunctionType, types.MemberDescriptorType, types.GetSetDescriptorType),
        types.CellType,
        *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    )
)
_LEAST_A_STEP = 1 / 8  # Objects of a type that become more by fewer are left out.
_STAYED = 0.5  # This share of them are there, at least, if they stay.
#: So many types are looked at, and so many new objects of each: lists of the look are among these.
_TYPES, _SAMPLE = 3, 64
_DEPTH, _PARTS = 4, 4096  # An object is weighed with so many parts, to this depth below it.


@dataclass(frozen=True)
class NewObjects:
    """Objects of one type that become more.

    Attributes:
        what: such as `2 new list objects a step, which C code keeps`.
        rate_bytes: about how many bytes a step they take, with what is below them.
        kept_by_c: whether no Python object refers to them, and C code does.
    """

    what: str
    rate_bytes: float
    kept_by_c: bool


class Counts:
    """The objects of the collector at one step, for a comparison with those of a later one."""

    def __init__(self, step: int) -> None:
        #: the step of these counts
        self.step = step
        self._census = Census()

    def found(self, step: int, least: float, since: int) -> NewObjects | None:
        """What has become more since then: objects that only C code keeps, or else those that take
        at least so many bytes a step. None if there are none. Takes a pass over the heap for the
        counts, one for the new objects of each of three types at most, and one for who refers to
        them; three to ten more where a holder is looked for.

        Args:
            step: the step now, after that of these counts.
            least: bytes a step.
            since: the step from which on memory has grown so. Where fewer objects of a type are
                there than have become more since then, at the pace of now, they come and go: calls
                that are running, for example.
        """
        steps, now = step - self.step, Census()
        growth, grown = now.diff(self._census), list[tuple[TypeGrowth, Own, float]]()
        for one in growth.types:
            if one.count < _LEAST_A_STEP * steps or len(grown) == _TYPES:
                break  # The types come in the order of their counts.
            if one.type not in _OF_MODULES and (sample := Own(growth.sample(one, _SAMPLE))):
                grown.append((one, sample, _rate(one, sample, steps)))
        expected = _STAYED * (step - since) / steps
        grown = [each for each in grown if now.types[each[0].type] >= expected * each[0].count]
        for one, sample, rate in grown:
            if _kept_by_c(sample):
                return NewObjects(f"{_new(one, steps)}, which C code keeps", rate, True)
        for one, _, rate in grown:
            if rate >= least:
                return NewObjects(_new(one, steps) + _holder(growth, one), rate, False)
        return None


def _new(one: TypeGrowth, steps: int) -> str:
    return of_new(one.count / steps, f"{one.type} objects", "step")


def _rate(one: TypeGrowth, sample: Own, steps: int) -> float:
    """Bytes a step of the new objects of a type, by some of them: by the median, because what they
    share is weighed with the first of them that reaches it."""
    seen, weights = set[int](), list[int]()
    for obj in sample:
        weights.append(_weight(obj, _DEPTH, seen))
        if len(seen) > _PARTS:
            break
    each = median_low(weights) if len(weights) > 1 else weights[0] / len(sample)
    return each * one.count / steps


def _holder(growth: Growth, one: TypeGrowth) -> str:
    holders = growth.holders(one)
    is_named = holders and holders[0].kind not in ("nobody", "C code")
    return f", held by {holders[0].path}" if is_named else ""


def _kept_by_c(sample: Own) -> bool:
    """Whether C code keeps most of these objects, and no Python object does."""
    above = referrers(sample)
    pairs = zip(above.holders, above.unaccounted, strict=True)
    orphans = sum(1 for holders, references in pairs if not holders and references > 0)
    return 2 * orphans > len(sample)


def _weight(obj: Any, depth: int, seen: set[int]) -> int:
    """The bytes of an object and of what is below it, by the methods of built-in types."""
    kind = type(obj)
    if id(obj) in seen or len(seen) > _PARTS or issubclass(kind, _SHARED):
        return 0
    seen.add(id(obj))
    sizer = next(base for base in type.__dict__["__mro__"].__get__(kind) if base in _SIZED)
    size = int(sizer.__sizeof__(obj)) + (16 if gc.is_tracked(obj) else 0)
    if depth > 0:
        size += sum(_weight(part, depth - 1, seen) for part in gc.get_referents(obj))
    return size


#: what a program has once, and many objects refer to
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_SIZED = frozenset((list, dict, set, tuple, str, bytes, bytearray, int, float, object))

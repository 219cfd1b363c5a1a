"""A garbage collection that can count and name the tensors in the cycles that it frees.

    collect(inspect=True)
      DEBUG_SAVEALL on ── gc.collect() ── flags back ── look at what was put into gc.garbage
                                                        ── take it out again ── gc.collect()

The first collection finds the garbage and runs its finalizers and the callbacks of weak references,
as gc.collect() does, but keeps the objects. The second collection frees them. Python runs a
finalizer once. What finalizers release, such as the variables of an unfinished generator, is free
before the look and is not counted. gc.callbacks run twice. Objects that cannot be freed stay in
gc.garbage.

The collector does not know a tensor that only C++ holds, such as a saved tensor of autograd: it is
freed with its graph and not counted. Bytes are those of the storages of the tensors, each counted
once; a storage that a living tensor shares stays.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from memtools._base import torch as bridge
from memtools._base.classes import is_heap_type

_MOST_KINDS = 3  # Examples show so many kinds of tensors,
_MOST_NAMES = 3  # and so many names of objects beside them.

_inspectors: dict[object, None] = {}  # The first one inspects.


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection found.

    Attributes:
        objects: unreachable objects, as gc.collect() returns it.
        tensors: the number of tensors among them; None without an inspection.
        tensor_bytes: the memory of their storages; None without an inspection.
        examples: up to three kinds of these tensors, the one with the most bytes first, each with
            the most frequent classes and functions of the garbage around them.
        ms: duration in milliseconds, all of it.
    """

    objects: int
    tensors: int | None
    tensor_bytes: int | None
    examples: tuple[str, ...]
    ms: float


class _Look(NamedTuple):
    tensors: int = 0
    bytes: int = 0
    examples: tuple[str, ...] = ()


def collect(generation: int = 2, inspect: bool = False) -> Collected:
    """Collect garbage; with `inspect` count the tensors in it and name the objects around them.

    Without `inspect` it is gc.collect(generation). With it the garbage is collected twice, the
    second time always in full, which takes two to three times as long, and 5 us more for each
    tensor in the garbage. Of the program's code only finalizers and callbacks run, and no reference
    to the garbage stays.

    While another thread inspects, or in a finalizer that an inspection runs, there is no inspection
    (`tensors` is None). If the program has set gc.DEBUG_SAVEALL, the garbage stays in gc.garbage.
    Raises ValueError if `generation` is not 0, 1 or 2.
    """
    if type(generation) is not int or not 0 <= generation <= 2:
        raise ValueError(f"generation must be 0, 1 or 2, got {generation!r}; 2 collects all")
    start = time.perf_counter()
    found = _alone(generation) if inspect else None
    objects, look = (gc.collect(generation), None) if found is None else found
    ms = 1e3 * (time.perf_counter() - start)
    if look is None:
        return Collected(objects, None, None, (), ms)
    return Collected(objects, *look, ms)


def _alone(generation: int) -> tuple[int, _Look] | None:
    """Inspect, unless another inspection runs; then None. An interrupt could come between taking a
    lock and noting that it was taken, so this is not a lock."""
    me = object()
    try:
        _inspectors[me] = None
        first, *_ = _inspectors
        if first is not me:
            return None
        return _inspected(generation)
    finally:
        _inspectors.pop(me, None)


def _inspected(generation: int) -> tuple[int, _Look]:
    """Collect twice. An interrupt may come after any call, so `finally` restores the flags and then
    the garbage."""
    flags, garbage = gc.get_debug(), gc.garbage
    mark = len(garbage)
    try:
        try:
            gc.set_debug(flags | gc.DEBUG_SAVEALL)
            objects = gc.collect(generation)
        finally:
            gc.set_debug(flags)
        # An earlier import would allocate objects, and so make Python collect the garbage unseen.
        from memtools._census.holders import Own

        return objects, _look(Own(garbage[mark:]))
    finally:
        # Collections of other threads may have put objects there while the flag was set. If the
        # program has set the flag itself, the second collection puts the garbage there again.
        del garbage[mark:]
        gc.collect()


def _look(garbage: list[Any]) -> _Look:
    from memtools._census.census import _grouped, _merged
    from memtools._census.holders import tensor_facts

    torch = bridge.loaded()
    try:
        kinds = {id(kind): kind for kind in map(type, garbage)}
        wanted = {key for key, kind in kinds.items() if torch and issubclass(kind, torch.Tensor)}
        if not wanted:
            return _Look()
        facts = [tensor_facts(torch, obj) for obj in garbage if id(type(obj)) in wanted]
        groups = _merged(_grouped(facts))
        beside = _names(garbage, {key: kinds[key] for key in kinds.keys() - wanted})
        examples = tuple(f"{group.kind}{beside}" for group in groups[:_MOST_KINDS])
        return _Look(len(facts), sum(group.bytes for group in groups), examples)
    finally:
        garbage.clear()  # a traceback may keep this frame


def _names(garbage: list[Any], kinds: dict[int, type]) -> str:
    """`, beside Trainer, Hook`: the classes that Python code made and the functions that ran, the
    most frequent first; without these, other types. There are no counts, so that a loop that leaks
    has the same text each time."""
    from memtools._census.holders import function_name, short_name

    found: Counter[str] = Counter()
    classes = {key for key, kind in kinds.items() if issubclass(kind, type)}
    for key, count in Counter(id(type(obj)) for obj in garbage).items():
        if key in kinds and key not in classes and is_heap_type(kinds[key]):
            found[short_name(kinds[key])] += count
    if not kinds.keys().isdisjoint({id(FrameType), id(FunctionType), *classes}):
        for obj in garbage:
            if type(obj) is FrameType:
                found[f"frame of {function_name(obj.f_code)}"] += 1
            elif type(obj) is FunctionType:
                found[f"function {function_name(obj)}"] += 1
            elif id(type(obj)) in classes:
                found[f"class {short_name(obj)}"] += 1
    if not found:
        found.update(short_name(kind) for kind in kinds.values())
    names = sorted(found, key=lambda name: (-found[name], name))[:_MOST_NAMES]
    return f", with {', '.join(names)}" if names else ""


class Inspector:
    """Decides which collections are worth an inspection, so that ordinary ones cost nothing more.

    After a collection that found much, the next three are inspected, and then every tenth as long
    as collections find much. After ten in a row that found little it begins again.
    """

    __slots__ = ("_close", "_much", "_quiet", "_since")

    _CLOSE, _EVERY = 3, 10
    _OBJECTS, _GAIN = 1_000, 0.01

    def __init__(self) -> None:
        self._close, self._since, self._quiet, self._much = self._CLOSE, 0, 0, False

    def due(self) -> bool:
        """Whether to inspect the next collection. Takes some 0.1 us."""
        return self._much and (self._close > 0 or self._since + 1 >= self._EVERY)

    def saw(self, collected: Collected, gain: float = 0.0, device_freed: int = 0) -> None:
        """Note what a collection has found, inspected or not.

        Args:
            collected: the result of the collection.
            gain: the share of all memory that it has freed; 0.01 is much.
            device_freed: the bytes that it has freed on devices; any number is much.
        """
        if collected.tensors is None:
            self._since += 1
        else:
            self._since, self._close = 0, max(0, self._close - 1)
        self._much = collected.objects >= self._OBJECTS or gain >= self._GAIN or device_freed > 0
        self._quiet = 0 if self._much else self._quiet + 1
        if self._quiet >= self._EVERY:
            self._close = self._CLOSE

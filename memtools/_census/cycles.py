"""A full collection that can say which tensors hung on the cycles that it freed.

    collect(inspect=True)
      DEBUG_SAVEALL on ── gc.collect() ── flags back ── look at what was put into gc.garbage
                                                        ── take it out again ── gc.collect()

What differs from gc.collect(): the first collection finds the garbage, runs its finalizers and
weak references' callbacks and lets their referents go, as always, but its last step keeps the
objects instead of freeing them; the second frees them. A finalizer runs once: Python marks the
object. So what finalizers let go of (the variables of a generator that was not finished, say) is
free before the look and is not counted. gc.callbacks run twice. Objects that nothing can free stay
in gc.garbage as always.

A tensor that only C++ holds (autograd's saved tensors) is no object of the collector: it is freed
with its graph and not counted. Bytes are those of the storages that the tensors show, each counted
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

_MOST_KINDS = 3  # of tensors that are shown
_MOST_NAMES = 3  # of the objects beside them
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_FLAGS = type.__dict__["__flags__"].__get__

_inspectors: dict[object, None] = {}  # who is inspecting: the first one


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection found.

    Attributes:
        objects: unreachable objects, as gc.collect() returns it.
        tensors: tensors among them; None where they were not looked for.
        tensor_bytes: memory of their storages; None where they were not looked for.
        examples: up to three kinds of these tensors, the one with the most bytes first, each with
            the most frequent classes and functions of the garbage that they lay in.
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
    """Collect garbage; with `inspect` count the tensors in it and name what they lay among.

    Without `inspect` it is gc.collect(generation). With it the garbage is collected twice, the
    second time always in full: two to three times as long, and 5 us more for each tensor in the
    garbage. Nothing of the program's code runs but finalizers and callbacks, and no reference to
    the garbage stays.

    While another thread inspects, or in a finalizer that an inspection runs, nothing is inspected
    (`tensors` is None). Where the program has set gc.DEBUG_SAVEALL itself, the garbage stays in
    gc.garbage, as it wants. Raises ValueError for another generation than 0, 1, 2.
    """
    if type(generation) is not int or not 0 <= generation <= 2:
        raise ValueError(f"generation is 0, 1 or 2, got {generation!r}; 2 collects all")
    start = time.perf_counter()
    found = _alone(generation) if inspect else None
    objects, look = (gc.collect(generation), None) if found is None else found
    ms = 1e3 * (time.perf_counter() - start)
    if look is None:
        return Collected(objects, None, None, (), ms)
    return Collected(objects, *look, ms)


def _alone(generation: int) -> tuple[int, _Look] | None:
    """One inspection at a time; None where there is one. A lock would do, but for an interrupt
    between its being taken and our knowing it."""
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
    """An interrupt may come after any call: `finally` sees to the flags, then to the garbage."""
    flags, garbage = gc.get_debug(), gc.garbage
    mark = len(garbage)
    try:
        try:
            gc.set_debug(flags | gc.DEBUG_SAVEALL)
            objects = gc.collect(generation)
        finally:
            gc.set_debug(flags)
        # Before, what an import allocates would make Python collect the garbage, which nobody sees.
        from memtools._census.holders import Own

        return objects, _look(Own(garbage[mark:]))
    finally:
        # What other threads' collections put there while the flag was set is there too.
        # Where the program has set the flag itself, the second collection puts it there again.
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
    """`, beside Trainer, Hook`: the classes that Python code made and the functions that ran,
    the most frequent first; without such, what else is there. No counts: a loop that leaks says
    the same each time."""
    from memtools._census.holders import function_name, short_name

    found: Counter[str] = Counter()
    classes = {key for key, kind in kinds.items() if issubclass(kind, type)}
    for key, count in Counter(id(type(obj)) for obj in garbage).items():
        if key in kinds and key not in classes and _FLAGS(kinds[key]) & _HEAP_TYPE:
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
    return f", beside {', '.join(names)}" if names else ""


class Inspector:
    """Says which collections are worth an inspection, so that ordinary ones cost nothing more.

    After a collection that found much, the next three are inspected; then every tenth, as long as
    collections find much. Ten in a row that find little, and the next three are free again.
    """

    __slots__ = ("_close", "_much", "_quiet", "_since")

    _CLOSE, _EVERY = 3, 10
    _OBJECTS, _GAIN = 1_000, 0.01

    def __init__(self) -> None:
        self._close, self._since, self._quiet, self._much = self._CLOSE, 0, 0, False

    def due(self) -> bool:
        """Whether to inspect the collection that comes now. Takes some 0.1 us."""
        return self._much and (self._close > 0 or self._since + 1 >= self._EVERY)

    def saw(self, collected: Collected, gain: float = 0.0, device_freed: int = 0) -> None:
        """Tell what each collection found, whether it was inspected, `gain` as a share of all
        memory (0.01 is much) and the bytes it freed on the devices (any is much)."""
        if collected.tensors is None:
            self._since += 1
        else:
            self._since, self._close = 0, max(0, self._close - 1)
        self._much = collected.objects >= self._OBJECTS or gain >= self._GAIN or device_freed > 0
        self._quiet = 0 if self._much else self._quiet + 1
        if self._quiet >= self._EVERY:
            self._close = self._CLOSE

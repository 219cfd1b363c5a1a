"""A full collection that can say which tensors hung on the cycles that it freed.

    collect(inspect=True)
      DEBUG_SAVEALL on ── gc.collect() ── flags back ── look at what was put into gc.garbage
                                                        ── take it out again ── gc.collect()

What differs from gc.collect(): the first collection finds the garbage, runs its finalizers and
weak references' callbacks and lets their referents go, as ever, but its last step keeps the objects
instead of freeing them; the second frees them. A finalizer runs once: Python marks the object. So
what finalizers let go of (the variables of a generator that was not finished, say) is free before
the look and is not counted. gc.callbacks run twice. Objects that nothing can free stay in
gc.garbage as ever.

A tensor that only C++ holds (autograd's saved tensors) is no object of the collector: it is freed
with its graph and not counted. Bytes are those of the storages that the tensors show, each counted
once; a storage that a living tensor shares stays.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._census.census import _grouped, _merged
from memtools._census.holders import function_name, step_down
from memtools._census.objects import Own, TensorFacts, TensorKind, short_name, tensor_facts

_EXAMPLES = 3
_NEAR = 20_000  # objects that paths are searched in, 2 us each
_LOOKED_UP = 64  # objects above a tensor that are tried as members of a cycle
_SHOWN = 8  # steps of a path
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE

_inspectors: dict[object, None] = {}  # who is inspecting: the first one


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection found.

    Attributes:
        objects: unreachable objects, as gc.collect() returns it.
        tensors: tensors among them; None where they were not looked for.
        tensor_bytes: memory of their storages; None where they were not looked for.
        examples: up to three paths from a cycle to a tensor, of different kinds of tensors, the
            kind with the most bytes first.
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
    """Collect garbage; with `inspect` count the tensors in it and show what kept them.

    Without `inspect` it is gc.collect(generation). With it the garbage is collected twice, the
    second time always in full: two to three times as long, and 5 us more for each tensor in the
    garbage and up to 0.1 s to find the paths. Nothing of the program's code runs but finalizers and
    callbacks, and no reference to the garbage stays.

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
        return objects, _look(Own(garbage[mark:]))
    finally:
        # What other threads' collections put there while the flag was set is there too.
        # Where the program has set the flag itself, the second collection puts it there again.
        del garbage[mark:]
        gc.collect()


def _look(garbage: Own) -> _Look:
    torch, first = bridge.loaded(), dict[TensorKind, int]()
    try:
        kinds = {id(kind): kind for kind in map(type, garbage)}
        wanted = {key for key, kind in kinds.items() if torch and issubclass(kind, torch.Tensor)}
        if not wanted:
            return _Look()
        facts = list[TensorFacts]()
        for i in range(len(garbage)):
            if id(type(garbage[i])) in wanted:
                facts.append(tensor_facts(torch, garbage[i]))
                first.setdefault(facts[-1].kind, i)
        groups = _merged(_grouped(facts))
        examples = _examples(garbage, [(first[g.kind], g.kind) for g in groups[:_EXAMPLES]])
        return _Look(len(facts), sum(group.bytes for group in groups), examples)
    finally:
        garbage.clear()  # a traceback may keep this frame


def _examples(garbage: Own, tensors: list[tuple[int, TensorKind]]) -> tuple[str, ...]:
    """Of much garbage only what lies near: objects lie as they were made, a cycle together."""
    found, cycles = [], None
    for i, kind in tensors:
        begin = max(0, min(i - _NEAR // 2, len(garbage) - _NEAR))
        if cycles is None or cycles.begin != begin:
            cycles = _Cycles(garbage, begin)
        found.append(cycles.example(i, kind))
    return tuple(found)


class _Cycles:
    """Who refers to whom among the garbage, _NEAR objects of it; they are numbers here."""

    def __init__(self, garbage: Own, begin: int) -> None:
        self.garbage, self.begin = garbage, begin
        self.holders: dict[int, list[int]] = {}
        near = range(begin, min(begin + _NEAR, len(garbage)))
        number = {id(garbage[i]): i for i in near}
        for i in near:
            for held in gc.get_referents(garbage[i]):
                if (n := number.get(id(held))) is not None:
                    self.holders.setdefault(n, []).append(i)

    def example(self, tensor: int, kind: TensorKind) -> str:
        """`Trainer -> dict 'metrics' -> list -> Tensor [256, 256] float32, cycle Trainer -> ...`.

        No counts: a loop that leaks says the same each time."""
        path, cycle = self._to(tensor)
        text = f"{self._in_words(path)} {_rest(kind)}"
        return f"{text}, cycle {self._in_words(cycle)}" if cycle else text

    def _to(self, tensor: int) -> tuple[list[int], list[int]]:
        """From an object in the nearest cycle down to the tensor, and once round that cycle."""
        below, todo = {tensor: tensor}, deque([tensor])
        last = tensor
        for _ in range(_LOOKED_UP):
            if not todo:
                break
            last = todo.popleft()
            cycle = self._round(last)
            if cycle:
                turned = self._turned(cycle, tensor)
                into = turned[: turned.index(last)]
                return [*into, *_down(below, last)], [*turned, turned[0]]
            for holder in self.holders.get(last, ()):
                if holder not in below:
                    below[holder] = last
                    todo.append(holder)
        return _down(below, last), []

    def _round(self, n: int) -> list[int]:
        """The shortest cycle from an object back to itself, from holder to held; [] without one."""
        below, todo = dict[int, int](), deque([n])
        while todo:
            held = todo.popleft()
            for holder in self.holders.get(held, ()):
                if holder == n:
                    return [n, *_down(below, held)][:-1]
                if holder not in below:
                    below[holder] = held
                    todo.append(holder)
        return []

    def _turned(self, cycle: list[int], tensor: int) -> list[int]:
        """The cycle from the member on that a reader knows by its class, the nearest above the
        first one that is no tensor; as it is without one."""
        for i in (0, *range(len(cycle) - 1, 0, -1)):
            if cycle[i] != tensor and _named(self.garbage[cycle[i]]):
                return [*cycle[i:], *cycle[:i]]
        return cycle

    def _in_words(self, path: list[int]) -> str:
        words = [_name(self.garbage[path[0]])]
        for upper, n in itertools.pairwise(path):
            holder, obj = self.garbage[upper], self.garbage[n]
            if type(obj) is CellType or _core._instance_dict(holder) is obj:
                continue  # says nothing: its key does
            key = _key(holder, obj)
            words.append(_name(obj) if key is None else f"{_name(obj)} {key!r}")
        if len(words) > _SHOWN:
            half = _SHOWN // 2
            words[half:-half] = [f"({len(words) - _SHOWN} more)"]
        return " -> ".join(words)


def _down(below: dict[int, int], n: int) -> list[int]:
    path = [n]
    while n in below and below[n] != n:
        n = below[n]
        path.append(n)
    return path


def _named(obj: Any) -> bool:
    """Whether a reader knows it by name: a class, or an instance of one that Python code made."""
    flags = type.__dict__["__flags__"].__get__(type(obj))
    return bool(flags & _HEAP_TYPE) or issubclass(type(obj), type)


def _name(obj: Any) -> str:
    if type(obj) is FrameType:
        return f"frame of {function_name(obj.f_code)}"
    if type(obj) is FunctionType:
        return f"function {function_name(obj)}"
    if issubclass(type(obj), type):
        return f"class {short_name(obj)}"
    return short_name(type(obj))


def _key(holder: Any, obj: Any) -> str | None:
    """The name by which it is held: an attribute, a key, a variable."""
    if type(holder) is FrameType:
        return _core._frame_place(holder, obj)
    step = step_down(holder, obj)
    key = step.key if type(step.key) is str else step.text[1:]
    says = len(key) <= 40 and (type(step.key) is str or step.text.startswith("."))
    return key if says and not key.startswith(("__", "tb_")) else None


def _rest(kind: TensorKind) -> str:
    """`[256, 256] float32`: what the kind says beside the class."""
    name = "tensor" if kind.type == "torch.Tensor" else kind.type.rpartition(".")[2]
    return str(kind).replace(f" {name}", "", 1)


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

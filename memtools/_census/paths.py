"""How a person would call the place where an object lies: `MoEBlock.gate_history`.

From an object upwards, one pass over the heap a level: of the referrers the one that says most is
taken, until it is a name that a reader finds in the program: an attribute of an instance, class or
module, a variable, a function's closure or default. Nothing of the program's code runs: containers
are read by identity, and classes are never asked.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memtools import _core
from memtools._census.facts import short_name

LEVELS = 8
_HERE = str(Path(__file__).parents[1])
_LRU = type(functools.lru_cache(lambda: None))
_FRAMES = {
    types.GeneratorType: ("gi_frame", "generator"),
    types.CoroutineType: ("cr_frame", "coroutine"),
    types.AsyncGeneratorType: ("ag_frame", "async generator"),
}
# Classes whose own attributes say nothing: the name is where the instance lies.
_WRAPPERS = ("collections", "weakref", "queue", "_weakrefset", "asyncio.queues", "functools")
_MODULE_PARTS = ("_modules", "_buffers", "_parameters")


class Own(list[Any]):
    """A list of this package's own: not a holder of anything."""

    __slots__ = ()


class Local(NamedTuple):
    """A variable of a running function."""

    code: types.CodeType
    name: str | None


class Step(NamedTuple):
    """One step down from an owner to what it holds: `.name`, `[key]`, or "" for neither."""

    text: str
    key: Any = None


class Seen(NamedTuple):
    """Who refers to each of some objects, as far as they are the program's."""

    holders: list[Own]  # of objects, or Locals
    unaccounted: list[int]


def referrers(objects: Sequence[Any], ignored: Any = None) -> Seen:
    """One pass over the heap; `ignored` is a container that does not count."""
    targets = list(objects)
    edges, frames, unaccounted = _core._referrers(targets)
    holders = [Own() for _ in targets]
    for container, i in edges:
        if type(container) is not Own and container is not ignored:
            holders[i].append(container)
    for code, name, i in frames:
        if not code.co_filename.startswith(_HERE):
            holders[i].append(Local(code, name))
    return Seen(holders, unaccounted)


class Namer:
    """Names places; keeps the modules' namespaces while it does."""

    def __init__(self) -> None:
        self.modules = Own()
        self._names: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if issubclass(type(module), types.ModuleType):
                space = _core._instance_dict(module)
                self.modules.append(space)
                self._names.setdefault(id(space), name)  # __main__ may have a second one

    def is_namespace(self, obj: Any) -> bool:
        """Whether the object is the namespace of a module."""
        return type(obj) is dict and id(obj) in self._names

    def path(self, obj: Any, ignored: Any = None) -> str:
        """`Trainer.metrics['loss']`; "" when nobody on the Python heap refers to the object."""
        if type(obj) is _LRU:
            return _cached(obj)
        steps: list[Step] = []
        head = Own([obj])
        for _ in range(LEVELS):
            name = self._namespace(head[0], steps)
            if name is None:
                found = referrers(head, ignored).holders[0]
                name, head[0] = self._step(head[0], found, steps)
            if name is not None:
                return name
        return "".join([f"a {short_name(type(head[0]))}", *(step.text for step in steps)])

    def _namespace(self, obj: Any, steps: list[Step]) -> str | None:
        """The name, when the object is the namespace of a module."""
        if not self.is_namespace(obj):
            return None
        module = self._names[id(obj)]
        if not steps or type(steps[0].key) is not str:
            return f"attributes of module {module}"
        return f"module attribute {module}.{_dotted(steps)}"

    def _step(self, obj: Any, found: Own, steps: list[Step]) -> tuple[str | None, Any]:
        """(the whole name, object) or (None, the next one upwards), with a step added."""
        ranked = sorted(found, key=lambda holder: self._rank(obj, holder))
        if not ranked:
            return "".join(["", *(step.text for step in steps)]).lstrip("."), obj
        best = ranked[0]
        name = _final(obj, best, steps)
        if name is None:
            steps.insert(0, step_down(best, obj))
        return name, best

    def _rank(self, obj: Any, holder: Any) -> int:
        """What says more comes first."""
        kind = type(holder)
        if kind is Local:
            return 5 if holder.name else 9
        if id(holder) in self._names:
            return 0
        if issubclass(kind, (type, types.ModuleType)):
            return 1
        if kind is types.FunctionType or kind is _LRU:
            return 3 if type(obj) is not types.CellType else 1
        if kind in _FRAMES or kind is types.FrameType:
            return 6
        if issubclass(kind, (dict, list, collections.deque, set, tuple, frozenset)):
            return 4
        return 2 if _attribute(holder, obj) is not None else 7


def step_down(holder: Any, obj: Any) -> Step:
    """How a container gets at what it holds."""
    kind = type(holder)
    if issubclass(kind, (dict, list, tuple)):
        key = _core._place(holder, obj)
        return Step(f"[{_key_text(key)}]", key)
    if issubclass(kind, (collections.deque, set, frozenset)):
        return Step("[...]")
    if kind in (types.CellType, types.MethodType) or _is_wrapper(holder):
        return Step("")
    name = _attribute(holder, obj)
    return Step("" if name is None else f".{name}")


def _key_text(key: Any) -> str:
    if type(key) in (str, int, bool, float, bytes) and len(repr(key)) <= 40:
        return repr(key)
    return short_name(type(key)) if key is not None else "..."


def _dotted(steps: list[Step]) -> str:
    """The first step as an attribute of a namespace, then the others."""
    return f"{steps[0].key}{_after(steps)}"


def _attribute(holder: Any, obj: Any) -> str | None:
    """By which attribute an instance holds an object, or "" when it is its __dict__."""
    space = _core._instance_dict(holder)
    if space is not None:
        if space is obj:
            return ""
        name = _core._place(space, obj)
        if type(name) is str:
            return name
    for base in type.__dict__["__mro__"].__get__(type(holder)):
        for name, member in base.__dict__.items():
            if type(member) is types.MemberDescriptorType and _slot(member, holder) is obj:
                return str(name)
    return None


def _slot(member: types.MemberDescriptorType, holder: Any) -> Any:
    try:
        return member.__get__(holder)
    except AttributeError:  # not set
        return _slot


def _is_wrapper(holder: Any) -> bool:
    module = type.__dict__["__module__"].__get__(type(holder))
    return type(module) is str and module in _WRAPPERS


def _final(obj: Any, holder: Any, steps: list[Step]) -> str | None:
    """The whole name where the holder is one that a reader finds in the program, else None."""
    kind, rest = type(holder), "".join(step.text for step in steps)
    if kind is Local:
        name = f"local {holder.name!r}" if holder.name else "a value in use"
        return f"{name}{rest} of {function_name(holder.code)}"
    if kind is types.FunctionType:
        return _of_function(obj, holder, steps)
    if kind is _LRU:
        return f"{_cached(holder)}{rest}"
    if kind in _FRAMES:
        attribute, what = _FRAMES[kind]
        frame = getattr(holder, attribute)
        variable = None if frame is None else _core._frame_place(frame, obj)
        return f"{_variable(variable)}{rest} of {what} {function_name(holder)}"
    if kind is types.FrameType:
        variable = _core._frame_place(holder, obj)
        return f"{_variable(variable)}{rest} of {function_name(holder.f_code)}, kept by a traceback"
    if issubclass(kind, type):
        return _of_namespace(f"class attribute {short_name(holder)}", obj, steps)
    if issubclass(kind, (dict, list, tuple, set, frozenset, collections.deque)):
        return None
    return _of_instance(obj, holder, steps, rest)


def _cached(cache: Any) -> str:
    return f"lru_cache of {function_name(cache.__wrapped__)}"


def _variable(name: str | None) -> str:
    return f"local {name!r}" if name else "a value in use"


def function_name(owner: Any) -> str:
    """`train()`, of a function, a code object or a generator; whatever it has."""
    code = owner if type(owner) is types.CodeType else getattr(owner, "__code__", owner)
    name = getattr(code, "co_qualname", None) or getattr(owner, "__qualname__", "a function")
    return f"{str(name).rpartition('<locals>.')[2]}()"


def _of_namespace(owner: str, obj: Any, steps: list[Step]) -> str | None:
    if type(obj) is not dict:  # a base class, say
        return None
    if not steps or type(steps[0].key) is not str:
        return owner.replace("class attribute", "attributes of class")
    return f"{owner}.{_dotted(steps)}"


def _of_function(obj: Any, function: types.FunctionType, steps: list[Step]) -> str:
    name, rest = function_name(function), "".join(step.text for step in steps)
    if obj is _core._instance_dict(function):
        return f"attribute {name[:-2]}.{_dotted(steps)}" if steps else f"attributes of {name}"
    if (argument := _defaulted(function, obj, steps)) is not None:
        return f"default argument {argument!r}{_after(steps)} of {name}"
    if obj is function.__closure__ and steps and type(steps[0].key) is int:
        variable = function.__code__.co_freevars[steps[0].key]
        return f"{variable!r}{_after(steps)} in closure of {name}"
    return f"{rest.lstrip('.')} of function {name}".lstrip()


def _defaulted(function: types.FunctionType, obj: Any, steps: list[Step]) -> str | None:
    """The argument whose default lies at the first step of a function's defaults."""
    defaults, code = function.__defaults__, function.__code__
    if not steps or obj is None:
        return None
    if obj is defaults and defaults is not None and type(steps[0].key) is int:
        first = code.co_argcount - len(defaults)
        return code.co_varnames[first + steps[0].key]
    return str(steps[0].key) if obj is function.__kwdefaults__ else None


def _after(steps: list[Step]) -> str:
    return "".join(step.text for step in steps[1:])


def _of_instance(obj: Any, holder: Any, steps: list[Step], rest: str) -> str | None:
    """`MoEBlock.gate_history`. None for wrappers and for C objects without attributes."""
    if _is_wrapper(holder) or type(holder) is types.CellType:
        return None
    if issubclass(type(holder), threading.local):
        names = [step.key for step in steps if type(step.key) is str]
        return f"thread-local attribute {names[-1]}" if names else "thread-local attributes"
    name = _attribute(holder, obj)
    if name is None:
        return None
    owner = short_name(type(holder))
    if name in _MODULE_PARTS and steps and type(steps[0].key) is str:
        return f"{owner}.{_dotted(steps)}"  # of torch.nn.Module: how it is written in the program
    if name:
        return f"{owner}.{name}{rest}"
    if not steps or type(steps[0].key) is not str:
        return f"attributes of {owner}"
    if steps[0].key in _MODULE_PARTS and len(steps) > 1 and type(steps[1].key) is str:
        return f"{owner}.{_dotted(steps[1:])}"
    return f"{owner}.{_dotted(steps)}"


def capacity_of(container: Any) -> int | None:
    """How many objects a container will hold at most, where it has such a bound."""
    kind = type(container)
    if issubclass(kind, collections.deque):
        return collections.deque.maxlen.__get__(container)  # type: ignore[no-any-return]
    if kind is _LRU:
        return container.cache_parameters()["maxsize"]  # type: ignore[no-any-return]
    return None


def length_of(container: Any) -> int | None:
    """Its length, of a container whose length needs no code of the program."""
    for kind in (list, dict, tuple, set, frozenset, collections.deque):
        if issubclass(type(container), kind):
            return int(kind.__len__(container))
    return None

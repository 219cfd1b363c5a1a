"""Whether a container may be a buffer that still fills: by its name, and by the code that fills it.

A shuffle buffer, a replay list or a cache grows in a straight line until it is full, and a straight
line is all that a leak shows as well. What the program says of it is here: the container has the
name of such a thing, its owner has a maximum, or the function that adds to it takes from it as
well, or compares its length with a number.
"""

from __future__ import annotations

import dis
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from memtools import _core
from memtools._census.holders import LRU_CACHE, Local

#: Words of names, as in `shuffle_buffer`, `samples_queue` or `_LORA_CACHE`.
_WORDS = re.compile(
    r"(?<![a-z])(buf|buffer|cache|pool|queue|replay|memo|shuffle)(s|d|r|ed|ing|ized)?(?![a-z])",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # `ReplayMemory` is two words.
#: The name of the container at the end of a path.
_NAME = re.compile(r"local '(\w+)'|'(\w+)'(?:\[.*\])* in closure|\.(\w+)(?:\[.*\])*(?: \(.*\))?$")
_MAXIMA = re.compile(r"max_?(size|len|length|entries|items)|capacity|limit|bound|size_limit")
_ADDS = {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "put"}
_TAKES = {"pop", "popleft", "popitem", "move_to_end"}
_HEAP_ADDS = {"heappush", "heappushpop", "insort"}
_HEAP_TAKES = {"heappop", "heappushpop", "heapreplace"}
#: Without one of these names, and without `del`, a function sets no end. To read all
#: would take 30 ms for a class such as torch.nn.Module.
_ENDS, _DELETES = {"len", *_TAKES, *_HEAP_TAKES}, dis.opmap["DELETE_SUBSCR"]
_ORDERS = ("<", "<=", ">", ">=")
_LEAST_BOUND = 16  # `if len(rows) > 1` is no bound.
_MOST_CODES = 256


def may_fill(path: str, way: Sequence[Any]) -> bool:
    """Whether the program gives a reason to take a container for a buffer that fills.

    Args:
        path: the name of the container.
        way: the container, and what holds it, one by one.
    """
    if type(way[0]) is LRU_CACHE:
        return False  # It says itself whether it has a bound.
    if _WORDS.search(_HUMP.sub("_", path).replace("_", " ")):
        return True
    found = _NAME.search(path)
    if found is None:
        return False
    name = next(filter(None, found.groups()))
    owners = way[1:4]
    if any(map(_has_maximum, owners)):
        return True
    return any(_bounds(code, name) for owner in owners for code in _codes_of(owner))


def _has_maximum(owner: Any) -> bool:
    """Whether an instance has an attribute such as `maxsize` above 0."""
    space = _core._instance_dict(owner) if type(owner) is not Local else None
    if type(space) is not dict or _core._module_of(space) is not None:
        return False
    return any(
        type(key) is str and type(value) is int and value > 0 and _MAXIMA.fullmatch(key.strip("_"))
        for key, value in tuple(dict.items(space))
    )


def _codes_of(owner: Any) -> Iterator[types.CodeType]:
    """The code that may fill what an owner holds: that of a function whose variable it is, of the
    methods of a class, or of the functions of a module and of the module itself."""
    kind, spaces = type(owner), list[Any]()
    if kind is Local:
        yield owner.code
    elif kind is types.FunctionType:
        yield owner.__code__
    elif kind is types.GeneratorType:
        yield owner.gi_code
    elif kind is types.CoroutineType:
        yield owner.cr_code
    elif kind is types.AsyncGeneratorType:
        yield owner.ag_code
    elif _core._module_of(owner) is not None:
        space = owner if kind is dict else _core._instance_dict(owner)
        spaces.append(space)
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals is space and frame.f_code.co_name == "<module>":
                yield frame.f_code
            frame = frame.f_back
    elif kind is not dict:
        mro = type.__dict__["__mro__"].__get__(owner if issubclass(kind, type) else kind)
        spaces += [type.__dict__["__dict__"].__get__(base) for base in mro]
    for space in spaces:
        for member in tuple(space.values())[:_MOST_CODES]:
            if type(member) is types.FunctionType:
                yield member.__code__


def _bounds(code: types.CodeType, name: str) -> bool:
    """Whether a function adds to a container of this name and takes from it, or compares its length
    with a number."""
    if not {name}.isdisjoint(
        (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    ):
        words = [
            (one.opname, one.argval) for one in dis.get_instructions(code) if one.opname != "CACHE"
        ]
        adds, takes, compares = _uses(words, name)
        if adds and (takes or compares):
            return True
    inner = (one for one in code.co_consts if type(one) is types.CodeType)
    return any(_bounds(one, name) for one in inner)


def _uses(words: Sequence[tuple[str, Any]], name: str) -> tuple[bool, bool, bool]:
    """Whether instructions add to what has this name, take from it, and compare its length."""
    adds = takes = compares = False
    for i, (operation, value) in enumerate(words):
        if value != name or not operation.startswith("LOAD"):
            continue
        before, after = words[max(0, i - 4) : i], words[i + 1 : i + 10]
        method = after[0] if after else ("", None)
        if method[0] in ("LOAD_METHOD", "LOAD_ATTR"):
            adds |= method[1] in _ADDS
            takes |= method[1] in _TAKES
        called = {argument for operation, argument in before if operation.startswith("LOAD")}
        adds |= not called.isdisjoint(_HEAP_ADDS)
        takes |= not called.isdisjoint(_HEAP_TAKES)
        near = [operation for operation, _ in after[:4]]
        adds |= "STORE_SUBSCR" in near
        takes |= "DELETE_SUBSCR" in near
        if "len" in called:
            compares |= _is_compared(after)
    return adds, takes, compares


def _is_compared(after: Sequence[tuple[str, Any]]) -> bool:
    """Whether a length is compared with something that may be a bound."""
    for operation, value in after:
        if operation == "LOAD_CONST" and not (type(value) is int and value >= _LEAST_BOUND):
            return False
        if operation == "COMPARE_OP":
            return value in _ORDERS
        if operation.startswith(("STORE", "POP_JUMP", "RETURN")):
            return False
    return False

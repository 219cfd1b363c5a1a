"""Objects whose memory in C a walk of the heap does not see: those of extension modules.

A handle of a file, a parser's tree or an index is a small object for Python, and holds what its
library allocates. A walk counts the small object alone. Here is which entries of a container lead
to one of their own.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import types
from collections.abc import Iterable, Sequence
from typing import Any

from memtools._base import torch as bridge
from memtools._base.classes import is_heap_type, namespace_of
from memtools._census.holders import MRO, type_name

_DEPTH = 3  # Objects are looked for to this depth below an entry.
_BROAD, _MOST = 16, 512  # So many of what an object refers to are followed, and so many in all.
_READ = 256  # Of so many that it refers to; what refers to nothing is left out.
#: A metaclass may define __eq__, so types are compared by identity.
_ATOMS = frozenset(map(id, (str, bytes, bool, int, float, types.NoneType)))
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
#: Modules whose types a walk measures, or that have nothing in C.
_MEASURED = {
    *("collections", "types", "functools", "itertools", "operator", "weakref"),
    *("array", "datetime", "decimal", "re", "enum", "abc", "io", "mmap", "threading", "asyncio"),
    *("contextvars", "thread", "queue", "random", "struct", "numpy", "torch"),
}  # fmt: skip
_MODULE = type.__dict__["__module__"].__get__
_BASE = type.__dict__["__base__"].__get__
_DICT_OFFSET = type.__dict__["__dictoffset__"].__get__


def extension_of(entries: Sequence[Any]) -> str:
    """The class of an extension of which all these entries have an object of their own; "" if there
    is none, or for fewer than two."""
    seen = {id(entry) for entry in entries}
    found = collections.Counter(filter(None, (_below([entry], seen) for entry in entries)))
    # What all of them share is found below the first one alone.
    name, count = found.most_common(1)[0] if found else ("", 0)
    return name if len(entries) > 1 and count >= len(entries) - 1 else ""


def _below(level: Iterable[Any], seen: set[int]) -> str:
    """The class of the first object of an extension on these levels that was not seen before."""
    level = list(level)
    for _ in range(_DEPTH + 1):
        for obj in level:
            if is_of_extension(type(obj)):
                return type_name(type(obj))
        below = [part for obj in level for part in _referents(obj)]
        level = []
        for part in below:
            is_code = issubclass(type(part), (type, types.ModuleType, types.FunctionType))
            if is_code or id(part) in seen or len(seen) > _MOST:
                continue
            seen.add(id(part))
            level.append(part)
    return ""


def _referents(obj: Any) -> Iterable[Any]:
    """The first objects to which one refers that may refer to others. The dict of an instance is no
    object of its own: its attributes are the instance's."""
    found = gc.get_referents(obj)[:_READ]
    if not issubclass(type(obj), _CONTAINERS):
        spaces = [part for part in found if type(part) is dict]
        found = [part for part in found if type(part) is not dict]
        found += [part for space in spaces for part in gc.get_referents(space)[:_READ]]
    return itertools.islice((part for part in found if id(type(part)) not in _ATOMS), _BROAD)


def is_of_extension(kind: type) -> bool:
    """Whether objects of a type may have memory in C that a walk does not see."""
    torch = bridge.loaded()
    if torch is not None and issubclass(kind, torch.Tensor):
        return False
    return any(map(_is_compiled, MRO(kind)))


def _is_compiled(kind: type) -> bool:
    """Whether a type is of C code, and not one of those that are measured. A class of Python has a
    dict or slots, or a base that has."""
    module = _MODULE(kind)
    if type(module) is not str:
        return False
    is_static = not is_heap_type(kind)
    if module == "builtins" and is_static:  # So is a type called whose name has no module.
        return id(kind) not in _interpreter()
    if module.lstrip("_").partition(".")[0] in _MEASURED:
        return False
    if is_static:
        return True
    names, base = namespace_of(kind), _BASE(kind)
    if "__dict__" in names or "__slots__" in names:
        return False
    return base is None or _DICT_OFFSET(base) == 0


@functools.cache
def _interpreter() -> range:
    """The addresses of the interpreter's own types; all of them where they are not known."""
    try:
        with open("/proc/self/maps") as file:
            maps = [line.split(maxsplit=5) for line in file]
    except OSError:
        return range(1 << 64)
    ends = [([int(end, 16) for end in line[0].split("-")], line[-1]) for line in maps]
    home = next((path for (low, high), path in ends if low <= id(int) < high), "")
    own = [end for span, path in ends if path == home for end in span]
    return range(min(own), max(own)) if home.startswith("/") else range(1 << 64)

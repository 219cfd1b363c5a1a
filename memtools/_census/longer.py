"""Objects of extensions that the program has by a name, and that become longer.

    attributes, variables ──► their values ──► objects of an extension ──► lengths, by C code
         Scores.table         pl.DataFrame     PyDataFrame                 height

A table of rows, a tree or a map in C is one object for a walk of the heap, however large it is: it
is changed in place, or made of the one before it. How many items it has is asked here of its own C
code. Code of the program is not run for it, and nothing of the program is kept.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.classes import is_heap_type, namespace_of, with_subclasses
from memtools._base.libraries import USER, owner_of
from memtools._census.extensions import is_of_extension
from memtools._census.holders import MRO, Holder, Local, Namer, type_name
from memtools._census.keepers import Keepers, running
from memtools._census.names import is_users_module, module_name_of, space_of

_MOST_INSTANCES = 64  # Instances of a class that has more are entries of something.
_MOST_ENTRIES = 64  # The entries of a longer dict, list or tuple have no names.
_MOST_SEEN = 20_000  # objects that are looked at
_DEPTH = 2  # An object of an extension lies at most so deep in one of a library's own classes.
#: What the length of an object is called, by Python and by libraries of tables.
_LENGTHS = ("__len__", "height", "num_rows")
_IN_C = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_CONTAINERS = (dict, list, tuple)
_CODE = (type, types.ModuleType, types.FunctionType)
#: What a search does with objects of a type.
_LEAVE, _FOLLOW, _MEASURE = range(3)


class Lengths:
    """How many items objects of extensions have, at the steps at which they are read. A reading
    takes a pass over the heap, and some 20 ms.

    Args:
        step: the first of these steps.
    """

    def __init__(self, step: int) -> None:
        self._since = self._step = step
        self._keepers = Keepers()
        self._lengths = {path: length for path, (length, *_) in _Search().found().items()}

    def longer(self, step: int) -> tuple[Holder, ...]:
        """Read them again. Returns those that have become longer since the reading before, by one
        item in eight steps at least, without bytes: how many they have is not known.

        Args:
            step: the step of now, which is after that of the reading before.
        """
        found, steps = _Search().found(), step - self._step
        more = {path: found[path][0] - length for path, length in self._lengths.items()
                if path in found}  # fmt: skip
        self._step, self._lengths = step, {path: length for path, (length, *_) in found.items()}
        return tuple(
            self._holder(path, count, steps, *found[path])
            for path, count in more.items()
            if 8 * count >= steps
        )

    def _holder(
        self, path: str, more: int, steps: int, length: int, kind: str, way: list[Any]
    ) -> Holder:
        kept = self._keepers.find(path, way, changes=True)
        found = Holder(path, "variable", length, None, more, 0, what="items", steps=steps,
                       since_step=self._since, only_gained=True, extension=kind)  # fmt: skip
        return replace(found, **kept._asdict())


class _Search:
    """One search for objects of extensions that have a length."""

    def __init__(self) -> None:
        self._seen = set[int]()
        self._ways = dict[int, int]()  # by type: what to do with its objects
        #: the program's modules
        self._modules = {key: one for key, one in list(sys.modules.items()) if is_users_module(one)}

    def found(self) -> dict[str, tuple[int, str, list[Any]]]:
        """By its name: the length, the class, and what holds it. Those of one name, such as an
        attribute of several instances, count together."""
        found, namer = dict[str, tuple[int, str, list[Any]]](), Namer()
        for way in itertools.islice(self._named(), _MOST_SEEN):
            lengths = [(length_of(one), type(one)) for one in self._below(way[0])]
            known = [(length, kind) for length, kind in lengths if length is not None]
            if known:
                path, length = namer.path_along(way), sum(length for length, _ in known)
                before = found[path][0] if path in found else 0
                found[path] = before + length, type_name(known[0][1]), way
        return found

    def _named(self) -> Iterator[list[Any]]:
        """The values of the program's attributes and variables, each with what holds it."""
        for root in (*self._instances(), *map(space_of, self._modules.values())):
            for value in gc.get_referents(root):
                yield from _with_entries([value, root])
        for frame in running():
            if owner_of(frame.f_code.co_filename) == USER:
                for name, value in _core._frame_variables(frame):
                    yield from _with_entries([value, Local(frame.f_code, name)])

    def _instances(self) -> list[Any]:
        """The instances of the program's classes."""
        kinds = tuple(kind for kind in with_subclasses(object) if self._is_users(kind))
        by_type = dict[int, list[Any]]()
        for obj in _core._instances(kinds):
            by_type.setdefault(id(type(obj)), []).append(obj)
        few = (same for same in by_type.values() if len(same) <= _MOST_INSTANCES)
        return list(itertools.chain.from_iterable(few))

    def _below(self, value: Any) -> list[Any]:
        """The objects of extensions that a value is, or has in a library's own classes."""
        level, found = [value], list[Any]()
        for _ in range(_DEPTH + 1):
            below = list[Any]()
            for obj in level:
                what = self._what_with(type(obj))
                if what == _LEAVE or id(obj) in self._seen or len(self._seen) > _MOST_SEEN:
                    continue
                self._seen.add(id(obj))
                if what == _MEASURE:
                    found.append(obj)
                else:
                    below += gc.get_referents(obj)
            level = below
        return found

    def _what_with(self, kind: type) -> int:
        what = self._ways.get(id(kind))
        if what is None:
            what = self._ways[id(kind)] = self._way_of(kind)
        return what

    def _way_of(self, kind: type) -> int:
        if issubclass(kind, _CODE) or self._is_users(kind):
            return _LEAVE  # What the program's instances have is searched by itself.
        if is_of_extension(kind):
            return _MEASURE
        torch = bridge.loaded()
        is_tensor = torch is not None and issubclass(kind, torch.Tensor)
        is_pythons = is_heap_type(kind) or any(kind is one for one in _CONTAINERS)
        return _FOLLOW if is_pythons and not is_tensor else _LEAVE

    def _is_users(self, kind: type) -> bool:
        return module_name_of(kind) in self._modules


def _with_entries(way: list[Any], depth: int = _DEPTH + 1) -> Iterator[list[Any]]:
    """The way to a value, or the ways to its entries if it is a short dict, list or tuple."""
    value = way[0]
    if type(value) is types.CellType:
        yield from _with_entries([*gc.get_referents(value)[:1], *way[1:]], depth)
    elif not any(type(value) is kind for kind in _CONTAINERS):
        yield way
    elif depth > 0 and len(value) <= _MOST_ENTRIES:
        for entry in list(value.values() if type(value) is dict else value):
            yield from _with_entries([entry, *way], depth - 1)


def length_of(obj: Any) -> int | None:
    """How many items an object has, by C code of its type; None if that does not say it. Types that
    pretend to be another one, as proxies do, are not asked."""
    bases = [namespace_of(base) for base in MRO(type(obj))[:-1]]
    if any("__class__" in space for space in bases):
        return None
    for name in _LENGTHS:
        member = next((space[name] for space in bases if name in space), None)
        if not any(type(member) is kind for kind in _IN_C):
            continue
        try:
            found = member.__get__(obj)  # type: ignore[union-attr]
            found = found() if callable(found) else found
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # A panic of Rust code is not an Exception.
            continue
        if type(found) is int:
            return found
    return None

"""size_of(): the bytes that stay in memory because of a value."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from memtools import _core

#: what one entry of a cache takes beside its key and value: the entry, and its place in the table
ENTRY_BYTES = 96
#: how many objects are visited; the rest of a container counts as those before it
MOST_VISITED = 4096
MOST_DEPTH = 16
_ALONE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NUMBERS = (int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def size_of(value: object) -> int:
    """Return the bytes that stay in memory as long as this value does.

    NumPy arrays count with the array that owns their memory, since a view keeps all of it, and
    tensors with their storage, on a device as well. PIL images count their pixels. Lists, tuples,
    dicts, sets, deques and the attributes of other objects are gone through, each object once, and
    anything else counts as `sys.getsizeof` says. Of more than 4,096 objects the rest of a container
    is estimated by those before. An array in a memory-mapped file counts as if it were in memory.
    """
    return _Walk().bytes_of(value, 0)


def size_of_entry(key: object, value: object) -> int:
    """The bytes of an entry of a cache, with its key."""
    walk = _Walk()
    return walk.bytes_of(value, 0) + walk.bytes_of(key, 0) + ENTRY_BYTES


class _Walk:
    """One measurement: what was counted already."""

    __slots__ = ("seen", "visited")

    def __init__(self) -> None:
        self.seen: set[object] = set()
        self.visited = 0

    def bytes_of(self, value: object, depth: int) -> int:
        self.visited += 1
        kind = type(value)
        if kind in _NUMBERS:
            return sys.getsizeof(value)
        if id(value) in self.seen:
            return 0
        self.seen.add(id(value))
        if kind in (bytes, str):
            return sys.getsizeof(value)
        if kind in _CONTAINERS:
            return sys.getsizeof(value) + self._contents(value, depth)
        if isinstance(value, memoryview):
            return sys.getsizeof(value) + self.bytes_of(value.obj, depth)
        for module, measure in _KINDS:
            if module in sys.modules and (found := measure(self, value, depth)) is not None:
                return found
        return self._instance(value, depth)

    def _contents(self, container: Any, depth: int) -> int:
        """The bytes of what a container holds."""
        both = isinstance(container, dict)
        parts: Iterable[object] = (
            (part for pair in container.items() for part in pair) if both else container
        )
        return self._parts(parts, len(container) * (2 if both else 1), depth)

    def _parts(self, parts: Iterable[object], count: int, depth: int) -> int:
        if depth == MOST_DEPTH or count == 0:
            return 0
        total = 0
        for done, part in enumerate(parts):
            if self.visited >= MOST_VISITED and done > 0:
                return total * count // done
            total += self.bytes_of(part, depth + 1)
        return total

    def _instance(self, value: object, depth: int) -> int:
        """An object that nothing is known of, with its attributes."""
        total = sys.getsizeof(value)
        if isinstance(value, _ALONE):
            return total
        if isinstance(value, _CONTAINERS):
            total += self._contents(value, depth)
        attributes = [*_slots(value)]
        if (named := _core._instance_dict(value)) is not None:
            total += sys.getsizeof(named)
            attributes += named.values()
        return total + self._parts(attributes, len(attributes), depth)

    def array(self, value: Any, depth: int) -> int | None:
        """A NumPy array, with the memory that it is a view of."""
        ndarray = sys.modules["numpy"].ndarray
        if not isinstance(value, ndarray):
            return None
        total, owner = 0, value
        while isinstance(owner.base, ndarray):  # the headers of views on the way down
            total += sys.getsizeof(owner)
            owner = owner.base
        if owner is not value and id(owner) in self.seen:
            return total
        self.seen.add(id(owner))
        memory = int(owner.nbytes)
        header = sys.getsizeof(owner) - (memory if owner.flags.owndata else 0)
        if isinstance(owner.base, (bytes, bytearray)):
            memory = self.bytes_of(owner.base, depth)
        if owner.dtype.hasobject:
            flat = owner.ravel() if owner.dtype.kind == "O" else ()
            memory += self._parts(islice(flat, MOST_VISITED), len(flat), depth)
        return total + header + memory

    def tensor(self, value: Any, depth: int) -> int | None:
        """A tensor, with its storage, or those of a sparse one."""
        torch = sys.modules["torch"]
        if not isinstance(value, torch.Tensor):
            return None
        total = sys.getsizeof(value)
        if value.layout is not torch.strided:
            return total + self._parts(list(_sparse_parts(torch, value)), 2, depth)
        try:
            storage = value.untyped_storage()
            place, size = int(storage.data_ptr()), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):  # one without memory: fake, or a wrapper
            return total + int(value.numel()) * int(value.element_size())
        if size and ("storage", place) in self.seen:
            return total
        self.seen.add(("storage", place))
        return total + size

    def image(self, value: Any, depth: int) -> int | None:
        """A PIL image: its pixels, loaded yet or not. Those of several bands take four bytes."""
        image = sys.modules["PIL.Image"].Image
        if not isinstance(value, image):
            return None
        width, height = map(int, value.size)
        of_pixel = 2 if value.mode.startswith("I;16") else 4
        if value.mode in ("1", "L", "P"):
            of_pixel = 1
        return sys.getsizeof(value) + width * height * of_pixel


def _sparse_parts(torch: Any, value: Any) -> Iterator[object]:
    """The dense tensors that a sparse one is made of."""
    if value.layout is torch.sparse_coo:
        yield from (value._indices(), value._values())
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (value.crow_indices(), value.col_indices(), value.values())
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (value.ccol_indices(), value.row_indices(), value.values())


def _slots(value: object) -> Iterator[object]:
    """The values of an object's slots, without a call of its own code."""
    for kind in type(value).__mro__:
        if "__slots__" not in kind.__dict__:
            continue
        for member in kind.__dict__.values():
            if type(member) is MemberDescriptorType:
                try:
                    yield member.__get__(value)
                except AttributeError:  # not set
                    continue


#: of which library, and what measures its objects; libraries that are not loaded have none
_KINDS = (("numpy", _Walk.array), ("torch", _Walk.tensor), ("PIL.Image", _Walk.image))

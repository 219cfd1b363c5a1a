"""size_of(): the bytes that stay in memory because of a value."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from memtools import _core

#: Bytes of a cache entry beside its key and value: the entry, and its place in the table.
ENTRY_BYTES = 224
#: About this many objects are visited; the rest of a long container counts like those before it.
MOST_VISITED = 4096
#: This many levels are visited recursively; what lies deeper is visited after them.
MOST_DEPTH = 16
#: The parts of a container divide its visits, so that a long list leaves some to what is beside it.
#: Of many parts, each has a 64th of them, but at least 4. A record has at most 64 parts.
LEAST_PART, LEAST_VISITS = 64, 4
_ALONE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NUMBERS = (int, float, complex, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def size_of(value: object) -> int:
    """Return the bytes that stay in memory as long as a value does.

    Arrays count with the whole memory that they are views of, also if mapped, tensors with their
    storage, also on a device, PIL images with their pixels. Containers and attributes of objects
    are followed, each object once; everything else counts as in `sys.getsizeof`. Beyond 4,096
    objects the rest of a container is estimated.
    """
    walk = _Walk()
    return walk.bytes_of(value, 0, MOST_VISITED) + walk.rest()


def size_of_entry(key: object, value: object) -> int:
    """The bytes of an entry of a cache, with its key."""
    walk = _Walk()
    total = walk.bytes_of(value, 0, MOST_VISITED) + walk.bytes_of(key, 0, MOST_VISITED)
    return total + walk.rest() + ENTRY_BYTES


class _Walk:
    """One measurement: what was counted already, which stays alive so that ids stay its own, and
    what lies too deep for now."""

    __slots__ = ("deeper", "seen", "visited")

    def __init__(self) -> None:
        self.seen: dict[object, object] = {}
        self.deeper: list[object] = []
        self.visited = 0

    def bytes_of(self, value: Any, depth: int, visits: int) -> int:
        """The bytes of a value and of what it holds, in about so many visits of objects."""
        self.visited += 1
        kind = type(value)
        if kind in _NUMBERS:
            return sys.getsizeof(value)
        if id(value) in self.seen:
            return 0
        if depth == MOST_DEPTH:
            self.deeper.append(value)
            return 0
        self.seen[id(value)] = value
        if kind is str or kind is bytes:
            return sys.getsizeof(value)
        if kind in _CONTAINERS:
            parts, count = _contents(value)
            record = kind in (tuple, dict)
            return sys.getsizeof(value) + self._parts(
                parts, count, depth, visits - 1, record=record
            )
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and value.layout is torch.strided:
            return self._dense(value)  # the usual batch of a DataLoader, which waits for this
        if isinstance(value, memoryview):
            return sys.getsizeof(value) + self.bytes_of(value.obj, depth, visits)
        for module, measure in _KINDS:
            if module not in sys.modules:
                continue
            if (found := measure(self, value, depth, visits)) is not None:
                return found
        return self._instance(value, depth, visits)

    def _parts(
        self, parts: Iterable[object], count: int, depth: int, visits: int, *, record: bool
    ) -> int:
        """The bytes of what an object holds. Once the visits are used up, the rest of the parts
        counts as those before it, or in a record, whose parts differ, without what they hold."""
        if visits < 0:
            return 0
        record = record and count <= LEAST_PART
        end, least = self.visited + visits, max(LEAST_VISITS, visits // LEAST_PART)
        total = 0
        for done, part in enumerate(islice(parts, count)):
            left = end - self.visited
            if left <= 0 and done > 0 and not record:
                return total * count // done
            share = max(least, left // (count - done)) if left > 0 or done == 0 else 0
            total += self.bytes_of(part, depth + 1, share)
        return total

    def rest(self) -> int:
        """The bytes of what lay too deep."""
        total = 0
        while self.deeper and self.visited < MOST_VISITED:
            total += self.bytes_of(self.deeper.pop(), 0, MOST_VISITED - self.visited)
        return total

    def _instance(self, value: object, depth: int, visits: int) -> int:
        """An object that nothing is known of, with its attributes."""
        total = sys.getsizeof(value)
        if isinstance(value, _ALONE):
            return total
        size, parts = _attributes(value)
        held, count = _contents(value) if isinstance(value, _CONTAINERS) else ((), 0)
        count += len(parts)
        return total + size + self._parts(chain(parts, held), count, depth, visits - 1, record=True)

    def array(self, value: Any, depth: int, visits: int) -> int | None:
        """A NumPy array, with the memory that it is a view of."""
        ndarray = sys.modules["numpy"].ndarray
        if not isinstance(value, ndarray):
            return None
        total, owner = 0, value
        if type(value) is not ndarray:  # such as a masked array, with its mask
            total, parts = _attributes(value)
            total += self._parts(parts, len(parts), depth, visits - 1, record=True)
        while isinstance(owner.base, ndarray):  # the headers of views on the way down
            total += sys.getsizeof(owner)
            owner = owner.base
        if owner is not value and id(owner) in self.seen:
            return total
        self.seen[id(owner)] = owner
        memory = int(owner.nbytes)
        total += sys.getsizeof(owner) - (memory if owner.flags.owndata else 0)
        if (base := owner.base) is not None:
            base = base.obj if isinstance(base, memoryview) else base
            if isinstance(base, (bytes, bytearray)) or _is_tensor(base):
                return total + self.bytes_of(base, depth, visits)
        if owner.dtype.kind == "O":
            memory += self._parts(owner.flat, owner.size, depth, visits - 1, record=False)
        return total + memory

    def tensor(self, value: Any, depth: int, visits: int) -> int | None:
        """A tensor, with its storage, or those of the dense ones that it is made of."""
        if not _is_tensor(value):
            return None
        if parts := _dense_parts(value):
            held = self._parts(parts, len(parts), depth, visits - 1, record=True)
            return sys.getsizeof(value) + held
        return self._dense(value)

    def _dense(self, value: Any) -> int:
        """A tensor of one storage."""
        total = sys.getsizeof(value)
        try:
            storage = value.untyped_storage()
            place, size = int(storage.data_ptr()), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):  # one without memory: fake, or a wrapper
            return total + int(value.numel()) * int(value.element_size())
        if size and ("storage", place) in self.seen:
            return total
        self.seen["storage", place] = None
        return total + size

    def image(self, value: Any, depth: int, visits: int) -> int | None:
        """A PIL image: its pixels, loaded yet or not. Those of several bands take four bytes."""
        image = sys.modules["PIL.Image"].Image
        if not isinstance(value, image):
            return None
        width, height = map(int, value.size)
        of_pixel = 2 if value.mode.startswith("I;16") else 4
        if value.mode in ("1", "L", "P"):
            of_pixel = 1
        return sys.getsizeof(value) + width * height * of_pixel


def _contents(container: Any) -> tuple[Iterable[object], int]:
    """What a container holds, and how many that are."""
    if isinstance(container, dict):
        return chain.from_iterable(container.items()), 2 * len(container)
    return container, len(container)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _dense_parts(value: Any) -> list[object]:
    """The dense tensors that a sparse or a nested one is made of."""
    match str(value.layout).removeprefix("torch."):
        case "sparse_coo":
            return [value._indices(), value._values()]
        case "sparse_csr" | "sparse_bsr":
            return [value.crow_indices(), value.col_indices(), value.values()]
        case "sparse_csc" | "sparse_bsc":
            return [value.ccol_indices(), value.row_indices(), value.values()]
        case "jagged":
            return [value.offsets(), value.values()]
    return []


def _attributes(value: object) -> tuple[int, list[object]]:
    """The bytes of an object's __dict__, and the values of its attributes."""
    parts = [*_slots(value)]
    if (named := _core._instance_dict(value)) is None:
        return 0, parts
    return sys.getsizeof(named), parts + list(named.values())


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


#: The functions that measure the objects of a library; a library that is not loaded has none.
_KINDS = (("numpy", _Walk.array), ("torch", _Walk.tensor), ("PIL.Image", _Walk.image))

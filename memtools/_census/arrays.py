"""Which tensor or array has a block of memory, by its name in the program."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._census.growth import kind_of, ndarray_type
from memtools._census.holders import Own, holder_of, part_of_a_look, tensor_facts, type_name

_LEAST = 1 / 2  # What has this share of what the largest one has of the block is named as well.
_NAMED = 2  # So many are named,
_TRIED = 8  # of the first so many.


@part_of_a_look
class _Memory:
    """What an object has of a block, and whether it shows the memory of another object."""

    __slots__ = ("first", "is_view", "obj", "size")

    def __init__(self, obj: Any, first: int, size: int, *, is_view: bool = False) -> None:
        self.obj, self.first, self.size, self.is_view = Own([obj]), first, size, is_view


def owner_of(begin: int, end: int) -> str:
    """The names of the tensors and arrays that have the memory from one address to another, such as
    `Replay.observations`; "" if none has any of it.

    Looks at all objects of the process, which takes some 0.1 us for each, and at those that are
    found in it as `holder_of` does. Runs none of the program's code.
    """
    found: list[_Memory] = []  # without views of what others have, the oldest first
    for one in sorted(_memories(), key=lambda one: (one.first, -one.size, one.is_view)):
        first, last = max(begin, one.first), min(end, one.first + one.size)
        if first < last and not (found and last <= found[-1].first + found[-1].size):
            found.append(_Memory(one.obj[0], first, last - first))
    found.sort(key=lambda one: -one.size)
    found = [one for one in found if one.size >= _LEAST * found[0].size]
    names = [_name_of(one.obj[0]) for one in found[:_TRIED]]
    named = list(dict.fromkeys(names))[:_NAMED]
    return " and ".join(named)


def _memories() -> Iterator[_Memory]:
    torch = bridge.loaded()
    tensor: Any = None if torch is None else torch.Tensor
    ndarray = ndarray_type()
    wanted = (tensor, ndarray, mmap.mmap, bytearray)
    objects = Own(_core._held(tuple(kind for kind in wanted if kind is not None)))
    for obj in objects:
        kind = type(obj)
        if tensor is not None and issubclass(kind, tensor):
            facts = tensor_facts(torch, obj)
            yield _Memory(obj, facts.storage, facts.storage_bytes, is_view=True)
        elif ndarray is not None and issubclass(kind, ndarray):
            first = ndarray.__array_interface__.__get__(obj)["data"][0]
            is_view = ndarray.base.__get__(obj) is not None
            yield _Memory(obj, first, int(ndarray.nbytes.__get__(obj)), is_view=is_view)
        elif kind is mmap.mmap or kind is bytearray:
            yield _Memory(obj, *_extent(obj))


def _extent(obj: Any) -> tuple[int, int]:
    """The address and the size of a buffer that can be written; (0, 0) for others."""
    try:
        first = ctypes.c_char.from_buffer(obj)
        return ctypes.addressof(first), len(obj)
    except (TypeError, ValueError, BufferError):  # it is empty, closed or cannot be written
        return 0, 0


def _name_of(obj: Any) -> str:
    """Where it is in the program, or what it is if nothing has a name for it."""
    holders = holder_of(Own([obj]))
    if holders and holders[0].kind not in ("nobody", "C code"):
        return holders[0].path
    return f"a {kind_of(obj) or type_name(type(obj))}"

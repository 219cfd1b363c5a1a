"""Which tensor or array has a block of memory, by its name in the program."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._census.fills import maximum_of
from memtools._census.growth import kind_of, ndarray_type
from memtools._census.holders import (
    Local,
    Namer,
    Own,
    part_of_a_look,
    referrers,
    short_name,
    tensor_facts,
    type_name,
)
from memtools._census.keepers import Keepers
from memtools._census.names import is_users

_LEAST = 1 / 2  # What has this share of what the largest one has of the block is named as well.
_NAMED = 2  # So many are named.
_LEVELS, _WIDEST = 5, 32  # A buffer is so many objects above its arrays, and so many are tried.
_MOST = 256  # So many of the largest are looked at.


@part_of_a_look
class _Memory:
    """What an object has of a block. Of several that have all of it, the one of the lowest rank is
    named: a tensor may show the memory of an array, or of a file that is mapped for it."""

    __slots__ = ("first", "obj", "rank", "size")

    def __init__(self, obj: Any, first: int, size: int, rank: int = 0) -> None:
        self.obj, self.first, self.size, self.rank = Own([obj]), first, size, rank


class Owner(NamedTuple):
    """The tensors and arrays that have a block of memory.

    Attributes:
        name: their names in the program, such as `Replay.observations`; "" if none has any of it.
        bound: the number of rows that the buffer says it takes, such as `max_size 20,000`; "" where
            it does not.
        library: the class of a library that the buffer is, such as
            `stable_baselines3.common.buffers.ReplayBuffer`; "" for the program's own.
        kept_at: the line of the user's program that makes it or writes to it, as
            `file:line in function`; "" if that is not known.
    """

    name: str = ""
    bound: str = ""
    library: str = ""
    kept_at: str = ""


def owner_of(begin: int, end: int) -> Owner:
    """The tensors and arrays that have the memory from one address to another, as `owners_of`."""
    return owners_of([(begin, end)])[0]


def owners_of(ranges: Sequence[tuple[int, int]]) -> list[Owner]:
    """The tensors and arrays that have each of some ranges of memory, from one address to another.
    Of their buffer is said what the first one of it says.

    Looks at all objects of the process, which takes some 0.3 us for each, and as much for each name
    that is found. Runs none of the program's code.
    """
    memories, found = _sorted(), list[list[_Memory]]()
    for begin, end in ranges:
        several = sorted(_within(begin, end, memories), key=lambda one: -one.size)
        least = _LEAST * several[0].size if several else 0
        found.append([one for one in several if one.size >= least][:_NAMED])
    ways = iter(Namer().ways(Own(one.obj[0] for several in found for one in several)))
    owners, buffers = list[Owner](), set[str]()
    for several in found:
        own = [next(ways) for _ in several]
        owner = Owner(" and ".join(dict.fromkeys(map(_name_of, own))))
        owners.append(_of_buffer(owner, own[0], buffers) if own else owner)
    return owners


def _of_buffer(owner: Owner, way: Own, known: set[str]) -> Owner:
    """The owner with what is said of the buffer that has its array: the nearest object above it
    that says how many rows it takes. Those of which it was said are `known`."""
    at = next((i for i, one in enumerate(way) if i and maximum_of(one) is not None), 0)
    if at == 0 and len(way) > 1 and not (way := _way_to_a_buffer(way[0])):
        return owner
    at = at or len(way) - 1
    maximum = maximum_of(way[at])
    if maximum is None:
        return owner
    kind, (attribute, rows) = type(way[at]), maximum
    name = owner.name
    if f"{short_name(kind)}." not in name:
        name = f"{name} of {short_name(kind)}"
    owner = owner._replace(name=name)
    if type_name(kind) in known:
        return owner
    known.add(type_name(kind))
    kept_at = ""
    with contextlib.suppress(Exception):  # A buffer without its line is found as well.
        above = way[at:] if at + 1 < len(way) else Namer().ways(way[at:])[0]
        kept_at = Keepers().find(name, [way[at - 1], *above], changes=False).kept_at
    library = "" if is_users(kind) else type_name(kind)
    return owner._replace(bound=f"{attribute} {rows:,}", library=library, kept_at=kept_at)


def _way_to_a_buffer(obj: Any) -> Own:
    """From an object by any of its holders, and not the one that says most about where it is, to
    the nearest one that says how many rows it takes; empty if there is none."""
    level, seen = [Own([obj])], {id(obj)}
    for _ in range(_LEVELS):
        heads = Own(way[-1] for way in level)
        above, upper = referrers(heads).holders if heads else [], list[Own]()
        for way, holders in zip(level, above, strict=True):
            for holder in holders:
                is_place = type(holder) is Local or issubclass(type(holder), type)
                if is_place or id(holder) in seen or _core._module_of(holder) is not None:
                    continue
                seen.add(id(holder))
                upper.append(Own([*way, holder]))
                if maximum_of(holder) is not None:
                    return upper[-1]
        level = upper[:_WIDEST]
    return Own()


def extents(least: int) -> list[tuple[int, int]]:
    """The address and the bytes of what tensors and arrays have, each of at least so many bytes,
    without views; the largest ones. Looks at all objects of the process, as `owner_of` does."""
    found = [
        (one.first, one.size) for one in _within(0, sys.maxsize, _sorted()) if one.size >= least
    ]
    return sorted(found, key=lambda one: -one[1])[:_MOST]


def _within(begin: int, end: int, memories: Sequence[_Memory]) -> list[_Memory]:
    """What tensors and arrays have of the memory between two addresses, without views of what
    others have."""
    found: list[_Memory] = []
    for one in memories:
        first, last = max(begin, one.first), min(end, one.first + one.size)
        if first < last and not (found and last <= found[-1].first + found[-1].size):
            found.append(_Memory(one.obj[0], first, last - first))
    return found


def _sorted() -> list[_Memory]:
    """All memory of tensors and arrays by its address, the largest first of those of one, and those
    that show the memory of others last."""
    return sorted(_memories(), key=lambda one: (one.first, -one.size, one.rank))


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
            yield _Memory(obj, facts.storage, facts.storage_bytes, 1)
        elif ndarray is not None and issubclass(kind, ndarray):
            first = ndarray.__array_interface__.__get__(obj)["data"][0]
            rank = 0 if ndarray.base.__get__(obj) is None else 3
            yield _Memory(obj, first, int(ndarray.nbytes.__get__(obj)), rank)
        elif kind is mmap.mmap or kind is bytearray:
            yield _Memory(obj, *_extent(obj), 2)


def _extent(obj: Any) -> tuple[int, int]:
    """The address and the size of a buffer that can be written; (0, 0) for others."""
    try:
        first = ctypes.c_char.from_buffer(obj)
        return ctypes.addressof(first), len(obj)
    except (TypeError, ValueError, BufferError):  # it is empty, closed or cannot be written
        return 0, 0


def _name_of(way: Own) -> str:
    """Where an object is in the program, or what it is if nothing has a name for it."""
    path = Namer().path_along(way) if len(way) > 1 else ""
    return path or f"a {kind_of(way[0]) or type_name(type(way[0]))}"

"""GrowthCensus: looks at the heap from time to time, and names what only ever grew.

    look(16)   look(24)   look(32) ...        each a walk in C: csrc/py/census/walk.h
        │          │          │
        └──────────┴──────────┴──► tables in C: what is longer than at the look before, and was
                                   never shorter (csrc/core/census/growth.h)
                                        │ candidates, with the objects on the way to each
                                        ▼
                                   names, by the words of holders.py ──► holders()

A look keeps numbers and texts, but no objects of the program. It runs no Python code of the
program: types are compared by identity, and objects are read by the getters of built-in types.
"""

from __future__ import annotations

import collections
import gc
import io
import itertools
import mmap
import sys
import time
import types
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.libraries import PACKAGE, library_paths, users_paths
from memtools._census.extensions import extension_of
from memtools._census.holders import (
    LRU_CACHE,
    Holder,
    Local,
    Namer,
    extent,
    graphs_in,
    name_of_local,
    part_of_a_look,
    shape_words,
    short_name,
    tensor_facts,
    tensor_kind,
    type_name,
)
from memtools._census.keepers import Keepers, Ways

_LEAST_NAMED = 64.0  # bytes a step: one of several holders of the same name needs no more
_MOST_HOLDERS = 8
_SAMPLED = 8  # So many of the newest entries are sampled.
_DEPTH = 4  # Tensors and arrays are looked for to this depth below an entry.
#: The kinds of rows of the table, as csrc/py/census/growth.c numbers them.
_CONTAINER, _GRAPH, _CHAIN, _CYCLE, _SLOTS, _CALLS, _ENTRIES = range(7)
_NO_COLLECTIONS = (
    "variable",
    "stream",
    "callbacks",
)  # the kinds of what has no entries that fill it
_OF_CYCLES = "cycles of .grad made by backward(create_graph=True)"
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_MODULES = (types.ModuleType, types.FunctionType)
_NO_COLLECTIONS = ("callbacks", "stream", "variable")
_HOOKS = ("_hooks", "_pre_hooks", "hooks_dict")


@part_of_a_look
class GrowthCensus:
    """Looks at the heap from time to time, and names what only ever grew between the looks.

    A look measures everything that a path from the program's modules, running functions or
    libraries reaches: lists, dicts, sets, deques and caches with all below them, arrays, texts and
    tensors, each storage once. From the third look on, a container is named if it never got
    shorter, rose at two looks, does not slow down, and gains at least `least_rate`. What keeps a
    growing linked chain, or old nodes of autograd's graphs, is named as well.

    Without memtools' torch shim (another version of torch) the bytes of tensors are those of the
    newest entries of what is named, and single tensors and graphs are not known.

    memtools._leak.judge decides whether holders explain the growth of the process.

    Args:
        own: classes whose instances are not entered, beside those of memtools; by default none.
        least_rate: the bytes a step, above 0, that a holder must gain to be named.
        keepers: finds the lines that keep what holders have; by default in the program's code.

    Attributes:
        looks: the number of looks.
        seconds: the CPU time that they took, of the calling thread.
        keepers: as given.
        cut: whether the newest look left things out, because it would have taken too long or was
            a quick one. What it has not seen counts neither as grown nor as gone.
        reached_bytes: the bytes of everything that the newest look has reached.
    """

    __slots__ = (
        *("_holders", "_least_rate", "_libraries", "_own", "_table"),
        *("cut", "keepers", "looks", "reached_bytes", "seconds"),
    )

    def __init__(
        self, own: Sequence[type] = (), *, least_rate: float, keepers: Keepers | Ways | None = None
    ) -> None:
        self._table = _core.GrowthTable()
        self.keepers = Keepers() if keepers is None else keepers
        self._least_rate = least_rate
        self._own = tuple(own)
        self._libraries = library_paths()
        self._holders: tuple[Holder, ...] = ()
        self.looks = 0
        self.seconds = 0.0
        self.cut = False
        self.reached_bytes = 0

    def look(self, step: int, *, quick: bool = False) -> None:
        """Walk through what the program can reach. Takes 30 to 120 ms, in which no other Python
        thread runs; it keeps numbers only.

        Args:
            step: the number of the step, at least 0, and above that of the look before.
            quick: whether a large heap is walked in part, in 200 ms at most: what lies near the
                names of the program, and what is longer than at the look before. False by default.

        Raises ValueError if the step does not come after that of the look before, MemoryError.
        """
        begin = time.thread_time()
        torch = bridge.loaded()
        has_shim = False
        if torch is not None:
            try:
                has_shim = bridge.connect().shim is not None
            except ImportError:  # an older torch
                has_shim = False
        rows, _, self.cut, self.reached_bytes = self._table._look(
            step,
            collections.deque,
            LRU_CACHE,
            ndarray_type(),
            None if torch is None else torch.Tensor,
            has_shim,
            self._libraries,
            PACKAGE,
            self._own,
            users_paths(),
            quick,
        )
        self.looks += 1
        self._holders = _named(rows, has_shim, self._least_rate, self.keepers)
        self.seconds += time.thread_time() - begin

    def holders(self) -> tuple[Holder, ...]:
        """The holders that only ever grew, as of the newest look: containers with a bound, then
        other containers and single buffers, then autograd graphs, the largest first. Empty before
        the third look.
        """
        return self._holders

    def __repr__(self) -> str:
        return f"GrowthCensus({self.looks} looks, {len(self._holders)} holders)"


def _named(
    rows: list[Any], has_shim: bool, least_rate: float, keepers: Keepers | Ways
) -> tuple[Holder, ...]:
    """The holders that gain at least so many bytes a step, those of one name joined. Without the
    shim a walk sees no memory of tensors."""
    if not rows:
        return ()
    namer, joined = Namer(), dict[tuple[str, str], Holder]()
    ways = dict[tuple[str, str], list[Any]]()  # of the first one of each name: its row
    for row in rows:
        if row[5] < _LEAST_NAMED and row[1] not in (_GRAPH, _CYCLE):
            continue
        holder = _holder(namer, has_shim, *row)
        if holder is None:
            continue
        if keepers.reads_code and _is_collection(holder, row[1]):
            holder = replace(holder, extension=extension_of(_entries(row[0][0])))
        key = holder.path, holder.kind
        joined[key] = joined[key]._with(holder) if key in joined else holder
        ways.setdefault(key, row)
    found = [h for h in joined.values() if h.rate_bytes >= least_rate or _may_have_more(h)]
    found.sort(key=_best_first)
    found = [_with_line(h, ways[h.path, h.kind], keepers) for h in found[:_MOST_HOLDERS]]
    return tuple(sorted(found, key=_best_first))


def _with_line(holder: Holder, row: list[Any], keepers: Keepers | Ways) -> Holder:
    """The holder with what the program says of it: the line that keeps what it holds, and whether
    it may be a buffer that fills, and up to which length."""
    way, sort = row[0], row[1]
    if sort == _CYCLE:
        return holder
    if sort == _CALLS:
        way = [Local(*way[0])]
    changes = sort in (_GRAPH, _CHAIN) or _is_buffer(way[0])
    kept = keepers.find(holder.path, way, changes=changes)
    fills, capacity = kept.may_fill and _is_collection(holder, sort), holder.capacity
    is_plain = fills and holder.kind == short_name(type(way[0]))
    if capacity is None and is_plain and (kept.capacity or 0) >= (holder.length or 0):
        capacity = kept.capacity
    return replace(holder, **kept._replace(may_fill=fills, capacity=capacity)._asdict())


def _is_collection(holder: Holder, sort: int) -> bool:
    """Whether it holds objects that the program puts into it and may take out."""
    return sort in (_CONTAINER, _SLOTS) and holder.kind not in _NO_COLLECTIONS


def _may_have_more(holder: Holder) -> bool:
    """Whether a holder that gains little may gain more in C, which a walk does not see."""
    return bool(holder.extension) and holder.capacity is None


def _best_first(holder: Holder) -> tuple[bool, bool, float]:
    is_graph = holder.kind == "autograd graph"
    return is_graph, holder.capacity is None, -holder.rate_bytes


def _holder(
    namer: Namer,
    has_shim: bool,
    way: list[Any],
    sort: int,
    count: int,
    length: int,
    longer: int,
    pace: float,
    since: int,
    until: int,
    rises: int,
    fell: bool,
    slows: bool,
    kept: int,
) -> Holder | None:
    """A candidate of the table as a holder with a name. None if it slows down and has no bound:
    that is not a leak, and nothing says where it ends."""
    steps = until - since
    if slows and extent(way[0])[1] is None:
        return None
    if sort == _CALLS:
        path = name_of_local(Local(*way[0]))
        return Holder(path, "calls", length, None, longer, round(pace * steps),
                      what="running calls", steps=steps, since_step=since, rises=rises,
                      only_gained=not fell)  # fmt: skip
    if type(way[-1]) is tuple and len(way) > 1:
        way[-1] = Local(*way[-1])
    path, container = namer.path_along(way), way[0]
    size = round(pace * steps)
    found = Holder(path, short_name(type(container)), length, None, longer, size, steps=steps,
                   since_step=since, rises=rises, only_gained=not fell)  # fmt: skip
    if sort == _GRAPH:
        path = f"autograd graph in {path or 'C code'}"
        return replace(found, path=path, kind="autograd graph", what="nodes")
    if sort == _CYCLE:
        what = "nodes" if len(way) > 1 else "leaf tensors"
        return replace(found, path=_OF_CYCLES, kind="autograd graph", what=what)
    if sort == _CHAIN:
        path = f"chain of {found.kind} in {path or 'C code'}"
        what = f"{type_name(type(container))} objects"
        return replace(found, path=path, kind="chain", what=what)
    if sort == _ENTRIES:  # Such containers fill, as a rule, so it is no evidence of a leak.
        path = f"{found.kind} {path}, whose entries grow"
        return replace(found, path=path, kind="entries", new_objects=0, only_gained=False)
    if type(container) is types.ModuleType:
        path = "callbacks of atexit.register()"
        return replace(found, path=path, kind="callbacks", what="objects")
    if issubclass(type(container), (io.BytesIO, io.StringIO)):
        return replace(found, path=f"{found.kind} {path}", kind="stream", new_objects=0)
    if _is_buffer(container) and sort != _SLOTS:
        what = kind_of(container) or found.kind
        return replace(found, kind="variable", new_objects=0, what=what)
    new_objects, size, what, view = _newest(container, longer, size, has_shim, count > 1)
    now, capacity = extent(container)
    if _is_buffer(container):  # an array of objects
        now = int(ndarray_type().size.__get__(container))
    if type(container) is LRU_CACHE:
        now = length
    elif sort == _SLOTS:  # Its entries replace None.
        path, now, capacity = f"{found.kind} {path}", length, now
    else:
        path = f"{found.kind}{'' if capacity is None else f'(maxlen={capacity})'} {path}"
    kind = _kind_of_holder(way, path, found.kind)
    weak = [short_name(weak) for one in way[1:3] for weak in _WEAK if type(one) is weak]
    if weak:
        kind = weak[0]
        path = f"{kind}{path.removeprefix(found.kind)}"
        if _values_keep_keys(container):
            path += " (its values keep its keys)"
    if any(map(_is_error, _entries(container))):
        kind = "exceptions"
    if _core._module_of(container) is not None:
        path += _such_as(container)
    if count > 1:
        path = f"{path} ({count} that grow in it)"
    if kept >= length > 0 and capacity is None:  # Each entry keeps what it was computed from.
        path, kind = graphs_in(replace(found, path=path)), "autograd graph"
    return replace(found, path=path, kind=kind, length=now, capacity=capacity,
                   new_objects=new_objects, new_bytes=size, what=what,
                   view_bytes=view)  # fmt: skip


def _kind_of_holder(way: list[Any], path: str, kind: str) -> str:
    """`optimizer state`, `hooks`, or the type of the container."""
    if type(way[0]) is LRU_CACHE:
        return "lru_cache"
    if path.endswith(_HOOKS):
        return "hooks"
    torch = bridge.loaded()
    for holder in way[1:3]:
        space = _core._instance_dict(holder) if type(holder) is not Local else None
        if space is None or (way[1] is not space and way[1] is not holder):
            continue
        name = _core._place(space, way[0])
        if (
            type(name) is str
            and name == "state"
            and torch is not None
            and issubclass(type(holder), torch.optim.Optimizer)
        ):
            return "optimizer state"
    return kind


def _such_as(namespace: dict[str, Any]) -> str:
    """The newest variable of a module that is not a text or a number, in words; "" for none."""
    for name in itertools.islice(reversed(namespace), _SAMPLED):
        if type(name) is str and not issubclass(type(namespace[name]), (str, int, float)):
            return f" (such as {name!r})"
    return ""


def _values_keep_keys(data: dict[Any, Any]) -> bool:
    """Whether the newest value of a weakref.WeakKeyDictionary leads to its key within four levels,
    or that of a WeakValueDictionary's key to its value."""
    for key, value in itertools.islice(reversed(data.items()), 1):
        is_of_key = issubclass(type(key), weakref.ref)
        wanted = weakref.ref.__call__(key if is_of_key else value)
        seen, level = {id(data)}, [value if is_of_key else key]
        for _ in range(_DEPTH):
            if any(one is wanted for one in level):
                return wanted is not None
            seen.update(map(id, level))
            below = [one for one in gc.get_referents(*level) if id(one) not in seen]
            level = [one for one in below if not issubclass(type(one), (type, *_MODULES))][:4096]
    return False


def _is_error(entry: Any) -> bool:
    """Whether an entry of a container is an exception, or a tuple with one."""
    parts = entry if type(entry) is tuple else (entry,)
    return any(issubclass(type(part), BaseException) for part in parts)


def ndarray_type() -> Any:
    """NumPy's type of arrays if the program has loaded it, else None."""
    found = getattr(sys.modules.get("numpy"), "ndarray", None)
    return found if type(found) is type else None


# --- what comes -----------------------------------------------------------------------------------


def kind_of(obj: Any) -> str:
    """`[2048, 64] float32 tensor` or `[84, 84] float32 array`; "" for other objects."""
    torch, ndarray = bridge.loaded(), ndarray_type()
    if torch is not None and issubclass(type(obj), torch.Tensor):
        return str(tensor_kind(torch, obj))
    if ndarray is not None and issubclass(type(obj), ndarray):
        shape, dtype = ndarray.shape.__get__(obj), ndarray.dtype.__get__(obj)
        return f"{shape_words(shape)} {dtype.name} array"
    return ""


def _is_buffer(obj: Any) -> bool:
    kinds = (str, bytes, bytearray, memoryview, io.BytesIO, io.StringIO, mmap.mmap)
    return bool(kind_of(obj)) or issubclass(type(obj), kinds)


#: A part of a tensor is small if all of it has so many times its bytes, and so many at least.
_PART_OF, _LEAST_WHOLE = 4, 1024
#: Tensors or arrays that are less than this share of what came are not named instead of the objects
#: that have them, unless these are plain containers or tensors.
_LEAST_SHARE = 0.1
_PLAIN = ("dict", "list", "tuple", "set", "collections", "torch", "numpy")


class _Kind:
    """The number of objects of one kind below some entries, their bytes, and the storages of
    tensors: the bytes of each that only one tensor has, 0 for others."""

    __slots__ = ("bytes", "count", "storages")

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.storages: dict[int, int] = {}

    @property
    def kept(self) -> int:
        """The bytes that they keep: their own, or those of their storages."""
        return max(self.bytes, sum(self.storages.values()))

    @property
    def view_bytes(self) -> int:
        """The bytes of the tensors of which these are small parts, one of each; 0 if they are not
        so. A part keeps all of its tensor's storage."""
        whole = sum(self.storages.values())
        is_part = len(self.storages) == self.count and all(self.storages.values())
        least = max(_PART_OF * self.bytes, _LEAST_WHOLE * self.count)
        return whole // self.count if is_part and whole >= least else 0


def _newest(
    container: Any, longer: int, size: int, has_shim: bool, in_entries: bool
) -> tuple[int, int, str, int]:
    """(number, bytes, kind, bytes of the tensors of which they are small parts) of the new objects
    in a container that got `longer` entries longer and gained `size` bytes, by its newest entries:
    the kind of tensors or arrays that takes most of them, or the entries themselves. Without the
    shim the bytes of tensors are those of the newest ones, without storages that several share.
    Where its entries have become longer, it is not known what else has come `in_entries`."""
    entries = _entries(container)
    if not entries:
        return longer, size, "objects", 0
    kinds, seen = collections.defaultdict[str, _Kind](_Kind), set[int]()
    for entry in entries:
        _count(entry, kinds, _DEPTH, seen)
    if not has_shim:
        storages = sum(sum(kind.storages.values()) for kind in kinds.values())
        size += storages * longer // len(entries)
    first = type(entries[0])  # A metaclass may define __eq__, so types are compared by identity.
    are_alike = not in_entries and all(type(entry) is first for entry in entries)
    if kinds:
        what, most = max(kinds.items(), key=_bytes_of_kind)
        # Below a large object, such as a model with its buffers, the sample may have seen little.
        is_much = most.kept * longer >= _LEAST_SHARE * size * len(entries)
        if is_much or not are_alike or type_name(first).partition(".")[0] in _PLAIN:
            each = max(1.0, most.bytes / most.count)
            count = min(round(most.count / len(entries) * longer), round(size / each))
            return count, size, f"{what}s", most.view_bytes
    return longer, size, f"{type_name(first)} objects" if are_alike else "objects", 0


def _bytes_of_kind(item: tuple[str, _Kind]) -> int:
    return item[1].bytes


def _entries(container: Any) -> list[Any]:
    """Some of the newest entries of a container, read by the methods of its built-in type."""
    kind = type(container)
    try:
        if issubclass(kind, list):
            there = (entry for entry in list.__reversed__(container) if entry is not None)
            return list(itertools.islice(there, _SAMPLED))
        if issubclass(kind, dict):
            return list(itertools.islice(reversed(dict.values(container)), _SAMPLED))
        if issubclass(kind, collections.deque):
            newest = collections.deque.__reversed__(container)
            return list(itertools.islice(newest, _SAMPLED))
        if issubclass(kind, tuple):
            return list(tuple.__getitem__(container, slice(-_SAMPLED, None)))
        if kind is LRU_CACHE and (extent(container)[1] or 0) <= 4096:
            found = gc.get_referents(container)
            inner = [obj for obj in found if type(obj) is dict and len(obj) > 0]
            if extent(container)[1] is None and inner:
                return _entries(inner[0])
            return found[1 : 2 * _SAMPLED : 2]
        if not issubclass(kind, (type, types.ModuleType)):  # an object of C
            return [obj for obj in gc.get_referents(container)[-_SAMPLED:] if obj is not kind]
    except (RuntimeError, IndexError):  # Another thread has changed it meanwhile.
        pass
    return []


def _count(obj: Any, kinds: dict[str, _Kind], depth: int, seen: set[int]) -> None:
    """Count the tensors and arrays below an object, each once, by their kinds."""
    if id(obj) in seen or len(seen) > 64 * _SAMPLED:
        return
    seen.add(id(obj))
    name = kind_of(obj)
    if name:
        _add(kinds[name], obj)
    elif depth > 0 and not issubclass(type(obj), type):
        for part in gc.get_referents(obj)[:16]:
            if not issubclass(type(part), type):
                _count(part, kinds, depth - 1, seen)


def _add(kind: _Kind, obj: Any) -> None:
    """Add a tensor or an array to its kind, with the bytes of its elements."""
    torch, ndarray = bridge.loaded(), ndarray_type()
    kind.count += 1
    if torch is None or not issubclass(type(obj), torch.Tensor):
        kind.bytes += int(ndarray.nbytes.__get__(obj))
        return
    facts = tensor_facts(torch, obj)
    kind.bytes += facts.bytes
    is_known = facts.storage in kind.storages
    kind.storages[facts.storage] = 0 if is_known else facts.storage_bytes

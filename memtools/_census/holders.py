"""Who keeps objects alive, and the name of the place: `list MoEBlock.gate_history`.

Two searches go upwards from an object, with one pass over the heap for each level. `find_holders`
climbs from a sample of the new objects to the containers that hold a good part of them. `Namer`
climbs from such a container to a name that a reader finds in the program: an attribute of an
instance, class or module, a variable, or a function's closure or default. At each level it takes
the referrer that says most.

    sample ──► referrers ──► a container of many of them? ──► Namer ──► Holder
                  ▲ no: climb to the first referrer │
                  └─────────────────────────────────┘

None of this runs code of the program's classes. A class may override `__class__`, `__qualname__`
(in its metaclass), `__torch_function__` or `__getattr__`; proxies raise or load things when they
are touched. So types are named by `type`'s own getters, tensors are read by `torch.Tensor`'s, and
types are compared by identity.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memtools import _core
from memtools._base import sentences
from memtools._base import torch as bridge
from memtools._base.libraries import is_own
from memtools._base.number import whole_number
from memtools._base.redact import harmless
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    import torch

SAMPLE = 64  # So many objects are looked at.
_LEVELS = 8  # Either search climbs up to so many levels.
_NAMED = 4  # One call names up to so many containers.
_COMMON = 1 / 8  # A container is a holder if it has this share of the sample.
FRAMES = {
    types.GeneratorType: ("gi_frame", "generator"),
    types.CoroutineType: ("cr_frame", "coroutine"),
    types.AsyncGeneratorType: ("ag_frame", "async generator"),
}
# The attributes of these modules' classes say nothing: the name is where the instance lies.
_WRAPPERS = ("collections", "weakref", "queue", "_weakrefset", "asyncio.queues", "functools")
_MODULE_PARTS = ("_modules", "_buffers", "_parameters")
_MODULE_LISTS = "torch.nn.modules.container"  # ModuleList, Sequential, ParameterDict and so on
MOST_NODES = 200_000  # One search walks up to so many nodes of graphs.
_LEAST_NODES = 256  # A graph is named from so many nodes on.
_ROOTS = 256  # Graphs are walked from so many tensors, the newest first.
_LEAST_BYTES = 1 << 20  # Graphs are reported from so many bytes on.
LRU_CACHE = type(functools.lru_cache(lambda: None))
_NOBODY = object()  # stands for a holder outside the Python heap
QUALNAME = type.__dict__["__qualname__"].__get__
_MODULE = type.__dict__["__module__"].__get__
MRO = type.__dict__["__mro__"].__get__

_T = TypeVar("_T", bound=type)
#: the ids of the classes that a census is made of: a class may define how it compares
PARTS_OF_LOOKS: set[int] = set()


def part_of_a_look(kind: _T) -> _T:
    """Decorate a class of a census. Its instances exist only because of a look, so they do not
    count as holders."""
    PARTS_OF_LOOKS.add(id(kind))
    return kind


def _is_one(kind: type, *wanted: type) -> bool:
    """Whether a type is one of these, by identity: `in` may ask its metaclass."""
    return any(kind is one for one in wanted)


def type_name(kind: type) -> str:
    """`list`, `torch.Tensor`, `mypackage.train.Trainer`."""
    name, module = str(QUALNAME(kind)), _MODULE(kind)
    if type(module) is not str or module in ("builtins", "__main__"):
        return name
    if module == "torch.nn.parameter":
        return f"torch.nn.{name}"
    return f"{module}.{name}"


def short_name(kind: type) -> str:
    """The class alone, as in `Trainer.metrics`; `<locals>` left out."""
    return str(QUALNAME(kind)).rpartition("<locals>.")[2]


def defines(kind: type, name: str, before: type) -> bool:
    """Whether a class in front of `before` in the order of inheritance defines the name."""
    for base in MRO(kind):
        if base is before:
            return False
        if name in base.__dict__:
            return True
    return False


def shape_words(shape: Sequence[int]) -> str:
    """`[2048, 64]`, or `scalar` without dimensions."""
    return f"[{', '.join(map(str, shape))}]" if shape else "scalar"


@part_of_a_look
class Shape(tuple[int, ...]):
    """A shape that a later census does not take for a tuple of the program."""

    __slots__ = ()


@part_of_a_look
class TensorKind(NamedTuple):
    """The key of a group of tensors. `shape` and `device` are None if reading them would run Python
    code; `shape` also for a nested tensor."""

    #: such as "torch.Tensor"
    type: str
    #: the dimensions
    shape: tuple[int, ...] | None
    #: such as "float32"
    dtype: str
    #: such as "cpu"
    device: str | None

    def __str__(self) -> str:
        shape = "nested or wrapped" if self.shape is None else shape_words(self.shape)
        device = "" if self.device in ("cpu", None) else f" on {self.device}"
        name = "tensor" if self.type == "torch.Tensor" else self.type.rpartition(".")[2]
        return f"{shape} {self.dtype} {name}{device}"


class TensorFacts(NamedTuple):
    """The key by which storages are given to groups, the kind, and the memory in bytes."""

    key: tuple[int, ...]
    kind: TensorKind
    storage: int
    storage_bytes: int
    bytes: int


def tensor_kind(torch: Any, tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor, by the getters of torch's own class."""
    base, kind = torch._C.TensorBase, type(tensor)
    shape: tuple[int, ...] | None = None
    device: str | None = None
    with torch._C.DisableTorchFunctionSubclass():
        try:
            dtype = str(base.dtype.__get__(tensor)).removeprefix("torch.")
        except RuntimeError:  # A collection on another thread has cleared it meanwhile.
            return TensorKind(type_name(kind), None, "undefined", None)
        if not defines(kind, "__torch_dispatch__", torch.Tensor):
            device = str(base.device.__get__(tensor))
            if not base.is_nested.__get__(tensor):
                shape = Shape(base.shape.__get__(tensor))
                if not {int}.issuperset(map(type, shape)):  # Symbols are used while tracing.
                    shape = None
    return TensorKind(type_name(kind), shape, dtype, device)


def tensor_facts(torch: Any, tensor: torch.Tensor) -> TensorFacts:
    """The facts that the shim gives, by public calls of torch: some 20 us a tensor."""
    base, kind = torch._C.TensorBase, tensor_kind(torch, tensor)
    where = whole = own = 0
    if kind.dtype == "undefined":
        return TensorFacts((id(type(tensor)), -1, 0), kind, 0, 0, 0)
    with torch._C.DisableTorchFunctionSubclass():
        dtype = base.dtype.__get__(tensor)
        try:
            storage = torch.Tensor.untyped_storage(tensor)
            where, whole = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # Sparse and fake tensors have no storage.
            pass
    if kind.shape is not None:
        own = dtype.itemsize
        for n in kind.shape:
            own *= n
    dims = [-1] if kind.shape is None else [len(kind.shape), *kind.shape]
    return TensorFacts((id(type(tensor)), *dims, id(dtype)), kind, where, whole, own)


def graph_of(torch: Any, tensor: torch.Tensor) -> Any:
    """The node of autograd's graph that made the tensor, or None."""
    if defines(type(tensor), "__torch_dispatch__", torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C.TensorBase.grad_fn.__get__(tensor)


# --- who refers to them ---------------------------------------------------------------------------


class Own(list[Any]):
    """A list of memtools, which never counts as a holder."""

    __slots__ = ()


class Local(NamedTuple):
    """A variable of a running function."""

    code: types.CodeType
    name: str | None


class Referrers(NamedTuple):
    """Who refers to each of some objects, in their order."""

    #: the program's containers and instances, and a Local for each variable of a running function
    holders: list[Own]
    #: references that nothing on the Python heap accounts for
    unaccounted: list[int]


def referrers(objects: Sequence[Any], ignored: Any = None) -> Referrers:
    """Who refers to the objects, by one pass over the heap; `ignored` is a container that does not
    count."""
    targets = list(objects)
    edges, frames, unaccounted = _core._referrers(targets)
    holders = list(map(Own, [()] * len(targets)))
    for container, i in edges:
        if type(container) is not Own and container is not ignored:
            holders[i].append(container)
    for code, name, i in frames:
        if type(code) is not types.CodeType:
            holders[i].append(code)  # what the interpreter keeps
        elif not is_own(code.co_filename):
            holders[i].append(Local(code, name))
    return Referrers(holders, unaccounted)


def extent(container: Any) -> tuple[int | None, int | None]:
    """(the length, the capacity) of a container; None without a bound, or if only code of the
    program knows the length."""
    kind = type(container)
    if issubclass(kind, collections.deque):
        bound = collections.deque.maxlen.__get__(container)
        return collections.deque.__len__(container), bound
    if kind is LRU_CACHE:
        return None, container.cache_parameters()["maxsize"]
    for builtin in (list, dict, tuple, set, frozenset):
        if issubclass(kind, builtin):
            return int(builtin.__len__(container)), None
    return None, None


# --- holders ---


@part_of_a_look
@dataclass(frozen=True, repr=False, slots=True)
class Holder:
    """What keeps objects alive. `str()` is one sentence.

    Attributes:
        path: where it is in the program, like `list MoEBlock.gate_history`.
        kind: the container's type, or `variable`, `calls`, `autograd graph`, `C code`, `function`.
        length: entries, or nodes of a graph.
        capacity: the most entries (`deque(maxlen=...)`, `lru_cache(maxsize)`); None if unbounded.
        new_objects: an estimate of how many of the objects it holds.
        new_bytes: bytes of these if they are tensors.
        containers: the number of containers of this name.
        what: the objects in words, like `[2048, 64] float32 tensors`.
        steps: the number of steps in which the objects came.
        since_step: the step at which it began to grow; None after a single look.
        rises: looks at which it was longer than before.
        only_gained: whether it was never shorter than before.
        extension: the extension class of the newest entries, whose memory in C is unknown.
        view_bytes: bytes of the whole tensor, if the newest tensors are small parts of larger ones.
        may_fill: whether it may be a buffer that still fills.
        bytes_in_c: the part of `new_bytes` that is memory in C, as far as known.
        kept_at: the user's line that puts them there, as `file:line in function`.
        kept_until: what empties the container, such as `train.py:80 in main empties it`.
        library: the owner of the container, such as `tarfile.TarFile`.
        release: a method of that object which releases them, such as `close()`.
    """

    path: str
    kind: str
    length: int | None
    capacity: int | None
    new_objects: int
    new_bytes: int
    containers: int = 1
    what: str = "objects"
    steps: int = 1
    since_step: int | None = None
    rises: int = 0
    only_gained: bool = False
    extension: str = ""
    bytes_in_c: int = 0
    view_bytes: int = 0
    kept_at: str = ""
    kept_until: str = ""
    may_fill: bool = False
    library: str = ""
    release: str = ""

    def __post_init__(self) -> None:
        """Remove terminal escapes and secrets from names of the program."""
        for name in ("path", "kind", "what", "kept_at", "kept_until", "library"):
            object.__setattr__(self, name, harmless(getattr(self, name)))

    @property
    def rate_bytes(self) -> float:
        """Bytes gained per step."""
        return self.new_bytes / self.steps

    @property
    def final_bytes(self) -> int | None:
        """Bytes of a bounded container when full."""
        return sentences.final_bytes(self)

    def _with(self, other: Holder) -> Holder:
        """Join two holders of the same name."""
        lengths = self.length, other.length
        rate = self.rate_bytes + other.rate_bytes
        return replace(
            self,
            length=None if lengths[0] is None or lengths[1] is None else lengths[0] + lengths[1],
            new_objects=self.new_objects + other.new_objects,
            new_bytes=round(rate * self.steps),
            containers=self.containers + 1,
            rises=min(self.rises, other.rises),
            only_gained=self.only_gained and other.only_gained,
        )

    def __repr__(self) -> str:
        held = sentences.of_held(self)
        return f"<Holder: {self.path}{f': {held}' if held else ''}>"

    def __str__(self) -> str:
        return sentences.of_holder(self)


def holder_of(objects: object, *, steps: int = 1) -> list[Holder]:
    """Find the holders of an object, or of the objects in a list, the largest holder first.

    Takes some passes over the heap, about 0.15 us per object each. Runs none of the program's code.

    Args:
        objects: one object, or a list or tuple of objects, of which the first 64 are used. For the
            holder of a list itself pass `[that_list]`. Text, small numbers and None are shared, so
            any part of the process may be named for them.
        steps: the number of steps in which they came, for rates, at least 1.

    Raises MemoryError if there is no memory for its tables.
    """
    steps = whole_number("steps", steps)
    given: Any = objects
    # By the methods of list and tuple, as a class may define its own.
    if issubclass(type(given), list):
        sample, count = Own(list.__getitem__(given, slice(SAMPLE))), list.__len__(given)
    elif issubclass(type(given), tuple):
        sample, count = Own(tuple.__getitem__(given, slice(SAMPLE))), tuple.__len__(given)
    else:
        return find_holders(Own([given]), 1, None, steps)
    found = find_holders(sample, count, None, steps, ignored=objects)
    if all(holder.kind != "nobody" for holder in found):
        return found
    # Does anything but a variable of a running function hold the sequence?
    if all(type(holder) is Local for holder in referrers(Own([objects])).holders[0]):
        return found
    return find_holders(sample, count, None, steps)


# --- from a sample to the containers where it is collected ----------------------------------------


@dataclass(frozen=True)
class _Share:
    """What the sample stands for."""

    count: int
    bytes: int
    what: str
    steps: int

    def of(self, part: float) -> tuple[int, int, int, str, int]:
        """The last fields of a Holder of this part, 0 to 1, of the sample."""
        return round(part * self.count), round(part * self.bytes), 1, self.what, self.steps


@dataclass
class _Place:
    """A container of some of the sample."""

    container: Own  # the container alone, or a Local
    inner: str  # how one gets from an entry of it to an object, like `['loss']`
    members: set[int]  # the indexes of the objects in the sample
    only: Own | None = None  # the sample, where it is one object


def _members(place: _Place) -> int:
    return len(place.members)


def find_holders(
    sample: Own, count: int, size: int | None, steps: int, ignored: Any = None
) -> list[Holder]:
    """The holders of `count` objects of `size` bytes that came in so many steps, by a sample of
    them; those that hold most first.

    Args:
        sample: some of the objects.
        count: how many there are.
        size: their bytes; None to take them from the sample.
        steps: in how many steps they came.
        ignored: a container that does not count as a holder.
    """
    if not sample:
        return []
    namer = Namer()
    places, orphans = _collect(sample, ignored)
    torch, names, storages = bridge.loaded(), set[str](), dict[int, int]()
    for obj in sample:
        if torch is not None and issubclass(type(obj), torch.Tensor):
            facts = tensor_facts(torch, obj)
            names.add(f"{facts.kind}s")
            if facts.storage:  # which counts once where several tensors share it
                storages[facts.storage] = facts.storage_bytes
        else:
            names.add(f"{type_name(type(obj))} objects")
    if size is None:
        size = sum(storages.values()) * count // len(sample)
    share = _Share(count, size, names.pop() if len(names) == 1 else "objects", steps)
    places.sort(key=_members, reverse=True)
    found = list[Holder]()
    for place in places[:_NAMED]:
        found.append(_holder(namer, place, ignored, len(place.members) / len(sample), share))
    if len(orphans) > len(sample) / 8:
        found.append(_orphans(sample, orphans, share))
    # Holders of one name as one: twelve layers have each a list of that name.
    joined: dict[tuple[str, str], Holder] = {}
    for holder in sorted(found, key=operator.attrgetter("new_objects"), reverse=True):
        key = holder.path, holder.kind
        joined[key] = joined[key]._with(holder) if key in joined else holder
    return list(joined.values())


def _collect(sample: Own, ignored: Any) -> tuple[list[_Place], dict[int, int]]:
    """Climb from the objects to the containers where they meet. Returns these, and the references
    of each object without a holder.

    Places with only a few objects are returned only if there are no others.
    """
    heads, inner = Own(sample), [""] * len(sample)  # what the climb has reached from each object
    members = [{i} for i in range(len(sample))]
    orphans: dict[int, int] = {}
    places, lonely = list[_Place](), list[_Place]()
    for level in range(_LEVELS):
        above = referrers(heads, ignored)
        for i, holders in enumerate(above.holders):
            if level == 0 and not holders:
                orphans[i] = above.unaccounted[i]
            if holders and PARTS_OF_LOOKS.issuperset(map(id, map(type, holders))):
                members[i] = set()  # It exists only because of a look.
        places += _common(above, members, inner, len(sample))
        heads, members, inner = _climb(heads, above, members, inner, places)
        for i in reversed(range(len(heads))):
            if _core._module_of(heads[i]) is not None:  # nothing above it says more
                lonely.append(_Place(Own([heads.pop(i)]), inner.pop(i), members.pop(i)))
        if not heads:
            break
    if len(sample) == 1:
        for place in places:
            place.only = sample
    for head, how, indexes in zip(heads, inner, members, strict=True):
        lonely.append(_Place(Own([head]), how, indexes))
    least = 1 if not places else max(2, len(sample) * _COMMON)
    return places + [place for place in lonely if len(place.members) >= least][:_NAMED], orphans


def _common(above: Referrers, members: list[set[int]], inner: list[str], n: int) -> list[_Place]:
    """Containers that hold a good part of the sample, each object given to the fullest."""
    candidates: dict[Any, _Place] = {}
    for i, holders in enumerate(above.holders):
        for holder in holders:
            key = holder if type(holder) is Local else id(holder)
            place = candidates.setdefault(key, _Place(Own([holder]), inner[i], set()))
            place.members |= members[i]
    least = max(2, n * _COMMON) if n > 1 else 1
    places, given = [], set[int]()
    for place in sorted(candidates.values(), key=_members, reverse=True):
        place.members -= given
        # A type that all its instances refer to is not a finding.
        if len(place.members) >= least and not issubclass(type(place.container[0]), type):
            given |= place.members
            places.append(place)
    return places


def _climb(
    heads: Own, above: Referrers, members: list[set[int]], inner: list[str], places: list[_Place]
) -> tuple[Own, list[set[int]], list[str]]:
    """One level up, to the first holder of each object that lies in none of the places; those that
    come to one holder go on as one."""
    done = set[int]()
    for place in places:
        done |= place.members
    upper, their_members, ways = Own(), list[set[int]](), list[str]()
    index: dict[int, int] = {}
    for i, holders in enumerate(above.holders):
        rest = members[i] - done
        if not rest:
            continue
        for holder in holders:
            if type(holder) is not Local and not issubclass(type(holder), type):
                break
        else:
            continue
        if id(holder) not in index:
            index[id(holder)] = len(upper)
            upper.append(holder)
            their_members.append(set())
            ways.append(step_down(holder, heads[i]).text + inner[i])
        their_members[index[id(holder)]] |= rest
    return upper, their_members, ways


def _holder(namer: Namer, place: _Place, ignored: Any, part: float, share: _Share) -> Holder:
    container, figures = place.container[0], share.of(part)
    if type(container) is Local:
        if len(place.members) == 1 and share.steps > 1:  # a variable refers to one object
            size = share.bytes // max(1, share.count)
            figures = (min(1, share.count), size, 1, share.what, share.steps)
        code = container.code.co_qualname.rpartition("<locals>.")[2]
        path = f"local {container.name!r} of {code}()" if container.name else f"values of {code}()"
        return Holder(path, "variable", None, None, *figures)
    kind, (length, capacity) = short_name(type(container)), extent(container)
    if place.only is not None and not _is_one(type(container), list, set, collections.deque):
        path = namer.path(place.only[0], ignored)
        return Holder(path, kind, length, capacity, *figures)
    path = namer.path(container, ignored) or "that only C code refers to"
    if not path.startswith("lru_cache"):
        path = f"{kind}{'' if capacity is None else f'(maxlen={capacity})'} {path}"
    if place.inner:
        path = f"{path}, as {place.inner} of each entry"
    return Holder(path, kind, length, capacity, *figures)


def _orphans(sample: Own, orphans: dict[int, int], share: _Share) -> Holder:
    """The holder of objects that no Python object holds: autograd, or other C or C++ code."""
    figures = share.of(len(orphans) / len(sample))
    graph = _keeper([sample[i] for i in orphans])
    if graph is not None:
        return replace(graph_holder(graph, share.steps), new_objects=figures[0],
                       new_bytes=figures[1], what=share.what)  # fmt: skip
    references = sum(orphans.values())
    if references == 0:
        path = "nobody but the caller, who can free "
        path += "it" if len(orphans) == 1 else "them"
        return Holder(path, "nobody", None, None, *figures)
    noun = "reference" if references == 1 else "references"
    path = f"C code ({references:,} {noun} that no Python object holds)"
    return Holder(path, "C code", None, None, *figures)


# --- autograd graphs that are kept ----------------------------------------------------------------
#
# `total = total + loss` without detach(), and what hangs on it. The memory of a graph lies in C++
# nodes that the collector does not know, with the tensors they saved. They are found from the
# tensors that Python holds, by grad_fn and next_functions.


class Graph(NamedTuple):
    """A graph and the tensor that keeps it, or several graphs and their tensors."""

    roots: Own
    nodes: int


def largest_graph() -> Graph | None:
    """The largest graph that a tensor with a holder keeps, if it is a large one."""
    graphs = _walk(_roots())
    return graphs[0][0] if graphs and graphs[0][0].nodes >= _LEAST_NODES else None


def graph_holder(graph: Graph, steps: int) -> Holder:
    """Who keeps a graph, as a holder of no objects."""
    places, many = _collect(graph.roots, None)[0], len(graph.roots)
    if many > 1 and places:
        keeper = _holder(Namer(), max(places, key=_members), None, 1, _Share(0, 0, "", 1))
        path = graphs_in(keeper)
    else:
        path = f"autograd graph in {Namer().path(graph.roots[0]) or 'C code'}"
    return Holder(path, "autograd graph", graph.nodes, None, 0, 0, steps=steps)


def graphs_in(holder: Holder) -> str:
    """The name of the graphs that are kept by the entries of a holder, without its type."""
    return f"autograd graphs in {holder.path.removeprefix(f'{holder.kind} ')}"


def kept_graphs(known: Iterable[torch.Tensor]) -> str:
    """Say in a clause who keeps autograd graphs alive, and the bytes of the tensors that they
    saved; "" below 1 MiB. Looks at all objects that the collector knows, which takes some 0.1 s.

    Args:
        known: tensors that live in any case, such as the model's parameters.
    """
    found = _walk(_roots())
    total, _ = _bytes_saved((node for _, nodes in found for node in nodes), known)
    if total < _LEAST_BYTES:
        return ""
    roots = Own(root for graph, _ in found for root in graph.roots)
    path = graph_holder(Graph(roots, sum(graph.nodes for graph, _ in found)), 1).path
    return (
        f"{format_bytes(total)} that earlier passes saved for backward() are still held: {path}; "
        "keep loss.detach(), or what is in step()'s report, not outputs with their graph"
    )


def graph_bytes(tensors: Sequence[torch.Tensor]) -> int | None:
    """The bytes of what the graphs of some tensors saved for their backward pass, without
    parameters. None without a graph, with more than 200,000 nodes, or if hooks would have to
    compute what was saved, as those of activation checkpointing do.

    Takes some microseconds for each node.
    """
    found = [node for _, nodes in _walk(tensors) for node in nodes]
    if not 0 < len(found) < MOST_NODES:
        return None
    leaves = [node.variable for node in found if type(node).__name__ == "AccumulateGrad"]
    total, is_all = _bytes_saved(found, leaves)
    return total if is_all else None


def _bytes_saved(nodes: Iterable[Any], known: Iterable[torch.Tensor]) -> tuple[int, bool]:
    """The bytes of the storages that nodes of a graph saved, and whether all of them are known;
    parts of one batch share theirs. Hooks that compute something are stopped.

    Args:
        nodes: of a graph.
        known: tensors that live in any case, and are not counted.
    """
    torch = bridge.loaded()
    own = {t.untyped_storage().data_ptr() for t in known}
    sizes: dict[int, int] = {}
    with _without_operators(torch) as mode:
        for value in _saved(nodes):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.data_ptr() not in own:
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()), not mode.refused


def _without_operators(torch: Any) -> Any:
    """A context in which every operator of torch raises RuntimeError; `refused` says whether one
    was called."""

    class Refusing(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        refused = False

        def __torch_dispatch__(self, *arguments: Any, **keywords: Any) -> Any:
            self.refused = True
            raise RuntimeError("nothing is computed for a look at a graph")

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # else torch imports 820 modules at the first operator

    return Refusing()


def _keeper(orphans: Sequence[Any]) -> Graph | None:
    """The graphs that keep these tensors alive, joined; None if there are none."""
    torch = bridge.loaded()
    if torch is None or not issubclass(type(orphans[0]), torch.Tensor):
        return None
    wanted = {id(t) for t in orphans}
    own = [graph_of(torch, t) for t in orphans]
    nodes = {id(node) for node in own if node is not None}  # which stay as long as `own`
    roots, total = Own(), 0
    for graph, reached in _walk([t for t in _roots() if id(t) not in wanted]):
        is_of_it = not nodes.isdisjoint(map(id, reached))
        if is_of_it or not wanted.isdisjoint(map(id, _saved(reached))):
            roots += graph.roots
            total += graph.nodes
    return Graph(roots, total) if roots else None


def _roots() -> Own:
    """Tensors with a graph that a Python object holds, the newest first."""
    torch = bridge.loaded()
    if torch is None:
        return Own()
    tensors = Own(_core._census(torch.Tensor, False)[2])
    tensors = Own(t for t in tensors if graph_of(torch, t) is not None)
    tensors.sort(key=lambda t: -graph_of(torch, t)._sequence_nr())
    del tensors[_ROOTS:]
    holders_of_each = referrers(tensors).holders
    return Own(t for t, holders in zip(tensors, holders_of_each, strict=True) if holders)


def _walk(roots: Sequence[Any]) -> list[tuple[Graph, Own]]:
    """Each root's graph with the nodes that no root before it reaches, the largest first."""
    torch, seen = bridge.loaded(), set[Any]()
    graphs = []
    for root in roots:
        reached, todo = Own(), [graph_of(torch, root)]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reached.append(node)
            todo += [following for following, _ in node.next_functions]
        if reached:
            graphs.append((Graph(Own([root]), len(reached)), reached))
    return sorted(graphs, key=lambda pair: -pair[0].nodes)


def _saved(nodes: Iterable[Any]) -> Iterator[Any]:
    """What nodes of a graph saved for their backward pass."""
    names: dict[type, list[str]] = {}
    for node in nodes:
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
        for name in names[kind]:
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by backward()
                continue
            yield from value if _is_one(type(value), tuple, list) else (value,)


# --- from a container to its name in the program ------------------------------------------------


class Step(NamedTuple):
    """One step down from an owner to what it holds: `.name`, `[key]`, or "" for neither."""

    text: str
    key: Any = None


class Namer:
    """Names places in the program."""

    def path(self, obj: Any, ignored: Any = None) -> str:
        """`Trainer.metrics['loss']`; "" if no Python object refers to the object."""

        def best(head: Own) -> Any:
            return self._best(head[0], referrers(head, ignored).holders[0])

        return self._path(obj, best, _LEVELS)

    def ways(self, objects: Sequence[Any]) -> list[Own]:
        """Of each object, it and who holds it, one by one, up to a module or a variable of a
        function. Takes one pass over the heap for each level."""
        ways = [Own([one]) for one in objects]
        climbing = list(ways)
        for _ in range(_LEVELS):
            heads = {id(way[-1]): way[-1] for way in climbing}  # Several may have come to one.
            if not heads:
                break
            above = dict(zip(heads, referrers(Own(heads.values()), heads).holders, strict=True))
            for way in climbing:
                best = self._best(way[-1], above[id(way[-1])])
                if best is not _NOBODY:
                    way.append(best)
            climbing = [
                way
                for way in climbing
                if id(way[-1]) not in heads
                and type(way[-1]) is not Local
                and _core._module_of(way[-1]) is None
            ]
        return ways

    def _best(self, obj: Any, holders: Own) -> Any:
        """Of those that refer to an object, who says most about where it is."""
        if not holders:
            return _NOBODY
        return min(holders, key=functools.partial(self._rank, obj))

    def path_along(self, way: Sequence[Any]) -> str:
        """The same for the first of some objects, each of which is held by the next one."""
        above = iter(Own(way[1:]))
        return self._path(way[0], lambda _: next(above, _NOBODY), len(way))

    def _path(self, obj: Any, holder_of_head: Callable[[Own], Any], levels: int) -> str:
        if type(obj) is LRU_CACHE:
            return _cached(obj)
        steps: list[Step] = []
        head = Own([obj])
        for _ in range(levels):
            module = _core._module_of(head[0])
            if module is not None:
                if not steps or type(steps[0].key) is not str:
                    return f"attributes of module {module}"
                of = _script(head[0]) if module == "__main__" else module
                return f"{of}.{_dotted(steps)}".lstrip(".")
            best = holder_of_head(head)
            if best is _NOBODY:
                return _text(steps).lstrip(".")
            name = _final(head[0], best, steps)
            if name is not None:
                return name
            step = step_down(best, head[0])
            if steps and head[0] is _core._instance_dict(best) and _says_nothing(best, steps):
                steps[0] = Step("")
            else:
                steps.insert(0, step)
            head[0] = best
        return f"a {short_name(type(head[0]))}{_text(steps)}"

    def _rank(self, obj: Any, holder: Any) -> int:
        """How little a holder says about where the object is: the lowest rank is best."""
        kind = type(holder)
        if kind is Local:
            return 5 if holder.name else 9
        if _core._module_of(holder) is not None:
            return 0
        if issubclass(kind, (type, types.ModuleType)) or kind is contextvars.ContextVar:
            return 1
        if kind is types.FunctionType or kind is LRU_CACHE:
            return 3 if type(obj) is not types.CellType else 1
        if _is_one(kind, *FRAMES, types.FrameType):
            return 6
        if issubclass(kind, (dict, list, collections.deque, set, tuple, frozenset)):
            return 4
        return 2 if attribute_of(holder, obj) is not None else 7


def _script(space: dict[str, Any]) -> str:
    """The name that the script would have as a module: `train` of train.py; "" without a file, as
    in a notebook."""
    file = space.get("__file__")
    return os.path.splitext(os.path.basename(file))[0] if type(file) is str else ""


def step_down(holder: Any, obj: Any) -> Step:
    """How a container gets at what it holds."""
    kind = type(holder)
    if issubclass(kind, (dict, list, tuple)):
        key = _core._place(holder, obj)
        if issubclass(kind, list) and key == list.__len__(holder) - 1 > 0:
            return Step("[-1]", key)  # the newest entry, which another one follows soon
        if _is_one(type(key), str, int, bool, float, bytes) and len(repr(key)) <= 40:
            return Step(f"[{key!r}]", key)
        return Step("[...]" if key is None else f"[{short_name(type(key))}]", key)
    if issubclass(kind, (collections.deque, set, frozenset)):
        return Step("[...]")
    if _is_one(kind, types.CellType, types.MethodType) or is_wrapper(holder):
        return Step("")
    name = attribute_of(holder, obj) or hooks_of(holder, obj)
    return Step("" if name is None else f".{name}")


def hooks_of(holder: Any, obj: Any) -> str | None:
    """The attribute of a tensor that holds its hooks, which torch keeps in C++."""
    torch = bridge.loaded()
    if torch is None or not _is_one(type(holder), torch.Tensor, torch.nn.Parameter):
        return None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(holder, name, None) is obj:
            return name
    return None


def _text(steps: list[Step]) -> str:
    return "".join(map(operator.attrgetter("text"), steps))


def _dotted(steps: list[Step]) -> str:
    """The first step as an attribute of a namespace, then the others."""
    return f"{steps[0].key}{_text(steps[1:])}"


def attribute_of(holder: Any, obj: Any) -> str | None:
    """The attribute by which an instance holds an object; "" where that is its __dict__."""
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


def is_wrapper(holder: Any) -> bool:
    module = type.__dict__["__module__"].__get__(type(holder))
    return type(module) is str and module in _WRAPPERS


def _says_nothing(holder: Any, steps: list[Step]) -> bool:
    """Whether the attribute of an instance, which is the first step, says nothing: that of a
    wrapper, or what a list of modules keeps them in."""
    return is_wrapper(holder) or (
        len(steps) == 1
        and steps[0].key in _MODULE_PARTS
        and type.__dict__["__module__"].__get__(type(holder)) == _MODULE_LISTS
    )


def _final(obj: Any, holder: Any, steps: list[Step]) -> str | None:
    """The whole name if a reader finds the holder in the program, else None."""
    kind, rest = type(holder), _text(steps)
    if kind is Local:
        return name_of_local(holder, rest)
    if kind is types.FunctionType:
        return _of_function(obj, holder, steps)
    if kind is LRU_CACHE:
        return f"{_cached(holder)}{rest}"
    if _is_one(kind, *FRAMES):
        attribute, what = FRAMES[kind]
        frame = getattr(holder, attribute)
        variable = None if frame is None else variable_of(frame, obj)
        return f"{_variable(variable)}{rest} of {what} {function_name(holder)}"
    if kind is types.FrameType:
        variable = variable_of(holder, obj)
        return f"{_variable(variable)}{rest} of {function_name(holder.f_code)}, kept by a traceback"
    if kind is contextvars.ContextVar:
        return f"ContextVar {str.__repr__(holder.name)}{rest}"
    if kind is types.ModuleType and holder is sys.modules.get("atexit"):
        return f"arguments of atexit.register(){rest}"
    if issubclass(kind, type):
        return _of_class(holder, obj, steps)
    if issubclass(kind, (dict, list, tuple, set, frozenset, collections.deque)):
        return None
    return _of_instance(obj, holder, steps, rest)


def name_of_local(local: Local, rest: str = "") -> str:
    """`local 'rows' of train()`; with `rest` the way from it to what it holds."""
    name = f"local {local.name!r}" if local.name else "a value in use"
    return f"{name}{rest} of {function_name(local.code)}"


def _cached(cache: Any) -> str:
    return f"lru_cache of {function_name(cache.__wrapped__)}"


def variable_of(frame: types.FrameType, obj: Any) -> str | None:
    """The name of the variable of a frame that has an object; None if there is none."""
    variables = _core._frame_variables(frame)
    return next((name for name, value in variables if value is obj), None)


def _variable(name: str | None) -> str:
    return f"local {name!r}" if name else "a value in use"


def function_name(owner: Any) -> str:
    """`train()`, for a function, a code object or a generator."""
    code = owner if type(owner) is types.CodeType else getattr(owner, "__code__", owner)
    name = getattr(code, "co_qualname", None) or getattr(owner, "__qualname__", "a function")
    return f"{str(name).rpartition('<locals>.')[2]}()"


def _of_class(kind: type, obj: Any, steps: list[Step]) -> str | None:
    if type(obj) is not dict:  # a base class, say
        return None
    if not steps or type(steps[0].key) is not str:
        return f"attributes of class {short_name(kind)}"
    return f"{short_name(kind)}.{_dotted(steps)}"


def _of_function(obj: Any, function: types.FunctionType, steps: list[Step]) -> str:
    name, rest = function_name(function), _text(steps)
    if obj is _core._instance_dict(function):
        return f"{name[:-2]}.{_dotted(steps)}" if steps else f"attributes of {name}"
    if (argument := _defaulted(function, obj, steps)) is not None:
        return f"default argument {argument!r}{_text(steps[1:])} of {name}"
    if obj is function.__closure__ and steps and type(steps[0].key) is int:
        variable = function.__code__.co_freevars[steps[0].key]
        return f"{variable!r}{_text(steps[1:])} in closure of {name}"
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


def _of_instance(obj: Any, holder: Any, steps: list[Step], rest: str) -> str | None:
    """`MoEBlock.gate_history`. None for wrappers and for C objects without attributes."""
    if is_wrapper(holder) or type(holder) is types.CellType:
        return None
    if issubclass(type(holder), threading.local):
        names = [step.key for step in steps if type(step.key) is str]
        return f"thread-local attribute {names[-1]}" if names else "thread-local attributes"
    name = attribute_of(holder, obj)
    if name is None:
        return None
    if not name and _says_nothing(holder, steps):
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

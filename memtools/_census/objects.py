"""What can be learnt of an object, and who refers to it, without running any code of its class.

A class may override `__class__`, `__qualname__` (in its metaclass), `__torch_function__` or
`__getattr__`; proxies raise or load things when they are touched. So types are named by `type`'s
own getters, tensors are read by `torch.Tensor`'s, and types are compared by identity.

    objects: names, tensors, referrers  <-  graphs  <-  holders  <-  census
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memtools import _core

if TYPE_CHECKING:
    import torch

_PACKAGE = str(Path(__file__).parents[1])
LRU_CACHE = type(functools.lru_cache(lambda: None))
_QUALNAME = type.__dict__["__qualname__"].__get__
_MODULE = type.__dict__["__module__"].__get__
_MRO = type.__dict__["__mro__"].__get__


_T = TypeVar("_T", bound=type)
#: the ids of the classes that a census is made of: a class may define how it compares
PARTS_OF_LOOKS: set[int] = set()


def part_of_a_look(kind: _T) -> _T:
    """Class decorator for what a census is made of: it exists because somebody looked, and so it
    holds nothing of the program's."""
    PARTS_OF_LOOKS.add(id(kind))
    return kind


def type_name(kind: type) -> str:
    """`list`, `torch.Tensor`, `mypackage.train.Trainer`."""
    name, module = str(_QUALNAME(kind)), _MODULE(kind)
    if type(module) is not str or module in ("builtins", "__main__"):
        return name
    if module == "torch.nn.parameter":
        return f"torch.nn.{name}"
    return f"{module}.{name}"


def short_name(kind: type) -> str:
    """The class alone, as in `Trainer.metrics`; `<locals>` left out."""
    return str(_QUALNAME(kind)).rpartition("<locals>.")[2]


def defines(kind: type, name: str, before: type) -> bool:
    """Whether a class in front of `before` in the order of inheritance defines the name."""
    for base in _MRO(kind):
        if base is before:
            return False
        if name in base.__dict__:
            return True
    return False


@part_of_a_look
class TensorKind(NamedTuple):
    """What tensors are grouped by. `shape` and `device` are None where asking would run Python code
    of the tensor's class (`__torch_dispatch__`); `shape` also for a nested tensor."""

    type: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str | None

    def __str__(self) -> str:
        shape = (
            "nested or wrapped" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        )
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
        except RuntimeError:  # a collection of another thread has cleared it meanwhile
            return TensorKind(type_name(kind), None, "undefined", None)
        if not defines(kind, "__torch_dispatch__", torch.Tensor):
            device = str(base.device.__get__(tensor))
            if not base.is_nested.__get__(tensor):
                shape = tuple(base.shape.__get__(tensor))
                if not {int}.issuperset(map(type, shape)):  # symbols while tracing
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
        except (NotImplementedError, RuntimeError):  # sparse, fake, functional: no memory to show
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


class Own(list[Any]):
    """A list of this package's own, which never counts as a holder."""

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
        if not code.co_filename.startswith(_PACKAGE):
            holders[i].append(Local(code, name))
    return Referrers(holders, unaccounted)


def extent(container: Any) -> tuple[int | None, int | None]:
    """(how many objects it has, how many it will have at most); None where it has no bound, or
    where its length is for the program's code to say."""
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

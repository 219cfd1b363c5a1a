"""What a census says of types and tensors, asked so that no code of theirs runs.

A class may override `__class__`, `__qualname__` (in its metaclass), `__torch_function__` or
`__getattr__`; proxies raise or load things when they are touched. So types are named by `type`'s
own getters, and tensors are read by `torch.Tensor`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_QUALNAME = type.__dict__["__qualname__"].__get__
_MODULE = type.__dict__["__module__"].__get__
_MRO = type.__dict__["__mro__"].__get__


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
                shape = _shape(base, tensor)
    return TensorKind(type_name(kind), shape, dtype, device)


def _shape(base: Any, tensor: torch.Tensor) -> tuple[int, ...] | None:
    shape = tuple(base.shape.__get__(tensor))
    return shape if all(type(n) is int for n in shape) else None  # symbols while tracing


def tensor_facts(torch: Any, tensor: torch.Tensor) -> TensorFacts:
    """All that the shim tells, by public calls: some 20 us."""
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
    """The node of autograd's graph that the tensor came from, or None."""
    if defines(type(tensor), "__torch_dispatch__", torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C.TensorBase.grad_fn.__get__(tensor)

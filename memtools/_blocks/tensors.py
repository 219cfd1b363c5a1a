"""Tensors: finds the storages of parameters, gradients, optimizer state and buffers.

One pass over the objects that Python's collector knows, with the frozen ones, finds the modules and
the optimizers. Weak references to them are kept while a step is recorded. torch is never imported
for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.classes import with_subclasses
from memtools._blocks.peak import BUFFER, GRADIENT, INPUT, OF_STATE, PARAMETER, Marked

_MRO = type.__dict__["__mro__"].__get__

#: address and bytes of a storage
Storage = tuple[int, int]
DEEPEST = 3  # Lists and dicts are entered to this depth.
MOST = 1 << 17  # So many tensors of one kind are looked at.
_CATEGORIES = (PARAMETER, BUFFER, GRADIENT, OF_STATE)


class Tensors:
    """The modules and optimizers of a program, and the storages that they hold now."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._names: dict[int, str] = {}  # of parameters and buffers, by the tensor's id

    def find(self) -> None:
        """Find modules and optimizers, and forget earlier ones."""
        self.forget()
        torch = bridge.loaded()
        modules = _classes(_class(torch, "nn.Module"))
        optimizers = _classes(_class(torch, "optim.Optimizer"))
        # Compare classes by identity: isinstance() may run code of the program.
        kinds = {id(cls) for cls in modules}, {id(cls) for cls in optimizers}
        for one in _core._instances((*modules, *optimizers)):
            for refs, kind in zip((self._modules, self._optimizers), kinds, strict=True):
                if id(type(one)) in kind:
                    with contextlib.suppress(TypeError):  # It allows no weak references.
                        refs.append(weakref.ref(one))
        alive = [module for ref in self._modules if (module := ref()) is not None]
        self._names = dict(reversed(list(_names(alive))))  # The first of two names stays.

    def forget(self) -> None:
        """Keep nothing of the program."""
        self._modules, self._optimizers, self._names = [], [], {}

    def held(self) -> Iterator[tuple[int, list[tuple[Storage, Marked]]]]:
        """For each category of Blocks.mark, the host storages that they hold now, each once, and
        what each of them is. Frozen parameters count as parameters."""
        torch = bridge.loaded()
        if torch is None:
            return
        seen: set[int] = set()
        parameters: dict[int, Any] = {}
        found: dict[int, list[tuple[Storage, Marked]]] = {c: [] for c in _CATEGORIES}

        def add(category: int, tensor: Any, name: str) -> None:
            storage = storage_of(torch, tensor)
            if storage is not None and storage[0] not in seen and len(found[category]) < MOST:
                seen.add(storage[0])
                found[category].append((storage, _marked(category, tensor, storage, name)))

        with torch._C.DisableTorchFunction():
            for module in (one for ref in self._modules if (one := ref()) is not None):
                for tensor in _tensors_of(vars(module).get("_parameters")):
                    parameters.setdefault(id(tensor), tensor)
                for tensor in _tensors_of(vars(module).get("_buffers")):
                    add(BUFFER, tensor, self._names.get(id(tensor), ""))
            optimizers = [one for ref in self._optimizers if (one := ref()) is not None]
            for optimizer in optimizers:
                for group in list(getattr(optimizer, "param_groups", ())):
                    for tensor in list(group.get("params", ())):
                        parameters.setdefault(id(tensor), tensor)
            for tensor in parameters.values():
                add(PARAMETER, tensor, self._names.get(id(tensor), ""))
            for tensor in parameters.values():
                if tensor.is_leaf and (gradient := tensor.grad) is not None:
                    add(GRADIENT, gradient, self._names.get(id(tensor), ""))
            for optimizer in optimizers:
                for owner, kept in list(getattr(optimizer, "state", {}).items()):
                    of = self._names.get(id(owner), "")
                    for name, tensor in _within(torch, kept):
                        add(OF_STATE, tensor, " of ".join(part for part in (name, of) if part))
        yield from found.items()


def inputs_of(arguments: Iterable[object]) -> list[tuple[Storage, Marked]]:
    """The host tensors among the arguments of a call that take no part in gradients."""
    torch, found = bridge.loaded(), []
    if torch is None:
        return []
    with torch._C.DisableTorchFunction():
        for _, tensor in _within(torch, list(arguments)):
            if tensor.grad_fn is None and not tensor.requires_grad:
                storage = storage_of(torch, tensor)
                if storage is not None:
                    found.append((storage, _marked(INPUT, tensor, storage, "")))
    return found


def storage_of(torch: Any, tensor: Any) -> Storage | None:
    """The address and the bytes of a tensor's storage; None if it is not plain host memory."""
    try:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except Exception:  # Fake, functional and wrapper tensors may raise anything.
        return None
    return (address, size) if address and size else None


def _marked(category: int, tensor: Any, storage: Storage, name: str) -> Marked:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Marked(storage[0], category, storage[1], dtype, tuple(map(int, tensor.shape)), name)


def _class(torch: Any, path: str) -> type | None:
    """A class of torch; None without torch."""
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None


def _classes(base: type | None) -> list[type]:
    """A class and all its subclasses."""
    return [] if base is None else list(with_subclasses(base))


def _tensors_of(registered: object) -> list[Any]:
    values = list(registered.values()) if isinstance(registered, dict) else []
    return [value for value in values if value is not None]


def _names(modules: list[Any]) -> Iterator[tuple[int, str]]:
    """(id of a parameter or buffer, its name), from the modules that no other module has. If there
    are several of these, the name begins with the class."""
    parts = {
        id(part)
        for module in modules
        for part in _tensors_of(vars(module).get("_modules"))
        if part is not module
    }
    found = [_names_in(module) for module in modules if id(module) not in parts]
    roots = [(cls, names) for cls, names in found if names]
    for cls, names in roots:
        prefix = "" if len(roots) == 1 else f"{cls}."
        for number, name in names:
            yield number, f"{prefix}{name}"


def _names_in(root: Any) -> tuple[str, list[tuple[int, str]]]:
    """The name of a module's class, and (id, name) of its parameters and buffers, its own first."""
    found: list[tuple[int, str]] = []
    waiting, met = [("", root)], set[int]()
    while waiting and len(met) < MOST:
        path, module = waiting.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        for field in ("_parameters", "_buffers"):
            for name, tensor in list((vars(module).get(field) or {}).items()):
                if tensor is not None:
                    found.append((id(tensor), f"{path}{name}"))
        for name, part in reversed(list((vars(module).get("_modules") or {}).items())):
            if part is not None:
                waiting.append((f"{path}{name}.", part))
    return type(root).__name__, found


def _within(torch: Any, kept: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the tensors in a value, and in its lists and dicts."""
    kind = type(kept)  # isinstance() may run code of the program.
    if issubclass(kind, torch.Tensor):
        yield name, kept
    elif depth == DEEPEST:
        return
    elif issubclass(kind, dict):
        for key, value in list(dict.items(kept)):
            of_key = key if type(key) is str else ""
            yield from _within(torch, value, name or of_key, depth + 1)
    elif any(base is UserDict for base in _MRO(kind)):  # A batch of transformers is one.
        yield from _within(torch, (_core._instance_dict(kept) or {}).get("data"), name, depth)
    elif issubclass(kind, (list, tuple)):
        built_in: Any = list if issubclass(kind, list) else tuple
        for value in list(built_in.__iter__(kept)):
            yield from _within(torch, value, name, depth + 1)

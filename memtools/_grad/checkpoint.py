"""checkpoint_layers: layers that save only their input, and compute again in backward."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.number import whole_number

if TYPE_CHECKING:
    import torch


def checkpoint_layers(
    model: torch.nn.Module, every: int = 1, *, names: str | Iterable[str] | None = None
) -> CheckpointedLayers:
    """Checkpoint the activations of a model's layers, in place.

        handle = memtools.checkpoint_layers(model)                            # all repeated blocks
        handle = memtools.checkpoint_layers(model, every=2)                   # half of them
        handle = memtools.checkpoint_layers(model, names=["encoder.layers.*", "head"])
        print(handle); handle.remove()

    A checkpointed layer saves only its input; the backward pass runs its forward again, with the
    same random numbers and autocast, so losses and gradients have the same bits. Parameters, names
    and `state_dict()` do not change. Works with DDP, FSDP2, `torch.compile`, pickling and copying.
    Costs the layers' forward pass again, and about 0.2 ms per layer and step.

    Args:
        model: the model, which is changed in place.
        every: checkpoint every n-th layer, from the first one on.
        names: patterns of `model.named_modules()` names, in which "*" matches one part of a name or
            a piece of it. None: the members of the longest ModuleList or Sequential of one type,
            and of similar lists.

    Raises ValueError if no layer was found, or a layer is checkpointed already, is nested in
    another one, or is never called. No layer is wrapped then.
    """
    torch = bridge.connect().torch
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"checkpoint_layers() takes a torch.nn.Module, got {type(model).__name__}")
    every = whole_number("every", every)
    found = _repeated(torch, model) if names is None else _named(model, names)
    chosen = dict(list(found.items())[::every])
    _check(torch, model, chosen)
    wrappers = []
    for layer in chosen.values():
        norms = torch.nn.modules.batchnorm._NormBase
        statistics = any(isinstance(module, norms) for module in layer.modules())
        wrappers.append(_Recomputed(layer, layer.__dict__.get("forward"), statistics))
        layer.__dict__["forward"] = wrappers[-1]
    return CheckpointedLayers(tuple(chosen), len(found), tuple(wrappers))


@dataclass(frozen=True, slots=True)
class CheckpointedLayers:
    """The handle of `checkpoint_layers`. It does not keep the model alive."""

    #: of the checkpointed layers
    names: tuple[str, ...]
    #: the number of layers that `every` chose from
    found: int
    wrappers: tuple[_Recomputed, ...]

    def remove(self) -> None:
        """Let the layers run as before; not within a backward pass. May be called twice."""
        for wrapper in self.wrappers:
            wrapper.remove()

    @property
    def active(self) -> bool:
        """Whether the layers are checkpointed."""
        return any(wrapper.enabled for wrapper in self.wrappers)

    def __str__(self) -> str:
        state = "compute again in backward" if self.active else "run as before"
        shown = ", ".join(self.names[:4]) + (", ..." if len(self.names) > 4 else "")
        return f"{len(self.names)} of {self.found} layers {state}: {shown}"


class _Recomputed:
    """Replaces a layer's forward(), as an attribute of the layer. It holds the layer weakly, so
    that a model is freed at once and not by the garbage collector."""

    def __init__(
        self, layer: torch.nn.Module, before: Any, statistics: bool, enabled: bool = True
    ) -> None:
        self._torch = bridge.connect().torch
        self._layer = weakref.ref(layer)
        self._forward = type(layer).forward
        self._before = before  # the forward that other code had put there
        self._statistics = statistics
        self._reserved = _reserved()
        self.enabled = enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._before
        if forward is None:
            forward = self._forward.__get__(self._layer())
        torch = self._torch
        if not self.enabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        checkpoint = torch.utils.checkpoint.checkpoint
        if not self._reserved.isdisjoint(kwargs):  # The layer has keywords of the same names.
            forward, kwargs = functools.partial(forward, **kwargs), {}
        if self._statistics and not torch.compiler.is_compiling():
            kwargs = {**kwargs, "context_fn": self._contexts}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(self._torch, self._layer())

    def remove(self) -> None:
        layer, self.enabled = self._layer(), False
        if layer is None or layer.__dict__.get("forward") is not self:
            return  # Other code has wrapped this, and goes on calling it.
        del layer.__dict__["forward"]
        if self._before is not None:
            layer.__dict__["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        # The layer is a part of the state, as it refers to this object and is made first.
        return _blank, (), (self._layer(), self._before, self._statistics, self.enabled)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[0] is not None:
            self.__init__(*state)  # type: ignore[misc]


@functools.cache
def _reserved() -> frozenset[str]:
    """Return the keywords that torch's checkpoint does not pass to the layer."""
    checkpoint = bridge.connect().torch.utils.checkpoint.checkpoint
    return frozenset(inspect.signature(checkpoint).parameters) | {"preserve_rng_state"}


def _blank() -> _Recomputed:
    return object.__new__(_Recomputed)


@contextmanager
def _statistics_kept(torch: Any, layer: Any) -> Iterator[None]:
    """Restore running statistics after the second forward."""
    norms = torch.nn.modules.batchnorm._NormBase
    buffers = [
        buffer
        for module in layer.modules()
        if isinstance(module, norms) and module.training
        for buffer in module.buffers(recurse=False)
    ]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # .data, as other backward passes check its version


# --- which layers ---------------------------------------------------------------------------------

#: Layers by name, in the order of the model.
Layers = dict[str, Any]


def _repeated(torch: Any, model: Any) -> Layers:
    lists = list(_block_lists(torch, model, ""))
    longest = max((len(blocks) for blocks in lists), default=0)
    if not longest:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of 2 or more modules of one "
            'type; pass names=["..."] with names from model.named_modules()'
        )
    kinds = {type(next(iter(one.values()))) for one in lists if len(one) == longest}
    found: Layers = {}
    for blocks in lists:
        if type(next(iter(blocks.values()))) in kinds:
            found.update(blocks)
    return {name: layer for name, layer in model.named_modules() if name in found}  # each once


def _block_lists(torch: Any, module: Any, name: str) -> Iterator[Layers]:
    """Yield the outermost lists of modules of one type."""
    children = module._modules.items()  # A layer that is there twice counts twice.
    inside = {f"{name}.{key}".lstrip("."): child for key, child in children if child is not None}
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        called = not any(_is_container(torch, child) for child in inside.values())
        if len(inside) > 1 and called and len(set(map(type, inside.values()))) == 1:
            yield inside
            return
    for path, child in inside.items():
        yield from _block_lists(torch, child, path)


def _is_container(torch: Any, module: Any) -> bool:
    """Whether it has no forward()."""
    return type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__


def _named(model: Any, names: str | Iterable[str]) -> Layers:
    patterns = [names] if isinstance(names, str) else list(names)
    if not patterns:
        raise ValueError('names is empty; pass patterns like "blocks.*", or leave it out')
    matched: set[str] = set()
    modules: Layers = dict(model.named_modules())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f'names must be patterns like "blocks.*", got {type(pattern).__name__}')
        hits = [name for name in modules if _matches(name, pattern)]
        if not hits:
            raise ValueError(f"no module of {type(model).__name__} is called {pattern!r}")
        matched.update(hits)
    return {name: module for name, module in modules.items() if name in matched}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check(torch: Any, model: Any, chosen: Layers) -> None:
    """Raise ValueError if a layer cannot be checkpointed."""
    wrapped = [
        name
        for name, module in model.named_modules()
        if isinstance(module.__dict__.get("forward"), _Recomputed)
    ]
    for name, layer in chosen.items():
        if _is_container(torch, layer):
            raise ValueError(f"{name} is a {type(layer).__name__}, which is never called itself")
        if name in wrapped:
            raise ValueError(f"{name} is checkpointed already; remove() that first")
        for other in (*wrapped, *chosen):
            outer, inner = sorted((name, other), key=len)
            if outer != inner and (outer == "" or inner.startswith(f"{outer}.")):
                raise ValueError(
                    f"{inner} is inside {outer or 'the model'} and would be computed three times; "
                    "checkpoint one of the two"
                )

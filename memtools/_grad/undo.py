"""Undoes what a micro-batch changed, so that it can run again as if for the first time.

    begin()   save random numbers, buffers and gradients
      the micro-batch fails, or keep()
    back()    restore all of them

From the second micro-batch of a window on there are gradients. There are two ways to save them,
and the results have the same bits:

    scratch   if the gradients take less than a tenth of the memory: p.grad is put aside, the
              micro-batch makes new gradients, and keep() adds them to the old ones, as autograd
              would have done. This takes the memory of the gradients once more during the backward
              pass, and the time to allocate it.
    redo      else: nothing is saved. After a failure in a backward pass the window runs again from
              its start, in the same micro-batches up to the one that failed. This takes no memory,
              and the time of the lost micro-batches.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from memtools._base import torch as bridge
from memtools._base.limits import job_limit, lowest_limit_of_process
from memtools._base.oom import shortage

if TYPE_CHECKING:
    import torch

#: Buffers of so many bytes are not copied each time if they do not change.
LARGE: Final = 1 << 20
#: A large buffer is no longer copied after it was found unchanged so often.
QUIET: Final = 2
#: A checksum takes the bytes as a table with so many columns.
COLUMNS: Final = 4096
#: Copies may take this part of the memory of a device or the host.
SMALL: Final = 0.1
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
#: In torch's own modules a forward pass changes buffers and no other attributes. The attributes of
#: DistributedDataParallel describe its reducer.
_FIXED: Final = ("torch.nn.modules.", "torch.nn.parallel.")
_LISTS: Final = "torch.nn.modules.container"


class RandomState:
    """The states of the random number generators: torch's of the CPU and of the devices in use,
    Python's `random`, and numpy's global one if the program has imported numpy."""

    __slots__ = ("_devices", "_numpy", "_python", "_torch")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        torch = bridge.connect().torch
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices: list[tuple[Any, Any]] = []
        for device in devices:
            state = torch.get_device_module(device).get_rng_state(*_index(device))
            self._devices.append((device, state))

    def restore(self) -> None:
        """Set all generators to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch = bridge.connect().torch
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)


class Buffers:
    """The state of a model's modules at one moment: the values of their buffers, such as the
    running statistics of BatchNorm, and which buffers, submodules and attributes they have.

    Small buffers are copied each time. A large buffer (a causal mask, a cache) is copied until it
    was found unchanged twice. From then on its tensor, address, shape and version are compared
    before each micro-batch, and its checksum is compared as well before it counts as restored,
    since a change through `.data` does not raise the version.

    Attributes that are small tensors without a gradient are copied like buffers. Numbers, str and
    None are saved. Other attributes may be activations of the pass before, and are not saved.

    Attributes:
        kept: the saved tensors.
        count: how many of them are buffers.
    """

    __slots__ = ("_held", "_names", "count", "kept")

    def __init__(self) -> None:
        self._held: list[_ModuleState] = []
        self._names: list[str] = []
        self.kept: list[_SavedTensor] = []
        self.count = 0

    def save(self, model: torch.nn.Module, others: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        """Save the state of the model and other named tensors. Existing copies of the same tensors
        are used again.

        Raises TypeError for a buffer of a kind that cannot be copied and restored.
        """
        torch = bridge.connect().torch
        self._held = [
            _ModuleState(module, torch) for module in _modules_of(model) if _may_change(module)
        ]
        found = [(name, value) for held in self._held for name, value in held.buffers.items()]
        places = [(name, value) for name, value in found if value is not None]
        self.count = len(places)
        places += [place for held in self._held for place in held.tensors]
        places += others
        self._names, tensors = [name for name, _ in places], [tensor for _, tensor in places]
        if len(tensors) != len(self.kept) or any(
            kept.tensor is not tensor for kept, tensor in zip(self.kept, tensors, strict=True)
        ):
            known = {id(kept.tensor): kept for kept in self.kept}
            self.kept = [
                known.get(id(tensor)) or _SavedTensor(tensor, name) for name, tensor in places
            ]
        with torch.no_grad():
            due = [kept for kept in self.kept if kept.is_due()]
            if due:
                copies = [kept.copy for kept in due]
                torch._foreach_copy_(copies, [_memory(kept.tensor) for kept in due])

    def restore(self) -> None:
        """Restore the tensors and their values, also of replaced and resized ones, and remove what
        was added.

        Raises RuntimeError if a large buffer has changed for the first time, as there is no copy of
        it. The others are restored, and from the next window on it is copied.
        """
        changed = []
        with bridge.connect().torch.no_grad():
            for held in self._held:
                held.restore()
            for name, kept in zip(self._names, self.kept, strict=True):
                if not kept.restore():
                    changed.append(name)
        if changed:
            raise RuntimeError(
                f"step(): the buffer {changed[0]!r} changed in a micro-batch that ran out of "
                "memory, and had never changed before, so that there is no copy of it: restore its "
                "values; from now on it is copied before each micro-batch"
            )


@functools.cache
def _own_names(torch: Any) -> frozenset[str]:
    """Return the names of the attributes that every module has, except `training`."""
    return frozenset(vars(torch.nn.Module())) - {"training"}


def _modules_of(model: torch.nn.Module) -> list[Any]:
    """Return `list(model.modules())` in a fifth of its time."""
    found = {id(model): model}
    queue = [model]
    for module in queue:
        for inner in module._modules.values():
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                queue.append(inner)
    return queue


def _may_change(module: Any) -> Any:
    """Whether a pass can change more of a module than the values of its parameters. In most modules
    it cannot, but a list of modules may get its first one."""
    home = type(module).__module__
    return module._buffers or module._modules or home == _LISTS or not home.startswith(_FIXED)


class _ModuleState:
    """The buffers, submodules, parameters and attributes of one module, by name.

    Attributes:
        buffers: tensors or None.
        tensors: (name, tensor) of the attributes that are copied like buffers.
    """

    __slots__ = ("_all", "_attributes", "_module", "_parts", "_temporary", "buffers", "tensors")

    def __init__(self, module: Any, torch: Any) -> None:
        self._module = module
        self.tensors: list[tuple[str, Any]] = []
        self._attributes: dict[str, Any] = {}
        self._all: frozenset[str] | None = None
        self._parts: dict[str, dict[str, Any]] = {}
        if type(module._buffers) is not dict:  # A module of TorchScript cannot get new parts.
            self.buffers = dict(module.named_buffers(recurse=False))
            return
        self.buffers = dict(module._buffers)
        self._temporary = frozenset(module._non_persistent_buffers_set)
        # Only the names of parameters are saved: fully_shard replaces parameters in each pass.
        self._parts = {"_buffers": self.buffers, "_modules": dict(module._modules)}
        self._parts["_parameters"] = dict.fromkeys(module._parameters)
        if type(module).__module__.startswith(_FIXED):
            return
        names = vars(module)
        self._all = frozenset(names)
        for name in self._all - _own_names(torch):
            value = names[name]
            if isinstance(value, _PLAIN):
                self._attributes[name] = value
            elif (
                type(value) is torch.Tensor
                and not value.requires_grad
                and value.numel() * value.element_size() < LARGE
            ):
                self._attributes[name] = value
                self.tensors.append((name, value))

    def restore(self) -> None:
        """Put back what was replaced or removed, and remove what was added."""
        names = vars(self._module)
        for part, before in self._parts.items():
            now = names[part]
            if part == "_parameters":
                for name in now.keys() - before.keys():
                    del now[name]
            elif list(now) != list(before) or any(now[name] is not before[name] for name in now):
                now.clear()
                now.update(before)
        if self._parts and names["_non_persistent_buffers_set"] != self._temporary:
            names["_non_persistent_buffers_set"].clear()
            names["_non_persistent_buffers_set"].update(self._temporary)
        if self._all is None:
            return
        for name in names.keys() - self._all:
            del names[name]
        for name, value in self._attributes.items():
            if names.get(name, self) is not value:
                names[name] = value


class _SavedTensor:
    """One tensor with a copy of its values, or with a checksum if it does not change.

    Raises TypeError for a tensor that cannot be copied and restored.
    """

    __slots__ = ("_checksum", "_moves", "_quiet", "_seen", "_shape", "copy", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor = tensor
        self.copy: torch.Tensor | None = None
        memory = _memory(tensor)
        self._moves = memory.numel() * memory.element_size() < LARGE or _integers(tensor) is None
        self._quiet = 0
        self._checksum: torch.Tensor | None = None
        self._seen: tuple[Any, ...] = ()
        self._shape: Any = None
        if not _is_plain(tensor):
            self._try(name)

    def _try(self, name: str) -> None:
        """Restore it once, unchanged, as not all kinds of tensors allow that."""
        try:
            with bridge.connect().torch.no_grad():
                self.is_due()
                self.restore()
        except Exception as error:
            if shortage(error) is not None:
                raise
            kind, first = type(self.tensor).__name__, str(error).partition("\n")[0]
            raise TypeError(
                f"step(): the buffer {name!r}, a {kind} of layout {self.tensor.layout}, cannot be "
                f"restored when memory runs out ({first}): make it a strided tensor"
            ) from error

    def is_due(self) -> bool:
        """Whether the values have to be copied into `copy` now. Allocates it if necessary."""
        tensor = self.tensor
        if self._checksum is not None:
            if self._seen == _look(tensor):
                return False
            self._moves, self._checksum = True, None
        memory = _memory(tensor)
        if self.copy is None or self.copy.shape != memory.shape:
            self.copy, self._shape = memory.detach().clone(), _shape(tensor)
            self._seen = () if self._moves else _look(tensor)
            return False
        if self._moves:
            return True
        if self._seen != _look(tensor) or not _has_bytes(self.copy, tensor):
            self._moves = True
            return True
        self._quiet += 1
        if self._quiet >= QUIET:
            self._checksum, self.copy = _checksum(tensor), None
        return False

    def restore(self) -> bool:
        """Restore the saved values. Returns whether that was possible."""
        tensor, copy = self.tensor, self.copy
        if copy is None:
            now = _checksum(tensor) if self._seen == _look(tensor) else None
            before = self._checksum
            if now is not None and before is not None and now.equal(before):
                return True
            self._moves, self._checksum = True, None
            return False
        if _shape(tensor) != self._shape:
            tensor.data = copy.clone().expand(self._shape)
        elif tensor.is_inference():
            with bridge.connect().torch.inference_mode():
                _memory(tensor).copy_(copy)
        else:
            _memory(tensor).copy_(copy)
        if not self._moves:
            self._seen = _look(tensor)  # The copy has raised the version.
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    torch = bridge.connect().torch
    kinds = (torch.Tensor, torch.nn.Buffer, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not tensor.is_nested


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, each once. An expanded tensor repeats some of them, and
    cannot be written to."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout is not bridge.connect().torch.strided or 0 not in tensor.stride():
        return tensor
    for axis, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _shape(tensor: torch.Tensor) -> Any:
    """Return the shape, or None for a nested tensor, whose shape does not change."""
    return None if tensor.is_nested else tensor.shape


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return facts that most changes of a tensor alter. Takes a microsecond."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return its bytes as 64-bit integers without a copy; None if that is impossible."""
    torch = bridge.connect().torch
    plain = type(tensor) in (torch.Tensor, torch.nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_inference() or tensor.is_meta or not tensor.is_contiguous():
        return None
    try:
        return tensor.detach().view(-1).view(torch.int64)
    except RuntimeError:  # The number of bytes or their address is not a multiple of 8.
        return None


def _checksum(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sums of the rows and of the columns of its bytes as a table, which differ if two
    values change places. None if the tensor cannot be summed any more."""
    integers = _integers(tensor)
    if integers is None:
        return None
    table = integers[: integers.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = integers[table.numel() :]
    summed: torch.Tensor = bridge.connect().torch.cat([table.sum(0), table.sum(1), rest])
    return summed


class Frozen:
    """The parameters without a gradient that the forward pass itself changes, such as those of a
    momentum encoder. The first window finds them: after each of its micro-batches, all frozen
    parameters are compared with their checksums from its start.

    In the first window all of them are copied like buffers, if together they take less than a tenth
    of the memory. After it, those that changed are copied.
    """

    __slots__ = ("_before", "_changed", "_copied", "_is_first")

    def __init__(self, model: torch.nn.Module) -> None:
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        named = [(name, p) for name, p in named if _is_frozen(p)]
        self._before = [(name, p, _sums_of(p).clone()) for name, p in named]
        self._copied = named if _is_small([p for _, p in named]) else None
        self._changed: dict[int, tuple[str, torch.Tensor]] = {}
        self._is_first = True

    @property
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """(name, parameter) of those that are copied like buffers."""
        return list(self._changed.values()) if self._copied is None else self._copied

    def _differing(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, p) for name, p, sums in self._before if not _has_bytes(_sums_of(p), sums)]

    def compare(self) -> None:
        """Find those that a successful micro-batch of the first window changed. If memory runs out
        meanwhile, all of them count as changed."""
        try:
            found = self._differing()
        except Exception as error:
            if shortage(error) is None:
                raise
            found = [(name, p) for name, p, _ in self._before]
        self._changed |= {id(p): (name, p) for name, p in found}
        self._is_first = False

    def require_copies(self, whole: bool) -> None:
        """Raise RuntimeError if a parameter without a copy has changed. This is called after a
        failure in the first window.

        Args:
            whole: whether only a micro-batch was undone, and not the window.
        """
        if self._copied is not None or (whole and not self._is_first):
            return
        if changed := self._differing():
            raise RuntimeError(
                f"step(): memory ran out in the first window, after a forward pass had changed the "
                f"parameter {changed[0][0]!r}, which has requires_grad=False and of which there is "
                "no copy yet: begin with a micro_batch_size that fits, or make it a buffer"
            )

    def end(self) -> None:
        """The first window has ended."""
        self._copied, self._before = None, []


def _sums_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a checksum, or the values if there is none."""
    tensor = parameter.detach()
    summed = _checksum(tensor)
    return tensor if summed is None else summed


def _is_frozen(parameter: torch.Tensor) -> bool:
    """Whether it has no gradient, and is a plain tensor with memory."""
    torch = bridge.connect().torch
    is_there = not torch.nn.parameter.is_lazy(parameter) and not parameter.is_meta
    return is_there and not parameter.requires_grad and _is_plain(parameter)


def _has_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, so that a nan equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    uint8 = bridge.connect().torch.uint8
    first, second = (tensor.reshape(-1).view(uint8) for tensor in (one, other))
    return bool(first.equal(second))


# --- gradients ---


class Redo:
    """Saves no gradients: back() cannot restore those to which a backward pass has added."""

    name = "redo"
    __slots__ = ("_empty", "_parameters")

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def begin(self) -> None:
        self._empty = all(p.grad is None for p in self._parameters)

    def keep(self) -> None:
        """Make the micro-batch a part of the window."""

    def back(self) -> bool:
        """Undo the micro-batch. Returns False if the window has to run again from its start."""
        if self._empty:
            self.drop()
        return self._empty

    def drop(self) -> None:
        """Drop all gradients, as at the begin of a window."""
        for p in self._parameters:
            p.grad = None


class Scratch(Redo):
    """Puts the gradients aside, and adds those of the micro-batch to them."""

    name = "scratch"
    __slots__ = ("_aside",)

    def begin(self) -> None:
        self._aside: list[torch.Tensor | None] = []
        for p in self._parameters:
            self._aside.append(p.grad)
            p.grad = None

    def keep(self) -> None:
        torch = bridge.connect().torch
        into: list[Any] = []
        added: list[Any] = []
        with torch.no_grad():
            for p, old in zip(self._parameters, self._aside, strict=True):
                if old is None:
                    continue
                new, p.grad = p.grad, old
                if new is None:
                    continue
                if old.layout is new.layout is torch.strided:
                    into.append(old)
                    added.append(new)
                else:
                    p.grad = old + new if old.layout is torch.strided else new + old
            if into:
                torch._foreach_add_(into, added)
        self._aside = []

    def back(self) -> bool:
        for p, old in zip(self._parameters, self._aside, strict=True):
            p.grad = old
        self._aside = []
        return True


def choose(parameters: list[torch.Tensor]) -> Redo:
    """Return the way for these parameters: redo if the gradients take a tenth or more of the memory
    of a device, or of the host memory that this process may use."""
    return (Scratch if _is_small([p for p in parameters if p.requires_grad]) else Redo)(parameters)


def _is_small(tensors: list[torch.Tensor]) -> bool:
    """Whether their gradients take less than a tenth of the memory of each of their devices."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        size = tensor.numel() * (tensor.grad_dtype or tensor.dtype).itemsize
        sizes[tensor.device] = sizes.get(tensor.device, 0) + size
    return all(size < SMALL * memory_of(device) for device, size in sizes.items())


def memory_of(device: torch.device) -> float:
    """Return the bytes that this process may have on a device; inf where that is not known."""
    if device.type == "cuda":
        return float(bridge.connect().torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return float("inf")
    job, own = job_limit(), lowest_limit_of_process()
    known = [] if job is None else [job]
    return min([*known, *([] if own is None else own[:1])], default=float("inf"))


# --- all of it ---


class Undo:
    """Saves the state before a micro-batch, and restores it.

    Args:
        parameters: the tensors to which a backward pass may add gradients.
        choose: returns a Redo or Scratch for such parameters.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        choose: Callable[[list[torch.Tensor]], Redo] = choose,
    ) -> None:
        self._parameters, self._choose = parameters, choose
        self._gradients = self._chosen = choose(parameters)
        self._buffers, self._first = Buffers(), Buffers()
        self._frozen: Frozen | None = None
        self._model: Any = None
        self._devices: tuple[torch.device, ...] = ()
        self._random: list[RandomState] = []

    def begin_window(self, model: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        """Save what is needed to go back to the start of the window. Call it before the first
        micro-batch. `parameters` may differ from before, as programs add groups to optimizers."""
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters, self._chosen = parameters, self._choose(parameters)
        # Gradients that are there already were not made by this window, and cannot be made again.
        has_gradients = any(p.grad is not None for p in parameters)
        self._gradients = Scratch(parameters) if has_gradients else self._chosen
        self._model = model
        # The generator of the CPU is always saved.
        devices: set[Any] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type not in ("cpu", "meta"):
                devices.add(tensor.device)
        torch = bridge.connect().torch
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._devices = tuple(sorted(devices, key=str))
        self._random = [RandomState(self._devices)]
        if self._frozen is None:
            self._frozen = Frozen(model)
        else:
            self._frozen.end()
        if type(self._gradients) is Redo:
            self._first.save(model, self._frozen.tensors)

    def begin(self, in_place: bool = False) -> None:
        """Save the state before a micro-batch. `in_place`: its gradients can neither be moved nor
        restored."""
        self._random[1:] = [RandomState(self._devices)]
        self._buffers.save(self._model, self._frozen.tensors if self._frozen else ())
        self._in_place = in_place
        if not in_place:
            self._gradients.begin()

    def keep(self) -> None:
        """Make a successful micro-batch a part of the window."""
        if self._frozen is not None:
            self._frozen.compare()
        if not self._in_place:
            self._gradients.keep()

    def back(self, backward: bool) -> tuple[bool, str]:
        """Undo the failed micro-batch, or, if that is impossible, the window.

        Args:
            backward: whether it may have failed in its backward pass.

        Returns False if the window was undone and has to run again from its start, and what was
        restored, in words.
        """
        whole = self._in_place or self._gradients.back() or not backward
        (self._random[-1] if whole else self._random[0]).restore()
        (self._buffers if whole else self._first).restore()
        if not whole:
            self._gradients.drop()
        if self._frozen is not None:
            self._frozen.require_copies(whole)
        parts = ["random numbers"]
        if self._buffers.count:
            parts.append(f"{self._buffers.count} buffers")
        if not self._in_place:
            parts.append(f"gradients ({self._gradients.name})")
        if not whole:
            parts.append("the window from its start")
        return whole, ", ".join(parts)

    def drop(self) -> None:
        """Drop the gradients of the window. Random numbers and buffers stay as they are."""
        self._gradients.drop()

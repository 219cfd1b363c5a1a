"""Taking back what a micro-batch changed, so that it can be run again as if for the first time.

    begin()   random numbers, buffers, gradients as they are now
      the micro-batch: fails, or keep()
    back()    all of them as they were

What is kept of the gradients, from a window's second micro-batch on (before the first there are
none), is a choice of price. The results have the same bits whatever is chosen:

    scratch   p.grad is put aside, the micro-batch makes new ones, keep() adds them to the old:
              the addition that autograd would have made. Costs the memory of the gradients once
              more, while the backward pass runs, and the time to find that memory each time.
    copy      gradients stay where they are, a copy is made before each micro-batch. The same
              memory, all of the time, and the time of the copy. For what must find its gradients
              in place.
    redo      nothing is kept. After a failure in a backward pass the window runs again from its
              start, in the same micro-batches up to the one that failed. No memory; the time of
              what had been done.
    auto      scratch where the gradients take less than a tenth of the memory there is, else redo.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from memtools import _core
from memtools._base import malloc
from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

LARGE: Final = 1 << 20  # bytes of a buffer from which on copying it each time is worth avoiding
QUIET: Final = 2  # times that a large buffer is found unchanged before it is no longer copied
COLUMNS: Final = 4096
SMALL: Final = 0.1  # of a device's or the host's memory: as much as auto spends on scratch


class RandomState:
    """Where the random number generators stand: torch's of the CPU and of the devices in use,
    Python's `random`, and numpy's global one where the program has it."""

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
    """The values of a model's buffers, such as BatchNorm's running statistics, at one moment.

    Small ones are copied each time. A large one (a causal mask, a cache) is copied until it was
    found unchanged twice; from then on it is looked at instead: its tensor, address, shape and
    version before each micro-batch, and a checksum too before it is taken for restored, since
    `.data` leaves no trace in the version.

    Attributes:
        kept: one for each buffer.
    """

    __slots__ = ("_places", "kept")

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self.kept: list[_Kept] = []

    def save(self, holders: Iterable[dict[str, Any]]) -> None:
        """Save modules' `_buffers`, into the copies of before where the tensors are the same."""
        holders = list(holders)
        if not holders:
            self._places, self.kept = [], []
            return
        torch = bridge.connect().torch
        self._places = [
            (names, name) for names in holders for name in names if names[name] is not None
        ]
        tensors = [names[name] for names, name in self._places]
        if len(tensors) != len(self.kept) or any(
            kept.tensor is not tensor for kept, tensor in zip(self.kept, tensors, strict=True)
        ):
            known = {id(kept.tensor): kept for kept in self.kept}
            self.kept = [known.get(id(tensor)) or _Kept(tensor) for tensor in tensors]
        with torch.no_grad():
            due = [kept for kept in self.kept if kept.is_due()]
            if due:
                copies = [kept.copy for kept in due]
                torch._foreach_copy_(copies, [kept.tensor for kept in due])

    def restore(self) -> None:
        """The same tensors with the same values, replaced and resized ones as well.

        Raises RuntimeError where a large buffer has changed that never had before: there is no copy
        of it. The others are restored, and from the next window on it is copied.
        """
        changed = []
        with bridge.connect().torch.no_grad():
            for (names, name), kept in zip(self._places, self.kept, strict=True):
                names[name] = kept.tensor
                if not kept.restore():
                    changed.append(name)
        if changed:
            raise RuntimeError(
                f"step(): the buffer {changed[0]!r} changed in a micro-batch that ran out of "
                "memory, and had never changed before, so that no copy of it was made: put it as "
                "it was; from now on it is copied before each micro-batch"
            )


class _Kept:
    """One buffer: a copy of it, or the proof that it does not change."""

    __slots__ = ("_checksum", "_moves", "_quiet", "_seen", "copy", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.copy: torch.Tensor | None = None
        self._moves = tensor.numel() * tensor.element_size() < LARGE or _integers(tensor) is None
        self._quiet = 0
        self._checksum: torch.Tensor | None = None
        self._seen: tuple[Any, ...] = ()

    def is_due(self) -> bool:
        """Whether `copy` has to take the tensor's values now; it is made anew where it has to."""
        tensor = self.tensor
        if self._checksum is not None:
            if self._seen == _look(tensor):
                return False
            self._moves, self._checksum = True, None
        if self.copy is None or self.copy.shape != tensor.shape:
            self.copy = tensor.detach().clone()
            self._seen = () if self._moves else _look(tensor)
            return False
        if self._moves:
            return True
        if self._seen != _look(tensor) or not _same(self.copy, tensor):
            self._moves = True
            return True
        self._quiet += 1
        if self._quiet >= QUIET:
            self._checksum, self.copy = _checksum(tensor), None
        return False

    def restore(self) -> bool:
        """Whether it is as it was at the last look."""
        tensor, copy = self.tensor, self.copy
        if copy is None:
            now = _checksum(tensor) if self._seen == _look(tensor) else None
            before = self._checksum
            if now is not None and before is not None and now.equal(before):
                return True
            self._moves, self._checksum = True, None
            return False
        if tensor.shape != copy.shape:
            tensor.data = copy.clone()
        else:
            tensor.copy_(copy)
        if not self._moves:
            self._seen = _look(tensor)  # the copy itself raised the version
        return True


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes with most changes, in a microsecond."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its bytes as integers of 64 bits, without a copy; None where that cannot be."""
    torch = bridge.connect().torch
    plain = type(tensor) in (torch.Tensor, torch.nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_inference() or tensor.is_meta or not tensor.is_contiguous():
        return None
    try:
        return tensor.detach().view(-1).view(torch.int64)
    except RuntimeError:  # their number is odd, or they begin at an odd address
        return None


def _same(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Bit for bit: a nan equals itself."""
    one, other = _integers(copy), _integers(tensor)
    return one is not None and other is not None and one.equal(other)


def _checksum(tensor: torch.Tensor) -> torch.Tensor | None:
    """Sums over the rows and the columns of its bytes as a table, which tell a moved value from one
    in its place. None where the tensor has become one that cannot be summed."""
    integers = _integers(tensor)
    if integers is None:
        return None
    table = integers[: integers.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = integers[table.numel() :]
    summed: torch.Tensor = bridge.connect().torch.cat([table.sum(0), table.sum(1), rest])
    return summed


# --- gradients ---


class Redo:
    """Keeps nothing; back() cannot give back what a backward pass has added to."""

    name = "redo"
    __slots__ = ("_empty", "_parameters")

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def begin(self) -> None:
        self._empty = all(p.grad is None for p in self._parameters)

    def keep(self) -> None:
        """The micro-batch is part of the window."""

    def back(self) -> bool:
        """Undo the micro-batch; False where the window has to begin anew."""
        if self._empty:
            self.drop()
        return self._empty

    def drop(self) -> None:
        """No gradients, as at the begin of a window."""
        for p in self._parameters:
            p.grad = None


class Scratch(Redo):
    """Puts the gradients aside and adds the micro-batch's to them."""

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


class Copy(Redo):
    """Copies the gradients into memory of its own, kept from one micro-batch to the next."""

    name = "copy"
    __slots__ = ("_copies", "_grads")

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._copies: list[torch.Tensor | None] = [None] * len(parameters)

    def begin(self) -> None:
        self._grads = [p.grad for p in self._parameters]
        torch = bridge.connect().torch
        into, of = [], []
        for i, grad in enumerate(self._grads):
            if grad is None:
                continue
            copy, grad = self._copies[i], grad.detach()
            if copy is None or copy.shape != grad.shape or copy.layout is not grad.layout:
                self._copies[i] = grad.clone()
            elif type(grad) is torch.Tensor:
                into.append(copy)
                of.append(grad)
            else:  # torch copies shards one by one only
                copy.copy_(grad)
        if into:
            torch._foreach_copy_(into, of)

    def keep(self) -> None:
        self._grads = []

    def back(self) -> bool:
        with bridge.connect().torch.no_grad():
            for p, grad, copy in zip(self._parameters, self._grads, self._copies, strict=True):
                p.grad = grad
                if grad is not None and copy is not None:
                    grad.copy_(copy)
        self._grads = []
        return True


_KINDS: Final = {"scratch": Scratch, "copy": Copy, "redo": Redo}


def choose(mode: str, parameters: list[torch.Tensor]) -> Redo:
    """Return the way of one accumulator. "auto" is "redo" where the gradients take a tenth or more
    of the memory of some device, or of what this process may have of the host's."""
    if mode != "auto":
        return _KINDS[mode](parameters)
    sizes: dict[torch.device, int] = {}
    for p in parameters:
        if p.requires_grad:
            sizes[p.device] = sizes.get(p.device, 0) + p.numel() * p.element_size()
    for device, size in sizes.items():
        if size >= SMALL * memory_of(device):
            return Redo(parameters)
    return Scratch(parameters)


def memory_of(device: torch.device) -> float:
    """Return the bytes that this process may have on a device; inf where that is not known."""
    if device.type == "cuda":
        return float(bridge.connect().torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return float("inf")
    host, limit = _core.Probe().read(), malloc.lowest_limit()
    least = float("inf") if limit is None else limit[0]
    for most in (host.cgroup_limit, host.total):
        if most not in (None, -1):  # unknown, or unlimited
            least = min(least, most)
    return least


# --- all of it ---


class Undo:
    """What is kept before a micro-batch, and given back.

    Args:
        way: "scratch", "copy", "redo" or "auto", as above.
        parameters: all that a backward pass may add gradients to.
    """

    def __init__(self, way: str, parameters: list[torch.Tensor]) -> None:
        self._way, self._parameters = way, parameters
        self._gradients = choose(way, parameters)
        self._buffers, self._first = Buffers(), Buffers()
        self._holders: list[dict[str, Any]] = []
        self._devices: tuple[torch.device, ...] = ()
        self._random: list[RandomState] = []

    def begin_window(self, model: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        """Keep what is needed to go back to the window's start; call it before the first
        micro-batch. `parameters` may be others than before: groups are added to optimizers."""
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters, self._gradients = parameters, choose(self._way, parameters)
        self._holders = list(filter(None, map(attrgetter("_buffers"), model.modules())))
        # The CPU's generator counts in any case.
        devices: set[Any] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type not in ("cpu", "meta"):
                devices.add(tensor.device)
        torch = bridge.connect().torch
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._devices = tuple(sorted(devices, key=str))
        self._random = [RandomState(self._devices)]
        if type(self._gradients) is Redo:
            self._first.save(self._holders)

    def begin(self, in_place: bool = False) -> None:
        """Keep what is needed to go back to now, before a micro-batch. `in_place`: its gradients
        can be neither moved nor given back."""
        self._random[1:] = [RandomState(self._devices)]
        self._buffers.save(self._holders)
        self._in_place = in_place
        if not in_place:
            self._gradients.begin()

    def keep(self) -> None:
        """Add the micro-batch, which went well, to what is kept."""
        if not self._in_place:
            self._gradients.keep()

    def back(self, backward: bool) -> tuple[bool, str]:
        """Undo the failed micro-batch. Returns whether that could be done, and in words what is as
        before; where only the whole window could be undone, it has to run again from its start.

        Args:
            backward: whether it may have failed in its backward pass.
        """
        whole = self._in_place or self._gradients.back() or not backward
        (self._random[-1] if whole else self._random[0]).restore()
        (self._buffers if whole else self._first).restore()
        if not whole:
            self._gradients.drop()
        parts = ["random numbers"]
        if self._buffers.kept:
            parts.append(f"{len(self._buffers.kept)} buffers")
        if not self._in_place:
            parts.append(f"gradients ({self._gradients.name})")
        if not whole:
            parts.append("the window from its start")
        return whole, ", ".join(parts)

    def drop(self) -> None:
        """Give the window up: drop its gradients. Random numbers and buffers stay."""
        self._gradients.drop()

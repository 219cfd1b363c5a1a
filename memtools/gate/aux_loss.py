"""AuxLoss: the load-balancing loss of all layers, with its graph, until it was used."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING

from memtools._base import process
from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

_forks = 0  # how often this process is a child: a compiled function can read it, unlike os.getpid()


def _forked() -> None:
    global _forks
    _forks += 1


process.at_fork(_forked)


class AuxLoss:
    """Adds up scalar losses that layers produce during a forward pass.

        aux = memtools.AuxLoss()
        aux.add(loss)                            # in the layers
        total = total + 0.01 * aux.total()       # in the training step, then backward
        aux.reset()                              # after backward: the graphs can go

    The sum keeps the graph, because the gate must get its gradient. A sum that is never reset keeps
    every step's graph alive, the usual leak of a hand-written `self.aux_loss += loss`: after
    `warn_after` updates without reset() it warns, once.

    A recomputed forward under activation checkpointing adds nothing. With reentrant checkpointing
    the first forward has no graph, so a loss added inside the region gives the gate no gradient;
    the recomputation notices that and warns, once.
    """

    __slots__ = (
        "_count",
        "_lock",
        "_lost_graph",
        "_owner",
        "_stale",
        "_sum",
        "_used",
        "_warn_after",
        "_warned",
    )

    def __init__(self, warn_after: int = 3) -> None:
        if warn_after < 1:
            raise ValueError(f"warn_after is at least 1 update, got {warn_after}")
        self._warn_after = warn_after
        self._lock, self._owner = threading.RLock(), _forks
        self._warned: set[str] = set()
        self._sum: torch.Tensor | None = None
        self._clear()

    def _locked(self) -> threading.RLock:
        """The lock of what is added up. The thread that holds it may come again, by a signal
        handler, a finalizer or a tensor subclass; a forked child makes its own, because the thread
        that holds it may be the parent's alone."""
        if self._owner != _forks:
            self._lock, self._owner = threading.RLock(), _forks
        return self._lock

    def _clear(self) -> None:
        self._sum = None
        self._count = 0
        self._stale = 0  # updates since the last reset: times total() was asked, then more added
        self._used = False  # total() was asked since the last add()
        self._lost_graph = False  # something without a graph was added

    def add(self, loss: torch.Tensor) -> None:
        """Add a scalar floating-point tensor, with its graph.

        Raises TypeError for anything but a tensor, ValueError for more than one element; then
        nothing was added.
        """
        torch = bridge.connect().torch
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            raise TypeError(f"add() takes a floating-point scalar tensor, got {_kind(loss)}")
        if loss.numel() != 1:
            raise ValueError(f"add() takes a scalar loss, got shape {list(loss.shape)}; reduce it")
        if bridge.in_backward():
            self._notice_recomputation(loss)
            return
        self._add(loss.reshape(()))

    def _add(self, loss: torch.Tensor) -> None:
        with self._locked():
            while True:
                held = self._sum
                total = loss if held is None else held + loss
                if self._sum is held:  # nobody came again while torch ran
                    break
            stale = self._stale + self._used
            self._sum, self._stale, self._used = total, stale, False
            self._count += 1
            self._lost_graph = self._lost_graph or not loss.requires_grad
        if stale >= self._warn_after:
            self._warn_once(
                "stale",
                f"AuxLoss was not reset for {stale} updates and holds the graphs of "
                f"{self._count} losses; call reset() after backward()",
            )

    def _notice_recomputation(self, loss: torch.Tensor) -> None:
        if loss.requires_grad and self._lost_graph:
            self._warn_once(
                "reentrant",
                "an aux loss was added inside a reentrant checkpoint, where it has no graph: the "
                "gate gets no gradient from it; use checkpoint(..., use_reentrant=False), or "
                "return the loss from the checkpointed function and add it outside",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def total(self) -> torch.Tensor:
        """The sum with its graph: a 0-dim tensor; a zero without a graph when nothing was added."""
        with self._locked():
            self._used = self._used or self._count > 0
            held = self._sum
        return bridge.connect().torch.zeros(()) if held is None else held

    def reset(self) -> None:
        """Let go of the sum and its graph."""
        with self._locked():
            self._clear()

    def __reduce__(self) -> tuple[type[AuxLoss], tuple[int]]:
        """A copy of a model that holds one, or a file of it, gets an empty one: the graphs belong
        to the step of this model."""
        return type(self), (self._warn_after,)

    def __len__(self) -> int:
        """Losses added since the last reset()."""
        return self._count

    def __bool__(self) -> bool:
        return True  # an empty one is still a thing to add to: `if model.aux_loss:`

    def __repr__(self) -> str:
        return f"AuxLoss({self._count} losses since reset)"


def _kind(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"

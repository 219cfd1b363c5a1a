"""AuxLoss: the sum of all layers' load-balancing losses, with its graph, until reset()."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING

from memtools._base import process
from memtools._base import torch as bridge
from memtools._base.number import whole_number

if TYPE_CHECKING:
    import torch

# How many forks lie between this process and the first one. A compiled function can read it, unlike
# os.getpid().
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


process.at_fork(_forked)


class AuxLoss:
    """A sum of the scalar losses that layers produce during a forward pass.

        aux = memtools.AuxLoss()
        aux.add(loss)                            # in the layers
        total = total + 0.01 * aux.total()       # in the training step, then backward
        aux.reset()                              # after backward: release the graphs

    The sum keeps its graph for the gates' gradient. A sum that is never reset keeps every step's
    graph alive: AuxLoss warns once.

    A forward pass that activation checkpointing repeats adds nothing. Inside a reentrant checkpoint
    a loss gives the gates no gradient; AuxLoss warns once.

    Args:
        warn_after: how many updates may pass without a reset(), at least 1. An update is a total()
            followed by another add().
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
        self._warn_after = whole_number("warn_after", warn_after)
        self._lock, self._owner = threading.RLock(), _forks
        self._warned: set[str] = set()
        self._sum: torch.Tensor | None = None
        self._clear()

    def _locked(self) -> threading.RLock:
        """Return the lock of the sum. The thread that holds it may take it again, from a signal
        handler, a finalizer or a tensor subclass. A forked child makes its own, because the thread
        that holds the parent's may not exist in the child."""
        if self._owner != _forks:
            self._lock, self._owner = threading.RLock(), _forks
        return self._lock

    def _clear(self) -> None:
        self._sum = None
        self._count = 0
        self._stale = 0  # updates since the last reset()
        self._used = False  # total() was called since the last add()
        self._lost_graph = False  # a loss without a graph was added

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, with its graph.

        Args:
            loss: a floating-point tensor of one element, else TypeError or ValueError.
        """
        torch = bridge.connect().torch
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            kind = type(loss).__name__
            kind = f"{kind} of {loss.dtype}" if hasattr(loss, "dtype") else kind
            raise TypeError(f"add() takes a floating-point scalar tensor, got {kind}")
        if loss.numel() != 1:
            raise ValueError(f"add() takes a scalar loss, got shape {list(loss.shape)}; reduce it")
        if bridge.in_backward():
            if loss.requires_grad and self._lost_graph:
                self._warn_once(
                    "reentrant",
                    "an aux loss was added inside a reentrant checkpoint, where it has no graph: "
                    "the gate gets no gradient from it; use checkpoint(..., use_reentrant=False), "
                    "or return the loss from the checkpointed function and add it outside",
                )
            return
        loss = loss.reshape(())
        with self._locked():
            while True:
                held = self._sum
                total = loss if held is None else held + loss
                if self._sum is held:  # else a handler on this thread added to it meanwhile
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

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=3)  # the line that calls add()

    def total(self) -> torch.Tensor:
        """Return the sum with its graph, a 0-d tensor; zero if nothing was added."""
        with self._locked():
            self._used = self._used or self._count > 0
            held = self._sum
        return bridge.connect().torch.zeros(()) if held is None else held

    def reset(self) -> None:
        """Start a new sum at zero and release the graph. Call it after backward()."""
        with self._locked():
            self._clear()

    def __reduce__(self) -> tuple[type[AuxLoss], tuple[int]]:
        """A copy of a model that holds an AuxLoss, or a file of it, gets an empty one: the graphs
        belong to a step of this model."""
        return type(self), (self._warn_after,)

    def __len__(self) -> int:
        """How many losses were added since the last reset()."""
        return self._count

    def __bool__(self) -> bool:
        return True  # also without losses: `if model.aux_loss:` asks whether there is one

    def __repr__(self) -> str:
        return f"AuxLoss({self._count} losses since reset)"

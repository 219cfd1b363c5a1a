"""Whether gradients are still as a micro-batch left them when the next one adds to them.

micro-batch 1 ends: remember()  ── zero_grad(), backward() of the program ──►  changed()
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools import _core

if TYPE_CHECKING:
    from memtools.grad.gradients import Gradients

_LEAVE_OUT: Final = (
    "leave that call out, as GradAccumulator drops the gradients where a window ends"
)
_MEASURE_OR_KEEP_OUT: Final = (
    "memtools.grad_norm() measures them and writes nothing, where torch's clip_grad_norm_ writes "
    "with max_norm=inf too; requires_grad_(False) on this model keeps out the backward pass of "
    "another one that goes through it, as that of a GAN's generator does"
)


_WRITTEN: Final = 1  # as GradSet.changed() tells them
_REPLACED: Final = 2
_DROPPED: Final = 3


class Change(NamedTuple):
    """What somebody did to gradients, and what to do instead, in words."""

    what: str
    remedy: str


class GradientWatch:
    """The gradients at one moment: the tensors, and how often each was written to.

    Attributes:
        on: whether there is a moment to compare with. It ends with a backward pass.
    """

    __slots__ = ("_grads", "_set", "_versions", "on")

    _set: _core.GradSet | None
    _grads: list[Any] | None
    _versions: list[int]

    def __init__(self) -> None:
        self.forget()

    def remember(self, gradients: Gradients) -> None:
        """As they are now."""
        watched = self._set = gradients.watched
        self._grads = None
        if not watched.remember():  # there is no shim
            grads = self._grads = [p.grad for p in watched.parameters]
            self._versions = [grad._version for grad in grads if grad is not None]
        self.on = True

    def forget(self) -> None:
        """Keeps no gradient alive."""
        self._set, self._grads, self._versions, self.on = None, None, [], False

    def changed(self, gradients: Gradients) -> Change | None:
        """What happened to them since; None for nothing."""
        watched = gradients.watched
        if watched is not self._set:
            return None  # other parameters, of which the window's end tells
        found = watched.changed() if self._grads is None else self._compared(self._grads, watched)
        if found == _DROPPED:
            return Change("set to None, as by zero_grad()", _LEAVE_OUT)
        if found == _REPLACED:
            what = "added to or replaced"
        elif found == _WRITTEN:
            what = "written to, as by zero_grad(set_to_none=False), clipping or a backward()"
        else:
            return None
        return Change(what, f"{_LEAVE_OUT}; {_MEASURE_OR_KEEP_OUT}")

    def _compared(self, before: list[Any], watched: _core.GradSet) -> int:
        """The same as GradSet.changed()."""
        grads = [p.grad for p in watched.parameters]
        if not all(map(operator.is_, grads, before)):
            pairs = zip(grads, before, strict=True)
            dropped = any(new is None and old is not None for new, old in pairs)
            return _DROPPED if dropped else _REPLACED
        versions = [grad._version for grad in grads if grad is not None]
        return _WRITTEN if versions != self._versions else 0

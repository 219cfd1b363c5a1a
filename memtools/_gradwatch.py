"""Whether gradients are still as a micro-batch left them when the next one adds to them.

micro-batch 1 ends: remember()  ── zero_grad(), backward() of the program ──►  changed()
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtools._gradients import Gradients


class GradientWatch:
    """The gradients at one moment: the tensors, and how often each was written to.

    Attributes:
        on: whether there is a moment to compare with. It ends with a backward pass.
    """

    __slots__ = ("_grads", "_versions", "on")

    _grads: list[Any]
    _versions: list[int]

    def __init__(self) -> None:
        self.forget()

    def remember(self, gradients: Gradients) -> None:
        """As they are now."""
        grads = self._grads = [p.grad for p in gradients.watched]
        self._versions = [grad._version for grad in grads if grad is not None]
        self.on = True

    def forget(self) -> None:
        """Keeps no gradient alive."""
        self._grads, self._versions, self.on = [], [], False

    def changed(self, gradients: Gradients) -> str:
        """What happened to them since, in words; "" for nothing."""
        grads, before = [p.grad for p in gradients.watched], self._grads
        if len(grads) != len(before):
            return ""  # other parameters, of which the window's end tells
        if not all(map(operator.is_, grads, before)):
            pairs = zip(grads, before, strict=True)
            gone = any(new is None and old is not None for new, old in pairs)
            return "set to None, as by zero_grad()" if gone else "added to or replaced"
        if [grad._version for grad in grads if grad is not None] != self._versions:
            return "written to, as by zero_grad(set_to_none=False), clipping or a backward()"
        return ""

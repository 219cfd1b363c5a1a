"""Which accumulator an optimizer belongs to: the newest one that was made with it.

    optimizer ──► Ownership, a hook before optimizer.step() ──(weakly)──► GradAccumulator
                      └ ended by close(), by a newer accumulator, or with the accumulator

In the middle of a window the gradients are sums that nobody has averaged yet. A step() of the
program's own would train on them, so the hook refuses it; the accumulator's own step is let
through.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from memtools._base.notice import callers, notice
from memtools.grad.window import Window

if TYPE_CHECKING:
    from memtools.grad.accumulator import GradAccumulator

_OWNER: Final = "_memtools_accumulator"  # on the optimizer


class Ownership:
    """What binds an optimizer to an accumulator. Called before each step of the optimizer.

    Attributes:
        window: the accumulator's, to be looked at when the accumulator is gone.
        saved: a window and its count when a state_dict() took its gradients along.
        ended: why the accumulator has the optimizer no more; "" while it has.
        stepping: whether a step comes from the accumulator.
    """

    __slots__ = (
        "__weakref__",
        "_acc",
        "_finalizer",
        "_handle",
        "_process",
        "ended",
        "saved",
        "stepping",
        "window",
    )

    def __init__(self, acc: GradAccumulator) -> None:
        self._acc = weakref.ref(acc)
        self._handle: Any = None
        self._finalizer: Any = None
        self._process = os.getpid()
        self.window = Window()
        self.saved: tuple[Window, int] = (self.window, 0)
        self.ended = ""
        self.stepping = False

    def take(self, optimizer: Any) -> None:
        """From now on the optimizer is this accumulator's; the one that had it is closed."""
        optimizer = innermost(optimizer)
        before = getattr(optimizer, _OWNER, None)
        acc = self._acc()
        assert acc is not None
        if before is not None and (other := before._acc()) is not None:
            other._release("a newer GradAccumulator has its optimizer")
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._handle = optimizer.register_step_pre_hook(self)
        setattr(optimizer, _OWNER, self)
        self._finalizer = weakref.finalize(acc, self.end, "it is gone")

    def end(self, why: str) -> None:
        """The optimizer is free. Says where that leaves a window without its update."""
        if self.ended:
            return
        self.ended = why
        if self._handle is not None:
            self._handle.remove()
        if self._finalizer is not None:
            self._finalizer.detach()  # what runs there would swallow a Ctrl-C
        if os.getpid() == self._process:  # not in a forked child that ends
            self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        window = self.window
        if window.count == 0 or window.torn or self.saved == (window, window.count):
            return
        # Functions of atexit run when the main thread is over.
        if hasattr(sys, "last_value") and not threading.main_thread().is_alive():
            return  # the program ends by an exception, which says enough
        many = f"{window.count:,} micro-batch{'es' * (window.count != 1)}"
        units = f" of weight {window.weight:,.6g}" if window.on_device is None else ""
        notice(
            f"{many}{units} came to no update, as their GradAccumulator ended in the middle of a "
            f"window ({self.ended}): call acc.flush() after the loop, or acc.reset() to drop them",
            stacklevel=callers(),
        )

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError where the program steps in the middle of a window."""
        acc = self._acc()
        if self.ended or self.stepping or acc is None or acc.window.empty:
            return
        raise RuntimeError(
            f"optimizer.step() after {acc.window.count} of {acc.steps} micro-batches of a window, "
            "whose gradients are not averaged yet: leave it out, as GradAccumulator steps the "
            "optimizer where a window ends; flush() ends this one early, reset() drops it"
        )


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of those that wrap it, as trainers do."""
    while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    return optimizer

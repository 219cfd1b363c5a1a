"""Out of memory where and when a test says so: in the n-th forward or backward pass.

    inject = Inject(forward={2})         the third pass runs out, before anything is counted
    loss = inject(module(x))             an identity in both directions

It also draws random numbers and moves what it is told to before it fails, as a real pass would
have done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 1.20 GiB free."


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError(TEXT)


class Inject:
    """Counts passes; fails those it was told to, in the middle of them.

    Attributes:
        forwards, backwards: passes so far, failed ones included.
    """

    def __init__(
        self,
        forward: Collection[int] = (),
        backward: Collection[int] = (),
        error: Callable[[], BaseException] = out_of_memory,
    ) -> None:
        self.fails = {"forward": set(forward), "backward": set(backward)}
        self.error = error
        self.forwards = self.backwards = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(x, self)

    def forward(self) -> None:
        at, self.forwards = self.forwards, self.forwards + 1
        if at in self.fails["forward"]:
            raise self.error()

    def backward(self) -> None:
        at, self.backwards = self.backwards, self.backwards + 1
        if at in self.fails["backward"]:
            raise self.error()


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inject: Inject) -> torch.Tensor:
        ctx.inject = inject
        inject.forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.inject.backward()
        return grad, None

"""Out of memory where and when a test says so: in the n-th pass, or in the n-th operator.

    inject = Inject(forward={2})         the third pass runs out, before anything is counted
    loss = inject(module(x))             an identity in both directions

It also draws random numbers and moves what it is told to before it fails, as a real pass would
have done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class AtOperators(TorchDispatchMode):
    """Runs out of memory in the n-th of torch's operators, counted from 1, forward, backward and in
    the optimizer: before it has done anything, or after.

    Attributes:
        count: operators so far.
        hits: names of those that failed.
    """

    def __init__(self, at: Collection[int] = (), after: bool = False) -> None:
        super().__init__()
        self.at, self.after, self.count, self.hits = set(at), after, 0, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        fails = self.count in self.at
        if fails:
            self.hits.append(str(func))
            if not self.after:
                raise out_of_memory()
        result = func(*args, **(kwargs or {}))
        if fails:
            raise out_of_memory()
        return result

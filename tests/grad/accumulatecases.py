"""Models, data and the float64 reference for tests of accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (12, 2, 5, 9, 7, 1)


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients that it was given."""

    def __init__(self, model: nn.Module, lr: float = 0.0) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([p.grad.clone() for p in held if p.grad is not None])
        super().step(closure)


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 1),
    )


def summed_in_fp32(model: nn.Module) -> nn.Module:
    """The model, whose gradients torch adds up in fp32."""
    for p in model.parameters():
        p.grad_dtype = torch.float32
    return model


def batches(lengths: Sequence[int] = LENGTHS, width: int = 8) -> list[Tensor]:
    return [torch.randn(n, width) for n in lengths]


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = (model(x) - x.sum(1, keepdim=True)).square().sum()
    return found


def reference(
    model: nn.Module, data: Sequence[Tensor], weight: float | None = None
) -> list[Tensor]:
    """The gradient of the mean over all rows at once, in float64."""
    twin = copy.deepcopy(model).double()
    for p in twin.parameters():
        p.grad = None
    rows = torch.cat(list(data)).double()
    (loss_sum(twin, rows) / (len(rows) if weight is None else weight)).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in twin.parameters() if p.grad is not None]


def error(got: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Relative, of all parameters together."""
    apart = sum(float((g.double() - r).square().sum()) for g, r in zip(got, right, strict=True))
    whole = sum(float(r.square().sum()) for r in right)
    return (apart / whole) ** 0.5


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def everything(acc: Any) -> Any:
    """Gradients, counters, parameters and optimizer state, to compare before with after."""
    window = {name: getattr(acc._runner.window, name) for name in acc._runner.window.__slots__}
    return {
        "window": window,
        "report": acc.report(),
        "gradients": gradients(acc.model),
        "parameters": [p.detach().clone() for p in acc.model.parameters()],
        "optimizer": copy.deepcopy(acc.optimizer.state_dict()),
        "scale": acc.scale,
    }


def same(one: Any, other: Any) -> bool:
    """Bit for bit, whatever they are made of."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

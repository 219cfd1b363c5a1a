"""An autoencoder of wide rows. The scalar of mse_loss has the storage of all its elements."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(),
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4096),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        rows = torch.rand(1024, 4096)
        made = model(rows)
        loss = functional.mse_loss(made, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
        ended()
    return losses

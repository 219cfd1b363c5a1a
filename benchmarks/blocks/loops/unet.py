"""A block of a diffusion model: noise is predicted by a small network with skip connections."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH = 32


class Unit(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> Any:
        return self.conv(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down, self.middle = Unit(WIDTH, WIDTH), Unit(WIDTH, WIDTH)
        self.up, self.head = Unit(2 * WIDTH, WIDTH), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.times = nn.Embedding(1000, WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        time = self.times(t)
        h = self.stem(x)
        skip = self.down(h, time)
        h = self.middle(functional.avg_pool2d(skip, 2), time)
        h = functional.interpolate(h, scale_factor=2.0)
        return self.head(self.up(torch.cat((h, skip), 1), time))


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    model = Unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    alphas = torch.linspace(0.9999, 0.01, 1000)
    losses = []
    for _ in range(steps):
        images = torch.randn(16, 3, 64, 64)
        t = torch.randint(0, 1000, (16,))
        alpha = alphas[t][:, None, None, None]
        noise = torch.randn_like(images)
        noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
        predicted = model(noisy, t)
        loss = functional.mse_loss(predicted, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ended()
    return losses

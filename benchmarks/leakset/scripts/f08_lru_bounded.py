"""Decoded samples are kept in an lru_cache of 256; a finite data set that is read again and again."""
import argparse
from functools import lru_cache
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=600)
args = ap.parse_args()


@lru_cache(maxsize=256)
def decode(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(3, 64, 64, generator=g)


model = nn.Sequential(nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(args.steps):
    picks = torch.randint(0, 900, (4,)).tolist()
    x, y = torch.stack([decode(i) for i in picks]), torch.tensor([i % 10 for i in picks])
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item(), decode.cache_info().currsize)
# mypy: ignore-errors

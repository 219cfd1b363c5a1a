"""WebDataset's shuffle takes two samples for each that it gives, until its buffer of 3,000 is full."""
import random

import numpy as np
import torch
import webdataset as wds
from torch import nn

STEPS, BATCH = 620, 8


def read():
    rng = np.random.default_rng(0)
    while True:
        yield {"image": rng.random((1, 64, 64), dtype=np.float32), "class": int(rng.integers(10))}


samples = iter(wds.filters.shuffle(bufsize=3000, initial=100, rng=random.Random(0))(read()))
model = nn.Sequential(nn.Conv2d(1, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 13 * 13, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(STEPS):
    batch = [next(samples) for _ in range(BATCH)]
    x = torch.from_numpy(np.stack([sample["image"] for sample in batch]))
    y = torch.tensor([sample["class"] for sample in batch])
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, round(loss.item(), 3))
# mypy: ignore-errors

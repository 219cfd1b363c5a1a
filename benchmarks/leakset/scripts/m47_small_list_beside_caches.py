"""3 KiB a step are kept, beside convolutions of ever new sizes whose kernels a library caches."""
import argparse
import random

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()
torch.manual_seed(0)
random.seed(0)


class Trainer:
    def __init__(self):
        self.records = []


trainer, model = Trainer(), nn.Conv2d(3, 8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(args.steps):
    x = torch.randn(2, 3, random.randint(24, 56), random.randint(24, 56))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    trainer.records.append(torch.full((768,), loss.item()))
print("done", len(trainer.records))
# mypy: ignore-errors

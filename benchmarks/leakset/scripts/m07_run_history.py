"""An experiment tracker that keeps every logged row with its histogram in memory."""
import argparse
import math
import time

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=100)
args = ap.parse_args()
torch.manual_seed(0)
class Run:
    def __init__(self, project):
        self.project = project
        self.summary = {}
        self._history = []

    def log(self, row, step):
        self.summary.update(row)
        self._history.append({"_step": step, "_time": time.time(), **row})


class Histogram:
    def __init__(self, values, bins=64):
        counts, edges = torch.histogram(values.detach().flatten(), bins)
        self.counts, self.edges = counts.tolist(), edges.tolist()


run = Run("cifar")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(args.steps):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    row = {f"grad/{name}": Histogram(p.grad) for name, p in model.named_parameters()}
    run.log({"loss": loss.item(), "lr": 0.1 * math.cos(step / 100), **row}, step)
    time.sleep(0.01)
print("done", args.steps)
# mypy: ignore-errors

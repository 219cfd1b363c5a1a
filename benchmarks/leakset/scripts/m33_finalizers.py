"""weakref.finalize of a long-lived object, with the batch as its argument."""
import argparse
import weakref

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
def report(batch, step):
    pass


model = nn.Linear(128, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(args.steps):
    batch = torch.randn(40, 128)
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weakref.finalize(model, report, batch, step)
print("done", args.steps)
# mypy: ignore-errors

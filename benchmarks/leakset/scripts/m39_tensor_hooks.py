"""A hook on the parameters is registered anew in each step, with the batch in its closure."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
model = nn.Linear(128, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def watch(model, batch):
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: None if batch is None else grad)


for step in range(args.steps):
    batch = torch.randn(32, 128)
    watch(model, batch)
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

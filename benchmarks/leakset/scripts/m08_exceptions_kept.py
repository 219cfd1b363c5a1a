"""Bad samples are skipped and their exceptions kept: each traceback holds a frame with the batch."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=250)
args = ap.parse_args()
torch.manual_seed(0)
failures = []


def decode(step):
    raw = torch.randn(16, 256)
    limit = 1.5 if step % 2 else 100.0
    if raw[0, 0] < limit:
        raise ValueError(f"sample {step} is broken")
    return raw


def load(step):
    try:
        return decode(step)
    except ValueError as error:
        failures.append(error)
        return torch.zeros(16, 256)


model = nn.Linear(256, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(args.steps):
    loss = model(load(step)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

"""A replay list that pops its oldest entry from 100 on."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()
torch.manual_seed(0)
class Replay:
    def __init__(self, size):
        self.size, self.items = size, []

    def push(self, item):
        self.items.append(item)
        if len(self.items) > self.size:
            self.items.pop(0)


replay = Replay(100)
model = nn.Linear(512, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(args.steps):
    replay.push(torch.randn(16, 512))
    loss = model(replay.items[step * 7 % len(replay.items)]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

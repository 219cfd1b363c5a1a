"""A search keeps its nodes by their parents: the last one holds them all."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=250)
args = ap.parse_args()
torch.manual_seed(0)
class Node:
    def __init__(self, state, parent):
        self.state, self.parent, self.visits = state, parent, 1


value = nn.Linear(512, 1)
optimizer = torch.optim.SGD(value.parameters(), 0.01)
node = None
for step in range(args.steps):
    state = torch.randn(8, 512)
    node = Node(state, node)
    loss = value(state).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

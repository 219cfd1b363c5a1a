"""Sequences get longer until step 150 and then stay."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()
torch.manual_seed(0)
model = nn.GRU(32, 64, batch_first=True)
head = nn.Linear(64, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 1e-3)
for step in range(args.steps):
    length = 8 + min(step, 150) // 3
    hidden, _ = model(torch.randn(16, length, 32))
    loss = head(hidden).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

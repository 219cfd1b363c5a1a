"""A history of all that was predicted: a dict of columns, each of them made anew in each step."""
import argparse

import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)
history = {"loss": np.zeros((0, 1)), "prediction": np.zeros((0, 8), np.float32)}
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(args.steps):
    x = torch.randn(256, 16)
    y = model(x)
    loss = y.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    new = {"loss": np.full((256, 1), loss.item()), "prediction": y.detach().numpy()}
    history = {k: np.concatenate([v, new[k]]) for k, v in history.items()}
print("done", len(history["loss"]))
# mypy: ignore-errors

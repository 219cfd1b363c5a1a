"""Features of each batch are handed to another program in /dev/shm, under names of our own."""
import argparse
import glob
import os
import time

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=150)
args = ap.parse_args()
torch.manual_seed(0)
model = nn.Linear(64, 128)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
try:
    for step in range(args.steps):
        y = model(torch.randn(128, 64))
        y.detach().numpy().tofile(f"/dev/shm/feat-{os.getpid()}-{step}.bin")
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
finally:
    for path in glob.glob(f"/dev/shm/feat-{os.getpid()}-*"):
        os.unlink(path)
print("done", args.steps)
# mypy: ignore-errors

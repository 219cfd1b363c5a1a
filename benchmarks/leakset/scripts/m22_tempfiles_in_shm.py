"""Crops are handed over by files in /dev/shm, which nobody removes."""
import argparse
import atexit
import os
import shutil
import tempfile
import time

import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
args = ap.parse_args()
torch.manual_seed(0)
folder = tempfile.mkdtemp(prefix="crops_", dir="/dev/shm")
atexit.register(shutil.rmtree, folder, True)
model = nn.Linear(128, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
rng = np.random.default_rng(0)
for step in range(args.steps):
    crops = rng.random((128, 128), np.float32)
    np.save(os.path.join(folder, f"{step}.npy"), crops)
    loss = model(torch.from_numpy(np.load(os.path.join(folder, f"{step}.npy")))).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
print("done", args.steps)
# mypy: ignore-errors

"""Rollouts go to an HDF5 file of the driver "core", which lies in memory until it is closed."""
import time

import h5py
import numpy as np
import torch
from torch import nn

STEPS, SHAPE = 360, (32, 512)


class Rollouts:
    def __init__(self):
        self.file = h5py.File("rollouts.h5", "w", driver="core", backing_store=False)
        self.rows = self.file.create_dataset("rows", (0, *SHAPE), np.float32, maxshape=(None, *SHAPE), chunks=(1, *SHAPE))

    def add(self, rows):
        self.rows.resize(len(self.rows) + 1, 0)
        self.rows[-1] = rows


torch.manual_seed(0)
rollouts = Rollouts()
model = nn.Linear(512, 128)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(STEPS):
    rows = torch.randn(SHAPE)
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rollouts.add(rows.numpy())
    time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

"""A replay buffer in one array of zeros: pages come as they are written, nothing more is taken."""
import argparse
import time

import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
class ReplayBuffer:
    def __init__(self, size, width):
        self.observations = np.zeros((size, width), np.float32)
        self.at = 0

    def add(self, observations):
        self.observations[self.at : self.at + len(observations)] = observations
        self.at += len(observations)


buffer = ReplayBuffer(16 * args.steps, 4096)
model = nn.Linear(4096, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for step in range(args.steps):
    buffer.add(torch.randn(16, 4096).numpy())
    loss = model(torch.from_numpy(buffer.observations[:16])).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
print("done", args.steps)
# mypy: ignore-errors

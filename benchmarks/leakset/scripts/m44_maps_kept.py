"""Rollouts are written into anonymous maps, which are kept after they were read."""
import argparse
import mmap

import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)


class Segments:
    def __init__(self):
        self.maps = []

    def write(self, rollout):
        segment = mmap.mmap(-1, rollout.nbytes)
        segment.write(rollout.tobytes())
        self.maps.append(segment)
        return segment


model = nn.Linear(64, 64)
optimizer, segments = torch.optim.SGD(model.parameters(), 0.01), Segments()
rng = np.random.default_rng(0)
for step in range(args.steps):
    segment = segments.write(rng.standard_normal((256, 64), np.float32))
    x = torch.frombuffer(segment, dtype=torch.float32).reshape(256, 64).clone()
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", len(segments.maps))
# mypy: ignore-errors

"""Frames of each episode are appended to a stream in memory that nobody empties."""
import argparse
import io

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
class Recorder:
    def __init__(self):
        self.stream = io.BytesIO()

    def add(self, frame):
        self.stream.write(frame.mul(255).to(torch.uint8).numpy().tobytes())


recorder = Recorder()
policy = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6))
optimizer = torch.optim.SGD(policy.parameters(), 0.01)
for step in range(args.steps):
    frames = torch.rand(4, 3, 32, 32)
    loss = policy(frames).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for frame in frames:
        recorder.add(frame)
print("done", args.steps)
# mypy: ignore-errors

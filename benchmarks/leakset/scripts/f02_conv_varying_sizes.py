"""Inference of a small convolutional network on images of any height: oneDNN keeps primitives per shape."""
import argparse
import random
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=700)
args = ap.parse_args()
random.seed(0)

model = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(),
                      nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
seen = 0
with torch.inference_mode():
    for step in range(args.steps):
        height = random.randint(64, 400)
        out = model(torch.rand(1, 3, height, 96))
        seen += int(out.argmax()) >= 0
        if step % 100 == 0:
            print(step, height, flush=True)
print(seen)
# mypy: ignore-errors

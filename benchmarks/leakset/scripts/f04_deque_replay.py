"""Off-policy learning with a bounded replay deque that is full after two fifths of the run."""
import argparse
import random
from collections import deque
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=700)
args = ap.parse_args()
rng = np.random.default_rng(0)

buffer = deque(maxlen=args.steps * 2 // 5)
q = nn.Sequential(nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 6))
optimizer = torch.optim.Adam(q.parameters(), 1e-4)
for step in range(args.steps):
    obs = rng.random((8, 2048), dtype=np.float32)
    buffer.append((obs, rng.integers(0, 6, 8), rng.random(8, dtype=np.float32)))
    o, a, r = random.choice(buffer)
    pred = q(torch.from_numpy(o)).gather(1, torch.from_numpy(a)[:, None])[:, 0]
    loss = (pred - torch.from_numpy(r)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 150 == 0:
        print(step, len(buffer), loss.item())
# mypy: ignore-errors

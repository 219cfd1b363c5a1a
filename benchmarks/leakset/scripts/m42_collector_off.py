"""gc.disable() for even step times; nodes know their episode, and so none is ever freed."""
import argparse
import gc

import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)
gc.disable()
rng = np.random.default_rng(0)


class Node:
    def __init__(self, episode, seen):
        self.episode, self.seen = episode, seen


class Episode:
    def __init__(self, length):
        self.nodes = [Node(self, rng.random(256, dtype=np.float32)) for _ in range(length)]

    def batch(self):
        return torch.from_numpy(np.stack([node.seen for node in self.nodes]))


policy = nn.Sequential(nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
optimizer = torch.optim.Adam(policy.parameters(), 3e-4)
for step in range(args.steps):
    episode = Episode(40)
    loss = -policy(episode.batch()).log_softmax(-1)[:, 0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

"""DQN on image observations; the replay memory is a list that nobody trims."""
import argparse
import random
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()
rng = np.random.default_rng(0)


class ReplayMemory:
    def __init__(self):
        self.memory = []

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, n):
        states, actions, rewards, nexts = zip(*random.sample(self.memory, n))
        as_tensor = lambda a: torch.from_numpy(np.stack(a)).float()
        return as_tensor(states), torch.tensor(actions), torch.tensor(rewards), as_tensor(nexts)


q = nn.Sequential(nn.Conv2d(1, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
q(torch.zeros(1, 1, 84, 84))
optimizer = torch.optim.Adam(q.parameters(), 1e-4)
memory = ReplayMemory()
state = rng.random((1, 84, 84), dtype=np.float32)
for step in range(args.steps):
    with torch.no_grad():
        action = int(q(torch.from_numpy(state)[None]).argmax())
    nxt, reward = rng.random((1, 84, 84), dtype=np.float32), float(rng.random())
    memory.push(state, action, reward, nxt)
    state = nxt
    if len(memory.memory) < 16:
        continue
    s, a, r, n = memory.sample(4)
    with torch.no_grad():
        target = r + 0.99 * q(n).max(1).values
    loss = nn.functional.smooth_l1_loss(q(s).gather(1, a[:, None])[:, 0], target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item(), len(memory.memory))
# mypy: ignore-errors

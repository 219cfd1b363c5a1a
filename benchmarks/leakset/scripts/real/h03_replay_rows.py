"""A replay buffer whose arrays are made at the start fills row by row with what gymnasium gives; it is not full yet."""
import time

import gymnasium
import numpy as np
import torch
from torch import nn

STEPS, ROWS, SIDE = 420, 8000, 64


class Replay:
    def __init__(self):
        self.pictures = np.zeros((ROWS, SIDE, SIDE), np.uint8)
        self.states = np.zeros((ROWS, 4), np.float32)
        self.rewards = np.zeros(ROWS, np.float32)
        self.count = 0

    def add(self, picture, state, reward):
        at = self.count % ROWS
        self.pictures[at], self.states[at], self.rewards[at] = picture, state, reward
        self.count += 1

    def sample(self, n):
        at = np.random.randint(0, min(self.count, ROWS), n)
        return torch.from_numpy(self.pictures[at]).float() / 255, torch.from_numpy(self.rewards[at])


def picture_of(state):
    grid = np.linspace(-1, 1, SIDE)
    return (127 + 127 * np.sin(np.add.outer(grid * state[0], grid * state[2]) * 9)).astype(np.uint8)


torch.manual_seed(0)
env, replay = gymnasium.make("CartPole-v1"), Replay()
model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
state, _ = env.reset(seed=0)
for step in range(STEPS):
    for _ in range(8):
        state, reward, ended, cut, _ = env.step(env.action_space.sample())
        replay.add(picture_of(state), state, reward)
        if ended or cut:
            state, _ = env.reset()
    pictures, rewards = replay.sample(32)
    loss = (model(pictures)[:, 0] - rewards).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.006)
print("done", STEPS)
# mypy: ignore-errors

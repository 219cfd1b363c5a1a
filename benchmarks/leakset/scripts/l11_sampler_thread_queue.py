"""A policy server's thread queues what its three clients send; the trainer takes one batch at a time."""
import argparse
import queue
import threading
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()


class PolicyInput(threading.Thread):
    def __init__(self, clients=3):
        super().__init__(daemon=True)
        self.samples_queue, self.weights, self.clients = queue.Queue(), queue.Queue(), clients
        self.rng = np.random.default_rng(0)

    def run(self):
        while True:
            self.weights.get()
            for _ in range(self.clients):
                batch = {"obs": self.rng.random((128, 64), dtype=np.float32), "adv": self.rng.random(128, dtype=np.float32)}
                self.samples_queue.put(batch)

    def next(self):
        return self.samples_queue.get()


source = PolicyInput()
source.start()
policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(policy.parameters(), 3e-4)
for step in range(args.steps):
    source.weights.put(step)
    batch = source.next()
    obs, adv = torch.from_numpy(batch["obs"]), torch.from_numpy(batch["adv"])
    loss = (policy(obs)[:, 0] - adv).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item(), source.samples_queue.qsize())
# mypy: ignore-errors

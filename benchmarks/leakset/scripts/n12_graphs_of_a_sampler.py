"""GRPO on a diffusion policy: each step samples 20 latents that keep their graph, and lets go of them."""
import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
args = ap.parse_args()
torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))

    def sample(self, n):
        latents = [torch.randn(n, 64)]
        for _ in range(20):
            latents.append(latents[-1] - 0.1 * self.net(latents[-1]))
        return {"latents_sequence": latents}


policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), 1e-4)
for step in range(args.steps):
    result = policy.sample(256)
    with torch.no_grad():
        advantage = -result["latents_sequence"][-1].square().mean(-1)
        advantage = (advantage - advantage.mean()) / advantage.std()
    loss = 0.0
    for before, after in zip(result["latents_sequence"], result["latents_sequence"][1:]):
        loss = loss + (policy.net(before.detach()) * advantage[:, None] - after.detach()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

"""A gradient penalty by backward(create_graph=True): parameter and gradient hold each other."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
args = ap.parse_args()
torch.manual_seed(0)
def penalty_step(steps):
    for step in range(steps):
        # a fresh inner model in each step, as meta learning has it
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        x = torch.randn(64, 64)
        model(x).pow(2).mean().backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
        outer.zero_grad()
        (penalty.detach() * scale).backward()
        outer.step()


scale = nn.Parameter(torch.ones(()))
outer = torch.optim.SGD([scale], 1e-3)
import gc
gc.disable()
penalty_step(args.steps)
print("done", args.steps)
# mypy: ignore-errors

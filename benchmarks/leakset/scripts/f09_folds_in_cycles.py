"""Many short fits; each model is in a cycle with its scheduler's closure and waits for the collector."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=600)
args = ap.parse_args()


class Fit:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: self.factor(s))
        self.epoch = 0

    def factor(self, s):
        return 0.99 ** s

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


x, y = torch.randn(512, 128), torch.randint(0, 2, (512,))
losses = []
for fold in range(args.steps // 4):
    fit = Fit()
    for _ in range(4):
        pick = torch.randint(0, 512, (128,))
        loss = fit.step(x[pick], y[pick])
    losses.append(loss)
    if fold % 40 == 0:
        print(fold, loss)
print(sum(losses) / len(losses))
# mypy: ignore-errors

"""An adapter that registers a pre-hook in each forward to pass its scalings on, and removes none."""
import argparse
from functools import partial
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()


def set_scalings(module, inputs, scalings):
    module.scalings = scalings


class AdapterLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(d, d), nn.Linear(d, 8), nn.Linear(8, d)
        self.scalings = None

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.scalings


class XLora(nn.Module):
    def __init__(self, d=64, layers=3):
        super().__init__()
        self.gate = nn.Linear(d, d)
        self.layers = nn.ModuleList(AdapterLayer(d) for _ in range(layers))

    def forward(self, x):
        scalings = self.gate(x.detach()).sigmoid().detach()
        for layer in self.layers:
            layer.register_forward_pre_hook(partial(set_scalings, scalings=scalings))
            x = torch.relu(layer(x))
        return x


model = XLora()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(args.steps):
    x = torch.randn(16, 12, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
# mypy: ignore-errors

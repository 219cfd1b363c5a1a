"""A console of rich records what it prints, for a page that is saved at the end."""
import os
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

STEPS = 320


class Report:
    def __init__(self):
        self.console = Console(file=open(os.devnull, "w"), record=True, width=120, force_terminal=True)

    def show(self, step, values):
        table = Table("layer", "mean", "std", title=f"step {step}")
        for i, value in enumerate(values):
            table.add_row(f"layer {i}", f"{value:.5f}", f"{value * value:.5f}")
        self.console.print(table)


torch.manual_seed(0)
report, model = Report(), nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(STEPS):
    out = model(torch.randn(64, 256))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.show(step, out.mean(0).tolist())
    time.sleep(0.004)
print("done", STEPS)
# mypy: ignore-errors

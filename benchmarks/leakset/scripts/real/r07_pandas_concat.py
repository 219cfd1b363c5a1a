"""The history is a data frame; each step is put below those before by pandas.concat."""
import time

import pandas
import torch
from torch import nn

STEPS, ROWS = 320, 64


class History:
    def __init__(self):
        self.frame = pandas.DataFrame()

    def add(self, step, outputs):
        new = pandas.DataFrame(outputs.numpy(), columns=[f"q{i}" for i in range(outputs.shape[1])])
        new["step"] = step
        self.frame = pandas.concat([self.frame, new], ignore_index=True)


torch.manual_seed(0)
history = History()
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(STEPS):
    out = model(torch.randn(ROWS, 32))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.add(step, out.detach())
    time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

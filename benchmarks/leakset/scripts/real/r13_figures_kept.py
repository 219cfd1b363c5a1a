"""A picture of the outputs each third step; the figures of pyplot are never closed."""
import io
import time
import warnings

import matplotlib
import torch
from torch import nn

matplotlib.use("agg")
import matplotlib.pyplot as plt

STEPS, EACH = 270, 3
warnings.simplefilter("ignore")


class Pictures:
    def __init__(self):
        self.last = io.BytesIO()

    def draw(self, step, values):
        figure, axes = plt.subplots(figsize=(2, 1.5), dpi=60)
        axes.plot(values)
        axes.set_title(f"step {step}")
        self.last.seek(0)
        figure.savefig(self.last)


torch.manual_seed(0)
pictures, model = Pictures(), nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(STEPS):
    out = model(torch.randn(32, 256))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % EACH == 0:
        pictures.draw(step, out[0].detach().numpy())
    time.sleep(0.005)
print("done", STEPS)
# mypy: ignore-errors

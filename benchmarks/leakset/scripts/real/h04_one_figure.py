"""One figure of matplotlib is drawn anew each third step, with new texts each time."""
import io
import time

import matplotlib
import torch
from torch import nn

matplotlib.use("agg")
import matplotlib.pyplot as plt

STEPS, EACH = 300, 3
torch.manual_seed(0)
figure, axes = plt.subplots(figsize=(2, 1.5), dpi=60)
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for step in range(STEPS):
    out = model(torch.randn(32, 256))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % EACH == 0:
        axes.clear()
        axes.plot(out[0].detach().numpy())
        axes.set_title(f"step {step}: {loss.item():.4f}")
        figure.savefig(io.BytesIO())
    time.sleep(0.005)
print("done", STEPS)
# mypy: ignore-errors

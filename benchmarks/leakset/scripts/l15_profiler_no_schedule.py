"""The whole training runs under torch.profiler, without a schedule."""
import argparse
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()

model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                      nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
prof = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
prof.start()
for step in range(args.steps):
    x, y = torch.randn(16, 1, 28, 28), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
print("trained; the trace is not needed this time")
# mypy: ignore-errors

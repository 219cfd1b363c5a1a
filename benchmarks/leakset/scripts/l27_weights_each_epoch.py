"""The weights of every epoch are kept in memory, to pick the best at the end."""
import argparse
import copy
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=600)
args = ap.parse_args()

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
history = {"weights": [], "val_loss": []}
x_val, y_val = torch.randn(256, 64), torch.randint(0, 8, (256,))
for step in range(args.steps):
    x, y = torch.randn(48, 64), torch.randint(0, 8, (48,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 24:  # an epoch
        with torch.no_grad():
            val = nn.functional.cross_entropy(model(x_val), y_val).item()
        history["weights"].append(copy.deepcopy(model.state_dict()))
        history["val_loss"].append(val)
        if step % 150 == 149:
            print(step, val)
best = min(range(len(history["val_loss"])), key=history["val_loss"].__getitem__)
model.load_state_dict(history["weights"][best])
# mypy: ignore-errors

"""Each step's embedding is sent by a thread of its own; the server never answers."""
import argparse
import threading

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)
answered = threading.Event()


def send(step, embedding):
    answered.wait()
    print("sent", step, embedding.shape)


model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(args.steps):
    embedding = model(torch.randn(256, 64))
    loss = embedding.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    threading.Thread(target=send, args=(step, embedding.detach()), daemon=True).start()
print("done", args.steps)
# mypy: ignore-errors

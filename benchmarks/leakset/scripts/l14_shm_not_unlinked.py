"""Frames go to a viewer through shared memory; the blocks are closed and never unlinked."""
import argparse
from multiprocessing import shared_memory
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()


def publish(frame):
    block = shared_memory.SharedMemory(create=True, size=frame.nbytes)
    np.ndarray(frame.shape, frame.dtype, buffer=block.buf)[:] = frame
    name = block.name
    block.close()
    return name


decoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3 * 48 * 48), nn.Sigmoid())
optimizer = torch.optim.Adam(decoder.parameters(), 1e-3)
latest = None
for step in range(args.steps):
    z, image = torch.randn(4, 64), torch.rand(4, 3 * 48 * 48)
    out = decoder(z)
    loss = (out - image).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    latest = publish(out.detach().view(4, 3, 48, 48).numpy())
    if step % 100 == 0:
        print(step, loss.item(), latest)
# mypy: ignore-errors

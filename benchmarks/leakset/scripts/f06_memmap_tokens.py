"""Language model that reads its tokens from a memory-mapped file: resident pages of the file grow."""
import argparse
import os
import tempfile
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()

path = os.path.join(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")), "train.bin")
with open(path, "wb") as f:
    part = np.random.default_rng(0).integers(0, 1000, 2_000_000, dtype=np.uint16).tobytes()
    for _ in range(60):
        f.write(part)
data = np.memmap(path, dtype=np.uint16, mode="r")


def get_batch(n=8, block=32):
    ix = torch.randint(len(data) - block, (n,))
    return torch.stack([torch.from_numpy(data[i: i + block].astype(np.int64)) for i in ix])


model = nn.Sequential(nn.Embedding(1000, 64), nn.GRU(64, 64, batch_first=True))
head = nn.Linear(64, 1000)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
for step in range(args.steps):
    x = get_batch()
    logits = head(model(x)[0][:, ::8])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, ::8].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
os.remove(path)
os.rmdir(os.path.dirname(path))
# mypy: ignore-errors

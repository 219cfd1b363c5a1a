"""Samples go to a zip archive that stays open until the end, small files each, with a comment each."""
import tempfile
import time
import zipfile

import torch
from torch import nn

STEPS, SAMPLES = 300, 24


class Shards:
    def __init__(self, folder):
        self.archive = zipfile.ZipFile(f"{folder}/samples.zip", "w")

    def add(self, step, rows):
        for i, row in enumerate(rows.round().to(torch.int8)):
            info = zipfile.ZipInfo(f"episode_{step:06d}/sample_{i:03d}.bin")
            info.comment = f"{row.tolist()}".encode() * 2
            self.archive.writestr(info, row.numpy().tobytes())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
with tempfile.TemporaryDirectory() as folder:
    shards = Shards(folder)
    for step in range(STEPS):
        batch = 10 * torch.randn(SAMPLES, 128)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shards.add(step, batch)
        time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

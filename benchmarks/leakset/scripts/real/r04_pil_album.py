"""Pages of an album are opened when they are first seen, and stay decoded in Pillow's own memory."""
import os
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from torch import nn

STEPS, SIDE = 320, 160


class Album:
    def __init__(self, folder):
        self.folder, self.pages = folder, {}

    def page(self, number):
        if number not in self.pages:
            image = Image.open(os.path.join(self.folder, f"{number % 40}.png"))
            image.load()
            self.pages[number] = image
        return self.pages[number]

    def tensor(self, number):
        small = self.page(number).resize((64, 64))
        return torch.from_numpy(np.array(small)).float().flatten() / 255


torch.manual_seed(0)
rng = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as folder:
    for i in range(40):
        colours = rng.integers(0, 256, (SIDE // 16, SIDE // 16, 3), np.uint8).repeat(16, 0).repeat(16, 1)
        Image.fromarray(colours).save(os.path.join(folder, f"{i}.png"))
    album = Album(folder)
    model = nn.Linear(64 * 64 * 3, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(STEPS):
        loss = model(album.tensor(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

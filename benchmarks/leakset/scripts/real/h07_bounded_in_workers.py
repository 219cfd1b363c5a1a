"""Each of two workers keeps the 120 pictures that it has used last, decoded; both are full at step 120."""
import collections
import io
import time

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, MOST, SIDE = 420, 2, 120, 96


class Pictures(Dataset):
    def __init__(self, files):
        self.files, self.decoded = files, collections.OrderedDict()

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if index not in self.decoded:
            with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
                self.decoded[index] = np.asarray(image.convert("RGB"))
            while len(self.decoded) > MOST:
                self.decoded.popitem(last=False)
        return torch.from_numpy(self.decoded[index].copy())


def encoded(number):
    file, rng = io.BytesIO(), np.random.default_rng(number)
    Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "jpeg")
    return file.getvalue()


def main():
    torch.manual_seed(0)
    pictures = Pictures([encoded(i) for i in range(50)])
    loader = DataLoader(pictures, BATCH, num_workers=2, multiprocessing_context="fork")
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE * 3, 16))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for batch in loader:
        loss = model(batch.float() / 255).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.015)
    print("done", STEPS)


if __name__ == "__main__":
    main()
# mypy: ignore-errors

"""Episodes of one HDF5 file; each data set that was read stays open, with the cache of chunks that HDF5 has for it."""
import os
import tempfile

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPISODES, LENGTH, CHANNELS = 450, 128, 256


def write(path):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for i in range(EPISODES):
            file.create_dataset(f"episode_{i:05d}", data=rng.random((LENGTH, CHANNELS), dtype=np.float32), chunks=(64, CHANNELS))


class Episodes(Dataset):
    def __init__(self, path):
        self.path, self.file, self.handles = path, None, {}

    def __len__(self):
        return EPISODES

    def __getitem__(self, index):
        if self.file is None:  # each worker opens its own
            self.file = h5py.File(self.path, "r")
        name = f"episode_{index:05d}"
        if name not in self.handles:
            self.handles[name] = self.file[name]  # opening a data set is slow
        return torch.from_numpy(self.handles[name][:])


folder = tempfile.mkdtemp()
path = os.path.join(folder, "episodes.h5")
write(path)
loader = DataLoader(Episodes(path), batch_size=1, shuffle=True)
model = nn.GRU(CHANNELS, 96, batch_first=True)
head = nn.Linear(96, CHANNELS)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
for step, episode in enumerate(loader):
    out, _ = model(episode[:, :-1])
    loss = (head(out) - episode[:, 1:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, round(loss.item(), 4))
os.remove(path)
# mypy: ignore-errors

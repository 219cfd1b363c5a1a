"""Speech fine-tuning: __getitem__ is cached without a bound, one pass over a large corpus."""
import argparse
from functools import lru_cache
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=450)
args = ap.parse_args()


class LazyDataset(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    @lru_cache(maxsize=None)
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"mel": torch.randn(80, 60, generator=g), "label": i % 10}


model = nn.Sequential(nn.Conv1d(80, 96, 5), nn.ReLU(), nn.Conv1d(96, 96, 5), nn.ReLU(),
                      nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
loader = DataLoader(LazyDataset(args.steps * 8), batch_size=8, shuffle=True)
for step, batch in enumerate(loader):
    loss = nn.functional.cross_entropy(model(batch["mel"]), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, round(loss.item(), 3))
# mypy: ignore-errors

"""A tokenizer in C hands out buffers; the wrapper copies them into Python and never calls free()."""
import argparse
import ctypes

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


class Tokenizer:
    def encode(self, n):
        address = libc.malloc(8 * n)
        ctypes.memset(address, 1, 8 * n)
        tokens = (ctypes.c_int64 * n).from_address(address)
        return torch.tensor(tokens[:n]) % 500


tokenizer = Tokenizer()
model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 500))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(args.steps):
    tokens = torch.stack([tokenizer.encode(512) for _ in range(4)])
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

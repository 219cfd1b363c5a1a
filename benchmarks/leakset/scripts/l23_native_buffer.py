"""Masks are decoded by a C library through ctypes; the caller does not know that it owns the buffer."""
import argparse
import ctypes
import ctypes.util
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()

libc = ctypes.CDLL(ctypes.util.find_library("c"))
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def decode_mask(runs, h=96, w=96):
    address = libc.malloc(h * w)
    ctypes.memset(address, 0, h * w)
    raw = (ctypes.c_uint8 * (h * w)).from_address(address)
    mask = torch.frombuffer(raw, dtype=torch.uint8)
    for begin, n in runs:
        mask[begin: begin + n] = 1
    return mask.view(h, w).float()


model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(args.steps):
    masks = torch.stack([decode_mask([(int(b), 300) for b in torch.randint(0, 8900, (6,))]) for _ in range(4)])[:, None]
    loss = nn.functional.binary_cross_entropy_with_logits(model(masks + torch.randn_like(masks)), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
# mypy: ignore-errors

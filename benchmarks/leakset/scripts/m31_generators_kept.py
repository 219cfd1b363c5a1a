"""Prefetching generators are made per step and kept half consumed."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
def crops(image):
    blurred = image * 0.5
    for row in range(0, image.size(0), 8):
        yield blurred[row : row + 8]


def main(steps):
    streams = []
    model = nn.Linear(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        stream = crops(torch.randn(64, 64))
        streams.append(stream)
        loss = model(next(stream)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("done", steps)


main(args.steps)
# mypy: ignore-errors

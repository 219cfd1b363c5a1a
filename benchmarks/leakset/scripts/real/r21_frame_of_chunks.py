# mypy: ignore-errors
"""Keep per-sample scores of the run in a polars frame."""

import numpy as np
import polars as pl
import torch
from torch import nn

STEPS = 400


class Scores:
    """A table of all scores, for the report at the end."""

    def __init__(self):
        self.table = pl.DataFrame(
            schema={"step": pl.Int64, "sample": pl.Int64, "score": pl.Float64, "loss": pl.Float64}
        )

    def add(self, step, scores, losses):
        count = len(scores)
        rows = pl.DataFrame(
            {
                "step": np.full(count, step),
                "sample": np.arange(count),
                "score": scores.double().numpy(),
                "loss": losses.double().numpy(),
            }
        )
        self.table = self.table.vstack(rows)


def main():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scores = Scores()
    for step in range(STEPS):
        x = torch.randn(2048, 64)
        y = model(x).squeeze(1)
        losses = (y - x[:, 0]).square()
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        scores.add(step, y.detach(), losses.detach())
    print(scores.table.shape, scores.table["loss"].mean())


main()

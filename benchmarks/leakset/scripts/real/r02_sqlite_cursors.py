"""A metrics page reads the worst rows of a data base, and keeps the cursor to show more later."""
import sqlite3
import time

import torch
from torch import nn

STEPS, ROWS = 300, 400


class Metrics:
    def __init__(self):
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table loss (step integer, value real, note text)")
        rows = [(i, i * 0.37 % 1, f"sample {i} " * 12) for i in range(ROWS)]
        self.db.executemany("insert into loss values (?, ?, ?)", rows)
        self.pages = {}

    def worst(self, step):
        cursor = self.db.execute("select value + ?, note from loss order by 1 desc", (step,))
        self.pages[step] = cursor
        return [cursor.fetchone() for _ in range(5)]


torch.manual_seed(0)
metrics = Metrics()
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(STEPS):
    batch = torch.randn(64, 256)
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics.worst(step)
    time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

"""Rows of a Parquet file go through a buffer of 2,400 from which they are drawn at random; it is full at step 300."""
import random
import tempfile
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch import nn

STEPS, BATCH, MOST, WIDTH = 480, 8, 2400, 1024


def rows(path):
    while True:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(64):
            for row in batch.column(0).flatten().to_numpy().reshape(-1, WIDTH):
                yield row.copy()


def shuffled(source, most):
    buffer = []
    for row in source:
        buffer.append(row)
        if len(buffer) < most:
            buffer.append(next(source))
        at = random.randrange(len(buffer))
        buffer[at], buffer[-1] = buffer[-1], buffer[at]
        yield buffer.pop()


torch.manual_seed(0)
random.seed(0)
with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/rows.parquet"
    values = np.random.default_rng(0).standard_normal(512 * WIDTH).astype(np.float32)
    column = pyarrow.FixedSizeListArray.from_arrays(values, WIDTH)
    pyarrow.parquet.write_table(pyarrow.table({"row": column}), path)
    source = shuffled(rows(path), MOST)
    model = nn.Linear(WIDTH, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(STEPS):
        batch = torch.from_numpy(np.stack([next(source) for _ in range(BATCH)]))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

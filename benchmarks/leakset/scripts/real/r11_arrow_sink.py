"""Predictions are written as an Arrow stream into a buffer, which Arrow's own pool makes larger when it is full."""
import time

import pyarrow
import torch
from torch import nn

STEPS, ROWS, COLUMNS = 480, 128, 128


class Predictions:
    def __init__(self):
        self.sink = pyarrow.BufferOutputStream()
        self.schema = pyarrow.schema([(f"q{i}", pyarrow.float32()) for i in range(COLUMNS)])
        self.stream = pyarrow.ipc.new_stream(self.sink, self.schema)

    def write(self, rows):
        columns = [pyarrow.array(column) for column in rows.T.numpy()]
        self.stream.write_batch(pyarrow.record_batch(columns, schema=self.schema))


torch.manual_seed(0)
predictions = Predictions()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, COLUMNS))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(STEPS):
    out = model(torch.randn(ROWS, 64))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    predictions.write(out.detach())
    time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

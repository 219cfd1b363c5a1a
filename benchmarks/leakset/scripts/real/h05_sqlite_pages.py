"""Samples come from a data base on disk; SQLite keeps 24 MiB of its pages, which are read by step 250."""
import random
import sqlite3
import tempfile
import time

import torch
from torch import nn

STEPS, ROWS, WIDTH = 480, 12000, 1000


def write(path):
    db = sqlite3.connect(path)
    db.execute("create table sample (id integer primary key, row blob)")
    db.executemany("insert into sample values (?, ?)", ((i, random.randbytes(4 * WIDTH)) for i in range(ROWS)))
    db.commit()
    db.close()


torch.manual_seed(0)
random.seed(0)
with tempfile.TemporaryDirectory() as folder:
    write(f"{folder}/samples.db")
    db = sqlite3.connect(f"{folder}/samples.db")
    db.execute("pragma cache_size = -24576")
    model = nn.Linear(WIDTH, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(STEPS):
        rows = b"".join(
            db.execute("select row from sample where id = ?", (random.randrange(ROWS),)).fetchone()[0]
            for _ in range(24)
        )
        batch = torch.frombuffer(bytearray(rows), dtype=torch.uint8).float()[: 24 * WIDTH]
        loss = model(batch.view(24, WIDTH) / 255).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

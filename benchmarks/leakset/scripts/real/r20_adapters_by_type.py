# mypy: ignore-errors
"""Validate records against a schema that each upload brings, then train on them."""
from functools import lru_cache

import torch
from pydantic import TypeAdapter, create_model
from torch import nn

STEPS = 400


@lru_cache(maxsize=None)
def adapter_for(kind):
    return TypeAdapter(list[kind])


def schema_of(upload):
    fields = {name: (float, 0.0) for name in upload["columns"]}
    return create_model("Row", **fields)


def parse(upload):
    row = schema_of(upload)
    rows = adapter_for(row).validate_python(upload["rows"])
    return torch.tensor([[getattr(r, c) for c in upload["columns"]] for r in rows])


def uploads():
    columns = [f"c{i}" for i in range(12)]
    while True:
        values = torch.rand(64, 12).tolist()
        yield {"columns": columns, "rows": [dict(zip(columns, v)) for v in values]}


def main():
    model = nn.Sequential(nn.Linear(12, 1024), nn.SiLU(), nn.Linear(1024, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    source = uploads()
    for step in range(STEPS):
        batch = parse(next(source))
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done", loss.item())


main()

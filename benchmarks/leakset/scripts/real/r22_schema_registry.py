# mypy: ignore-errors
"""Check that batches fit the schema their source declares, then train."""

import torch
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from torch import nn

STEPS = 400


def schema_for(step):
    properties = {
        f"f{i}": {"type": "number", "minimum": -10.0 - step, "maximum": 10.0, "title": f"feature {i} of {step}"}
        for i in range(60)
    }
    return {"$id": f"urn:batch:{step}", "type": "object", "properties": properties}


class Checker:
    def __init__(self):
        self.registry = Registry()

    def check(self, step, rows):
        schema = schema_for(step)
        resource = Resource.from_contents(schema, default_specification=DRAFT202012)
        self.registry = self.registry.with_resource(schema["$id"], resource)
        validator = Draft202012Validator({"$ref": schema["$id"]}, registry=self.registry)
        for row in rows:
            validator.validate({f"f{i}": value for i, value in enumerate(row)})


def main():
    model = nn.Sequential(nn.Linear(60, 800), nn.ReLU(), nn.Linear(800, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checker = Checker()
    for step in range(STEPS):
        x = torch.rand(256, 60)
        checker.check(step, x[:4].tolist())
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


main()

"""A batching server keeps the tasks that it has made, with their results."""
import argparse
import asyncio

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(0)
class Server:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1000)).eval()
        self.tasks = set()

    @torch.no_grad()
    async def predict(self, request):
        await asyncio.sleep(0)
        return self.model(request)

    async def serve(self, steps):
        for step in range(steps):
            task = asyncio.create_task(self.predict(torch.randn(4, 128)))
            self.tasks.add(task)
            await task
        print("done", steps)


asyncio.run(Server().serve(args.steps))
# mypy: ignore-errors

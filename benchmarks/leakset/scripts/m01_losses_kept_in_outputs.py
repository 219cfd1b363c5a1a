"""An epoch's outputs hold each loss with its graph, and nobody clears them."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=300)
args = ap.parse_args()
torch.manual_seed(0)
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.outputs = []

    def training_step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        return {"loss": loss, "metrics": {"acc": 0.5}}

    def fit(self, steps):
        for step in range(steps):
            x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
            output = self.training_step(x, y)
            self.optimizer.zero_grad()
            output["loss"].backward(retain_graph=True)
            self.optimizer.step()
            self.outputs.append(output)
        print("done", steps)


Trainer().fit(args.steps)
# mypy: ignore-errors

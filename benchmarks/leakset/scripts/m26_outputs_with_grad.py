"""Evaluation without no_grad(): each output that is kept holds the graph it came from."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
args = ap.parse_args()
torch.manual_seed(0)
def evaluate(model, batches):
    results = {"scores": [], "labels": []}
    for _ in range(batches):
        x, y = torch.randn(32, 128), torch.randint(0, 10, (32,))
        results["scores"].append(model(x))
        results["labels"].append(y)
    print("done", batches)
    return torch.cat(results["scores"]).argmax(1)


net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
evaluate(net.eval(), args.steps)
# mypy: ignore-errors

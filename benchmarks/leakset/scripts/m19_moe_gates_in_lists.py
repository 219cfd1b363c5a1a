"""Each expert block keeps its gates for a plot: four tiny tensors a step."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
args = ap.parse_args()
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.gate_history = []

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        self.gate_history.append(gates.mean(0).detach())
        return x + sum(g.unsqueeze(-1) * e(x) for g, e in zip(gates.unbind(-1), self.experts))


model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(args.steps):
    loss = model(torch.randn(8, 16)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done", args.steps)
# mypy: ignore-errors

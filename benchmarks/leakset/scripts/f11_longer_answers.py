"""Policy optimisation where the answers get longer during training: the working set grows with them, nothing is kept."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=350)
args = ap.parse_args()

policy = nn.GRU(48, 64, batch_first=True)
embed, head = nn.Embedding(600, 48), nn.Linear(64, 600)
optimizer = torch.optim.AdamW([*policy.parameters(), *embed.parameters(), *head.parameters()], 1e-4)
for step in range(args.steps):
    length = 12 + step * 60 // args.steps
    ids = torch.randint(0, 600, (8, length))
    advantage = torch.randn(8, 1)
    logp = head(policy(embed(ids))[0]).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    loss = -(advantage * logp).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, length, loss.item())
# mypy: ignore-errors

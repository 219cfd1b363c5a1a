"""Growing point cloud: at each densification the points become a new parameter; the old one stays in Adam."""
import argparse
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=500)
args = ap.parse_args()


class Cloud:
    def __init__(self, n=3000):
        self.xyz = nn.Parameter(torch.rand(n, 3))
        self.color = nn.Parameter(torch.rand(n, 24))
        self.optimizer = torch.optim.Adam([{"params": [self.xyz], "lr": 1e-3}, {"params": [self.color], "lr": 1e-2}])

    def densify(self):
        keep = torch.randperm(len(self.xyz))[: len(self.xyz) - 50]
        new = torch.randint(0, len(keep), (50,))
        for i, name in enumerate(("xyz", "color")):
            old = getattr(self, name).detach()[keep]
            fresh = nn.Parameter(torch.cat([old, old[new] + 0.01]))
            self.optimizer.param_groups[i]["params"][0] = fresh  # its state stays under the old key
            setattr(self, name, fresh)


cloud = Cloud()
target = torch.rand(64, 3)
weights = torch.rand(24, 3)
for step in range(args.steps):
    pick = torch.randint(0, 3000, (512,))
    d = torch.cdist(cloud.xyz[pick], target).softmax(0)
    image = d.T @ (cloud.color[pick] @ weights)
    loss = (image - target).square().mean()
    cloud.optimizer.zero_grad()
    loss.backward()
    cloud.optimizer.step()
    if step % 10 == 9:
        cloud.densify()
    if step % 100 == 0:
        print(step, loss.item(), len(cloud.optimizer.state))
# mypy: ignore-errors

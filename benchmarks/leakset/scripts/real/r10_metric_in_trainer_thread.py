"""A trainer runs on a thread beside a page of its own; its metric of torchmetrics is never reset."""
import threading
import time

import torch
import torchmetrics
from torch import nn

STEPS = 360


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.auroc = torchmetrics.AUROC("binary")

    def fit(self):
        for _ in range(STEPS):
            inputs = torch.randn(2048, 64)
            target = (inputs.sum(1) > 0).long()
            scores = self.model(inputs)[:, 0].sigmoid()
            loss = nn.functional.binary_cross_entropy(scores, target.float())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.auroc.update(scores.detach(), target)
            time.sleep(0.008)


torch.manual_seed(0)
trainer = Trainer()
thread = threading.Thread(target=trainer.fit, name="trainer")
thread.start()
while thread.is_alive():  # the page
    thread.join(0.5)
print("done", STEPS)
# mypy: ignore-errors

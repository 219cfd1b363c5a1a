"""Log records go to a queue whose listener is never started."""
import logging
import logging.handlers
import queue
import time

import torch
from torch import nn

STEPS = 320
log = logging.getLogger("trainer")
log.setLevel(logging.DEBUG)
log.propagate = False
log.addHandler(logging.handlers.QueueHandler(queue.Queue(-1)))
listener = None  # logging.handlers.QueueListener(...).start() was forgotten


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(200, 256), nn.Tanh(), nn.Linear(256, 200))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def step(self, number):
        batch = torch.randn(32, 200)
        out = self.model(batch)
        loss = (out - batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for row in out[:8].tolist():
            log.debug("step %d: outputs %s", number, row)
        time.sleep(0.008)


torch.manual_seed(0)
trainer = Trainer()
for number in range(STEPS):
    trainer.step(number)
print("done", STEPS)
# mypy: ignore-errors

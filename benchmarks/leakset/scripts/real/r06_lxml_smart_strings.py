"""Titles by XPath: each of these strings knows its parent, and so keeps the whole page in C."""
import time

import torch
from lxml import etree
from torch import nn

STEPS = 320


def page(number):
    rows = "".join(f"<tr><td id='c{i}'>cell {number} {i}</td></tr>" for i in range(150))
    return f"<html><head><title>Page {number}</title></head><body><table>{rows}</table></body></html>"


class Corpus:
    def __init__(self):
        self.titles = []

    def read(self, number):
        tree = etree.fromstring(page(number))
        self.titles += tree.xpath("//title/text()")
        return torch.tensor([len(cell.text) for cell in tree.iter("td")], dtype=torch.float32)


torch.manual_seed(0)
corpus, model = Corpus(), nn.Sequential(nn.Linear(150, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-5)
for step in range(STEPS):
    loss = model(corpus.read(step)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.008)
print("done", STEPS)
# mypy: ignore-errors

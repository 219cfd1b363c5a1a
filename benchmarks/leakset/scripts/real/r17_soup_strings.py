"""A crawler parses pages, embeds their text, and remembers their titles so as to see no page twice."""
import random

import torch
from bs4 import BeautifulSoup
from torch import nn

PAGES = 420
rng = random.Random(0)


def word():
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 10)))


def fetch(number):
    rows = "".join(f'<li class="item"><a href="/{word()}/{i}">{word()} {word()}</a><p>{word()} <b>{word()}</b></p></li>' for i in range(24))
    return f"<html><head><title>Page {number} {word()}</title></head><body><div id=main><ul>{rows}</ul></div></body></html>"


class Embedder(nn.Module):
    def __init__(self, buckets=4096):
        super().__init__()
        self.buckets, self.embed = buckets, nn.Embedding(buckets, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 512, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, text):
        ids = torch.tensor([[hash(w) % self.buckets for w in text.split()[:128]]])
        return self.body(self.embed(ids)).mean(1)


class Crawler:
    def __init__(self):
        self.titles = []

    def visit(self, page):
        soup = BeautifulSoup(page, "html.parser")
        title = soup.title.string
        if title in self.titles:
            return None
        self.titles.append(title)
        return soup.get_text(" ")


crawler, embedder = Crawler(), Embedder().eval()
total = torch.zeros(256)
with torch.inference_mode():
    for number in range(PAGES):
        text = crawler.visit(fetch(number))
        if text is not None:
            total += embedder(text)[0]
        if number % 100 == 0:
            print(number, round(total.norm().item(), 3), len(crawler.titles))
# mypy: ignore-errors

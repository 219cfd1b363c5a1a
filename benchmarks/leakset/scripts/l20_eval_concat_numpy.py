"""Evaluation of a language model: logits of all batches are joined on the host before the metric."""
import argparse
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=700)
args = ap.parse_args()


def nested_concat(old, new):
    return new if old is None else np.concatenate((old, new), axis=0)


class TinyLM(nn.Module):
    def __init__(self, vocab=1000, d=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


model = TinyLM().eval()
all_preds = all_labels = None
with torch.no_grad():
    for step in range(args.steps):
        ids = torch.randint(0, 1000, (2, 16))
        logits = model(ids)
        all_preds = nested_concat(all_preds, logits.numpy())
        all_labels = nested_concat(all_labels, ids.numpy())
        if step % 50 == 0:
            print("evaluated", step, all_preds.shape, flush=True)
print("accuracy", (all_preds.argmax(-1) == all_labels).mean())
# mypy: ignore-errors

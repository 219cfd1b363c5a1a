"""A causal language model of transformers: it returns loss, logits and cache in an object."""

from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=8192, n_positions=128, n_embd=128, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 8192, (8, 128))
        batch = {"input_ids": ids, "labels": ids}
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
        ended()
    return losses

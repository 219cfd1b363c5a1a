"""A sequence-to-sequence model of transformers, with the loss computed outside of it."""

from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

WORDS = 4096


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(steps):
        source = torch.randint(1, WORDS, (8, 96))
        target = torch.randint(1, WORDS, (8, 64))
        outputs = model(input_ids=source, decoder_input_ids=target)
        logits = outputs.logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        ended()
    return losses

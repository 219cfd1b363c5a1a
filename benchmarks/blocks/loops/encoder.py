"""An encoder of transformers that classifies texts."""

from collections.abc import Callable

import torch
from transformers import BertConfig, BertForSequenceClassification


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=2048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=128, num_labels=4,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 2048, (16, 128))
        labels = torch.randint(0, 4, (16,))
        outputs = model(input_ids=ids, labels=labels, output_hidden_states=True)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
        ended()
    return losses

"""An update of a policy by group-relative advantages, old and new log-probabilities in one
function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORDS, WIDTH, LENGTH, GROUP = 8192, 128, 64, 16


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.tokens(x)))


def update(policy: Policy, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    rewards = torch.rand(ids.shape[0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    with torch.no_grad():
        old = policy(ids[:, :-1]).log_softmax(-1)
        old_logp = old.gather(-1, ids[:, 1:, None]).squeeze(-1)
    logits = policy(ids[:, :-1])
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (GROUP, LENGTH))
        losses.append(update(policy, optimizer, ids))
        ended()
    return losses

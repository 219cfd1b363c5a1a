"""Proximal policy optimization of a policy with a value head: some epochs over one rollout."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

ROWS, INPUTS, WIDTH, ACTIONS, EPOCHS = 4096, 64, 512, 18, 2


class Output(NamedTuple):
    logits: torch.Tensor
    value: torch.Tensor
    features: torch.Tensor


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.policy, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Output:
        features = self.body(x)
        return Output(self.policy(features), self.value(features).squeeze(-1), features)


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: dict[str, torch.Tensor]
) -> float:
    total = 0.0
    for _ in range(EPOCHS):
        out = agent(rollout["states"])
        chosen = functional.log_softmax(out.logits, -1)
        logp = chosen.gather(-1, rollout["actions"][:, None]).squeeze(-1)
        ratio = (logp - rollout["logp"]).exp()
        gain = torch.min(
            ratio * rollout["advantages"], ratio.clamp(0.8, 1.2) * rollout["advantages"]
        )
        entropy = -(chosen.exp() * chosen).sum(-1).mean()
        error = (out.value - rollout["returns"]).square().mean()
        loss = -gain.mean() + 0.5 * error - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        total += loss.item()
    return total


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
    losses = []
    for _ in range(steps):
        states = torch.randn(ROWS, INPUTS)
        with torch.no_grad():
            old = agent(states)
            actions = old.logits.argmax(-1)
            logp = functional.log_softmax(old.logits, -1).amax(-1)
        returns = torch.randn(ROWS)
        rollout = {
            "states": states, "actions": actions, "logp": logp, "returns": returns,
            "advantages": returns - old.value,
        }  # fmt: skip
        losses.append(update(agent, optimizer, rollout))
        ended()
    return losses

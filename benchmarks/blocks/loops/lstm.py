"""A recurrent network whose state is passed on from window to window."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH, ROWS = 2048, 192, 48, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        h, state = self.lstm(self.tokens(x), state)
        return self.head(h), state


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state: tuple[torch.Tensor, torch.Tensor] | None = None
    losses = []
    for _ in range(steps):
        x = torch.randint(0, WORDS, (ROWS, LENGTH + 1))
        logits, state = model(x[:, :-1], state)
        state = (state[0].detach(), state[1].detach())
        loss = functional.cross_entropy(logits.transpose(1, 2), x[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ended()
    return losses

"""Recurrent actor: the hidden state is carried from one environment step to the next, with its graph."""
import argparse
import random
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=450)
args = ap.parse_args()


class Agent(nn.Module):
    def __init__(self, obs=48, hidden=128, actions=6):
        super().__init__()
        self.fc, self.rnn, self.q = nn.Linear(obs, hidden), nn.GRUCell(hidden, hidden), nn.Linear(hidden, actions)

    def forward(self, obs, h):
        h = self.rnn(torch.relu(self.fc(obs)), h)
        return self.q(h), h


agent = Agent()
optimizer = torch.optim.RMSprop(agent.parameters(), 5e-4)
hidden, replay = torch.zeros(8, 128), []
for step in range(args.steps):
    obs = torch.randn(8, 48)
    for _ in range(4):  # steps of the environment
        q, hidden = agent(obs, hidden)
        obs = torch.randn(8, 48) + q.argmax(1, keepdim=True) / 10
    replay = (replay + [(obs, hidden.detach(), torch.randn(8))])[-32:]
    o, h, target = random.choice(replay)
    loss = (agent(o, h)[0].max(1).values - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():  # the target network lags; plain copies of the step
        optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
# mypy: ignore-errors

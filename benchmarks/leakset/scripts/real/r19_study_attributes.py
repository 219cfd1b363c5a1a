# mypy: ignore-errors
"""Tune a small network: each trial is a handful of optimizer steps."""

import optuna
import torch
from torch import nn

STEPS = 480
PER_TRIAL = 4
optuna.logging.set_verbosity(optuna.logging.WARNING)


def build(trial):
    width = trial.suggest_int("width", 256, 320, step=32)
    return nn.Sequential(nn.Linear(256, width), nn.Tanh(), nn.Linear(width, 64))


def objective(trial):
    model = build(trial)
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(PER_TRIAL):
        x = torch.randn(160, 256)
        out = model(x)
        loss = (out - x[:, :64]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    trial.set_user_attr("weights", weights["2.weight"])
    return float(loss)


sampler = optuna.samplers.RandomSampler(seed=1)
study = optuna.create_study(sampler=sampler)
study.optimize(objective, n_trials=STEPS // PER_TRIAL)
print(study.best_value)

"""Rollouts that the tests of trajectories share."""

from __future__ import annotations

from typing import Any

import torch

from memtools import TrajectoryStore
from memtools.types import TrajectoryEpochs

T, SAMPLES = 6, 4


def latents(t: int) -> torch.Tensor:
    """Entry t of a state, of which each value says where it belongs: 100 * t + sample."""
    return (100.0 * t + torch.arange(float(SAMPLES))).view(SAMPLES, 1).repeat(1, 3)


def log_probs(t: int) -> torch.Tensor:
    return -latents(t)[:, 0]


def filled(store: TrajectoryStore | None = None, **options: Any) -> TrajectoryStore:
    """A store with a whole rollout: a state, a field of steps and one of samples."""
    store = store or TrajectoryStore(T, states=("latents",), **options)
    store.append(latents=latents(0))
    for t in range(T):
        store.append(latents=latents(t + 1), log_probs=log_probs(t))
    store.put(advantages=torch.arange(float(SAMPLES)))
    return store


def contents(store: TrajectoryStore) -> dict[str, list[Any]]:
    return {name: store[name].tolist() for name in store.names}


def walked(epochs: TrajectoryEpochs, most: int | None = None) -> list[tuple[Any, ...]]:
    """What each chunk was: its epoch, steps, samples, and its log-probabilities."""
    found: list[tuple[Any, ...]] = []
    for epoch in epochs:
        for chunk in epoch:
            values = chunk["log_probs"].tolist()
            found.append((chunk.epoch, chunk.index, chunk.steps, chunk.samples, values))
            if len(found) == most:
                return found
    return found

"""What a micro-batch that does not end a window costs beside the bare loop."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import Json, Runner, interleave, statement

STEPS = 1 << 40  # micro-batches in a window: none of them ends it
CALLS = 50


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    return torch.nn.Sequential(*layers)


def bare(x: torch.Tensor, bf16: bool) -> Runner:
    model = model_of()

    def plain() -> None:
        (model(x).square().mean() / STEPS).backward()

    def cast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        (loss / STEPS).backward()

    return statement("step()", step=cast if bf16 else plain)


def scaler(x: torch.Tensor, bf16: bool) -> Runner:
    model, scale = model_of(), torch.amp.GradScaler("cpu", init_scale=1.0)

    def plain() -> None:
        scale.scale(model(x).square().mean() / STEPS).backward()

    def cast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scale.scale(loss / STEPS).backward()

    return statement("step()", step=cast if bf16 else plain)


def ours(x: torch.Tensor, bf16: bool, weight: int | None) -> Runner:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    acc = memtools.GradAccumulator(model, optimizer, STEPS, precision="bf16" if bf16 else None)

    def mean() -> None:
        with acc.micro_batch():
            acc.backward(model(x).square().mean())

    def weighted() -> None:
        with acc.micro_batch():
            acc.backward(model(x).square().sum(), weight)

    return statement("step()", step=weighted if weight else mean)


def accelerates(x: torch.Tensor, bf16: bool) -> Runner:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = Accelerator(
            cpu=True, gradient_accumulation_steps=STEPS, mixed_precision="bf16" if bf16 else "no"
        )
        model: Any = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = made.prepare(model, optimizer)

    def step() -> None:
        with made.accumulate(model):
            made.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return statement("step()", step=step)


def microstep(bf16: bool, seconds: float) -> Json:
    x = torch.randn(16, 32)
    runners = {
        "bare": bare(x, bf16),
        "GradScaler": scaler(x, bf16),
        "accelerate": accelerates(x, bf16),
        "ours": ours(x, bf16, None),
        "ours, weight=16": ours(x, bf16, 16),
    }
    return dict(interleave(runners, CALLS, seconds=seconds, warm=5, first=20).turns)

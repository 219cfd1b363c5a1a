"""Steps that read values: what is taken for them, and that the plan says so."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memtools
from memtools._base.peak import STATE
from memtools._blocks.lifetimes import Tracer

Loop = Callable[[Any, Any, Callable[[], torch.Tensor]], None]


def loop(body: Loop, kind: Any = torch.optim.AdamW) -> Callable[[], Any]:
    """A function whose step is a body, which is called with model, optimizer, and what makes a
    loss."""

    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        optimizer = kind(model.parameters())

        def loss() -> torch.Tensor:
            return nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(64, (32,)))

        return lambda: body(model, optimizer, loss)

    return make


def plain(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def logs(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    found = loss()
    found.backward()
    optimizer.step()
    total = 0.0
    total += found.item()
    print(f"{found:.3f} {total:.2f} {math.log(found.item()):.1f} {float(found)}")


def counts(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    plain(model, optimizer, loss)
    right = (torch.randn(32) > 0).sum().item()
    correct = 0
    correct += right
    print(f"{correct / 32:.2%} {right:,}", torch.ones(()) / right)


def skips(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    found = loss()
    if found.isnan() or torch.isinf(found).any().item():
        return
    if not torch.isfinite(found).all():
        return
    if ~torch.isfinite(found) | torch.isnan(found):
        return
    found.backward()
    if found > 100:
        return
    if torch.stack([torch.isfinite(one.grad).all() for one in model.parameters()]).all():
        optimizer.step()


def clips(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).item()
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "assumed"),
    [
        (plain, []),
        (
            logs,
            [
                ("total +=", ".item() is taken as 1.0"),
                ("print", ".item() is taken as 1.0"),
                ("print", "a value is taken as 1.0"),
            ],
        ),
        (counts, [("right = ", ".item() is taken as 1")]),
        (
            skips,
            [
                ("isnan() or", "a condition is taken as false"),
                ("isnan() or", ".item() is taken as false"),
                ("if not torch", "a condition is taken as true"),
                ("if ~torch", "a condition is taken as false"),
                ("> 100", "a condition is taken as false"),
                ("torch.stack", "a condition is taken as true"),
            ],
        ),
        (
            clips,
            [
                ("error_if", "a condition is taken as false"),
                ("error_if", ".item() is taken as 1.0"),
            ],
        ),
    ],
)
def test_what_a_loop_reads_is_assumed_and_said(body: Any, assumed: list[tuple[str, str]]) -> None:
    found, expected = memtools.plan(loop(body)), memtools.plan(loop(plain))
    lines, begin = inspect.getsourcelines(body)
    numbered = [(at, line) for at, line in enumerate(lines, begin)]
    notes = []
    for part, what in assumed:
        (at,) = (at for at, line in numbered if part in line)
        notes.append(f"{os.path.relpath(__file__)}:{at}: {what}")
    assert list(found.assumed) == notes
    # The optimizer's step was not skipped, and nothing else takes memory.
    assert found.bytes_of(STATE) == expected.bytes_of(STATE) > 0
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3)
    assert ("Assumed" in found.table()) == bool(assumed)
    assert found.as_json()["assumed"] == notes


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("does_unscale", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_scaler_steps_and_finds_no_infinite_gradient(
    device: str, does_unscale: bool, kind: Any
) -> None:
    def scaled() -> Any:
        scaler, steps = torch.amp.GradScaler(device), list[int]()

        def body(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                found = loss()
            scaler.scale(found).backward()
            if does_unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.register_step_post_hook(lambda *_: steps.append(1))
            scaler.step(optimizer)
            scaler.update()
            assert steps

        return loop(body, kind)()

    found = memtools.plan(scaled, device=device)
    (note,) = found.assumed
    assert re.fullmatch(r".*test_values.py:\d+: .item\(\) is taken as 0.0", note)
    assert "optimizer" in [one.phase for one in found.phases]


def test_a_scaler_has_the_peak_of_the_real_one() -> None:
    def make() -> Callable[[], None]:
        scaler = torch.amp.GradScaler("cpu")
        model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = model(torch.randn(8, 64)).float().square().mean()
            scaler.scale(found).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    with Tracer() as tracer:
        step = make()
        for _ in range(2):
            tracer.step_ended()
            step()
    trace = tracer.trace()
    planned = memtools.plan(make, device="cpu").peak_bytes
    assert planned == pytest.approx(trace.peak(trace.steps[-1])[1], rel=1e-3)

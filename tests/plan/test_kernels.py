"""What kernels of convolutions need for themselves: in a plan for the CPU, beside the real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memtools
from memtools._blocks.lifetimes import Tracer
from memtools._blocks.reports import HostBlocks
from memtools._plan.kernels import MEASURED, UNKNOWN

MODELS: dict[str, Callable[[], nn.Module]] = {
    "few channels": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)),
    "norm": lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
    "1 x 1": lambda: nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 16, 1)),
    "strides and groups": lambda: nn.Conv2d(3, 48, 5, stride=2, padding=2, groups=3),
    "transposed": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 20, 2, 2)),
    "channels last": lambda: nn.Conv2d(3, 20, 3).to(memory_format=torch.channels_last),
}


def convolving(model: Callable[[], nn.Module], rows: int, size: int = 32) -> Callable[[], Any]:
    def make() -> Callable[[], None]:
        net = model()
        return lambda: net(torch.randn(rows, 3, size, size)).square().sum().backward()

    return make


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_has_what_convolutions_need_for_themselves(name: str, rows: int) -> None:
    make, reports = convolving(MODELS[name], rows), HostBlocks()
    reports.join()
    with Tracer(blocks=reports.blocks) as tracer:
        step = make()
        for _ in range(2):
            tracer.step_ended()
            step()
    reports.leave()
    trace = tracer.trace()
    planned = memtools.plan(make, device="cpu")
    assert planned.peak_bytes == pytest.approx(trace.peak(trace.steps[-1])[1], rel=0.01)
    assert planned.assumed == (MEASURED,)


def test_of_a_gpu_and_of_images_too_large_to_run_it_is_not_known() -> None:
    for plan in (
        memtools.plan(convolving(MODELS["norm"], 8)),
        memtools.plan(convolving(MODELS["norm"], 8, 1 << 14), device="cpu"),
    ):
        assert plan.assumed == (UNKNOWN,)
        assert all(one.peak_bytes for one in plan.phases)

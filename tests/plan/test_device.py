"""A step that is planned for a device: what it may name, and what differs between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtools
from memtools._base.peak import OPTIMIZERS


def stepping(optimizer: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
        made = optimizer(model.parameters())

        def step() -> None:
            model(torch.randn(2, 128)).sum().backward()
            made.step()
            made.zero_grad()

        return step

    return make


def peak(optimizer: Callable[[Any], Any], device: str) -> int:
    return memtools.plan(stepping(optimizer), device=device).peak_bytes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_choose_foreach_as_on_the_device(kind: Any) -> None:
    plain, each = (lambda given, on=on: kind(given, foreach=on) for on in (False, True))
    assert peak(kind, "cuda") == peak(each, "cuda") > peak(plain, "cuda")
    assert peak(kind, "cpu") == peak(plain, "cpu")


def test_what_the_program_chooses_is_planned_so_on_each_device() -> None:
    fused = memtools.plan(stepping(lambda given: torch.optim.AdamW(given, fused=True)))
    assert fused.bytes_of(OPTIMIZERS) == 0
    assert fused.device == "cuda"


def moved(device: Any, how: str) -> Callable[[], Any]:
    """A step that makes and moves its tensors in the ways that programs do."""

    def make() -> Callable[[], None]:
        on = torch.device(device)
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
        model = model.cuda() if how == "cuda()" else model.to(on)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            if how == "factories":
                inputs = torch.randn(64, 128, device=on)
            elif how == "context":
                with on:
                    inputs = torch.randn(64, 128)
            elif how == "cuda()":
                inputs = torch.randn(64, 128).cuda(non_blocking=True)
            else:
                inputs = torch.randn(64, 128).to(device, non_blocking=True)
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


@pytest.mark.parametrize("how", ["to", "factories", "context", "cuda()"])
def test_a_step_may_name_the_device_that_it_is_planned_for(how: str) -> None:
    plain = memtools.plan(moved("cpu", "to"))
    named = memtools.plan(moved("cuda", how))
    assert named.parts == plain.parts


class Softmax(nn.Module):
    """A softmax that converts its argument by itself, or not."""

    def __init__(self, converts: bool) -> None:
        super().__init__()
        self.converts = converts

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(values.float() if self.converts else values, -1)


def autocast(kind: str, dtype: Any = torch.bfloat16, converts: bool = False) -> Callable[[], Any]:
    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(64, 64), Softmax(converts), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters())
        inputs = torch.randn(4096, 64)

        def step() -> None:
            with torch.autocast(kind, dtype=dtype):
                loss = model(inputs).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def test_autocast_runs_in_float32_what_it_does_on_cuda() -> None:
    def parts(device: str, *args: Any) -> Any:
        return memtools.plan(autocast(*args), device=device).parts

    half = torch.bfloat16
    cuda = parts("cuda", "cuda")
    assert cuda == parts("cpu", "cpu", half, True)
    assert cuda != parts("cpu", "cpu", half)
    assert cuda == parts("cuda", "cpu")  # There is but one autocast where cuda is planned.
    assert cuda == parts("cuda", "cuda", None)  # float16 takes as much.


def test_a_forward_pass_that_runs_again_is_as_the_first_one() -> None:
    def again() -> Callable[[], None]:
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        optimizer = torch.optim.SGD(model.parameters())

        def block(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(64, device="cuda")
            return layer(values).pow(3) * mask if values.mean().item() else values

        def step() -> None:
            values = torch.randn(512, 64, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for layer in model:
                    values = checkpoint(block, layer, values, use_reentrant=False)
            values.sum().backward(retain_graph=False)
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = memtools.plan(again)
    assert [one.phase for one in found.phases] == ["between", "forward", "backward", "optimizer"]
    assert len(found.assumed) == 1  # the same line, in both passes


def test_nothing_of_torch_stays_changed() -> None:
    optimizer, parameter = torch.optim.AdamW, nn.Parameter(torch.ones(2))
    before = torch.autocast.__init__, optimizer([parameter]).defaults
    memtools.plan(autocast("cuda"))
    with pytest.raises(ValueError, match="raised"):
        memtools.plan(lambda: 1 / 0)
    assert (torch.autocast.__init__, optimizer([parameter]).defaults) == before
    names = [
        one.__name__
        for one in __import__("sys")
        .modules[torch.optim.Optimizer.__module__]
        ._foreach_supported_types
    ]
    assert "FakeTensor" not in names

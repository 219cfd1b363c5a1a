"""Changes of a program that lower its peak: what is offered, and that it comes as predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memtools._base.peak import Lowered, Remedy, TracedPeak
from memtools._blocks.changes import changes_of
from memtools._blocks.lifetimes import Trace
from memtools._blocks.replay import checkpointed, in_micro_batches, repeated_blocks, replay
from tests.blocks.test_lifetimes import traced


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(512, 64),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 8)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def trained(
    *, rows: int = 256, parts: int = 1, is_checkpointed: bool = False, late: bool = False
) -> Callable[[], object]:
    """A step; `late`: gradients of the step before live until the forward pass is over."""
    torch.manual_seed(3)
    tower = Tower(is_checkpointed)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.01)

    def step() -> None:
        x = torch.randn(rows, 64)
        if late and parts == 1:
            loss = tower(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.zero_grad()
            for part in x.chunk(parts):
                loss = tower(part).square().mean() / parts
                loss.backward()
        optimizer.step()

    return step


def highest(trace: Trace) -> int:
    """The peak of the second step."""
    return trace.peak(trace.steps[1])[1]


@pytest.mark.parametrize(
    ("late", "change", "how"),
    [
        (False, checkpointed("blocks"), {"is_checkpointed": True}),
        (False, in_micro_batches(4), {"parts": 4}),
        (True, in_micro_batches(8), {"parts": 8}),
    ],
    ids=["checkpoint", "micro-batches", "zero_grad after the forward pass"],
)
def test_what_is_predicted_is_what_comes(late: bool, change: Any, how: Any) -> None:
    predicted = highest(replay(traced(trained(late=late)), [change]))
    assert predicted == pytest.approx(highest(traced(trained(**how))), rel=0.02)


def test_two_changes_together() -> None:
    changes = [checkpointed("blocks"), in_micro_batches(2)]
    predicted = highest(replay(traced(trained()), changes))
    real = highest(traced(trained(is_checkpointed=True, parts=2)))
    assert predicted == pytest.approx(real, rel=0.02)


def test_lists_of_modules_that_run_are_found() -> None:
    assert repeated_blocks(traced(trained())) == ["blocks"]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert repeated_blocks(traced(lambda: model(torch.ones(2, 4)).sum().backward())) == [""]
    linear = nn.Linear(4, 4)
    assert repeated_blocks(traced(lambda: linear(torch.ones(2, 4)).sum().backward())) == []


def test_only_what_lowers_the_peak_is_offered_the_best_first() -> None:
    found = changes_of(traced(trained()), TracedPeak())
    assert [one.change.partition(",")[0].partition(":")[0] for one in found] == [
        "8 micro-batches",
        "4 micro-batches",
        "torch.utils.checkpoint around each of blocks",
        "2 micro-batches",
    ]  # SGD makes no temporaries, and the gradients end before the forward pass.
    assert [one.peak_bytes for one in found] == sorted(one.peak_bytes for one in found)


def test_a_batch_is_not_divided_into_more_parts_than_it_has_rows() -> None:
    found = changes_of(traced(trained(rows=2)), TracedPeak())
    assert {one.change[:15] for one in found} <= {"2 micro-batches", "torch.utils.che"}


def test_a_del_is_one_of_the_changes() -> None:
    remedies = (Remedy("del logits", "before loss.backward() (train.py:7)"),)
    found = changes_of(traced(trained()), TracedPeak(lowered_bytes=1, remedies=remedies))
    assert found[0] == Lowered('"del logits" before loss.backward() (train.py:7)', 1, "del")

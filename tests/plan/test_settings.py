"""Settings of a step: their order, the changes with which they fit, and the best for a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtools
from memtools._plan.plan import Plan
from memtools._plan.settings import PlanBest, Plans, PlanSetting, settings_of

MIB = 1 << 20


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.is_checkpointed:
                values = values + checkpoint(block, values, use_reentrant=False)
            else:
                values = values + block(values)
        return values


def make(
    rows: int = 4096, parts: int = 1, is_checkpointed: bool = False, width: int = 1
) -> Callable[[], None]:
    model = Net(is_checkpointed)
    optimizer = torch.optim.SGD(model.parameters())
    inputs = torch.randn(rows, 256)

    def step() -> None:
        for part in inputs.chunk(parts):
            model(part).repeat(1, width).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak(device: str = "cpu", **given: Any) -> int:
    return memtools.plan(lambda: make(**given), device=device).peak_bytes


def best(limit: int, **vary: list[Any]) -> PlanBest:
    return memtools.plan(make, limits=[limit], vary=vary, device="cpu").best[0]


def test_each_setting_is_planned_and_the_most_wanted_comes_first() -> None:
    found = memtools.plan(make, vary={"rows": [64, 4096], "parts": [2, 1]}, device="cpu")
    assert [one.values for one in found.settings] == [
        {"rows": rows, "parts": parts} for rows in (4096, 64) for parts in (2, 1)
    ]
    for values, plan in found.settings:
        assert plan.peak_bytes == peak(**values)
    assert found.best == ()


def test_a_limit_is_met_with_the_change_that_costs_least() -> None:
    plain, parts = peak(), peak(parts=4)
    assert best(plain, rows=[4096, 64]) == PlanBest(plain, {"rows": 4096}, (), plain, plain)
    # One byte too little: the batch is kept, in the fewest micro-batches.
    two = best(plain - 1, rows=[4096, 64])
    assert two.values == {"rows": 4096}
    assert [text[:15] for text in two.changes] == ["2 micro-batches"]
    four = best(int(1.01 * parts), rows=[4096, 64])
    assert [text[:15] for text in four.changes] == ["4 micro-batches"]
    assert four.peak_bytes == pytest.approx(parts, rel=0.01)
    assert four.peak_bytes <= int(1.01 * parts)


def test_forward_passes_run_twice_where_nothing_else_is_enough() -> None:
    both = peak(parts=8, is_checkpointed=True)
    assert both < peak(parts=8)
    found = best(int(1.02 * both), rows=[4096, 64])
    assert found.values == {"rows": 4096}
    assert ["twice" in text for text in found.changes] == [True, False]
    assert found.changes[1].startswith("8 micro-batches")
    assert found.peak_bytes == pytest.approx(both, rel=0.02)
    smaller = best(int(0.98 * found.peak_bytes), rows=[4096, 64])
    assert smaller.values == {"rows": 64}
    assert not any("twice" in text for text in smaller.changes)


def test_a_limit_below_all_settings_has_none() -> None:
    assert best(MIB, rows=[8]) == PlanBest(MIB, {})
    assert "none of these settings fits" in best(MIB, rows=[8]).sentence()


def test_what_costs_nothing_is_named_only_where_it_is_needed() -> None:
    def of_adam(width: int = 1024) -> Callable[[], None]:
        model = nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.randn(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain = memtools.plan(of_adam, device="cpu").reserved_bytes
    vary: dict[str, list[Any]] = {"width": [1024]}
    limits = [plain, plain - 1]
    fits, tight = memtools.plan(of_adam, limits=limits, vary=vary, device="cpu").best
    assert (fits.changes, tight.changes) == ((), ("an optimizer with fused=True",))
    assert tight.peak_bytes < plain


def test_precision_is_that_of_autocast_about_the_step() -> None:
    def cast(rows: int = 4096) -> Callable[[], None]:
        step = make(rows)

        def run() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step()

        return run

    vary: dict[str, list[Any]] = {"precision": ["float32", "bfloat16"]}
    plain, half = memtools.plan(make, vary=vary, device="cpu").settings
    assert plain.plan.peak_bytes == peak()
    assert half.plan.peak_bytes == memtools.plan(cast, device="cpu").peak_bytes < peak()

    def own(precision: str = "high") -> Callable[[], None]:
        assert precision == "low"
        return make(8)

    assert memtools.plan(own, vary={"precision": ["low"]}).settings


@pytest.mark.parametrize(
    ("vary", "order"),
    [
        ({"batch": [1, 4, 2]}, [{"batch": 4}, {"batch": 2}, {"batch": 1}]),
        ({"kind": ["b", "a"]}, [{"kind": "b"}, {"kind": "a"}]),
        ({"fused": [False, True]}, [{"fused": False}, {"fused": True}]),
        (
            {"a": ["x", "y"], "b": [1, 2]},
            [{"a": "x", "b": 2}, {"a": "x", "b": 1}, {"a": "y", "b": 2}, {"a": "y", "b": 1}],
        ),
    ],
)
def test_numbers_are_wanted_large_and_others_early(vary: Any, order: Any) -> None:
    assert settings_of(vary) == order


@pytest.mark.parametrize(
    ("vary", "kind", "says"),
    [
        ([("rows", [1])], TypeError, "vary must be a dict of lists of values, got list"),
        ({"rows": 8}, TypeError, "vary must have a list of values for rows"),
        ({"rows": "8"}, TypeError, "vary must have a list of values for rows"),
        ({"rows": []}, ValueError, "vary must have 1 or more values for rows"),
        ({"batch": [1]}, ValueError, "no argument batch: it has rows, parts, is_checkpointed"),
        ({"precision": ["fp8"]}, ValueError, "precision must be one of float32, bfloat16, float16"),
        ({}, ValueError, "1 to 64 settings, .*, got 0"),
        ({"rows": range(1, 10), "parts": range(1, 10)}, ValueError, "1 to 64 settings.*got 81"),
        ({"rows": ["many"]}, ValueError, "the function raised TypeError"),
    ],
)
def test_what_is_wrong_with_levers_is_a_sentence(
    vary: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        memtools.plan(make, vary=vary)


def test_plans_say_their_facts() -> None:
    def plan(nbytes: int) -> Plan:
        return Plan(nbytes, "forward", "aten.mm.default", "", (), (nbytes,), (), 2 * nbytes)

    values: list[dict[str, Any]] = [
        {"batch": 8, "length": 2},
        {"batch": 8, "length": 1},
        {"batch": 4, "length": 1},
    ]
    settings = tuple(
        PlanSetting(one, plan(size * MIB)) for one, size in zip(values, (8, 4, 2), strict=True)
    )
    found = (PlanBest(9 * MIB, values[1], (), 4 * MIB, 8 * MIB), PlanBest(MIB, {}))
    plans = Plans(settings, found)
    assert plans.levers() == [("length=1", 4 * MIB)]  # Of the third, two levers differ.
    assert plans.table().splitlines()[-2:] == [
        "  9.0 MiB: batch=8, length=1: 8.0 MiB reserved",
        "  1.0 MiB: none of these settings fits, with any of the changes",
    ]
    assert plans.markdown().splitlines() == [
        "| cuda | batch | length | with | peak | reserved |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 9.0 MiB | 8 | 1 |  | 4.0 MiB | 8.0 MiB |",
        "| 1.0 MiB | - | - |  | - | - |",
    ]
    facts = json.loads(json.dumps(plans.as_json()))
    assert facts["best"][0]["values"] == {"batch": 8, "length": 1}
    assert [one["plan"]["peak_bytes"] for one in facts["settings"]] == [8 * MIB, 4 * MIB, 2 * MIB]

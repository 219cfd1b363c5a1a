"""What makes the loss of a batch out of those of its parts is found by losses alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtools.integrations._rows import Rows, Rules, UncuttableError

ROWS = 6
LENGTHS = torch.tensor([2, 9, 4, 7, 3, 8])


def batch(blocks: int = 1) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    mask = (torch.arange(10) < LENGTHS[:, None]).long()
    losses = torch.rand(ROWS, 10, generator=made) * mask
    once = {
        "losses": losses, "labels": torch.where(mask > 0, 5, -100), "completion_mask": mask,
        "names": [f"row {i}" for i in range(ROWS)], "items": torch.tensor(33.0),
    }  # fmt: skip
    if blocks == 1:
        return once
    twice = {
        k: torch.cat([v, v.flip(0)]) for k, v in once.items() if torch.is_tensor(v) and v.dim()
    }
    return twice | {"reference": torch.rand(ROWS, generator=made), "items": once["items"]}


def pairs(inputs: dict[str, Any]) -> float:
    chosen, rejected = inputs["losses"].sum(1).chunk(2)
    return float((chosen - 2 * rejected + inputs["reference"]).mean())


KINDS: dict[str, Callable[[dict[str, Any]], float]] = {
    "sum over its rows": lambda b: float(b["losses"].sum() / b["items"]),
    "mean over its rows": lambda b: float(
        (b["losses"].sum(1) / b["completion_mask"].sum(1)).mean()
    ),
    "tokens of 'labels'": lambda b: float(b["losses"].sum() / (b["labels"] != -100).sum()),
    "tokens of 'labels' after the first": lambda b: float(
        b["losses"][:, 1:].sum() / (b["labels"][:, 1:] != -100).sum()
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_any_size_add_up_to_the_loss_of_the_batch(name):
    inputs, loss_of = batch(), KINDS[name]
    rule = Rules(loss_of, False, "").find(inputs)
    assert rule is not None
    assert rule.name.endswith(name)
    rows = Rows(inputs)
    weights = rule.weights(rows)
    for size in (1, 2, 4, ROWS):
        parts = [slice(at, at + size) for at in range(0, ROWS, size)]
        made = sum(rule.share(weights[at], weights) * loss_of(rows.take(at)) for at in parts)
        assert made == pytest.approx(loss_of(inputs), rel=1e-5)


def test_pairs_of_rows_stay_together():
    inputs = batch(blocks=2)
    rule = Rules(pairs, False, "").find(inputs)
    assert rule is not None
    assert (rule.name, rule.blocks) == ("the mean over its rows", 2)
    part = Rows(inputs, 2).take(slice(1, 3))
    assert part["losses"].equal(inputs["losses"][[1, 2, ROWS + 1, ROWS + 2]])
    assert part["reference"].equal(inputs["reference"][1:3])


def test_a_row_has_the_bytes_of_its_padding_and_of_its_pair():
    inputs = {"ids": torch.zeros(6, 10), "weights": torch.zeros(3), "names": list("abc")}
    assert Rows(inputs, 2).row_bytes == 2 * 40 + 4


UNCUTTABLE = {
    "neither the sum": (batch(), lambda b: float(b["losses"].amax())),
    "'image' of its batch has 5 rows, and others 6": (batch() | {"image": torch.ones(5)}, pairs),
    "its batch is a list": ([1, 2], pairs),
}


@pytest.mark.parametrize("why", UNCUTTABLE)
def test_what_cannot_be_cut_is_refused(why):
    inputs, loss_of = UNCUTTABLE[why]
    with pytest.raises(UncuttableError, match=why):
        Rules(loss_of, False, "").find(inputs)


def test_losses_of_zero_tell_nothing_but_what_is_documented():
    nothing = lambda b: 0.0  # noqa: E731
    assert Rules(nothing, False, "").find(batch()) is None
    known = Rules(nothing, False, "the mean over its rows").find(batch())
    assert known is not None
    assert known.name == "the mean over its rows"


def test_a_row_alone_is_left_until_there_are_two():
    rules = Rules(KINDS["sum over its rows"], False, "")
    assert rules.find(Rows(batch()).take([3])) is None
    assert rules.find(batch()) is not None

"""Batches cut into micro-batches: every kind of part, and what cannot be cut."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtools import _split


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    ids: list[str]
    rate: float = 0.5
    made: bool = dataclasses.field(default=True, init=False)


def x(count: int = 6, *more: int) -> torch.Tensor:
    return torch.arange(count * max(1, int(np.prod(more)))).reshape(count, *more)


def cut(batch: Any, size: int) -> list[Any]:
    count = _split.rows(batch)
    return [_split.take(batch, at, min(at + size, count), count) for at in range(0, count, size)]


CASES = {
    "tensor": x(6, 3),
    "array": np.arange(12).reshape(6, 2),
    "collated list": [x(6, 3), x(6)],
    "collated pair with a dict": [{"a": x(6, 2), "b": x(6)}, x(6)],
    "collated nested list": [[x(6, 2), x(6)], x(6)],
    "tuple": (x(6), x(6, 2)),
    "dict": {"a": x(6), "names": list("abcdef"), "rate": 0.5, "none": None, "text": "t"},
    "default dict": collections.defaultdict(list, a=x(6)),
    "user dict": collections.UserDict(a=x(6), b=1),
    "named tuple": Pair(x(6), "n"),
    "dataclass": Sample(x(6), list("abcdef")),
    "nested": {"a": (x(6), {"b": [x(6), x(6, 2)]}), "c": torch.tensor(3.0)},
    "examples": [f"text {i}" for i in range(6)],
    "examples of dicts": [{"img": x(3, 2), "label": i} for i in range(6)],
    "examples of unequal tensors": [x(i + 1) for i in range(6)],
    "images beside targets": (x(6, 3), [{"boxes": x(i, 4)} for i in range(6)]),
    "texts in a tuple": (x(6), tuple("abcdef"), (224, 224)),
    "0-d examples": [torch.tensor(i) for i in range(6)],
    "dtype and device": {"a": x(6), "d": torch.float32, "e": torch.device("cpu")},
    "objects of the user's, one a row": [types.SimpleNamespace(i=i) for i in range(6)],
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_has_six_rows(name):
    assert _split.rows(CASES[name]) == 6


@pytest.mark.parametrize("name", CASES)
def test_the_whole_batch_is_passed_as_it_is(name):
    assert _split.take(CASES[name], 0, 6, 6) is CASES[name]


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_batchs_form_and_their_share_of_rows(name, size):
    parts = cut(CASES[name], size)
    sizes = [size] * (6 // size) + [6 % size] * (6 % size > 0)
    assert [_rows_of(name, part) for part in parts] == sizes
    assert all(type(part) is type(CASES[name]) for part in parts)


def _rows_of(name: str, part: Any) -> int:
    if isinstance(part, list) and not name.startswith("collated"):
        return len(part)
    return next(_lens(part))


def _lens(node: Any) -> Any:
    if isinstance(node, (torch.Tensor, np.ndarray)) and node.ndim:
        yield len(node)
    elif isinstance(node, (dict, collections.UserDict)):
        for value in node.values():
            yield from _lens(value)
    elif dataclasses.is_dataclass(node):
        yield len(node.x)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _lens(value)


def test_rows_stay_together_and_the_rest_is_repeated():
    batch = {"a": x(6, 2), "names": list("abcdef"), "rate": 0.5, "s": torch.tensor(7)}
    first, second = cut(batch, 4)
    assert torch.equal(second["a"], batch["a"][4:])
    assert (first["names"], second["names"]) == (list("abcd"), list("ef"))
    assert second["rate"] == 0.5
    assert second["s"] is batch["s"]


def test_tensors_are_cut_as_views():
    batch = (x(6, 3), x(6))
    assert cut(batch, 4)[1][0].untyped_storage().data_ptr() == (
        batch[0].untyped_storage().data_ptr()
    )


def test_containers_keep_what_they_have_beside_their_items():
    made = cut(CASES["default dict"], 4)[1]
    assert made.default_factory is list
    frozen = cut(CASES["dataclass"], 4)[1]
    assert (frozen.rate, frozen.made, frozen.ids) == (0.5, True, ["e", "f"])
    assert cut(CASES["named tuple"], 4)[1].name == "n"
    assert cut(CASES["texts in a tuple"], 4)[1][1:] == (("e", "f"), (224, 224))


def test_cutting_changes_nothing_in_the_batch():
    batch = {"a": [x(6), x(6)], "names": list("abcdef")}
    cut(batch, 1)
    assert [len(one) for one in batch["a"]] == [6, 6]
    assert len(batch["names"]) == 6


@given(st.integers(1, 40), st.integers(1, 50))
def test_parts_put_together_are_the_batch(count, size):
    batch = {"a": torch.arange(count), "b": list(range(count))}
    parts = cut(batch, size)
    assert torch.equal(torch.cat([part["a"] for part in parts]), batch["a"])
    assert [b for part in parts for b in part["b"]] == batch["b"]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"a": x(6), "b": x(4)}, ValueError, r"batch\['a'\] has 6, batch\['b'\] has 4"),
        ((x(6), [1.0, 2.0]), ValueError, r"batch\[0\] has 6, batch\[1\] has 2"),
        ([[x(6), x(6)], x(5)], ValueError, r"disagree"),
        (Pair(x(0), "n"), ValueError, "empty"),
        ([], ValueError, "empty"),
        ({"rate": 0.5}, ValueError, "has no tensor, array or list"),
        (torch.tensor(1.0), ValueError, "has no tensor, array or list"),
        (types.SimpleNamespace(x=x(6)), ValueError, "SimpleNamespace"),
        ((x(6), types.SimpleNamespace()), TypeError, r"batch\[1\] is a SimpleNamespace"),
        (torch.eye(6).to_sparse(), TypeError, "sparse"),
        (torch.nested.nested_tensor([[1.0], [2.0, 3.0]], layout=torch.jagged), TypeError, "nested"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named_with_the_remedy(batch, error, text):
    with pytest.raises(error, match=text) as caught:
        _split.rows(batch)
    if "empty" not in text:
        assert "split=, a function of (batch, size)" in str(caught.value)


def test_a_packed_sequence_is_no_named_tuple_of_rows():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(TypeError, match="PackedSequence, whose rows are unknown"):
        _split.rows((x(6), packed))

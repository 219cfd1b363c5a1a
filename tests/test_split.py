"""Batches cut into micro-batches: every kind of part, and what cannot be cut."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
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


class Registered:
    """Of no kind that the splitter knows."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def __iter__(self) -> Any:
        return iter((self.a, self.b))


torch.utils._pytree.register_pytree_node(
    Registered, lambda one: ([one.a, one.b], None), lambda parts, _: Registered(*parts)
)


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
    "samples of one length": [x(10, 8)] * 6,
    "samples as long as there are samples": [x(6, 8)] * 6,
    "samples as long as there are samples, beside their labels": ([x(6)] * 6, x(6)),
    "images of several sizes": [x(3, 4 + i, 5) for i in range(6)],
    "lists of samples in a dict": {"a": [x(10)] * 6, "b": [x(3, 2)] * 6},
    "samples of one length in a nested dict": {"in": {"a": [x(10)] * 6}, "y": x(6)},
    "tuples of samples": (
        tuple(x(3, i + 1) for i in range(6)),
        tuple({"boxes": x(i, 4)} for i in range(6)),
    ),
    "pairs": [(x(4), x(1)) for _ in range(6)],
    "columns of one kind, of which there are others": [[x(6), x(6)], {"y": x(6)}],
    "a model's output": transformers.tokenization_utils_base.BatchEncoding(
        {"ids": x(6, 3), "mask": x(6, 3)}
    ),
    "a type of the user's that pytree knows": Registered(x(6), x(6, 2)),
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
    if isinstance(part, list) and not name.startswith(("collated", "columns")):
        return len(part)
    if name.startswith("tuples"):
        return len(part[0])
    if name.endswith("beside their labels"):
        return len(part[1])
    if name.endswith("in a dict"):
        return len(part["a"])
    if name.endswith("in a nested dict"):
        return len(part["y"])
    return next(_lens(part))


def _lens(node: Any) -> Any:
    if isinstance(node, (torch.Tensor, np.ndarray)) and node.ndim:
        yield len(node)
    elif isinstance(node, (dict, collections.UserDict)):
        for value in node.values():
            yield from _lens(value)
    elif dataclasses.is_dataclass(node):
        yield len(node.x)
    elif isinstance(node, (list, tuple, Registered)):
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


def test_equal_lengths_by_chance_do_not_change_what_a_sample_is():
    """A batch of texts as tensors: whether their lengths differ is an accident of the data."""
    assert _split.rows([torch.zeros(10, 8)] * 4) == 4
    assert _split.rows([torch.zeros(n, 8) for n in (10, 9, 10, 10)]) == 4
    for part in cut([torch.zeros(10, 8)] * 4, 2):
        assert [len(one) for one in part] == [10, 10]


class Samples(list):
    """What a user's collate returns to say that its items are samples."""


def ids(count: int = 32) -> torch.Tensor:
    return torch.arange(count * 7).reshape(count, 7)


COLLATED = {
    "one tensor": [ids()],
    "tokens and labels of one type": [ids(), ids()],
    "three of one type": [ids(), ids(), ids()],
    "two of one type and several widths": [torch.zeros(32, 16), torch.zeros(32, 3)],
    "arrays": [np.zeros((32, 2)), np.zeros((32, 2))],
}


@pytest.mark.parametrize("name", COLLATED)
def test_what_the_usual_collate_makes_is_columns(name):
    batch = COLLATED[name]
    assert _split.rows(batch) == 32
    parts = cut(batch, 12)
    assert [[len(one) for one in part] for part in parts] == [
        [size] * len(batch) for size in (12, 12, 8)
    ]
    assert all(type(part) is list for part in parts)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_loaders_batch_has_the_rows_of_its_tensors_whatever_their_number(columns, rows):
    """A last batch may have as many rows as there are columns."""
    dataset = torch.utils.data.TensorDataset(*[ids(rows)] * columns)
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=rows)
    assert type(batch) is list
    assert _split.rows(batch) == rows
    assert [[len(one) for one in part] for part in cut(batch, 1)] == [[1] * columns] * rows


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ([x(6, 8), x(5, 8)], 2),
        ([x(6), x(5), x(6)], 3),
        ([torch.tensor(1.0)], 1),
        ([torch.tensor(1.0), torch.tensor(2.0)], 2),
        ([x(10, 8)] * 4, 4),
        (Samples([x(10, 8)]), 1),
        (Samples([x(10, 8)] * 2), 2),
        (["a", "b"], 2),
    ],
    ids=lambda one: "" if isinstance(one, int) else f"{type(one).__name__} of {len(one)}",
)
def test_a_short_list_of_what_has_no_rows_in_common_is_samples(batch, count):
    assert _split.rows(batch) == count
    assert [len(part) for part in cut(batch, 1)] == [1] * count


def test_columns_without_rows_are_an_empty_batch():
    with pytest.raises(ValueError, match="empty"):
        _split.rows([x(0), x(0)])


# --- random trees: what a batch is made of, to be built of any rows ---

_LEAVES = st.sampled_from(
    ["tensor", "wide", "array", "texts", "dicts", "one length", "lengths", "tuple of lengths"]
    + ["number", "none", "scalar"]
)


def _nodes(inner: Any) -> Any:
    few = st.lists(inner, min_size=1, max_size=3)
    return st.tuples(
        st.sampled_from(
            ["dict", "user dict", "tuple", "pair", "dataclass", "mixed list", "pytree"]
        ),
        few,
    )


TREES = st.recursive(_LEAVES, _nodes, max_leaves=8)


@dataclasses.dataclass
class Fields:
    first: Any
    rest: Any


class Two(NamedTuple):
    first: Any
    rest: Any


_BUILD_LEAF = {
    "tensor": torch.tensor,
    "wide": lambda ids: torch.tensor(ids)[:, None, None] * torch.ones(3, 2),
    "array": np.array,
    "texts": lambda ids: [f"t{i}" for i in ids],
    "dicts": lambda ids: [{"i": i, "x": torch.full((i % 3,), i)} for i in ids],
    "one length": lambda ids: [torch.full((7, 2), i) for i in ids],
    "lengths": lambda ids: [torch.full((i % 5 + 1,), i) for i in ids],
    "tuple of lengths": lambda ids: tuple(torch.full((i % 5 + 50,), i) for i in ids),
    "number": lambda ids: 0.5,
    "none": lambda ids: None,
    "scalar": lambda ids: torch.tensor(3.0),
}


def build(tree: Any, ids: list[int]) -> Any:
    """The part of a batch that has these rows."""
    if isinstance(tree, str):
        return _BUILD_LEAF[tree](ids)
    kind, parts = tree[0], [build(one, ids) for one in tree[1]]
    if kind in ("dict", "user dict"):
        made = {f"k{i}": part for i, part in enumerate(parts)}
        return made if kind == "dict" else collections.UserDict(made)
    if kind == "mixed list":
        return [torch.tensor(ids), 1.5, *parts]
    if kind == "tuple":
        return (torch.tensor(ids), None, *parts)
    two = {"pair": Two, "dataclass": Fields, "pytree": Registered}[kind]
    return two(parts[0], tuple(parts[1:]) or None)


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (dict, collections.UserDict)):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, Registered)):
        both = list(one), list(other)
        return len(both[0]) == len(both[1]) and all(map(equal, *both))
    if dataclasses.is_dataclass(one):
        return equal(one.first, other.first) and equal(one.rest, other.rest)
    return one == other


@given(TREES, st.integers(6, 30), st.integers(1, 35))
@settings(max_examples=300, deadline=None)
def test_any_tree_is_cut_into_parts_in_which_each_row_is_once(tree, count, size):
    """A part is what would have been built of its rows alone, in the same order."""
    ids = list(range(count))
    batch = {"first": torch.tensor(ids), "tree": build(tree, ids)}
    assert _split.rows(batch) == count
    for at in range(0, count, size):
        mine = ids[at : at + size]
        part = _split.take(batch, at, min(at + size, count), count)
        assert equal(part, {"first": torch.tensor(mine), "tree": build(tree, mine)})


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

"""Batches cut into micro-batches: every kind of part, and what cannot be cut."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import types
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from memtools._grad import split


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    ids: list[str]
    rate: float = 0.5
    made: bool = dataclasses.field(default=True, init=False)


class ByKeyword(collections.namedtuple("ByKeyword", "x name")):
    """A named tuple whose fields have to be named."""

    __slots__ = ()

    def __new__(cls, *, x: Any, name: Any) -> Any:
        return super().__new__(cls, x, name)


class ReadOnly(collections.abc.Mapping):
    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Shared(collections.abc.MutableMapping):
    """A mapping whose shallow copy has the same fields."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._fields[key] = value

    def __delitem__(self, key: str) -> None:
        del self._fields[key]

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class Uncut(list):
    """A list that ignores which rows are wanted."""

    def __getitem__(self, at: Any) -> Any:
        return list(self) if isinstance(at, slice) else super().__getitem__(at)


class Samples(list):
    """What a user's collate returns to say that its items are samples."""


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


def rows(batch: Any) -> int:
    return split.read(batch).rows


def cut(batch: Any, size: int) -> list[Any]:
    found = split.read(batch)
    count = found.rows
    return [found.take(batch, at, min(at + size, count)) for at in range(0, count, size)]


#: each of six rows; test_any_tree_is_cut_into_parts_in_which_each_row_is_once has the usual ones
CASES = {
    "collated list": [x(6, 3), x(6)],
    "collated pair with a dict": [{"a": x(6, 2), "b": x(6)}, x(6)],
    "collated nested list": [[x(6, 2), x(6)], x(6)],
    "arrays of one type": [np.zeros((6, 2)), np.zeros((6, 2))],
    "default dict": collections.defaultdict(list, a=x(6)),
    "dataclass": Sample(x(6), list("abcdef")),
    "named tuple by keyword": ByKeyword(x=x(6), name="n"),
    "what torch.max returns": torch.max(x(6, 2), 1),
    "settings that cannot be copied": {
        "x": x(6),
        "set": types.MappingProxyType({"rate": 0.5}),
        "size": torch.Size((6, 2)),
    },
    "texts in a tuple": (x(6), tuple("abcdef"), torch.Size((224, 224))),
    "0-d examples": [torch.tensor(i) for i in range(6)],
    "dtype and device": {"a": x(6), "d": torch.float32, "e": torch.device("cpu")},
    "texts in tuples": (tuple("abcdef"), tuple("ghijkl")),
    "a model's output": transformers.tokenization_utils_base.BatchEncoding(
        {"ids": x(6, 3), "mask": x(6, 3)}
    ),
    "objects of the user's, one a row": [types.SimpleNamespace(i=i) for i in range(6)],
}


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_batchs_form_and_their_share_of_rows(name):
    batch = CASES[name]
    assert rows(batch) == 6
    assert split.read(batch).take(batch, 0, 6) is batch
    first, second = cut(batch, 4)
    assert (rows(first), rows(second)) == (4, 2)
    assert type(first) is type(second) is type(batch)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        (x(6, 3), 24),
        ({"ids": x(6, 10), "mask": np.zeros((6, 10), bool), "scale": torch.ones(9).sum()}, 90),
        ((x(6), list("abcdef")), 8),
        (Samples(torch.zeros(n) for n in range(6)), 10),
    ],
)
def test_the_bytes_of_a_row_are_those_of_what_is_cut(batch, wanted):
    assert split.PartsByRows(batch).row_bytes == wanted


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
    assert cut(CASES["named tuple by keyword"], 4)[1].name == "n"
    assert cut(CASES["texts in a tuple"], 4)[1][1] == ("e", "f")


def ids(count: int = 32) -> torch.Tensor:
    return torch.arange(count * 7).reshape(count, 7)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_loaders_batch_has_the_rows_of_its_tensors_whatever_their_number(columns, count):
    """A last batch may have as many rows as there are columns."""
    dataset = torch.utils.data.TensorDataset(*[ids(count)] * columns)
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=count)
    assert type(batch) is list
    assert rows(batch) == count
    assert [[len(one) for one in part] for part in cut(batch, 1)] == [[1] * columns] * count


def refused(n: int) -> dict[str, Any]:
    """Batches of n rows, or of n samples, that nothing but their sizes could tell apart."""
    images = tuple(x(3, i + 1, 5) for i in range(n))
    return {
        "tensors of equal lengths": [x(n, 3)] * 4,
        "samples of unequal lengths": [x(i + 1, 8) for i in range(n + 4)],
        "two views": [[x(n, 8), x(n, 8)], x(n)],
        "two views in a tuple": ((x(n, 8), x(n, 8)), x(n)),
        "two views alone": {"views": [x(n, 8), x(n, 8)]},
        "images of three channels": (images, tuple({"boxes": x(i, 4)} for i in range(n))),
        "samples beside their labels": ([x(10, 8)] * n, x(n)),
        "pairs of pairs": [[x(n, 2), x(n, 2)], [x(n, 2), x(n, 2)]],
        "columns that are not joined": [[[x(7), x(8)], (1, 2)], x(n)],
        "dicts": [{"ids": x(8, 2)}] * n,
        "dicts with a number": [{"ids": x(8, 2), "label": 1}] * n,
        "numbers in a tuple": (x(n, 2), (224, 224)),
        "labels in a tuple": (x(n, 2), tuple(range(n))),
        "0-d tensors in a tuple": (x(n, 2), tuple(torch.tensor(i) for i in range(n))),
        "dicts in a tuple": (x(n, 2), tuple({"id": i} for i in range(n))),
    }


REFUSED = list(refused(1))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_what_can_be_samples_or_columns_is_refused_whatever_the_sizes(name, n):
    with pytest.raises(ValueError, match="can be .* rows or .*, and nothing says which") as caught:
        rows(refused(n)[name])
    told = str(caught.value)
    assert re.search(r"as (tuple\(batch\)|a dict or named tuple|a list|a class)", told)
    assert "split=, a function of (batch, size)" in told


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((x(32, 3), x(32, 3), x(32, 3), x(32, 3)), 32),
        (tuple([x(4, 3)] * 4), 4),
        (Samples([x(32, 3)] * 4), 4),
        ([{"a": x(2, 8), "b": x(2, 8)}, x(2)], 2),
        ((x(2, 8), x(2, 8), x(2)), 2),
        ({"views": {"a": x(2, 8), "b": x(2, 8)}, "y": x(2)}, 2),
        ([Samples([x(2, 8), x(2, 8)]), x(2)], 2),
        ((Samples(x(3, i + 1) for i in range(3)), Samples([{"boxes": x(3)}] * 3)), 3),
        ((x(4, 2), [1, 2, 3, 4]), 4),
    ],
)
def test_the_remedies_are_read(batch, count):
    assert rows(batch) == count
    assert len(cut(batch, 1)) == count


def _asked(batch: Any, patch: pytest.MonkeyPatch) -> int:
    """How many nodes the reading of a batch looks at."""
    seen, is_array = [0], split._is_array

    def counting(node: Any) -> bool:
        seen[0] += 1
        return is_array(node)

    with patch.context() as patched:
        patched.setattr(split, "_is_array", counting)
        split.read(batch)
    return seen[0]


@pytest.mark.parametrize(
    "batch",
    [
        lambda ids: {"ids": ids, "y": x(8)},
        lambda ids: {"y": x(8), "ids": ids, "mask": ids},
        lambda ids: (ids, x(8)),
        lambda ids: {"ids": ids},
        lambda ids: {"ids": [tuple(one) for one in ids], "y": x(8)},
        lambda ids: [{"ids": one, "y": 1} for one in ids],
        lambda ids: {"ids": [*ids[:4], *[[0.5] * len(ids[0])] * 4], "y": x(8)},
    ],
)
def test_padded_lists_of_tokens_are_not_walked(batch, monkeypatch):
    """The splitter looks at as many nodes as where the lists are short."""
    short, long = (_asked(batch([[1] * count] * 8), monkeypatch) for count in (10, 1000))
    assert long == short


# --- the table of the docs ---

TABLE = pathlib.Path(__file__).parents[2] / "docs/guides/oom_backoff.md"


def _table() -> list[tuple[str, str, str]]:
    """Its lines: the batch as an expression, the rows, how it is read."""
    lines = TABLE.read_text().split("| batch | rows |")[1].splitlines()[2:]
    ends = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return [tuple(part.strip() for part in line.split("|")[1:4]) for line in lines[:ends]]


@pytest.mark.parametrize("line", _table(), ids=lambda line: line[0])
def test_the_table_of_shapes_in_the_docs_is_true(line):
    code, count, _ = line
    batch = eval(code.strip("`"), {"x": x, "Samples": Samples})
    if count == "refused":
        with pytest.raises(ValueError, match="nothing says which"):
            rows(batch)
        return
    assert rows(batch) == int(count)
    assert len(cut(batch, 1)) == int(count)


# --- gradients: the same, cut or whole ---

_PARTS = st.recursive(
    st.sampled_from(["wide", "wide", "flat", "number"]),
    lambda inner: st.lists(inner, min_size=1, max_size=4),
    max_leaves=5,
)


def _sample(shape: Any, make: torch.Generator) -> Any:
    """A sample with tuples as a data set returns it."""
    if isinstance(shape, list):
        return tuple(_sample(one, make) for one in shape)
    if shape == "number":
        return 0.5
    return torch.rand(3 if shape == "wide" else (), generator=make)


def _total(model: torch.nn.Module, node: Any, place: int = 1) -> Any:
    """One number for each row, which depends on where in its sample a part is."""
    if isinstance(node, torch.Tensor):
        wide = node if node.ndim == 2 else node[:, None].expand(-1, 3)
        return place * model(wide.float()).squeeze(1)
    parts = [_total(model, one, 5 * place + at) for at, one in enumerate(node)]
    assert len({len(one) for one in parts}) == 1
    return sum(parts)


def _gradient(batch: Any, size: int | None) -> tuple[Any, Any, Any]:
    """The gradient, the weight and the mean loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    acc = memtools.GradAccumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=size
    )
    kept = []
    acc.optimizer.register_step_pre_hook(
        lambda *_: kept.append([p.grad.clone() for p in model.parameters()])
    )

    def loss_fn(micro):
        loss = _total(model, micro).square()
        return loss.sum(), len(loss)

    report = acc.step(batch, loss_fn)
    return torch.cat([one.flatten() for one in kept[-1]]), report.weight, report.loss


@pytest.mark.slow
@given(st.lists(_PARTS, min_size=1, max_size=4), st.integers(2, 6), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_what_a_loader_makes_has_one_gradient_cut_or_whole_or_is_refused(shape, count, size):
    """By torch's own collate; what is taken of a full batch is taken of any."""
    make = torch.Generator().manual_seed(count)
    collate = torch.utils.data.default_collate
    full, last = ([_sample(shape, make) for _ in range(n)] for n in (9, count))
    try:
        split.read(collate(full))
    except ValueError as error:  # at the first call, and so at any other
        with pytest.raises(ValueError, match="nothing says which"):
            split.read(collate(last))
        assert "nothing says which" in str(error)
        return
    part, weight, loss = _gradient(collate(last), size)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    whole = _total(model, collate(last)).square()
    (whole.sum() / count).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-4)
    assert (weight, loss) == (count, pytest.approx(whole.mean().item(), rel=1e-4))


_ITEMS = {
    "wide": lambda i, n: torch.full((3,), float(i)),
    "lengths": lambda i, n: torch.full((n + i % 2, 2), float(i)),
    "one length": lambda i, n: torch.full((n, 2), float(i)),
    "text": lambda i, n: f"{i}",
    "number": lambda i, n: float(i),
    "dict": lambda i, n: {"a": torch.full((n,), float(i)), "id": float(i)},
    "dict of tensors": lambda i, n: {"a": torch.full((n,), float(i)), "b": torch.ones(n, 2) * i},
}


def _owners(node: Any) -> set[float]:
    """Whose rows are in a part: each is filled with its number."""
    if isinstance(node, torch.Tensor):
        return set(node.flatten().tolist())
    if isinstance(node, (dict, list, tuple)):
        values = node.values() if isinstance(node, dict) else node
        return set().union(*map(_owners, values))
    return {float(node)}


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from([*_ITEMS]), st.sampled_from([list, tuple])),
        min_size=1,
        max_size=3,
    ),
    st.integers(2, 6),
    st.integers(1, 6),
    st.sampled_from(["tuple", "dict", "beside a tensor"]),
)
@settings(max_examples=500, deadline=None)
def test_columns_of_samples_are_cut_by_sample_or_refused(columns, count, length, form):
    """Of whatever lengths, and whatever their number has in common with the number of columns."""
    made = [kind(_ITEMS[item](i, length) for i in range(count)) for item, kind in columns]
    if form == "tuple":
        batch: Any = tuple(made)
    elif form == "dict":
        batch = {str(i): column for i, column in enumerate(made)}
    else:
        batch = {"columns": tuple(made), "y": torch.arange(float(count))}
    try:
        parts = cut(batch, 1)
    except ValueError as error:
        assert re.search("nothing says which|has no tensor|disagree", str(error))
        return
    assert [_owners(part) for part in parts] == [{float(i)} for i in range(count)]


# --- random trees: what a batch is made of, to be built of any rows ---

_LEAVES = st.sampled_from(
    ["tensor", "wide", "array", "texts", "numbers", "dicts", "samples", "tuple of texts"]
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
    "numbers": lambda ids: [[i, i + 1] for i in ids],
    "dicts": lambda ids: [{"i": i, "t": f"{i}"} for i in ids],
    "samples": lambda ids: Samples(torch.full((i % 5 + 1,), i) for i in ids),
    "tuple of texts": lambda ids: tuple(f"t{i}" for i in ids),
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
    return two(parts[0], dict(enumerate(parts[1:])) or None)


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other) and not isinstance(other, Samples):
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


@pytest.mark.slow
@given(TREES, st.integers(6, 30), st.integers(1, 35))
@settings(max_examples=300, deadline=None)
def test_any_tree_is_cut_into_parts_in_which_each_row_is_once(tree, count, size):
    """A part is what would have been built of its rows alone, in the same order."""
    ids = list(range(count))
    batch = {"first": torch.tensor(ids), "tree": build(tree, ids)}
    found = split.read(batch)
    assert found.rows == count
    for at in range(0, count, size):
        mine = ids[at : at + size]
        part = found.take(batch, at, min(at + size, count))
        assert equal(part, {"first": torch.tensor(mine), "tree": build(tree, mine)})


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
ENDLESS: dict[str, Any] = {"x": x(6)}
ENDLESS["again"] = ENDLESS


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"a": x(6), "b": x(4)}, ValueError, r"batch\['a'\] has 6, batch\['b'\] has 4"),
        ((x(6), [1.0, 2.0]), ValueError, r"batch\[0\] has 6, batch\[1\] has 2"),
        ([{"a": x(6)}, x(5)], ValueError, r"disagree"),
        (Pair(x(0), "n"), ValueError, "empty"),
        ([], ValueError, "empty"),
        ({"rate": 0.5}, ValueError, "has no tensor, array or list"),
        (torch.tensor(1.0), ValueError, "has no tensor, array or list"),
        (types.SimpleNamespace(x=x(6)), TypeError, "batch is a SimpleNamespace"),
        ([x(8, 3), x(7, 3)], ValueError, "samples of several lengths as a class derived from list"),
        ([x(8, 3), x(7)], ValueError, r"batch\[0\] has 8, batch\[1\] has 7"),
        ((x(6), types.SimpleNamespace()), TypeError, r"batch\[1\] is a SimpleNamespace"),
        (torch.eye(6).to_sparse(), TypeError, "sparse"),
        (torch.nested.nested_tensor([[1.0], [2.0, 3.0]], layout=torch.jagged), TypeError, "nested"),
        (NESTED, TypeError, "nested"),
        ({"x": x(2), "y": NESTED}, TypeError, r"batch\['y'\] is a nested tensor"),
        (types.MappingProxyType({"x": x(6)}), TypeError, "cannot be made of some of its rows"),
        ({"in": ReadOnly(x=x(6))}, TypeError, "cannot be made of some of its rows"),
        ({"a": Uncut("abcdef"), "b": x(6)}, TypeError, "Uncut gives 6 rows for 1"),
        (ENDLESS, ValueError, "contains itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named_with_the_remedy(batch, error, text):
    with pytest.raises(error, match=text) as caught:
        rows(batch)
    if "empty" not in text:
        assert "split=, a function of (batch, size)" in str(caught.value)


@pytest.mark.parametrize("sizes", [[6], []], ids=["of rows", "without a batch size"])
def test_a_tensordict_is_cut_along_its_rows(sizes):
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"z": x(6)}, [6])
    batch = tensordict.TensorDict({"x": x(6, 3), "inner": inner}, sizes)
    for form in (batch, {"in": batch, "y": x(6)}):
        parts = [part if form is batch else part["in"] for part in cut(form, 4)]
        assert [type(part) for part in parts] == [type(batch)] * 2
        assert [part["x"].tolist() for part in parts] == [
            x(6, 3)[:4].tolist(),
            x(6, 3)[4:].tolist(),
        ]
        assert [part["inner", "z"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5]]


def test_a_batch_that_cannot_be_cut_is_refused_although_it_fits():
    model = torch.nn.Linear(2, 1)
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    batch, before = types.MappingProxyType({"x": torch.ones(6, 2)}), model.weight.tolist()
    with pytest.raises(TypeError, match=r"cannot be cut.*pass split="):
        acc.step(batch, lambda micro: (model(micro["x"]).sum(), 6))
    assert model.weight.tolist() == before
    acc.step(batch, lambda micro: (model(micro["x"]).sum(), 6), lambda whole, size: [whole])


def test_a_mapping_whose_copy_shares_its_fields_is_refused_and_stays_whole():
    batch = Shared(rate=0.5, x=x(6))
    with pytest.raises(TypeError, match=r"copy\.copy\(\) of Shared shares its values"):
        rows(batch)
    assert batch["x"].tolist() == x(6).tolist()


def test_a_packed_sequence_is_no_named_tuple_of_rows():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(TypeError, match="PackedSequence, whose rows are unknown"):
        rows((x(6), packed))

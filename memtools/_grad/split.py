"""Cuts a batch into micro-batches of consecutive rows.

    {"tokens": [8, 128], "ids": [...8 strings], "scale": 0.5}        rows 2 to 4
      -> {"tokens": [2, 128], "ids": [2 strings], "scale": 0.5}      tensors as views: no copy

    tensor, numpy array        cut along its first dimension; repeated if it has none
    dict, named tuple,         their fields are cut
    dataclass, pytree node
    the batch, if a tuple      its fields are cut
    other list or tuple that   its fields are cut if they have several kinds, or if it is the batch
      holds tensors            and a list of at most three tensors; else it is refused
    list without tensors,      each item is a row
      tuple of str
    subclass of list           each item is a row
    number, str, None, ...     repeated

A list of tensors of one kind can be samples or columns, because the default collate of a DataLoader
makes a list of every tuple in a sample. Nothing in the list says which. What is refused is refused
for all sizes: in the first call, and not in the last batch of an epoch.

The user has to cut other batches, with `split=`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from memtools._base import torch as bridge
from memtools._base.oom import shortage

#: A function of (batch, size) that returns micro-batches of at most that size, in order.
Split = Callable[[Any, int], list[Any]]

_CONSTANT: Final = (str, bytes, type(None), numbers.Number, enum.Enum, type, range, slice)
_PYTHONS: Final = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
#: A batch that is a list of up to so many tensors of one kind has columns.
_MOST_COLUMNS: Final = 3
_HOOK: Final = "pass split=, a function of (batch, size) that returns a list of micro-batches"


class Cut(NamedTuple):
    """How a batch is cut.

    Attributes:
        rows: the number of rows.
        form: True for a part that is cut, False for one that is repeated, or a list with the forms
            of its fields.
    """

    rows: int
    form: Any

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Return rows `start` to `stop`, of tensors as views."""
        if start == 0 and stop == self.rows:
            return batch
        return _take(batch, self.form, start, stop)


def read(batch: Any) -> Cut:
    """Return how a batch is cut. Takes a few microseconds for each part.

    Raises:
        ValueError: the batch is empty or has no rows, its parts disagree on the number of rows, or
            a list or tuple can be samples or columns.
        TypeError: a part cannot be cut.
    """
    sizes: list[tuple[str, int]] = []
    try:
        form = _form(batch, "batch", sizes)
    except RecursionError:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) contains itself, or is nested too deep to "
            f"be cut; {_HOOK}"
        ) from None
    if not sizes:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) has no tensor, array or list with rows, "
            f"so it cannot be cut into micro-batches; {_HOOK}"
        )
    rows = sizes[0][1]
    if any(size != rows for _, size in sizes):
        shown = ", ".join(f"{name} has {size}" for name, size in sizes[:8])
        raise ValueError(
            f"step(): parts of the batch disagree on the number of rows: {shown}; make a value "
            "that belongs to no row a number or a 0-d tensor, pass samples of several lengths as a "
            f"class derived from list, or {_HOOK}"
        )
    if rows == 0:
        raise ValueError("step(): the batch is empty (0 rows); skip such batches")
    cut = Cut(rows, form)
    if form is not True or not _is_array(batch):  # An array can always be cut.
        _try_cut(batch, cut)
    return cut


def _form(node: Any, name: str, sizes: list[tuple[str, int]]) -> Any:
    """Return the form of a part, and append (name, rows) of everything that is cut to `sizes`.

    Raises TypeError for a part that cannot be cut, ValueError for one that can be cut in two ways.
    """
    _check_strided(node, name)
    if _is_array(node):
        if not node.ndim:
            return False
    elif not _is_rows(node, name):
        fields = _fields(node)
        if fields is not None:
            form = [_form(value, name + key, sizes) for key, value in fields]
            return form if any(form) else False
        if isinstance(node, _CONSTANT) or _is_torchs(node):
            return False
        raise TypeError(
            f"step(): {name} is a {type(node).__name__}, whose rows are unknown; {_HOOK}"
        )
    sizes.append((name, len(node)))
    return True


def _is_rows(node: Any, name: str) -> bool:
    """Whether it is a list or tuple whose items are rows, and not fields."""
    if isinstance(node, list) and (type(node) is not list or not node):
        return True
    is_batch = name == "batch"
    if type(node) is not list and (type(node) is not tuple or is_batch or not node):
        return False
    if not _has_rows(node):
        if type(node) is tuple and not _are_texts(node):
            raise _ambiguous(node, name, "values that belong to no row", _AS_VALUES)
        return True
    few = type(node) is list and is_batch and len(node) <= _MOST_COLUMNS
    if len(set(map(_kind, node))) > 1 or (few and _is_array(node[0])):
        return False
    remedy = "tuple(batch)" if is_batch else "a dict or named tuple"
    raise _ambiguous(node, name, f"{len(node)} columns", _AS_COLUMNS.format(remedy))


_AS_COLUMNS: Final = "pass columns as {}, samples as a class derived from list"
_AS_VALUES: Final = "pass rows as a list, other values as a named tuple"


def _ambiguous(node: Any, name: str, other: str, remedy: str) -> ValueError:
    return ValueError(
        f"step(): {name}, a {type(node).__name__} of {len(node)}, can be {len(node)} rows or "
        f"{other}, and nothing says which; {remedy}, or {_HOOK}"
    )


def _try_cut(batch: Any, cut: Cut) -> None:
    """Cut one row, so that a batch that cannot be cut is refused before memory runs out.

    Raises TypeError if a part cannot be made of some of its rows.
    """
    try:
        _take(batch, cut.form, 0, 1)
    except Exception as error:
        if shortage(error) is not None:
            raise
        raise TypeError(
            f"step(): the batch ({type(batch).__name__}) cannot be cut: a part of it cannot be "
            f"made of some of its rows ({type(error).__name__}: {error}); {_HOOK}"
        ) from error


# --- the kinds of nodes ---


def _is_array(node: Any) -> bool:
    """Whether it is a tensor or an array with a shape, which a nested tensor does not have."""
    if isinstance(node, bridge.connect().torch.Tensor):
        return not node.is_nested
    kind = type(node)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _are_texts(node: Any) -> bool:
    return bool(node) and all(isinstance(one, (str, bytes)) for one in node)


def _has_rows(node: Any) -> bool:
    """Whether it is or holds an array with a dimension."""
    if _is_array(node):
        return bool(node.ndim)
    return not _is_of_constants(node) and any(_has_rows(value) for value in _values(node))


def _is_of_constants(node: Any) -> bool:
    """Whether it is a list or tuple of numbers, str and other constants only. A long list, such as
    one of tokens, is not walked in Python."""
    if type(node) not in (list, tuple):
        return False
    return all(issubclass(kind, _CONSTANT) for kind in set(map(type, node)))


def _kind(node: Any) -> Any:
    """Return what the samples in one list have in common."""
    return (type(node).__module__, node.dtype, node.ndim) if _is_array(node) else type(node)


def _fields(node: Any) -> list[tuple[str, Any]] | None:
    """Return (key as Python writes it, value) of each field, or None if it has none. The fields of
    a packed sequence, which is a named tuple, have no rows in common."""
    if type(node).__name__ == "PackedSequence" or _is_torchs(node):
        return None
    kind = _pytree_kind(node)
    if kind is not None:
        return [(f".<{index}>", value) for index, value in enumerate(kind.flatten_fn(node)[0])]
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, list):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if isinstance(node, tuple):
        names: Any = getattr(node, "_fields", range(len(node)))
        return [
            (f".{name}" if isinstance(name, str) else f"[{name}]", value)
            for name, value in zip(names, node, strict=True)
        ]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{one.name}", getattr(node, one.name)) for one in dataclasses.fields(node)]
    return None


def _values(node: Any) -> Sequence[Any]:
    return node if isinstance(node, list) else [value for _, value in _fields(node) or ()]


def _pytree_kind(node: Any) -> Any:
    """Return how a type is registered with torch's pytree. None for other types, and for those of
    Python, whose subclasses are cut in the same way."""
    tree = sys.modules.get("torch.utils._pytree")
    if tree is None or type(node) in _PYTHONS or isinstance(node, _CONSTANT):
        return None
    return tree.SUPPORTED_NODES.get(type(node))


def _check_strided(node: Any, name: str) -> None:
    torch = bridge.connect().torch
    if not isinstance(node, torch.Tensor):
        return
    if node.layout is not torch.strided or node.is_nested:
        kind = "nested" if node.is_nested else str(node.layout)
        raise TypeError(f"step(): {name} is a {kind} tensor, whose rows cannot be cut; {_HOOK}")


def _is_torchs(node: Any) -> bool:
    """Whether it is a dtype, a device or another constant of torch."""
    torch = bridge.connect().torch
    return isinstance(node, (torch.dtype, torch.device, torch.layout, torch.Size))


# --- parts ---


def _take(node: Any, form: Any, start: int, stop: int) -> Any:
    if form is True:
        part = node[start:stop]
        if len(part) != stop - start:
            raise TypeError(f"{type(node).__name__} gives {len(part)} rows for {stop - start}")
        return part
    if form is False:
        return node
    values = zip(_values(node), form, strict=True)
    return _made(node, [_take(value, inner, start, stop) for value, inner in values])


def _bytes_of(node: Any, form: Any) -> int:
    """The bytes of the tensors and arrays that are cut, or that are rows of a list."""
    if form is False:
        return 0
    if _is_array(node):
        return int(node.nbytes)
    if form is True:
        return sum(int(row.nbytes) for row in node if _is_array(row))
    return sum(_bytes_of(value, inner) for value, inner in zip(_values(node), form, strict=True))


def _made(node: Any, parts: list[Any]) -> Any:
    """Return a copy of `node` with other fields."""
    kind = _pytree_kind(node)
    if kind is not None:
        return kind.unflatten_fn(parts, kind.flatten_fn(node)[1])
    if isinstance(node, list):
        return parts
    if isinstance(node, tuple):
        # The constructor of a named tuple may take its fields in another way than _make().
        return type(node)._make(parts) if hasattr(node, "_make") else type(node)(parts)
    if type(node) is dict:
        return dict(zip(node, parts, strict=True))
    # A copy keeps the factory of a default dict, and needs no call of a dataclass's __init__.
    new: Any = copy.copy(node)
    if isinstance(node, Mapping):
        for (key, value), part in zip(node.items(), parts, strict=True):
            new[key] = part
            if part is not value and node[key] is part:
                new[key] = value
                raise TypeError(f"copy.copy() of {type(node).__name__} shares its values")
        return new
    for one, part in zip(dataclasses.fields(node), parts, strict=True):
        object.__setattr__(new, one.name, part)  # also in a frozen one
    return new


# --- the rest of a batch ---
#
#   by rows       |-- done --|-- next: at most `size` rows --|------ rest ------|
#   by function   done parts, [next part] [part] [part]: cut again if they exceed `size`


class PartsByRows:
    """The rest of a batch that is cut along its rows.

    Attributes:
        most: the rows of the whole batch.
    """

    __slots__ = ("_at", "_batch", "_cut", "most")

    def __init__(self, batch: Any) -> None:
        self._batch, self._at = batch, 0
        self._cut = read(batch)
        self.most = self._cut.rows

    def next(self, size: float) -> tuple[Any, int, bool] | None:
        """Return the next micro-batch of at most `size` rows, its number of rows, and whether it is
        the last; None at the end."""
        if self._at == self.most:
            return None
        stop = int(min(self._at + size, self.most))
        micro = self._cut.take(self._batch, self._at, stop)
        return micro, stop - self._at, stop == self.most

    @property
    def row_bytes(self) -> float:
        """The bytes of a row, the mean of all."""
        return _bytes_of(self._batch, self._cut.form) / self.most

    @property
    def left(self) -> float:
        """The number of rows that are left."""
        return self.most - self._at

    def advance(self, count: int) -> None:
        """Skip the next `count` rows, which are done."""
        self._at += count

    def restart(self) -> None:
        """Start again with the whole batch."""
        self._at = 0

    def smaller(self, count: int) -> int | None:
        """Return the size to try after `count` rows failed; None if no size is smaller."""
        return (count + 1) // 2 if count > 1 else None


class PartsByFunction:
    """The rest of a batch that a function of the user cuts. Its sizes have the unit of that
    function, such as nodes.

    Attributes:
        most: the size of the whole batch: inf, as only the function knows it.
    """

    __slots__ = ("_batch", "_parts", "_split", "most")

    def __init__(self, batch: Any, split: Split) -> None:
        if not callable(split):
            raise TypeError(
                f"split must be a function of (batch, size), got {type(split).__name__}"
            )
        self._batch, self._split, self.most = batch, split, math.inf
        self.restart()

    def next(self, size: float) -> tuple[Any, int, bool] | None:
        """Return the next micro-batch, cut for `size`; the size that it was cut for, 0 for the
        whole batch; and whether it is the last. None at the end."""
        if not self._parts:
            return None
        head, cut = self._parts[0]
        if size < cut:
            parts = [(part, size) for part in self._cut(head, int(size))]
            self._parts[:1] = parts
            head, cut = parts[0]
        return head, 0 if cut == math.inf else int(cut), len(self._parts) == 1

    @property
    def row_bytes(self) -> float:
        """0: sizes may have another unit than rows."""
        return 0.0

    @property
    def left(self) -> float:
        """inf, or 0 at the end: only the function knows how much is left."""
        return math.inf if self._parts else 0.0

    def advance(self, count: int) -> None:
        """Skip the next micro-batch, which is done."""
        del self._parts[0]

    def restart(self) -> None:
        """Start again with the whole batch."""
        self._parts: list[tuple[Any, float]] = [(self._batch, math.inf)]

    def smaller(self, count: int) -> int | None:
        """Return the largest of size/2, size/4, ... that cuts the micro-batch that failed; None if
        none does."""
        head, cut = self._parts[0]
        size = len(self._cut(head, 1)) if cut == math.inf else int(cut)
        while size > 1:
            size = (size + 1) // 2
            if len(self._cut(head, size)) > 1:
                return size
        return None

    def _cut(self, part: Any, size: int) -> Sequence[Any]:
        parts = self._split(part, size)
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"split(batch, {size}) must return a list of micro-batches, got "
                f"{type(parts).__name__}"
            )
        if not parts:
            raise ValueError(
                f"split(batch, {size}) returned no micro-batch; it must return one or more"
            )
        return parts

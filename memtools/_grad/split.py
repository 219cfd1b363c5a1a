"""A batch cut into micro-batches: consecutive rows of whatever it is made of.

    {"tokens": [8, 128], "ids": [...8 strings], "scale": 0.5}        rows 2 to 4
      -> {"tokens": [2, 128], "ids": [2 strings], "scale": 0.5}      tensors as views: no copy

    tensor, numpy array        cut along its first dimension; without dimensions: repeated
    dict, named tuple,         their fields are cut
    dataclass, pytree node
    the batch a tuple          its fields are cut
    other list, other tuple    its fields are cut where these are of several kinds, or where it is
      that holds tensors       the batch, a list of at most three tensors; else it is refused
    list without tensors,      one item a row
      tuple of texts
    a user's class of list     one item a row
    number, text, None, ...    repeated

A list of tensors of one kind can be samples or columns, as a DataLoader's usual collate makes a
list of every tuple in a sample, and nothing in it tells which. What is refused is refused whatever
the sizes are: in the first call, and not in the last batch of an epoch.

What is none of these has to be cut by the user, who knows what its rows are.
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

#: Takes a batch and a size, returns micro-batches of at most that size, in order.
Split = Callable[[Any, int], list[Any]]

_CONSTANT: Final = (str, bytes, type(None), numbers.Number, enum.Enum, type, range, slice)
_PYTHONS: Final = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
_MOST_COLUMNS: Final = 3  # tensors of one kind in a list that is the batch
_HOOK: Final = "pass split=, a function of (batch, size) that returns a list of micro-batches"


class Cut(NamedTuple):
    """How a batch is cut.

    Attributes:
        rows: how many it has.
        form: of each part whether it is cut (True), repeated (False), or the forms of its fields.
    """

    rows: int
    form: Any

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Rows `start` to `stop`: views where it is made of tensors."""
        if start == 0 and stop == self.rows:
            return batch
        return _take(batch, self.form, start, stop)


def read(batch: Any) -> Cut:
    """How a batch is cut. Takes some us a leaf.

    Raises:
        ValueError: an empty batch, one without rows, parts that disagree (the sizes are named), or
            a list or tuple that can be samples or columns.
        TypeError: a part that cannot be cut.
    """
    sizes: list[tuple[str, int]] = []
    try:
        form = _form(batch, "batch", sizes)
    except RecursionError:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) contains itself, or its parts are nested "
            f"too deep to be cut; {_HOOK}"
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
            f"step(): parts of the batch disagree on the number of rows: {shown}; make what "
            "belongs to no row a number or a 0-d tensor, pass samples of several lengths as a "
            f"class derived from list, or {_HOOK}"
        )
    if rows == 0:
        raise ValueError("step(): the batch is empty (0 rows); leave such batches out")
    cut = Cut(rows, form)
    if form is not True or not _is_array(batch):  # of an array nothing can go wrong
        _try_cut(batch, cut)
    return cut


def _form(node: Any, name: str, sizes: list[tuple[str, int]]) -> Any:
    """See Cut; adds (name, rows) of all that is cut. Raises TypeError for what cannot be cut,
    ValueError for what can be cut in two ways."""
    _check_strided(node, name)
    if _is_array(node):
        if not node.ndim:
            return False
    elif not _is_rows(node, name):
        fields = _fields(node)
        if fields is not None:
            form = [_form(value, name + key, sizes) for key, value in fields]
            return form if any(form) else False  # of what belongs to no row: repeated
        if isinstance(node, _CONSTANT) or _is_torchs(node):
            return False
        raise TypeError(
            f"step(): {name} is a {type(node).__name__}, whose rows are unknown; {_HOOK}"
        )
    sizes.append((name, len(node)))
    return True


def _is_rows(node: Any, name: str) -> bool:
    """Whether it is a list or tuple of which each item is one row, and not a field."""
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
        f"{other}, and nothing tells which; {remedy}, or {_HOOK}"
    )


def _try_cut(batch: Any, cut: Cut) -> None:
    """Cut one row, so that a batch that cannot be cut is refused before memory runs out.

    Raises TypeError for a part that cannot be made of some of its rows, or becomes something else.
    """
    try:
        part = _take(batch, cut.form, 0, 1)
    except Exception as error:
        if shortage(error) is not None:
            raise
        raise TypeError(
            f"step(): the batch ({type(batch).__name__}) cannot be cut: a part of it cannot be "
            f"made of some of its rows ({type(error).__name__}: {error}); {_HOOK}"
        ) from error
    problem = _difference(batch, part, cut.form, "batch")
    if problem:
        raise TypeError(f"step(): {problem} where it is cut; {_HOOK}")


def _difference(node: Any, part: Any, form: Any, name: str) -> str:
    """Say in what a part has not the types and fields of what it was cut of; "" if it has. A list
    class of the user's becomes a list, as its rows alone are asked for."""
    if form is False:
        return ""
    kinds = (list,) if form is True and isinstance(node, list) else ()
    if type(part) not in (type(node), *kinds):
        return f"{name}, a {type(node).__name__}, becomes a {type(part).__name__}"
    if form is True:
        return "" if len(part) == 1 else f"{name} has {len(part)} rows instead of 1"
    fields, parts = _fields(node) or [], _values(part)
    if len(fields) != len(parts):
        return f"{name} has {len(parts)} fields instead of {len(fields)}"
    found = (
        _difference(value, one, inner, name + key)
        for (key, value), inner, one in zip(fields, form, parts, strict=True)
    )
    return next(filter(None, found), "")


# --- what a node is ---


def _is_array(node: Any) -> bool:
    """A nested tensor is none: it has no shape."""
    if isinstance(node, bridge.connect().torch.Tensor):
        return not node.is_nested
    kind = type(node)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _are_texts(node: Any) -> bool:
    return bool(node) and all(isinstance(one, (str, bytes)) for one in node)


def _has_rows(node: Any) -> bool:
    """Whether there is an array with a dimension in it."""
    if _is_array(node):
        return bool(node.ndim)
    return not _is_of_constants(node) and any(_has_rows(value) for value in _values(node))


def _is_of_constants(node: Any) -> bool:
    """Whether it is a list or tuple of numbers, texts and the like alone. Long ones, as tokens
    are, are not walked in Python."""
    if type(node) not in (list, tuple):
        return False
    return all(issubclass(kind, _CONSTANT) for kind in set(map(type, node)))


def _kind(node: Any) -> Any:
    """What is alike of the samples in one list."""
    return (type(node).__module__, node.dtype, node.ndim) if _is_array(node) else type(node)


def _fields(node: Any) -> list[tuple[str, Any]] | None:
    """(how it is written, value) of what holds fields; None for what does not. A packed sequence
    is a named tuple, and yet its fields have no rows in common."""
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
    """How the author of a type registered it with torch's pytree; None for other types, and for
    those of Python, whose classes of the user's are cut alike."""
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
    """dtypes, devices and the like."""
    torch = bridge.connect().torch
    return isinstance(node, (torch.dtype, torch.device, torch.layout, torch.Size))


# --- parts ---


def _take(node: Any, form: Any, start: int, stop: int) -> Any:
    if form is True:
        return node[start:stop]
    if form is False:
        return node
    values = zip(_values(node), form, strict=True)
    return _made(node, [_take(value, inner, start, stop) for value, inner in values])


def _made(node: Any, parts: list[Any]) -> Any:
    """Another one of the type of `node`, with other fields."""
    kind = _pytree_kind(node)
    if kind is not None:
        return kind.unflatten_fn(parts, kind.flatten_fn(node)[1])
    if isinstance(node, list):
        return parts
    if isinstance(node, Mapping):
        return _mapping(node, parts)
    if isinstance(node, tuple):
        # _make, as a constructor of the user's may want its fields in another way
        return type(node)._make(parts) if hasattr(node, "_make") else type(node)(parts)
    return _dataclass(node, parts)


def _mapping(node: Any, parts: list[Any]) -> Any:
    """A copy of the same type: a default dict keeps its factory, a BatchEncoding its encodings."""
    new = copy.copy(node) if not isinstance(node, dict) or type(node) is not dict else {}
    for key, part in zip(node, parts, strict=True):
        new[key] = part
    return new


def _dataclass(node: Any, parts: list[Any]) -> Any:
    """A copy without calling __init__, which may need more than the fields; works for frozen
    dataclasses too."""
    new = copy.copy(node)
    for one, part in zip(dataclasses.fields(node), parts, strict=True):
        object.__setattr__(new, one.name, part)
    return new


# --- what is left of a batch ---
#
#   by rows       |-- done --|-- next: at most `size` rows --|------ rest ------|
#   by function   done parts, [next part] [part] [part]: cut again where they exceed `size`


class PartsByRows:
    """What is left of a batch that is cut along its rows.

    Attributes:
        most: how many rows the whole batch has.
    """

    __slots__ = ("_at", "_batch", "_cut", "most")

    def __init__(self, batch: Any) -> None:
        self._batch, self._at = batch, 0
        self._cut = read(batch)
        self.most = self._cut.rows

    def next(self, size: float) -> tuple[Any, int, bool] | None:
        """Return the next micro-batch of at most `size` rows, how many it has, and whether it is
        the last; None where nothing is left."""
        if self._at == self.most:
            return None
        stop = int(min(self._at + size, self.most))
        micro = self._cut.take(self._batch, self._at, stop)
        return micro, stop - self._at, stop == self.most

    @property
    def left(self) -> float:
        """How many rows are left."""
        return self.most - self._at

    def advance(self, count: int) -> None:
        """Leave the next `count` rows behind: they are done."""
        self._at += count

    def restart(self) -> None:
        """Begin with the whole batch again."""
        self._at = 0

    def smaller(self, count: int) -> int | None:
        """Return the size to try after `count` rows failed; None where nothing is smaller."""
        return (count + 1) // 2 if count > 1 else None


class PartsByFunction:
    """What is left of a batch that the user's function cuts. A size is in units of that function's
    own, such as nodes.

    Attributes:
        most: how many the whole batch has: inf, as only the function knows.
    """

    __slots__ = ("_batch", "_parts", "_split", "most")

    def __init__(self, batch: Any, split: Split) -> None:
        if not callable(split):
            raise TypeError(f"split is a function of (batch, size), got {type(split).__name__}")
        self._batch, self._split, self.most = batch, split, math.inf
        self.restart()

    def next(self, size: float) -> tuple[Any, int, bool] | None:
        """Return the next micro-batch, cut for `size`; the size that it was cut for, 0 for the
        whole batch; and whether it is the last. None where nothing is left."""
        if not self._parts:
            return None
        head, cut = self._parts[0]
        if size < cut:
            parts = [(part, size) for part in self._cut(head, int(size))]
            self._parts[:1] = parts
            head, cut = parts[0]
        return head, 0 if cut == math.inf else int(cut), len(self._parts) == 1

    @property
    def left(self) -> float:
        """How many are left: inf, or 0 at the end, as only the function knows."""
        return math.inf if self._parts else 0.0

    def advance(self, count: int) -> None:
        """Leave the next micro-batch behind: it is done."""
        del self._parts[0]

    def restart(self) -> None:
        """Begin with the whole batch again."""
        self._parts: list[tuple[Any, float]] = [(self._batch, math.inf)]

    def smaller(self, count: int) -> int | None:
        """Return the largest of size/2, size/4, ... that cuts what failed; None where it cannot be
        cut."""
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
                f"split(batch, {size}) returns a list of micro-batches, got {type(parts).__name__}"
            )
        if not parts:
            raise ValueError(f"split(batch, {size}) returned no micro-batch; at least one is due")
        return parts

"""A batch cut into micro-batches: consecutive rows of whatever it is made of.

    {"tokens": [8, 128], "ids": [...8 strings], "scale": 0.5}        rows 2 to 4
      -> {"tokens": [2, 128], "ids": [2 strings], "scale": 0.5}      tensors as views: no copy

    tensor, numpy array        cut along its first dimension; without dimensions: repeated
    dict, named tuple,         their fields are cut
    dataclass, pytree node
    the batch a tuple          its fields are cut
    list, other tuple          one item a row, or its fields are cut: whichever fits the rest
    a user's class of list     one item a row
    number, text, None, ...    repeated

A list of tensors can be samples or columns, as a DataLoader's usual collate makes a list of every
tuple in a sample. It is read in the one way in which all parts have equally many rows:

    {"views": [[8, 3], [8, 3]], "y": [8]}                two columns of 8 rows
    {"views": [[8, 3], [8, 3]], "y": [2]}                two samples of 8 tokens
    {"views": [[2, 3], [2, 3]], "y": [2]}                either; so it is read as in the batches
                                                         that this loss function had before,
                                                         and refused if they do not tell

Two rules decide where both fit and no tensor outside of lists tells the number of rows. A batch
that is a list of one, two or three tensors of one type and dimension is columns, as a
TensorDataset's are. In other lists, items with numbers, texts or 0-d tensors of their own are
samples: a collate would have joined them.

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
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from memtools._base import torch as bridge
from memtools._base.oom import shortage

#: Takes a batch and a size, returns micro-batches of at most that size, in order.
Split = Callable[[Any, int], list[Any]]

#: How lists and tuples were read for certain, by their places in a batch: "rows" and "fields".
Known = dict[str, set[str]]

_CONSTANT: Final = (str, bytes, type(None), numbers.Number, enum.Enum, type, range, slice)
_PYTHONS: Final = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
_MOST_COLUMNS: Final = 3  # of one type and dimension, in a list that is the batch
_MOST_KNOWN: Final = 256  # places; where keys of dicts change with each batch, no more are kept
_ROWS: Final = "rows"
_FIELDS: Final = "fields"
_HOOK: Final = "pass split=, a function of (batch, size) that returns a list of micro-batches"


#: How the batches of each loss function were read, so that a last batch of few rows is read as
#: those before it.
Readings = weakref.WeakKeyDictionary[Any, Known]


def known_of(readings: Readings, loss_fn: Any) -> Known:
    """Those of one loss function, however often a program defines it anew."""
    code = getattr(loss_fn, "__code__", None)
    return readings.setdefault(code if isinstance(code, types.CodeType) else type(loss_fn), {})


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


def read(batch: Any, known: Known | None = None) -> Cut:
    """How a batch is cut. Takes some us a leaf. `known` is used and added to.

    Raises:
        ValueError: an empty batch, one without rows, parts that disagree (the sizes are named), or
            a list or tuple that can be samples or columns.
        TypeError: a part that cannot be cut.
    """
    _check_strided(batch, "batch")
    if _is_array(batch) and batch.ndim and len(batch):  # no part of it has to agree with another
        return Cut(len(batch), True)
    known = {} if known is None else known
    try:
        found = _read(batch, known)
    except RecursionError:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) contains itself, or its parts are nested "
            f"too deep to be cut; {_HOOK}"
        ) from None
    if found.rows > 1:
        _try_cut(batch, found)
    return found


def _read(batch: Any, known: Known) -> Cut:
    firm = next(_firm(batch), None)
    counts = dict.fromkeys(_lengths(batch)[0] if firm is None else [firm])
    tries = [_Try(batch, count, firm is not None, known) for count in counts]
    if not tries:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) has no tensor, array or list with rows, "
            f"so it cannot be cut into micro-batches; {_HOOK}"
        )
    fits = [one for one in tries if one.fits]
    if not fits:
        shown = ", ".join(f"{name} has {size}" for name, size in tries[0].sizes[:8])
        raise ValueError(
            f"step(): parts of the batch disagree on the number of rows: {shown}; make what "
            f"belongs to no row a number or a 0-d tensor, or {_HOOK}"
        )
    found = _choose(fits, known, _is_short(batch))
    if found.count == 0:
        raise ValueError("step(): the batch is empty (0 rows); leave such batches out")
    return Cut(found.count, found.form)


def _try_cut(batch: Any, cut: Cut) -> None:
    """Cut one row, so that a batch that cannot be cut is refused before memory runs out.

    Raises TypeError for a part that cannot be made of some of its rows, or becomes something else.
    """
    try:
        part = cut.take(batch, 0, 1)
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


# --- lists and tuples: rows or fields ---


class _Try:
    """A batch read with one number of rows.

    Attributes:
        firm: whether no other number can be meant.
        sizes: (name, rows) of all that is cut.
        readings: of each list and tuple, by its name.
        certain: those of them that are more than a guess.
        nodes: the lists and tuples, by their names.
        unsure: the names of those that can be read in both ways.
    """

    __slots__ = (
        "certain", "count", "firm", "form", "known", "nodes", "readings", "sizes", "unsure"
    )  # fmt: skip

    def __init__(self, batch: Any, count: int, firm: bool, known: Known) -> None:
        self.count, self.firm, self.known = count, firm, known
        self.sizes: list[tuple[str, int]] = []
        self.readings: dict[str, str] = {}
        self.certain: dict[str, str] = {}
        self.nodes: dict[str, Any] = {}
        self.unsure: list[str] = []
        self.form = self._form(batch, "batch")

    @property
    def fits(self) -> bool:
        return all(size == self.count for _, size in self.sizes)

    def _form(self, node: Any, name: str) -> Any:
        """See Cut. Raises TypeError for what cannot be cut."""
        _check_strided(node, name)
        if _is_array(node):
            if not node.ndim:
                return False
        elif not _is_sequence(node, name == "batch") or not self._is_rows(node, name):
            fields = _fields(node)
            if fields is not None:
                form = [self._form(value, name + key) for key, value in fields]
                return form if any(form) else False  # of what belongs to no row: repeated
            if isinstance(node, _CONSTANT) or _is_torchs(node):
                return False
            raise TypeError(
                f"step(): {name} is a {type(node).__name__}, whose rows are unknown; {_HOOK}"
            )
        self.sizes.append((name, len(node)))
        return True

    def _is_rows(self, node: Any, name: str) -> bool:
        """Whether each item is one row, rather than a field with rows."""
        if isinstance(node, list) and (type(node) is not list or not node):
            return True
        if not node or _is_mixed(node):
            return False
        if type(node) is tuple and not any(_has_rows(one) for one in node):
            return self._is_rows_of_values(node, name)
        as_rows = len(node) == self.count
        collated = all(_is_collated(one, self.count) for one in node)
        as_fields = collated or ((self.firm or as_rows) and _agree(node, self.count) is True)
        if not (as_rows and as_fields):
            either = as_fields or (self.firm and type(node) is tuple)  # else sizes disagree
            return self._note(node, name, _ROWS if as_rows or not either else _FIELDS)
        if self.count == 1:
            return False
        if name == "batch" and _is_short(node):
            return self._guess(node, name, _FIELDS)
        joined = collated or self.firm or type(node) is tuple
        return self._guess(node, name, None if joined else _ROWS)

    def _is_rows_of_values(self, node: tuple[Any, ...], name: str) -> bool:
        """Of a tuple without any tensor that has rows: texts, numbers, lists of texts."""
        if len(node) != self.count:
            return self._note(node, name, _FIELDS)
        if self.count == 1:
            return False
        return self._guess(node, name, _ROWS if _are_texts(node) else None)

    def _note(self, node: Any, name: str, reading: str) -> bool:
        """Only one reading fits."""
        self.nodes[name] = node
        self.readings[name] = self.certain[name] = reading
        return reading == _ROWS

    def _guess(self, node: Any, name: str, default: str | None) -> bool:
        """Both readings fit: that of the batches before, else the default."""
        before = self.known.get(name, set())
        reading = next(iter(before)) if len(before) == 1 else default
        self.nodes[name] = node
        if reading is None:
            self.unsure.append(name)
            return True
        self.readings[name] = reading
        return reading == _ROWS


def _choose(fits: list[_Try], known: Known, is_short: bool) -> _Try:
    """The one in which the batch is read; raises ValueError where nothing tells which."""
    if len(fits) == 1:
        (found,) = fits
        if found.unsure:
            name = found.unsure[0]
            _refuse(name, found.nodes[name], found.count)
        for name, reading in found.certain.items():
            if name in known or len(known) < _MOST_KNOWN:
                known.setdefault(name, set()).add(reading)
        return found
    alike = [one for one in fits if not _contradicts(one, known)]
    if is_short and len(alike) > 1:
        alike = [one for one in fits if one.readings.get("batch") == _FIELDS]
    if len(alike) == 1 and not alike[0].unsure:
        return alike[0]
    # Some there are: two numbers of rows fit only where something is read in two ways.
    fields = [
        (name, one) for one in fits for name, reading in one.readings.items() if reading == _FIELDS
    ]
    columns = [(name, one) for name, one in fields if _may_be_columns(one.nodes[name])]
    name, one = (columns or fields)[0]
    return _refuse(name, one.nodes[name], one.count)


def _contradicts(one: _Try, known: Known) -> bool:
    """Whether a list or tuple is read as it was not before."""
    return any(
        len(known.get(name, ())) == 1 and reading not in known[name]
        for name, reading in one.readings.items()
    )


def _may_be_columns(node: Any) -> bool:
    return isinstance(node, list) or _has_rows(node)


def _refuse(name: str, node: Any, count: int) -> NoReturn:
    kind, length = type(node).__name__, len(node)
    if _may_be_columns(node):
        columns = f"{length} columns of {count} rows"
        form = "tuple(batch)" if name == "batch" else "a dict or named tuple"
        remedy = f"pass columns as {form}, samples as a class derived from list"
    else:
        columns = "values that belong to no row"
        remedy = "pass rows as a list, other values as a named tuple"
    raise ValueError(
        f"step(): {name}, a {kind} of {length}, can be {length} rows or {columns}, and nothing "
        f"tells which; {remedy}, or {_HOOK}"
    )


# --- what a node is ---


def _is_sequence(node: Any, is_batch: bool) -> bool:
    """What may be one item a row. The fields of a batch that is a tuple are meant as such."""
    return isinstance(node, list) or (type(node) is tuple and not is_batch)


def _is_array(node: Any) -> bool:
    """A nested tensor is none: it has no shape."""
    if isinstance(node, bridge.connect().torch.Tensor):
        return not node.is_nested
    kind = type(node)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _is_short(batch: Any) -> bool:
    """Whether a batch is a list of so few tensors of one kind that these are columns, as the usual
    collate of a DataLoader makes them of a dataset of tensors."""
    if type(batch) is not list or not 1 <= len(batch) <= _MOST_COLUMNS:
        return False
    return all(_is_array(one) and one.ndim for one in batch)


def _are_texts(node: Any) -> bool:
    return bool(node) and all(isinstance(one, (str, bytes)) for one in node)


def _is_collated(node: Any, count: int) -> bool:
    """Whether a usual collate can have made it of so many samples: of tensors with as many rows, or
    texts, and of nothing else."""
    if _is_array(node):
        return bool(node.ndim) and len(node) == count
    if type(node) in (list, tuple) and _are_texts(node):
        return len(node) == count
    if isinstance(node, list) and type(node) is not list:
        return False
    values = _values(node)
    return bool(values) and all(_is_collated(value, count) for value in values)


def _agree(values: Iterable[Any], count: int) -> bool | None:
    """Whether at least one has `count` rows and the others none (True), none has any (False), or
    one has others (None)."""
    found = False
    for value in values:
        size = _agrees(value, count)
        if size is None:
            return None
        found = found or size
    return found


def _agrees(node: Any, count: int) -> bool | None:
    """The same of one part."""
    if _is_array(node):
        return (len(node) == count or None) if node.ndim else False
    if isinstance(node, list) and (type(node) is not list or len(node) == count):
        return len(node) == count or None
    if type(node) is tuple and len(node) == count and (_are_texts(node) or _has_rows(node)):
        return True
    if _is_of_constants(node):
        return None if isinstance(node, list) else False
    fields = _fields(node)
    if fields is None:
        return False if isinstance(node, _CONSTANT) or _is_torchs(node) else None
    found = _agree((value for _, value in fields), count)
    return found or (None if isinstance(node, list) else found)  # a list without any is rows


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


def _is_mixed(node: Any) -> bool:
    """Fields for certain: things of several kinds, tensors among them. Rows are of one kind."""
    kinds: set[Any] = set(map(type, node))
    if len(kinds) > 1 or (node and _is_array(node[0])):
        kinds = set(map(_kind, node))
    if len(kinds) > 1:
        return any(_is_firm(one) for one in node)
    return kinds <= {list, tuple} and _is_transposed(node)


def _is_transposed(node: Any) -> bool:
    """Whether it is `list(zip(*samples))`: sequences of one length, each of one kind of its own.
    The first items tell it of lists of numbers, which are long."""
    if not node or any(not one or len(one) != len(node[0]) for one in node):
        return False
    firsts = [one[0] for one in node]
    if all(isinstance(item, _CONSTANT) for item in firsts) or len(set(map(_kind, firsts))) == 1:
        return False
    one_each = all(len(set(map(_kind, one))) == 1 for one in node)
    return one_each and any(_has_rows(one) for one in node)


def _kind(node: Any) -> Any:
    """What is alike of the items of one column."""
    return _array_kind(node) if _is_array(node) else type(node)


def _array_kind(node: Any) -> tuple[Any, ...]:
    return type(node).__module__, node.dtype, node.ndim


def _is_firm(node: Any) -> bool:
    """Whether it holds an array that is in no list."""
    if _is_array(node):
        return bool(node.ndim)
    return not isinstance(node, list) and any(_is_firm(value) for value in _values(node))


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


# --- walks ---


def _firm(node: Any, is_batch: bool = True) -> Iterator[int]:
    """Rows of the tensors that are in no list or tuple of one kind: these have no other meaning."""
    if _is_array(node):
        if node.ndim:
            yield len(node)
    elif not _is_sequence(node, is_batch) or (type(node) in (list, tuple) and _is_mixed(node)):
        for value in _values(node):
            yield from _firm(value, False)


def _lengths(node: Any, is_batch: bool = True) -> tuple[list[int], bool]:
    """What the number of rows can be, the likeliest first, and whether it is certainly one of
    these. All parts agree, so that the first of certain ones will do."""
    if _is_array(node):
        return ([len(node)], True) if node.ndim else ([], False)
    found, is_certain = [], False
    if _is_sequence(node, is_batch):
        if type(node) is tuple and not _has_rows(node):
            return ([len(node)] if _are_texts(node) else []), False
        found.append(len(node))
        if type(node) not in (list, tuple):
            return found, True
        is_certain = True
    if _is_of_constants(node):
        return found, is_certain
    for value in _values(node):
        inner, last = _lengths(value, False)
        found += inner
        if last:
            return found, True
    return found, is_certain


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

    def __init__(self, batch: Any, known: Known) -> None:
        self._batch, self._at = batch, 0
        self._cut = read(batch, known)
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

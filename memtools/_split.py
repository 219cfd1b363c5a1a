"""A batch cut into micro-batches: consecutive rows of whatever it is made of.

    {"tokens": [8, 128], "ids": [...8 strings], "scale": 0.5}        rows 2 to 4
      -> {"tokens": [2, 128], "ids": [2 strings], "scale": 0.5}      tensors as views: no copy

    tensor, numpy array        cut along its first dimension; without dimensions: repeated
    dict, named tuple,         their fields are cut
    dataclass, pytree node
    tuple                      its fields are cut; where these have no rows in common, or are texts,
                               and there are as many as the batch has rows: one item a row
    list                       one item a row, whatever lengths the items have; its fields are cut
                               where they are tensors of several types or dimensions, or tensors
                               beside other things, as a DataLoader's usual collate makes them, or
                               where the list has another length than the batch and its fields fit
    the batch a list           its tensors are cut where it is one tensor, or two or three of one
                               type and dimension with equally many rows
    number, text, None, ...    repeated

A list of two or three tensors that fit can be columns or samples, and nothing tells which. It is
read as columns, which a DataLoader's usual collate makes of a TensorDataset. A class of the user's
that is derived from list holds samples, and so does a list of four or more tensors of one type and
dimension. Whether the samples of a longer list are equally long does not matter.

What is none of these has to be cut by the user, who knows what its rows are.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from memtools import _bridge

#: Takes a batch and a size, returns micro-batches of at most that size, in order.
Split = Callable[[Any, int], list[Any]]

_CONSTANT: Final = (str, bytes, type(None), numbers.Number, enum.Enum, type, range, slice)
_MOST_COLUMNS: Final = 3  # of one type and dimension; more of them in a list are samples
_HOOK: Final = "pass split=, a function of (batch, size) that returns a list of micro-batches"


def rows(batch: Any) -> int:
    """How many rows a batch has. Takes some us a leaf.

    Raises:
        ValueError: an empty batch, one without rows, or parts that disagree: the sizes are named.
        TypeError: a part that cannot be cut.
    """
    if _is_collated(batch):
        batch = tuple(batch)
    first = None
    for count, is_an_arrays in _candidates(batch):
        first = count if first is None else first
        fits = _fits(batch, count)
        if fits and not (is_an_arrays and not _cuts_arrays(batch, count)):
            if count == 0:
                raise ValueError("step(): the batch is empty (0 rows); leave such batches out")
            return count
    if first is None:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) has no tensor, array or list with rows, "
            f"so it cannot be cut into micro-batches; {_HOOK}"
        )
    sizes = dict(_sizes(batch, first, "batch"))
    shown = ", ".join(f"{name} has {size}" for name, size in list(sizes.items())[:8])
    raise ValueError(
        f"step(): parts of the batch disagree on the number of rows: {shown}; make what belongs to "
        f"no row a number or a 0-d tensor, or {_HOOK}"
    )


def take(batch: Any, start: int, stop: int, count: int) -> Any:
    """Rows `start` to `stop` of a batch that has `count`: views where it is made of tensors."""
    if start == 0 and stop == count:
        return batch
    if _is_collated(batch):
        return [one[start:stop] for one in batch]
    return _take(batch, start, stop, count)


# --- what a node is ---


def _is_array(node: Any) -> bool:
    torch = _bridge.loaded()
    if torch is not None and isinstance(node, torch.Tensor):
        return True
    kind = type(node)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def _is_collated(batch: Any) -> bool:
    """Whether a batch is a list of columns, as the usual collate of a DataLoader makes it of a
    dataset of tensors. Two or three samples that are equally long look the same."""
    if type(batch) is not list or not 1 <= len(batch) <= _MOST_COLUMNS:
        return False
    if not all(_is_array(one) and one.ndim for one in batch):
        return False
    return len({len(one) for one in batch}) == 1 and not _is_mixed(batch)


def _fields(node: Any) -> list[tuple[str, Any]] | None:
    """(how it is written, value) of what holds fields; None for what does not. A packed sequence
    is a named tuple, and yet its fields have no rows in common."""
    if type(node).__name__ == "PackedSequence":
        return None
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, tuple):
        names: Any = getattr(node, "_fields", range(len(node)))
        return [
            (f".{name}" if isinstance(name, str) else f"[{name}]", value)
            for name, value in zip(names, node, strict=True)
        ]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{one.name}", getattr(node, one.name)) for one in dataclasses.fields(node)]
    return _registered(node)


def _registered(node: Any) -> list[tuple[str, Any]] | None:
    """The children of a type that its author registered with torch's pytree."""
    kind = _pytree_kind(node)
    if kind is None:
        return None
    children, _ = kind.flatten_fn(node)
    return [(f".<{index}>", value) for index, value in enumerate(children)]


def _pytree_kind(node: Any) -> Any:
    tree = sys.modules.get("torch.utils._pytree")
    if tree is None or isinstance(node, (list, tuple, Mapping)):
        return None
    return tree.SUPPORTED_NODES.get(type(node))


def _are_rows(node: Any, count: int) -> bool:
    """Whether each item of a list or tuple is one row, rather than a field with rows."""
    if isinstance(node, list):
        return not _is_mixed(node) and (len(node) == count or not _are_fields(node, count))
    if type(node) is not tuple or len(node) != count or not node:
        return False
    if all(isinstance(one, (str, bytes)) for one in node):
        return True
    return not (_is_mixed(node) or _are_fields(node, count)) and any(
        next(_arrays(one), None) is not None for one in node
    )


def _are_fields(node: Any, count: int) -> bool:
    """Whether all items have `count` rows, and at least one has any."""
    return all(_fits(one, count) for one in node) and any(
        size == count for one in node for _, size in _sizes(one, count, "")
    )


def _fits(node: Any, count: int) -> bool:
    try:
        return all(size == count for _, size in _sizes(node, count, ""))
    except TypeError:
        return False


def _is_mixed(node: Any) -> bool:
    """Fields for certain: things of several kinds, tensors among them. Rows are of one kind."""
    kinds = {_array_kind(one) if _is_array(one) else type(one) for one in node}
    return len(kinds) > 1 and any(next(_firm(one), None) is not None for one in node)


def _array_kind(node: Any) -> tuple[Any, ...]:
    return type(node).__module__, node.dtype, node.ndim


def _check_strided(node: Any, name: str) -> None:
    torch = _bridge.loaded()
    if torch is None or not isinstance(node, torch.Tensor):
        return
    if node.layout is not torch.strided or node.is_nested:
        kind = "nested" if node.is_nested else str(node.layout)
        raise TypeError(f"step(): {name} is a {kind} tensor, whose rows cannot be cut; {_HOOK}")


# --- walks ---


def _candidates(batch: Any) -> Iterator[tuple[int, bool]]:
    """What the number of rows may be, the likeliest first, and whether it is that of an array."""
    samples = ((len(one), False) for one in _lists(batch))
    inside = ((len(array), True) for one in _lists(batch) for array in _arrays(one))
    of_tuples = ((length, False) for length in _lengths_of_tuples(batch))
    firm = ((count, True) for count in _firm(batch))
    seen = set()
    for candidate in itertools.chain(firm, samples, inside, of_tuples):
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _cuts_arrays(node: Any, count: int) -> bool:
    """Whether an array is cut, so that its own length can be the number of rows. One sample of a
    tuple may be as long as the tuple by chance."""
    if _is_array(node):
        return bool(node.ndim)
    if isinstance(node, (list, tuple)) and _are_rows(node, count):
        return False
    return any(_cuts_arrays(value, count) for value in _values(node))


def _firm(node: Any) -> Iterator[int]:
    """Rows of the tensors that are in no list of one kind: these have no other meaning."""
    if _is_array(node):
        if node.ndim:
            yield len(node)
    elif not isinstance(node, list) or _is_mixed(node):
        for value in _values(node):
            yield from _firm(value)


def _lists(node: Any) -> Iterator[list[Any]]:
    """Lists that can be samples, the outer before the inner ones."""
    if isinstance(node, list) and not _is_mixed(node):
        yield node
    if not _is_array(node):
        for value in _values(node):
            yield from _lists(value)


def _lengths_of_tuples(batch: Any) -> Iterator[int]:
    """Of two or more tuples inside of a batch, as `tuple(zip(*samples))` has them. A tuple alone is
    more likely one of columns that disagree, which is an error."""
    lengths = Counter(len(one) for one in _tuples(batch) if one is not batch)
    yield from (length for length, count in lengths.items() if count > 1)


def _tuples(node: Any) -> Iterator[tuple[Any, ...]]:
    if type(node) is tuple:
        yield node
    if not _is_array(node):
        for value in _values(node):
            yield from _tuples(value)


def _arrays(node: Any) -> Iterator[Any]:
    """All with a dimension."""
    if _is_array(node):
        if node.ndim:
            yield node
    else:
        for value in _values(node):
            yield from _arrays(value)


def _values(node: Any) -> list[Any]:
    return node if isinstance(node, list) else [value for _, value in _fields(node) or ()]


def _sizes(node: Any, count: int, name: str) -> Iterator[tuple[str, int]]:
    """(name, rows) of all that is cut. Raises TypeError for what cannot be."""
    if _is_array(node):
        _check_strided(node, name)
        if node.ndim:
            yield name, len(node)
        return
    if isinstance(node, (list, tuple)) and _are_rows(node, count):
        yield name, len(node)
        return
    fields = list(enumerate(node)) if isinstance(node, list) else _fields(node)
    if fields is not None:
        for key, value in fields:
            inner = f"{name}[{key}]" if isinstance(key, int) else name + key
            yield from _sizes(value, count, inner)
    elif not isinstance(node, _CONSTANT) and not _is_torchs(node):
        raise TypeError(
            f"step(): {name} is a {type(node).__name__}, whose rows are unknown; {_HOOK}"
        )


def _is_torchs(node: Any) -> bool:
    """dtypes, devices and the like."""
    torch = _bridge.loaded()
    kinds = () if torch is None else (torch.dtype, torch.device, torch.layout, torch.Size)
    return isinstance(node, kinds)


def _take(node: Any, start: int, stop: int, count: int) -> Any:
    if _is_array(node):
        return node[start:stop] if node.ndim else node
    if isinstance(node, (list, tuple)) and _are_rows(node, count):
        return node[start:stop]
    if isinstance(node, list):
        return [_take(value, start, stop, count) for value in node]
    fields = _fields(node)
    if fields is None:
        return node
    parts = [_take(value, start, stop, count) for _, value in fields]
    if isinstance(node, Mapping):
        return _mapping(node, parts)
    if isinstance(node, tuple):
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(node):
        return _dataclass(node, parts)
    kind = _pytree_kind(node)
    return kind.unflatten_fn(parts, kind.flatten_fn(node)[1])


def _mapping(node: Any, parts: list[Any]) -> Any:
    """Of the same type: a default dict keeps its factory, a BatchEncoding what else it has."""
    new = copy.copy(node) if not isinstance(node, dict) or type(node) is not dict else {}
    for key, part in zip(node, parts, strict=True):
        new[key] = part
    return new


def _dataclass(node: Any, parts: list[Any]) -> Any:
    """Without its __init__, which may want what is no field; frozen ones as well."""
    new = copy.copy(node)
    for one, part in zip(dataclasses.fields(node), parts, strict=True):
        object.__setattr__(new, one.name, part)
    return new

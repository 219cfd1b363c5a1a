"""A batch cut into micro-batches: consecutive rows of whatever it is made of.

    {"tokens": [8, 128], "ids": [...8 strings], "scale": 0.5}        rows 2 to 4
      -> {"tokens": [2, 128], "ids": [2 strings], "scale": 0.5}      tensors as views: no copy

    tensor, numpy array        cut along its first dimension; without dimensions: repeated
    dict, tuple, named tuple,  their fields are cut
    dataclass
    list                       of tensors that all have as many rows as the batch, or of tensors
                               beside other things: fields, as a DataLoader's usual collate makes
                               them; any other list: one item a row
    tuple of texts             one text a row, where there are as many
    number, text, None, ...    repeated

What is none of these has to be cut by the user, who knows what its rows are.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from memtools import _bridge

#: Takes a batch and a size, returns micro-batches of at most that size, in order.
Split = Callable[[Any, int], list[Any]]

_CONSTANT: Final = (str, bytes, type(None), numbers.Number, enum.Enum, type, range, slice)
_HOOK: Final = "pass split=, a function of (batch, size) that returns a list of micro-batches"


def rows(batch: Any) -> int:
    """How many rows a batch has. Takes some us a leaf.

    Raises:
        ValueError: an empty batch, one without rows, or parts that disagree: the sizes are named.
        TypeError: a part that cannot be cut.
    """
    count = next(_firm(batch), None)
    if count is None:
        count = next((_list_rows(one) for one in _lists(batch)), None)
    if count is None:
        raise ValueError(
            f"step(): the batch ({type(batch).__name__}) has no tensor, array or list with rows, "
            f"so it cannot be cut into micro-batches; {_HOOK}"
        )
    sizes = dict(_sizes(batch, count, "batch"))
    if set(sizes.values()) > {count}:
        shown = ", ".join(f"{name} has {size}" for name, size in list(sizes.items())[:8])
        raise ValueError(
            f"step(): parts of the batch disagree on the number of rows: {shown}; make what "
            f"belongs to no row a number or a 0-d tensor, or {_HOOK}"
        )
    if count == 0:
        raise ValueError("step(): the batch is empty (0 rows); leave such batches out")
    return count


def take(batch: Any, start: int, stop: int, count: int) -> Any:
    """Rows `start` to `stop` of a batch that has `count`: views where it is made of tensors."""
    if start == 0 and stop == count:
        return batch
    return _take(batch, start, stop, count)


# --- what a node is ---


def _is_array(node: Any) -> bool:
    torch = _bridge.loaded()
    if torch is not None and isinstance(node, torch.Tensor):
        return True
    kind = type(node)
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


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
    return None


def _are_rows(node: Any, count: int) -> bool:
    """Whether each item of a list or tuple is one row, rather than a field with rows."""
    if isinstance(node, list):
        columns = bool(node) and all(_is_array(one) and one.ndim for one in node)
        return not (_is_mixed(node) or (columns and all(len(one) == count for one in node)))
    texts = bool(node) and all(isinstance(one, (str, bytes)) for one in node)
    return texts and type(node) is tuple and len(node) == count


def _is_mixed(node: list[Any]) -> bool:
    """Fields for certain: things of several kinds, tensors among them. Rows are of one kind."""
    kinds = {"array" if _is_array(one) else type(one) for one in node}
    return len(kinds) > 1 and any(next(_firm(one), None) is not None for one in node)


def _check_strided(node: Any, name: str) -> None:
    torch = _bridge.loaded()
    if torch is None or not isinstance(node, torch.Tensor):
        return
    if node.layout is not torch.strided or node.is_nested:
        kind = "nested" if node.is_nested else str(node.layout)
        raise TypeError(f"step(): {name} is a {kind} tensor, whose rows cannot be cut; {_HOOK}")


# --- walks ---


def _firm(node: Any) -> Iterator[int]:
    """Rows of the tensors that are in no list of one kind: these have no other meaning."""
    if _is_array(node):
        if node.ndim:
            yield len(node)
    elif not isinstance(node, list) or _is_mixed(node):
        for value in _values(node):
            yield from _firm(value)


def _lists(node: Any) -> Iterator[list[Any]]:
    if isinstance(node, list) and not _is_mixed(node):
        yield node
    elif not _is_array(node):
        for value in _values(node):
            yield from _lists(value)


def _values(node: Any) -> list[Any]:
    return node if isinstance(node, list) else [value for _, value in _fields(node) or ()]


def _list_rows(node: list[Any]) -> int:
    """Of a list when nothing else has rows: columns of one length, or a row an item."""
    if node and _is_array(node[0]) and node[0].ndim and not _are_rows(node, len(node[0])):
        return len(node[0])
    return len(node)


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
            yield from _sizes(
                value, count, f"{name}[{key}]" if isinstance(key, int) else name + key
            )
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
    return _dataclass(node, parts)


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

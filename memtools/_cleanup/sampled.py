"""Find tensors that a sampling function returns together with their autograd graph.

    latents = sample(policy)        51 tensors, each with a node of the graph
        └ grad_fn ─► node ─► node ─► ... each with the tensors that it saved for a backward pass

Without torch.no_grad() all of these stay in memory as long as one of the samples lives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import Any, Final

from memtools._base import torch as bridge
from memtools._base.size import format_bytes
from memtools._census.holders import graph_of

MOST_ITEMS: Final = 4096  # At most this many items of a result are examined.
MOST_NODES: Final = 20_000  # At most this many nodes of a graph are visited.
LEAST_BYTES: Final = 1 << 20  # A smaller graph is not reported.


def graph_of_result(result: Any, name: str) -> str | None:
    """Describe the graph that a result keeps alive, in a sentence.

    Returns "" if the graph is small, None if there is none. Takes about 0.1 us for each item of the
    result, and 3 us for each node of a graph.
    """
    torch = bridge.loaded()
    if torch is None:
        return None
    tensors = _with_graph(torch, result)
    if not tensors:
        return None
    size = _saved_bytes(torch, tensors)
    if size < LEAST_BYTES:
        return ""
    many = f"{len(tensors):,} sampled tensor{'s' * (len(tensors) != 1)}"
    carry = "carries" if len(tensors) == 1 else "carry"
    return (
        f"{many}, which {name}() returned, {carry} a graph of {format_bytes(size)} that lives as "
        "long as they do: sample within torch.no_grad(), or detach() what is kept; if a loss needs "
        "the graph, as that of REINFORCE does, drop them after its backward pass"
    )


def _with_graph(torch: Any, result: Any) -> list[Any]:
    """Find the tensors with a graph in nested lists, dicts and dataclasses."""
    found, todo, seen, left = [], [result], set(), MOST_ITEMS
    while todo and left > 0:
        one, left = todo.pop(), left - 1
        kind = type(one)
        if issubclass(kind, torch.Tensor):
            if graph_of(torch, one) is not None:
                found.append(one)
            continue
        inner = _items(kind, one)
        if inner is not None and id(one) not in seen:
            seen.add(id(one))
            todo.extend(itertools.islice(inner, left))
    return found


def _items(kind: type, one: Any) -> Any:
    if issubclass(kind, dict):
        return dict.values(one)
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return iter(one)
    if dataclasses.is_dataclass(kind):
        return [getattr(one, field.name, None) for field in dataclasses.fields(one)]
    return None


def _saved_bytes(torch: Any, tensors: list[Any]) -> int:
    """Sum the storages that the graph's nodes saved, without those of parameters. What a hook has
    packed, as activation checkpointing does, is not unpacked and does not count."""
    storages: dict[int, int] = {}
    own: set[int] = set()
    todo, seen = [graph_of(torch, tensor) for tensor in tensors], set[Any]()
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if (variable := getattr(node, "variable", None)) is not None:
            own.add(variable.untyped_storage().data_ptr())
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                for pointer, size in _storages(torch, node, name):
                    storages[pointer] = size
    return sum(size for pointer, size in storages.items() if pointer not in own)


def _storages(torch: Any, node: Any, name: str) -> list[tuple[int, int]]:
    """Return the address and the bytes of each tensor that a node saved under a name."""
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed by a backward pass
        return []
    found = []
    for one in saved if type(saved) in (tuple, list) else (saved,):
        if getattr(one, "unpack_hook", True) is not None:
            continue
        if isinstance(tensor := one.data, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found.append((storage.data_ptr(), storage.nbytes()))
    return found

"""Autograd graphs that are kept: `total = total + loss` without detach(), and what hangs on it.

The memory of a graph lies in C++ nodes that the collector does not know, with the tensors they
saved. They are found from the tensors that Python holds, by grad_fn and next_functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._census.objects import Own, graph_of, referrers

MOST_NODES = 200_000  # that are walked in one search
_LEAST = 256  # nodes of a graph that is worth a word when nothing else grew
_ROOTS = 256  # tensors that graphs are walked from, the newest first


class Graph(NamedTuple):
    """A graph and the tensor that keeps it, or several graphs and their tensors."""

    roots: Own
    nodes: int


def largest() -> Graph | None:
    """The largest graph that a tensor with a holder keeps, if it is a large one."""
    graphs = kept()
    return graphs[0][0] if graphs and graphs[0][0].nodes >= _LEAST else None


def kept() -> list[tuple[Graph, Own]]:
    """Each graph that a tensor with a holder keeps, with its nodes, the largest first."""
    return _walk(_roots())


def keeper(orphans: Sequence[Any]) -> Graph | None:
    """The graphs that keep these tensors alive, as one; None where none does."""
    torch = bridge.loaded()
    if torch is None or not issubclass(type(orphans[0]), torch.Tensor):
        return None
    wanted = {id(t) for t in orphans}
    own = [graph_of(torch, t) for t in orphans]
    nodes = {id(node) for node in own if node is not None}  # which stay as long as `own`
    roots, total = Own(), 0
    for graph, reached in _walk([t for t in _roots() if id(t) not in wanted]):
        if not nodes.isdisjoint(map(id, reached)) or _saves(reached, wanted):
            roots += graph.roots
            total += graph.nodes
    return Graph(roots, total) if roots else None


def _roots() -> Own:
    """Tensors with a history that somebody on the Python heap holds, the newest first."""
    torch = bridge.loaded()
    if torch is None:
        return Own()
    tensors = Own(_core._census(torch.Tensor, False)[2])
    tensors = Own(t for t in tensors if graph_of(torch, t) is not None)
    tensors.sort(key=lambda t: -graph_of(torch, t)._sequence_nr())
    del tensors[_ROOTS:]
    holders_of_each = referrers(tensors).holders
    return Own(t for t, holders in zip(tensors, holders_of_each, strict=True) if holders)


def _walk(roots: Sequence[Any]) -> list[tuple[Graph, Own]]:
    """Each root's graph with the nodes that no root before it reaches, the largest first."""
    torch, seen = bridge.loaded(), set[Any]()
    graphs = []
    for root in roots:
        reached, todo = Own(), [graph_of(torch, root)]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reached.append(node)
            todo += [following for following, _ in node.next_functions]
        if reached:
            graphs.append((Graph(Own([root]), len(reached)), reached))
    return sorted(graphs, key=lambda pair: -pair[0].nodes)


def _saves(nodes: Sequence[Any], wanted: set[int]) -> bool:
    """Whether one of the nodes saved one of the tensors."""
    names: dict[type, list[str]] = {}
    for node in nodes:
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
        if any(_saved(node, name) & wanted for name in names[kind]):
            return True
    return False


def _saved(node: Any, name: str) -> set[int]:
    try:
        value = getattr(node, name)
    except RuntimeError:  # freed by backward()
        return set()
    return {id(part) for part in (value if type(value) in (tuple, list) else (value,))}

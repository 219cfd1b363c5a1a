"""What still holds the graph of a pass that failed: a list of outputs that were not detached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.size import format_bytes
from memtools._census import graphs, holders

if TYPE_CHECKING:
    import torch

LEAST = 1 << 20  # bytes that are worth a sentence


def kept_graphs(known: Iterable[torch.Tensor]) -> str:
    """Who keeps autograd graphs alive, and the bytes of the tensors that these saved. Looks at all
    objects that the collector knows: some 0.1 s.

    Args:
        known: tensors that live in any case, such as the model's parameters.

    Returns a clause, or "" where less than a MiB is kept.
    """
    found = graphs.kept()
    # The graphs' storages by address; parts of one batch share theirs.
    own = {t.untyped_storage().data_ptr() for t in known}
    sizes: dict[int, int] = {}
    for _, nodes in found:
        for tensor in _saved(nodes):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
    total = sum(sizes.values())
    if total < LEAST:
        return ""
    roots = type(found[0][0].roots)(root for graph, _ in found for root in graph.roots)
    graph = graphs.Graph(roots, sum(graph.nodes for graph, _ in found))
    path = holders.graph_holder(graph, 1).path
    return (
        f"{format_bytes(total)} that passes before saved for backward() are still held: {path}; "
        "keep loss.detach(), or what is in step()'s report, rather than outputs with their graph"
    )


def _saved(nodes: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The tensors that nodes of a graph saved for their backward pass."""
    tensor = bridge.connect().torch.Tensor
    names: dict[type, list[str]] = {}
    for node in nodes:
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_saved_")]
        for name in names[kind]:
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by backward()
                continue
            for part in value if type(value) in (tuple, list) else (value,):
                if isinstance(part, tensor) and part.layout is bridge.connect().torch.strided:
                    yield part

"""Storages that torch's allocator hook does not report, and the line that created their tensor.

copy.deepcopy (so a state dict that is kept of each epoch) and torch.UntypedStorage(n) use torch's
first allocator, past the one that memtools hooks. Their storages are not blocks of Python's either.
But the tensor over a storage is an object of Python's, and while tracemalloc is on its block has a
line:

    tensor ──its object──► tracemalloc: model.py:24, made in this window
       └──its storage──► not reported, and torch's own: counts as made there, once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memtools import _core
from memtools._base import torch as bridge
from memtools._blocks.tensors import storage_of

Frames = tuple[tuple[str, int], ...]  # (file, line), the innermost first


def untracked_storages(is_tracked: Callable[[int], bool]) -> Iterator[tuple[Frames, int]]:
    """Yield the stack and the bytes of each living storage on the host whose tensor was made since
    tracemalloc was started. Yields nothing if torch is not loaded.

    Tensors of subclasses are left out, because reading them may run code of the program's; so is
    memory that torch has not allocated itself, such as that of NumPy's arrays. Goes once through
    all objects that the garbage collector knows: some 7 ms for 284,000, and 30 where Python is not
    3.11 to 3.13.

    Args:
        is_tracked: whether a storage that begins at this address is known.
    """
    torch = bridge.loaded()
    if torch is None:
        return
    known = set[int]()
    with torch._C.DisableTorchFunction():
        for one in _core._instances((torch.Tensor, torch.nn.Parameter)):
            frames = _core._traced_at(one)
            storage = None if frames is None else storage_of(torch, one)
            if frames is None or storage is None or not one.untyped_storage().resizable():
                continue
            address, size = storage
            if address not in known and not is_tracked(address):
                known.add(address)
                yield frames, size

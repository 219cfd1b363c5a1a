"""DispatchedBlocks: finds the lines that make host tensors if memtools._torch is missing.

    trace(True) ──► a dispatch mode of torch on this thread
                        │ each operator that runs
                        ▼
                 a storage that none of its arguments has: new ──► line, bytes, generation
                        │ its weak reference says when it dies
                        ▼
                 sites(first, last): what lives of what was made in these generations

It has the methods of memtools._core.Blocks for lines, but not the bytes in use: it does not know
tensors that were made before. It is on only for the steps that are traced. It sees the operators of
the thread that turned it on, with their backward passes, but not those of compiled code.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from memtools._base import torch as bridge
from memtools._base.libraries import GENERATED, is_users, library_paths

Frame = tuple[str, int, str]  # file, line, function
SITE_FRAMES = 3  # A site has up to so many frames of the user's code, the innermost first.


class _Block(NamedTuple):
    bytes: int
    site: int
    generation: int
    alive: Any  # the weak reference to the storage, which must live as long as the entry


class DispatchedBlocks:
    """The blocks of host tensors that operators make, with their lines, while it traces.

    Attributes:
        is_on: whether torch is loaded, so that it can trace.

    Args:
        libraries: prefixes of paths whose files are not the user's code.
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._libraries = (*library_paths(), *libraries, "<")
        self._mode: Any = None  # the dispatch mode, as long as it is on torch's stack
        self._thread = 0  # the thread whose stack that is
        self._is_traced = False
        self._generation = 0
        self._living: dict[int, _Block] = {}  # by the address of the storage's implementation
        self._sites: dict[tuple[Frame, ...], int] = {(): 0}

    @property
    def is_on(self) -> bool:
        return bridge.loaded() is not None

    def trace(self, on: bool) -> None:
        """Begin or end to note what is made. If another thread ends it, or a mode of the program
        lies above it, it notes nothing more, and the next call takes it off the stack."""
        self._is_traced = on
        if not on:
            self._living.clear()
            self._leave()
        elif self._mode is None:
            mode = _mode_of(self)
            mode.__enter__()
            self._mode, self._thread = mode, threading.get_ident()

    def turn(self) -> int:
        """End a generation; return the number of the next one."""
        self._generation += 1
        return self._generation

    def sites(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """(site, bytes, blocks) of what lives of these generations, the most bytes first."""
        sums: dict[int, tuple[int, int]] = {}
        for block in list(self._living.values()):
            if first <= block.generation <= last:
                size, count = sums.get(block.site, (0, 0))
                sums[block.site] = size + block.bytes, count + 1
        found = [(site, size, count) for site, (size, count) in sums.items()]
        return sorted(found, key=lambda one: (-one[1], one[0]))

    def frames(self, site: int) -> tuple[Frame, ...]:
        """(file, line, function) of a site, the innermost first; () if it is not known."""
        return next((frames for frames, number in self._sites.items() if number == site), ())

    def site_of(self, address: int) -> int | None:
        """The site of the block that begins at this address, or None."""
        for block in list(self._living.values()):
            storage = block.alive()
            if storage is not None and storage.data_ptr() == address:
                return block.site
        return None

    def ran(self, arguments: Iterable[Any], result: Any, frame: FrameType | None) -> None:
        """Note the result of an operator. A storage that none of its arguments has is new."""
        if not self._is_traced:
            return
        before: set[int] | None = None
        for storage in _storages(_flat((result,))):
            if before is None:
                before = {one._cdata for one in _storages(_flat(arguments))}
            if storage._cdata not in before and storage._cdata not in self._living:
                self._born(storage, frame)

    # --- what is made ---

    def _born(self, storage: Any, frame: FrameType | None) -> None:
        key, living = storage._cdata, self._living
        alive = weakref.ref(storage, lambda _: living.pop(key, None))
        site = self._sites.setdefault(self._frames_of(frame), len(self._sites))
        living[key] = _Block(storage.nbytes(), site, self._generation, alive)

    def _frames_of(self, frame: FrameType | None) -> tuple[Frame, ...]:
        """Up to three frames of the user's code; if there are none, the innermost of a library."""
        found: list[Frame] = []
        library: tuple[Frame, ...] = ()
        while frame is not None and len(found) < SITE_FRAMES:
            file = frame.f_code.co_filename
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            if (file.startswith(self._libraries) and not is_users(file)) or GENERATED in file:
                library = library or ((file, frame.f_lineno, name),)
            else:
                found.append((file, frame.f_lineno, name))
            frame = frame.f_back
        return tuple(found) or library

    def _leave(self) -> None:
        """Take the mode off torch's stack, if it lies on top."""
        torch = bridge.loaded()
        if self._mode is None or torch is None or threading.get_ident() != self._thread:
            return
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None
        elif not any(mode is self._mode for mode in stack):
            self._mode = None


def _mode_of(blocks: DispatchedBlocks) -> Any:
    """A dispatch mode of torch that passes each operator to `blocks`."""
    torch = bridge.connect().torch

    class Lines(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            blocks.ran((args, kwargs), result, sys._getframe(1))
            return result

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # Otherwise torch imports 820 modules at the first operator.

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # Compiled code runs as it would without the mode.

    return Lines()


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    """The values in nested tuples, lists and dicts."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
        else:
            yield value


def _storages(values: Iterable[Any]) -> Iterable[Any]:
    """The storages of host tensors among the values."""
    torch = bridge.connect().torch
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            continue
        try:
            storage = value.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, nested, of a functional transform
            continue
        if storage.nbytes() > 0:
            yield storage

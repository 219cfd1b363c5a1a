"""DispatchedBlocks: the lines that make tensors on the host, where memtools._torch is not there.

    trace(True) ──► a dispatch mode of torch on this thread
                        │ each operator that runs
                        ▼
                 a storage that none of its arguments has: new ──► line, bytes, generation
                        │ its weak reference says when it dies
                        ▼
                 sites(first, last): what lives of what was made in these generations

It answers as memtools._core.Blocks does, but not how much is in use: what was made before is not
known, so it is not a signal. It is on only for the steps that are traced. The operators of the
thread that turned it on are heard, with their backward passes; those of compiled code are not.
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
SITE_FRAMES = 3  # of the user's code, the innermost first


class _Block(NamedTuple):
    bytes: int
    site: int
    generation: int
    alive: Any  # the weak reference to the storage, which is to live as long as the entry


class DispatchedBlocks:
    """Blocks of host tensors that operators make, with their lines, while it is traced.

    Attributes:
        is_on: whether torch is there; then it may be traced.

    Args:
        libraries: beginnings of paths whose files are not the user's code.
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._libraries = (*library_paths(), *libraries, "<")
        self._mode: Any = None  # once it was turned on, as long as it is on torch's stack
        self._thread = 0  # whose stack that is
        self._is_traced = False
        self._generation = 0
        self._living: dict[int, _Block] = {}  # by the address of the storage's implementation
        self._sites: dict[tuple[Frame, ...], int] = {(): 0}

    @property
    def is_on(self) -> bool:
        return bridge.loaded() is not None

    def trace(self, on: bool) -> None:
        """Begin or end to note what is made. Ended on another thread, or below a mode of the
        program, nothing is noted from then on, and it leaves the stack at the next occasion."""
        self._is_traced = on
        if not on:
            self._living.clear()
            self._leave()
        elif self._mode is None:
            mode = _mode_of(self)
            mode.__enter__()
            self._mode, self._thread = mode, threading.get_ident()

    def turn(self) -> int:
        """Ends a generation; returns the number of the one that begins."""
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
        """(file, line, function) of a site, the innermost first; () for one that is not known."""
        return next((frames for frames, number in self._sites.items() if number == site), ())

    def site_of(self, address: int) -> int | None:
        """The site of the block that begins at this address, or None."""
        for block in list(self._living.values()):
            storage = block.alive()
            if storage is not None and storage.data_ptr() == address:
                return block.site
        return None

    def ran(self, arguments: Iterable[Any], result: Any, frame: FrameType | None) -> None:
        """Hear that an operator has returned. What none of its arguments has in memory is new."""
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
        """Up to three of the user's code; where there are none, the innermost of a library."""
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
        """Take the mode off torch's stack, where it lies on top."""
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
    """A dispatch mode of torch that tells `blocks` of each operator."""
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
            return False  # else torch imports 820 modules at the first operator

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # what is compiled runs as it would without

    return Lines()


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    """What is in nested tuples, lists and dicts of arguments."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
        else:
            yield value


def _storages(values: Iterable[Any]) -> Iterable[Any]:
    """The storages of the host tensors among them that have one."""
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

"""Operators: calls a function after each operator of torch that runs on a thread.
DispatchedBlocks: finds the lines that make host tensors by it if memtools._torch is missing.

    trace(True) ──► Operators: a dispatch mode of torch on this thread
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
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
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
        self._operators = Operators(self.ran)
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
        if on:
            self._operators.begin()
        else:
            self._living.clear()
            self._operators.end()

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

    def ran(
        self, operator: Any, arguments: Iterable[Any], result: Any, frame: FrameType | None
    ) -> None:
        """Note the result of an operator. A storage that none of its arguments has is new."""
        if not self._is_traced:
            return
        before: set[int] | None = None
        for storage in _storages(flat((result,))):
            if before is None:
                before = {one._cdata for one in _storages(flat(arguments))}
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
            if is_of_a_library(frame.f_code.co_filename, self._libraries):
                library = library or (frame_of(frame),)
            else:
                found.append(frame_of(frame))
            frame = frame.f_back
        return tuple(found) or library


class Operators:
    """Calls a function after each operator that runs on the thread that called `begin`, with those
    of its backward passes, but not those of compiled code. Costs nothing before `begin`.

    Attributes:
        took_ns: nanoseconds that the newest one took.

    Args:
        ran: called with the operator, its arguments, its result and the frame that called it.
    """

    def __init__(self, ran: Callable[[Any, Iterable[Any], Any, FrameType | None], object]) -> None:
        self._ran = ran
        self.took_ns = 0
        self._mode: Any = None  # the dispatch mode, as long as it is on torch's stack
        self._thread = 0  # the thread whose stack that is
        self._is_on = False

    def begin(self) -> None:
        self._is_on = True
        if self._mode is None:
            mode = self._new_mode()
            mode.__enter__()
            self._mode, self._thread = mode, threading.get_ident()

    def end(self) -> bool:
        """End. Returns whether the mode has left torch's stack. On another thread, or if a mode of
        the program lies above it, it stays there, does nothing, and the next call takes it off."""
        self._is_on = False
        torch = bridge.loaded()
        if self._mode is not None and torch is not None and threading.get_ident() == self._thread:
            stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            if stack and stack[-1] is self._mode:
                self._mode.__exit__(None, None, None)
                self._mode = None
            elif not any(mode is self._mode for mode in stack):
                self._mode = None
        return self._mode is None

    def _new_mode(self) -> Any:
        torch, operators = bridge.connect().torch, self

        class Listening(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                begun = time.perf_counter_ns()
                result = func(*args, **(kwargs or {}))
                if func is torch.ops.aten.alias.default:
                    result = _as_made(torch, result, sys._getframe(1))
                if operators._is_on:
                    operators.took_ns = time.perf_counter_ns() - begun
                    operators._ran(func, (args, kwargs), result, sys._getframe(1))
                return result

            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # Otherwise torch imports 820 modules at the first operator.

            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True  # Compiled code runs as it would without the mode.

        return Listening()


def _as_made(torch: Any, result: Any, frame: FrameType) -> Any:
    """The alias that `torch.Tensor.__new__(cls, tensor)` makes, as an instance of `cls`. Under a
    mode it is a torch.Tensor already, of which torch refuses to make one of a subclass: such as a
    MemoryMappedTensor of tensordict."""
    code = frame.f_code
    if code.co_name != "__new__" or code.co_argcount == 0 or type(result) is not torch.Tensor:
        return result
    cls = frame.f_locals.get(code.co_varnames[0])
    if not isinstance(cls, type) or not issubclass(cls, torch.Tensor):
        return result
    return torch.Tensor._make_subclass(cls, result)


def frame_of(frame: FrameType) -> Frame:
    code = frame.f_code
    return code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name)


def is_of_a_library(file: str, libraries: tuple[str, ...]) -> bool:
    """Whether a file is not the user's, by the prefixes of what is not."""
    return (file.startswith(libraries) and not is_users(file)) or GENERATED in file


def flat(values: Iterable[Any]) -> list[Any]:
    """The values in nested tuples, lists, dicts and slices."""
    found = list[Any]()
    for value in values:
        if isinstance(value, (tuple, list)):
            found += flat(value)
        elif isinstance(value, dict):
            found += flat(value.values())
        elif isinstance(value, slice):
            found += (value.start, value.stop, value.step)
        else:
            found.append(value)
    return found


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

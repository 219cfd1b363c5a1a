"""KeyboardInterrupt at each place of a module in turn where Python may deliver it, or, finer,
before each of its instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class _Interrupt:
    """At the n-th place: as a function is entered, and as a call into C returns."""

    def __init__(self, module: ModuleType, n: int) -> None:
        self.file, self.left = module.__file__, n

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename == self.file:
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupted(module: ModuleType, n: int, call: Callable[[], Any]) -> bool:
    """Calls it, interrupted at place n; False where it has no such place."""
    sys.setprofile(_Interrupt(module, n))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


class _Instruction:
    """Before the n-th instruction, also between what a call returns and where it is kept."""

    def __init__(self, module: ModuleType, n: int, handler: Callable[[], Any]) -> None:
        self.file, self.left, self.handler = module.__file__, n, handler

    def __call__(self, frame: Any, event: str, arg: Any) -> _Instruction | None:
        if frame.f_code.co_filename != self.file:
            return None
        frame.f_trace = self  # without it 3.13 passes over the next line
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left == -1:
                sys.settrace(None)
                self.handler()
        return self


def _apart(call: Callable[[], Any]) -> Iterator[None]:
    """A generator has an exception state of its own. CPython 3.11 leaves one behind where an
    interrupt comes as a handled exception is put away: later ones would have it as context."""
    call()
    yield


def handled_before(
    module: ModuleType, n: int, handler: Callable[[], Any], call: Callable[[], Any]
) -> bool:
    """Calls it, and the handler of a signal before instruction n; False where it has fewer."""
    before, place = sys.gettrace(), _Instruction(module, n, handler)
    sys._getframe().f_trace_opcodes = True  # 3.12 tells no instructions unless a frame asks before
    sys.settrace(place)
    try:
        next(_apart(call))
    finally:
        sys.settrace(before)
    return place.left < 0


def _interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_before(module: ModuleType, n: int, call: Callable[[], Any]) -> bool:
    """Calls it, interrupted before instruction n; False where it has fewer."""
    try:
        return handled_before(module, n, _interrupt, call)
    except KeyboardInterrupt:
        return True

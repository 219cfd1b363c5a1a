"""KeyboardInterrupt at each place of a module in turn where Python may deliver it."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

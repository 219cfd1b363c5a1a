"""What torch's compiler reads in place of memtools._core.Managed's slots, which are C.

The interpreter itself does not come here. Imports nothing of memtools: the native module takes
`__call__` and `__get__` into the type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
    return self._traced(*args, **kwargs)


def __get__(self: Any, instance: object, owner: type | None = None) -> Any:  # noqa: N807
    return self if instance is None else self._traced.__get__(instance, owner)


def compiling() -> bool:
    """Whether torch.compile reads the caller now."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def twin(
    core: Any, gate: Any, function: Callable[..., Any], clear: Callable[..., None] | None
) -> Callable[..., Any]:
    """What `core` does, in Python that the compiler knows; where nobody compiles, a call of it.

    A call of C would break the graph. An assignment does not: it is done when the graph has run,
    once for all of them, so that a compiled region is one update of the policy that `gate` is of.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not compiling():
            return core(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        finally:
            if clear is not None:
                clear(args, kwargs)
        gate._updated = True
        return result

    return traced

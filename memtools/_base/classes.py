"""Facts of classes that no metaclass can hide or answer by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FLAGS = type.__dict__["__flags__"].__get__
_NAMESPACE = type.__dict__["__dict__"].__get__
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_heap_type(kind: type) -> bool:
    """Whether a type was made while the program ran, as all classes of Python code are. Others were
    compiled in."""
    return bool(_FLAGS(kind) & _HEAP_TYPE)


def namespace_of(kind: type) -> Mapping[str, Any]:
    """What a class defines itself."""
    found: Mapping[str, Any] = _NAMESPACE(kind)
    return found


def with_subclasses(base: type) -> Iterator[type]:
    """A class and all its subclasses, each once."""
    seen, waiting = set[int](), [base]
    while waiting:
        kind = waiting.pop()
        if id(kind) not in seen:
            seen.add(id(kind))
            yield kind
            waiting += type.__subclasses__(kind)

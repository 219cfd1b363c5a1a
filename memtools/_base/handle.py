"""What a registration returns: `remove()` takes the callback or guard away."""

from __future__ import annotations

from collections.abc import Callable


class Handle:
    """A registered callback or guard. `remove()` removes it, also from within it."""

    __slots__ = ("_remove", "_text")

    def __init__(self, remove: Callable[[], object], text: str) -> None:
        self._remove, self._text = remove, text

    def remove(self) -> None:
        """Remove the callback or guard. A second call does nothing."""
        self._remove()

    def __repr__(self) -> str:
        return self._text

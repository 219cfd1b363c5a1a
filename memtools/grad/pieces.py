"""What is left of a batch, and the next micro-batch of it.

rows      |-- done --|-- next: at most `size` rows --|------ rest ------|
by hook   done parts, [next part] [part] [part]: cut again where they exceed `size`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memtools.grad.split import Known, Split, read


class Rows:
    """A batch that is cut along its rows.

    Attributes:
        most: rows.
    """

    __slots__ = ("_at", "_batch", "_cut", "most")

    def __init__(self, batch: Any, known: Known) -> None:
        self._batch, self._at = batch, 0
        self._cut = read(batch, known)
        self.most = self._cut.rows

    @property
    def over(self) -> bool:
        return self._at == self.most

    def next(self, size: float) -> tuple[Any, int, bool]:
        """The next micro-batch of at most so many rows, how many it has, whether it is the last."""
        stop = int(min(self._at + size, self.most))
        micro = self._cut.take(self._batch, self._at, stop)
        return micro, stop - self._at, stop == self.most

    def advance(self, count: int) -> None:
        """The next `count` rows are done."""
        self._at += count

    def restart(self) -> None:
        self._at = 0

    def smaller(self, count: int) -> int | None:
        """What to try after `count` rows failed; None: there is nothing smaller."""
        return (count + 1) // 2 if count > 1 else None


class Hooked:
    """A batch that the user's function cuts. A size is in units of its own, such as nodes."""

    __slots__ = ("_batch", "_parts", "_split", "most")

    def __init__(self, batch: Any, split: Split) -> None:
        if not callable(split):
            raise TypeError(f"split is a function of (batch, size), got {type(split).__name__}")
        self._batch, self._split, self.most = batch, split, math.inf
        self.restart()

    @property
    def over(self) -> bool:
        return not self._parts

    def next(self, size: float) -> tuple[Any, int, bool]:
        """The next micro-batch, cut for `size`, and whether it is the last; in place of its rows,
        which only the function knows, the size that it was cut for, 0 for the whole batch."""
        head, cut = self._parts[0]
        if size < cut:
            parts = [(part, size) for part in self._cut(head, int(size))]
            self._parts[:1] = parts
            head, cut = parts[0]
        return head, 0 if cut == math.inf else int(cut), len(self._parts) == 1

    def advance(self, count: int) -> None:
        del self._parts[0]

    def restart(self) -> None:
        self._parts: list[tuple[Any, float]] = [(self._batch, math.inf)]

    def smaller(self, count: int) -> int | None:
        """The largest of size/2, size/4, ... that cuts what failed; None: it cannot be cut."""
        head, cut = self._parts[0]
        size = len(self._cut(head, 1)) if cut == math.inf else int(cut)
        while size > 1:
            size = (size + 1) // 2
            if len(self._cut(head, size)) > 1:
                return size
        return None

    def _cut(self, part: Any, size: int) -> Sequence[Any]:
        parts = self._split(part, size)
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"split(batch, {size}) returns a list of micro-batches, got {type(parts).__name__}"
            )
        if not parts:
            raise ValueError(f"split(batch, {size}) returned no micro-batch; at least one is due")
        return parts


def pieces(batch: Any, split: Split | None, known: Known) -> Rows | Hooked:
    """`known`: how batches before were read. Raises TypeError and ValueError for what cannot be
    cut."""
    return Rows(batch, known) if split is None else Hooked(batch, split)

"""How many rows a micro-batch gets: half after an OOM, remembered, and tried upward later.

     rows
      16  ##x                    #x          x: out of memory
       8     ########...########   #########     ...
       4
             |- 8 good windows -|  |- 16 good windows, and so on up to 1,024 -|

A step up that fails makes the next one wait twice as long; one that lasts as long as it waited
counts as found, and the wait is short again. It never goes above the size that it began with.

A size that did well in 32 windows is not given up for one failure: data have giants now and then.
That window goes on in smaller parts, the next one begins with the old size.
"""

from __future__ import annotations

import math
from typing import Any, Final

FIRST_WAIT: Final = 8  # good windows before a step up
LONGEST_WAIT: Final = 1024
PROVEN: Final = 32  # good windows after which one failure is the data's
_STATE: Final = ("size", "good", "wait", "before")


class SizeControl:
    """The size that windows begin with. Numbers only; the same failures give the same sizes.

    Attributes:
        top: rows that it began with, inf for the whole batch.
        size: rows of a micro-batch in the next window; inf: the whole batch, however large.
        good: windows without a failure since the size last changed, of those that used it.
        wait: good windows before it goes up.
        before: the size before the last step up, while that is on trial; else 0.
    """

    __slots__ = ("_lowest", "_used", "before", "good", "size", "top", "wait")

    def __init__(self, start: int | None) -> None:
        self.top = self.size = math.inf if start is None else float(start)
        self.good, self.wait, self.before = 0, FIRST_WAIT, 0.0
        self.begin_window()

    def begin_window(self) -> None:
        """Forgets what was said of a window that came to no end."""
        self._used = self._lowest = 0.0

    def used(self, rows: float) -> None:
        """A micro-batch of so many rows went well."""
        self._used = max(self._used, rows)

    def failed(self, smaller: float) -> None:
        """One did not fit; this window goes on with `smaller`."""
        self._lowest = smaller

    def end_window(self, most: float) -> None:
        """It made its update; more than `most` rows had been of no use to it."""
        if self._lowest:
            if self.before or self.good < PROVEN:
                self.lower(self._lowest)
            self.good = 0
        elif self._used >= self.size or self.size == math.inf:
            self.good += 1
            self._rise(most)

    def lower(self, smaller: float) -> None:
        """The size is too large: back to before the step up where that was one, else to this."""
        if self.before:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        halved_once = 2 * smaller >= self.size  # then what is known to fit has not failed
        self.size = self.before if self.before and halved_once else min(self.size, smaller)
        self.before, self.good = 0.0, 0

    def _rise(self, most: float) -> None:
        if self.good < self.wait:
            return
        if self.before:  # it lasted as long as it had waited
            self.before, self.wait = 0.0, FIRST_WAIT
        if self.size < min(self.top, most):
            self.before, self.size, self.good = self.size, min(2 * self.size, self.top), 0

    def state(self) -> dict[str, Any]:
        """To come back to by `load`, with None for the whole batch: for files."""
        state = {name: getattr(self, name) for name in _STATE}
        return state | {"size": None if self.size == math.inf else self.size}

    def load(self, state: dict[str, Any]) -> None:
        """Raises KeyError where something is missing."""
        size = math.inf if state["size"] is None else float(state["size"])
        good, wait, before = int(state["good"]), int(state["wait"]), float(state["before"])
        self.size, self.good, self.wait, self.before = min(size, self.top), good, wait, before
        self.begin_window()

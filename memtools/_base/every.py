"""How often something is done: each so many steps, or each so many seconds."""

from __future__ import annotations

import operator
import re
from typing import NamedTuple

from memtools._base.number import LARGEST, shown

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*(steps?|s|min|h|)\s*")
_SHOWN = 40  # An error repeats this many characters of a text.


class Every(NamedTuple):
    """One of the two is set: a number of steps, or of seconds."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.seconds is None else f"{self.seconds:g} s"


def parse_every(every: int | str, name: str = "print_every") -> Every:
    """The interval that an argument means.

    Args:
        every: steps, as an int of at least 1 or a text like "1000" or "1000 steps"; or a time of at
            least 0.1 s, as a text like "30 s", "5 min" or "1 h".
        name: the argument's name, for errors.

    Raises TypeError if it is neither an int nor a text, ValueError if it is not written so or out
    of its range.
    """
    wanted = f'{name} must be a number of steps, or a time like "30 s"'
    if not isinstance(every, str):
        if isinstance(every, bool) or not hasattr(every, "__index__"):
            raise TypeError(f"{wanted}, got {type(every).__name__}")
        if 1 <= (steps := operator.index(every)) <= LARGEST:
            return Every(steps=steps)
        raise ValueError(f"{wanted}, got {shown(steps)}")
    found = _PATTERN.fullmatch(every)
    number, unit = found.groups() if found else ("", "")
    if unit in _SECONDS and float(number) * _SECONDS[unit] >= 0.1:
        return Every(seconds=float(number) * _SECONDS[unit])
    if unit in ("", "step", "steps") and number.isdecimal() and int(number) >= 1:
        return Every(steps=int(number))
    raise ValueError(f"{wanted}, got {every[:_SHOWN]!r}")

"""Arguments that are numbers: what is taken, and the one sentence for what is not."""

from __future__ import annotations

import math
import operator
from typing import Any


def whole_number(name: str, value: Any, least: int | None = 1) -> int:
    """An argument as an int; whole numbers of NumPy and torch are taken as well.

    Raises TypeError if it is none, ValueError if it is below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an int, got {type(value).__name__}")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} is at least {least:,}, got {number:,}")
    return number


def positive(name: str, value: Any, remedy: str = "") -> float:
    """An argument as a float.

    Args:
        name: of the argument.
        value: of the argument.
        remedy: what the sentence adds for an infinite one.

    Raises TypeError if it is not a number, ValueError if it is not above 0 and finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        hint = remedy if value == math.inf else ""
        raise ValueError(f"{name} is above 0 and finite, got {value}{hint}")
    return float(value)

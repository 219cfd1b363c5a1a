"""Check arguments that are numbers, and refuse others in one sentence."""

from __future__ import annotations

import math
import operator
from typing import Any, Final

#: The largest and the smallest number that C code takes.
LARGEST: Final = 2**63 - 1
SMALLEST: Final = -(2**63)
_SHORT: Final = 128  # A message shows an int of at most this many bits as it is.


def any_whole_number(name: str, value: Any) -> int:
    """An argument as an int of any size. Raises TypeError if it is not an int."""
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)


def whole_number(name: str, value: Any, least: int | None = 1, most: int = LARGEST) -> int:
    """An argument as an int; whole numbers of NumPy and torch are taken as well.

    Raises TypeError if it is not an int, ValueError if it is below `least` (None: -2**63), or above
    `most`.
    """
    __tracebackhide__ = True
    number = any_whole_number(name, value)
    if number < (SMALLEST if least is None else least):
        smallest = "-2**63" if least is None else f"{least:,}"
        raise ValueError(f"{name} must be at least {smallest}, got {shown(number)}")
    if number > most:
        largest = "2**63 - 1" if most == LARGEST else f"{most:,}"
        raise ValueError(f"{name} must be at most {largest}, got {shown(number)}")
    return number


def shown(number: float) -> str:
    """A number for a message; of an int with very many digits its size alone."""
    if not isinstance(number, int):
        return str(number)
    sign, bits = "-" * (number < 0), number.bit_length()
    return f"{number:,}" if bits <= _SHORT else f"about {sign}2**{bits}"


def number(name: str, value: Any) -> float:
    """An argument as a float, which is infinite for an int beyond the largest float.

    Raises TypeError if it is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return as_float(value)


def repr_of(value: Any) -> str:
    """`repr(value)` for a message; of an int with very many digits its size alone."""
    is_long = isinstance(value, int) and value.bit_length() > _SHORT
    return shown(value) if is_long else repr(value)


def positive(name: str, value: Any, remedy: str = "") -> float:
    """An argument as a float.

    Args:
        name: of the argument.
        value: of the argument.
        remedy: what the sentence adds for an infinite one.

    Raises TypeError if it is not a number, ValueError if it is not above 0 and finite.
    """
    found = number(name, value)
    if not (math.isfinite(found) and found > 0):
        hint = remedy if found == math.inf else ""
        raise ValueError(f"{name} must be above 0 and finite, got {shown(value)}{hint}")
    return found


def as_float(value: Any) -> float:
    """`float(value)`, which is infinite for an int beyond the largest float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if operator.index(value) > 0 else -math.inf

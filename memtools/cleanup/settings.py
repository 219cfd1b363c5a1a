"""What a cleanup policy may be told: one clear sentence for what makes no sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from memtools.cleanup.clocks import MOST_EVERY, UPDATE, Every

MOST_TOGETHER: Final = 10  # updates between agreements of the ranks


def check(settings: Mapping[str, Any], ranks: object) -> None:
    """All but cadences and the limit. Raises TypeError and ValueError."""
    for name in ("at_epoch", "manage_gc", "strict"):
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} is True or False, got {type(settings[name]).__name__}")
    if _number("pressure", settings["pressure"]) <= 0:
        raise ValueError(f"pressure is above 0 and at most 1, got {settings['pressure']}")
    _number("max_cost", settings["max_cost"])
    warmup = settings["warmup"]
    if isinstance(warmup, bool) or not isinstance(warmup, int):
        raise TypeError(f"warmup is an int, got {type(warmup).__name__}")
    if not 0 <= warmup <= MOST_EVERY:
        raise ValueError(f"warmup is 0 to {MOST_EVERY:,} updates, got {warmup:,}")
    if isinstance(ranks, (str, int)) and not isinstance(ranks, bool):
        raise TypeError(f"ranks is a bool, a process group or None, got {type(ranks).__name__}")
    name = settings["name"]
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a str or None, got {type(name).__name__}")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is 0 to 1, a part of the whole, got {value}")
    return value


def together(cadences: Iterable[Every | None]) -> int:
    """Updates from one agreement of the ranks to the next: as the shortest cadence has it, and at
    most 10, as pressure is seen only there."""
    counts = [every[UPDATE] for every in cadences if every is not None and every[UPDATE]]
    return min([MOST_TOGETHER, *counts])

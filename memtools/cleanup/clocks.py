"""What a cleanup policy counts, and at which counts an action is due.

clock  0 update   1 micro_batch   2 validation   3 epoch   4.. the program's own phases
every  gc_every={"update": 500, "generation": 1}  ->  (500, 0, 0, 0, 1, 0, ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

UPDATE, MICRO_BATCH, VALIDATION, EPOCH = range(4)
BUILT_IN: Final = ("update", "micro_batch", "validation", "epoch")
MOST_CLOCKS: Final = 16
MOST_EVERY: Final = 10**9  # counts from one time to the next

_MISTAKEN: Final = {
    "updates": "update",
    "steps": "update",
    "micro_batches": "micro_batch",
    "validations": "validation",
    "epochs": "epoch",
}

Cadence = int | Mapping[str, int] | None
Every = tuple[int, ...]  # by clock, 0 for never


class Clocks:
    """The clocks of a policy. Phases get theirs when their name comes first."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = {name: number for number, name in enumerate(BUILT_IN)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def phase(self, name: str) -> int:
        """The clock of a phase. Raises TypeError and ValueError for a name that is none."""
        if type(name) is not str:
            raise TypeError(f"a phase's name is a str, got {type(name).__name__}")
        if not name:
            raise ValueError("a phase's name has characters, got an empty str")
        if name in BUILT_IN:
            raise ValueError(
                f"a phase cannot be called {name!r}: the policy counts those by itself"
            )
        return self._number(name)

    def every(self, cadence: Cadence, argument: str, **default: int) -> Every:
        """The cadence by clock; `default` counts for clocks that it does not name.

        Raises TypeError and ValueError with the argument's name; then no clock is new.
        """
        wanted = default | dict(_by_name(cadence, argument))
        new = [name for name in wanted if name not in self._numbers]
        if len(self._numbers) + len(new) > MOST_CLOCKS:
            raise ValueError(f"{argument}: {_too_many(new[-1])}")
        by_clock = {self._number(name): count for name, count in wanted.items()}
        return tuple(by_clock.get(number, 0) for number in range(MOST_CLOCKS))

    def named(self, every: Every) -> list[str]:
        """The phases of a cadence."""
        names = self.names[len(BUILT_IN) :]
        return [name for name, n in zip(names, every[len(BUILT_IN) :], strict=False) if n]

    def words(self, every: Every) -> str:
        """`100 updates, 1 generation`; "" for never."""
        names = self.names
        return ", ".join(f"{n:,} {_plural(names[i], n)}" for i, n in enumerate(every) if n)

    def _number(self, name: str) -> int:
        if name not in self._numbers and len(self._numbers) == MOST_CLOCKS:
            raise ValueError(_too_many(name))
        return self._numbers.setdefault(name, len(self._numbers))


def _too_many(name: str) -> str:
    return (
        f"a policy counts {MOST_CLOCKS - len(BUILT_IN)} phases at most, {name!r} is one more; "
        "give phases that are alike one name"
    )


def _by_name(cadence: Cadence, argument: str) -> Iterable[tuple[str, int]]:
    if cadence is None:
        return
    if not isinstance(cadence, Mapping):
        yield "update", _count(cadence, argument)
        return
    for name, count in cadence.items():
        if type(name) is not str or not name:
            raise TypeError(f'{argument}: a key is a name such as "update", got {name!r}')
        if name in _MISTAKEN:
            raise ValueError(f"{argument}: a key is {_MISTAKEN[name]!r}, got {name!r}")
        yield name, _count(count, f"{argument}[{name!r}]")


def _count(count: int, argument: str) -> int:
    if isinstance(count, bool) or not isinstance(count, int):
        kinds = "an int" if "[" in argument else "an int, a dict of ints or None"
        raise TypeError(f"{argument} is {kinds}, got {type(count).__name__}")
    if not 1 <= count <= MOST_EVERY:
        raise ValueError(f"{argument} is 1 to {MOST_EVERY:,}, got {count:,}; None is never")
    return count


def _plural(name: str, count: int) -> str:
    """A phase by the name that the program gave it."""
    if name not in BUILT_IN:
        return name
    micro = {"micro_batch": "micro-batch", "validation": "validation micro-batch"}
    if name in micro:
        return micro[name] + "es" * (count != 1)
    return name + "s" * (count != 1)

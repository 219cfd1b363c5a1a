"""The schedule of a cleanup policy: its clocks, and the counts at which an action is due.

clock  0 update   1 micro_batch   2 validation   3 epoch   4.. the program's own phases
every  gc_every={"update": 500, "generation": 1}  ->  (500, 0, 0, 0, 1, 0, ...)
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from memtools import _core
from memtools._base.decorate import decorated, in_scope
from memtools._base.number import number, shown
from memtools._base.text import as_name

UPDATE, MICRO_BATCH, VALIDATION, EPOCH = range(4)
BUILT_IN: Final = ("update", "micro_batch", "validation", "epoch")
MOST_CLOCKS: Final = 16
MOST_EVERY: Final = 10**9  # The largest cadence.
MOST_TOGETHER: Final = 10  # The ranks agree at least every 10 updates.

_MISTAKEN: Final = {
    "updates": "update",
    "steps": "update",
    "micro_batches": "micro_batch",
    "validations": "validation",
    "epochs": "epoch",
}

Cadence = int | Mapping[str, int] | None
Every = tuple[int, ...]  # The cadence on each clock; 0 means never.
NEVER: Final[Every] = (0,) * MOST_CLOCKS
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a CleanupPolicy but for `ranks`, which belongs to one process.

    Checks all but cadences and the limit. Raises TypeError and ValueError.
    """

    gc_every: Cadence
    empty_cache_every: Cadence
    trim_every: Cadence
    pool_trim_every: Cadence
    at_epoch: bool
    pressure: float
    strict: bool
    limit: int | str | None

    def __post_init__(self) -> None:
        for argument in ("at_epoch", "strict"):
            value = getattr(self, argument)
            if not isinstance(value, bool):
                raise TypeError(f"{argument} must be True or False, got {type(value).__name__}")
        pressure = number("pressure", self.pressure)
        if not 0 < pressure <= 1:
            raise ValueError(f"pressure must be above 0 and at most 1, got {shown(pressure)}")


def together(cadences: Iterable[Every | None]) -> int:
    """Updates from one agreement of the ranks to the next: as many as the shortest cadence has,
    and at most 10, because pressure is seen only there."""
    counts = [every[UPDATE] for every in cadences if every is not None and every[UPDATE]]
    return min([MOST_TOGETHER, *counts])


class Clocks:
    """The clocks of a policy. A phase gets its clock when its name comes first."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = {name: number for number, name in enumerate(BUILT_IN)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def phase(self, name: str) -> int:
        """The clock of a phase.

        Raises TypeError if `name` is not a str, ValueError if it is empty, the name of a built-in
        clock, or one more than 12 different ones.
        """
        if type(name) is not str:
            raise TypeError(f"a phase's name must be a str, got {type(name).__name__}")
        as_name("a phase's name", name)
        if name in BUILT_IN:
            raise ValueError(f"a phase cannot be called {name!r}: the policy counts those itself")
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

    def phases_of(self, every: Every) -> list[str]:
        """The names of the phases that a cadence counts."""
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
            raise TypeError(f'{argument}: a key must be a name such as "update", got {name!r}')
        as_name(f"{argument}: a key", name)
        if name in _MISTAKEN:
            raise ValueError(f"{argument}: a key must be {_MISTAKEN[name]!r}, got {name!r}")
        yield name, _count(count, f"{argument}[{name!r}]")


def _count(count: int, argument: str) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        kinds = "an int" if "[" in argument else "an int, a dict of ints or None"
        raise TypeError(f"{argument} must be {kinds}, got {type(count).__name__}")
    if not 1 <= (found := operator.index(count)) <= MOST_EVERY:
        raise ValueError(
            f"{argument} must be 1 to {MOST_EVERY:,}, got {shown(found)}; None means never"
        )
    return found


def _plural(name: str, count: int) -> str:
    """A phase keeps the name that the program gave it."""
    if name not in BUILT_IN:
        return name
    micro = {"micro_batch": "micro-batch", "validation": "validation micro-batch"}
    if name in micro:
        return micro[name] + "es" * (count != 1)
    return name + "s" * (count != 1)


class Span:
    """A part of the program that ticks a clock where it ends, an epoch also where it begins; what
    is due then is cleaned up there.

    A context manager and a decorator. It keeps nothing between begin and end, so one object serves
    blocks inside each other and on several threads. A block that an exception leaves is not
    counted, and the exception passes. One that was made and never used is reported once for each
    policy.
    """

    __slots__ = ("_begins", "_call", "_clock", "_complain", "_core", "_used")

    def __init__(
        self, core: _core.Policy, clock: int, call: str, complain: Callable[[str, str], None]
    ) -> None:
        self._core, self._clock, self._begins = core, clock, clock == EPOCH
        #: The call as the program wrote it, such as "epoch()".
        self._call = call
        self._complain = complain
        self._used = False

    def __enter__(self) -> Span:
        self._used = True
        if self._begins:
            self._core.tick(self._clock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._core.tick(self._clock)

    def __call__(self, function: _F) -> _F:
        """`function` as such a part; keeps its name, signature and documentation."""
        self._used = True
        return decorated(
            function, self._call, lambda plain: in_scope(plain, lambda args, kwargs: self)
        )

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            call = f"policy.{self._call}"
            self._complain(
                self._call,
                f"{call} was called and not entered, so nothing was counted: write `with {call}:` "
                f"around what it is to count, or @{call} above a function",
            )

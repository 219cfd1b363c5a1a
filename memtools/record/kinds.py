"""The typed events of a record: for each kind a class with the fields that one part of memtools
writes and another reads, and the sentence that is made of them when they are shown.

    monitor ──► payload() ──► run.mem ──► read() ──► RecordEvent.data: Leak, Holder, Limit, ...
                JSON of the fields             └───► RecordEvent.text: data.sentence()

What a program says in its own words (a mark, the name of a phase) is a text, and has no fields. A
kind of this module that was written as a sentence (by version 1 of the format) is read by
memtools/record/version1.py into the same class, as far as the sentence tells.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Union

from memtools._base import sentences

#: characters of a field: some of them fit into the 64 KiB of a payload, whatever they are
LONGEST = 2048
_NUMBER = 2**63  # no count of anything is larger


@dataclass(frozen=True)
class Event:
    """What all typed events have."""

    KIND: ClassVar[str]

    def sentence(self) -> str:
        """The event in words, for people."""
        raise NotImplementedError


@dataclass(frozen=True)
class Leak(Event):
    """A verdict of the run's own leak test: the fields of a LeakVerdict. `filling`: the container
    with a bound that fills. `over`: nothing is left of what was said before."""

    KIND = "leak"

    kind: str
    signal: str | None
    rate_bytes_per_step: float
    since_step: int | None
    rss_bytes_per_step: float | None = None
    steps_left: tuple[float, float, float] | None = None
    shape: float = 0.0
    declarable: bool = False
    filling: str = ""
    over: bool = False

    def sentence(self) -> str:
        return ("no longer: " if self.over else "") + sentences.of_verdict(self, self.filling)


@dataclass(frozen=True)
class Holder(Event):
    """Who holds what grows: the fields of a Holder of the census."""

    KIND = "holder"

    path: str
    kind: str
    length: int | None
    capacity: int | None
    new_objects: int
    new_bytes: int
    containers: int = 1
    what: str = "objects"
    steps: int = 1

    @property
    def rate_bytes(self) -> float | None:
        """Bytes a step that it took; None where that is not known."""
        return self.new_bytes / self.steps if self.new_bytes and self.steps > 1 else None

    def sentence(self) -> str:
        return sentences.of_holder(self)


@dataclass(frozen=True)
class Limit(Event):
    """A limit of the process itself; `limit_bytes` is None where it was lifted."""

    KIND = "limit"

    name: str
    limit_bytes: int | None

    def sentence(self) -> str:
        size = "unlimited" if self.limit_bytes is None else f"{self.limit_bytes} B"
        return f"{self.name} {size}"


@dataclass(frozen=True)
class Heap(Event):
    """Freed memory that malloc kept when the host's memory had run out."""

    KIND = "heap"

    kept_bytes: int

    def sentence(self) -> str:
        return f"malloc keeps {self.kept_bytes} B of freed memory"


@dataclass(frozen=True)
class GuardSet(Event):
    """The share of the limit at which a guard waits for the end of a step."""

    KIND = "guard_set"

    fraction: float

    def sentence(self) -> str:
        return f"{self.fraction:g} of the limit, at the end of a step"


KINDS: dict[str, type[Event]] = {kind.KIND: kind for kind in (Leak, Holder, Limit, Heap, GuardSet)}

# --- as they stand in a record --------------------------------------------------------------------


def payload(kind: str, body: object, **more: object) -> bytes:
    """The fields of `body`, an object or a mapping that has them, and `more` in the form that a
    record keeps. What is as usual is left out, and a long text is cut."""
    given = body if isinstance(body, Mapping) else None
    found: dict[str, object] = {}
    for one in fields(KINDS[kind]):
        usual = None if one.default is MISSING else one.default
        value = given.get(one.name, usual) if given else getattr(body, one.name, usual)
        value = more.get(one.name, value)
        if value != one.default:
            found[one.name] = _plain(value)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: object) -> object:
    """JSON has no infinity: null is one among the numbers of a tuple, which has no other use. Half
    a character is escaped."""
    if isinstance(value, str):
        return value[:LONGEST].encode("utf-8", "backslashreplace").decode()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(kind: str, data: bytes) -> tuple[Event | None, str]:
    """The event of a payload, and its sentence. Nothing in it is trusted: None for a kind that this
    version does not know and for fields that cannot be, with what is there for a text."""
    try:
        found = json.loads(data, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False).encode()  # no half characters
        event = _event(KINDS[kind], found)
        return event, event.sentence()
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None, data.decode("utf-8", "backslashreplace").replace("\0", "\\0")


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _event(cls: type[Event], found: dict[str, Any]) -> Event:
    hints = _HINTS[cls.KIND]
    return cls(**{name: _fitting(hints[name], found[name]) for name in hints if name in found})


_HINTS = {
    kind: {one.name: typing.get_type_hints(cls)[one.name] for one in fields(cls)}
    for kind, cls in KINDS.items()
}


def _fitting(hint: Any, value: Any) -> Any:
    """The value, where it is one of that type. Raises ValueError for another."""
    kinds, parts = typing.get_origin(hint), typing.get_args(hint)
    if kinds in (types.UnionType, Union):
        return None if value is None else _fitting(parts[0], value)
    if kinds is tuple and isinstance(value, list):
        numbers = parts[0] is float
        values = [math.inf if numbers and v is None else _fitting(parts[0], v) for v in value]
        if Ellipsis in parts or len(parts) == len(values):
            return tuple(values)
    elif hint is float and type(value) in (int, float) and abs(value) < _NUMBER:
        return float(value)
    elif type(value) is hint and (hint is not int or abs(value) < _NUMBER):
        return value
    raise ValueError(f"{value!r} is not {hint}")

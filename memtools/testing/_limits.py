"""MemoryLimits: what `@pytest.mark.memory(...)` asks for, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memtools._base.devices import parse_device
from memtools._base.size import format_bytes, parse_bytes
from memtools.testing._flat import check_steps, parse_growth

KEYWORDS = ("peak", "growth", "device", "steps", "isolate", "timeout")


@dataclass(frozen=True)
class Allowed:
    """A number of bytes, and how the test has written it."""

    bytes: int
    told: str


@dataclass(frozen=True)
class MemoryLimits:
    """The limits of one test.

    Attributes:
        peak: what the test may take at most beyond what was in use when it began; None: anything.
        growth: what memory may grow by in each step; None: anything.
        device: as `assert_flat` has it. With "cuda" or like "cuda:1" the peak is that device's.
        steps: how often the test is called where it makes no steps of an optimizer.
        isolate: whether it runs in a process of its own.
        timeout: seconds that this process may take; None: any time.
    """

    peak: Allowed | None
    growth: Allowed | None
    device: object
    steps: int
    isolate: bool
    timeout: float | None


def limits_of(positional: Sequence[object], keywords: Mapping[str, object]) -> MemoryLimits:
    """What a marker with these arguments means.

    Raises TypeError or ValueError with one sentence for arguments that mean nothing.
    """
    names = f"{', '.join(KEYWORDS[:-1])} and {KEYWORDS[-1]}"
    if positional:
        raise TypeError(f"memory() takes keywords alone: {names}")
    unknown = next((name for name in keywords if name not in KEYWORDS), None)
    if unknown is not None:
        raise TypeError(f"memory() has no keyword {unknown!r}; there are {names}")
    growth, isolate = keywords.get("growth"), keywords.get("isolate", False)
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate is True or False, got {type(isolate).__name__}")
    device, steps = keywords.get("device"), keywords.get("steps", 50)
    if device is not None:
        parse_device(device)
    check_steps(steps)
    assert isinstance(steps, int)
    found = MemoryLimits(
        _peak(keywords.get("peak")),
        None if growth is None else Allowed(*parse_growth(growth)),
        device,
        steps,
        isolate,
        _timeout(keywords.get("timeout"), isolate),
    )
    if found.peak is None and found.growth is None and not isolate:
        raise ValueError("memory() checks nothing; pass peak or growth")
    return found


def _peak(size: object) -> Allowed | None:
    if size is None:
        return None
    count = parse_bytes(size, "peak")  # type: ignore[arg-type]  # says itself what is wrong
    return Allowed(count, size.strip() if isinstance(size, str) else format_bytes(count))


def _timeout(seconds: object, isolate: bool) -> float | None:
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(f"timeout is a number of seconds, got {type(seconds).__name__}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout is above 0 seconds, got {seconds}")
    if not isolate:
        raise ValueError(
            "timeout needs isolate=True, as nothing can end a test of this process; without it "
            "take pytest-timeout"
        )
    return float(seconds)

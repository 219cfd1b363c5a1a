"""The environment keys: settings for people who run a script that they cannot edit.

    MEMTOOLS=0              nothing watches and nothing cleans up
    MEMTOOLS_LOG            the record's path
    MEMTOOLS_LIMIT          what counts as full, like "12 GiB"
    MEMTOOLS_GUARD          the share of the limit at which HostMemoryPressure is raised
    MEMTOOLS_PRINT_EVERY    how often a summary is printed, like "1000" (steps) or "30 s"
    MEMTOOLS_TRACE=0        no step is traced for the line that makes what leaks

    the environment ──► is_off           asked at one place by each part that watches or cleans
                    └─► read() ──► Keys  `memtools run`, and the defaults of MemoryMonitor()

All keys are read and checked here. An option or an argument that is given beats a key. Any other
name that begins with MEMTOOLS_ is ignored: a job's environment may have keys of
another version, and a program must not fail on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from memtools._base.size import parse_bytes

if TYPE_CHECKING:
    from memtools._base.every import Every

_Parsed = TypeVar("_Parsed")

#: The keys, with what each one sets. MEMTOOLS is read when memtools is imported.
KEYS = {
    "MEMTOOLS": "0 turns watching and cleaning off",
    "MEMTOOLS_LOG": "the record",
    "MEMTOOLS_LIMIT": "the memory limit",
    "MEMTOOLS_GUARD": "raises HostMemoryPressure at this share of the limit",
    "MEMTOOLS_PRINT_EVERY": "how often a summary is printed",
    "MEMTOOLS_TRACE": "0 turns off the tracing that finds a leak's line",
}

#: Whether MEMTOOLS=0 was set when memtools was imported: nothing watches, nothing cleans up.
is_off = os.environ.get("MEMTOOLS", "").strip() == "0"

#: `memtools run` has taken the other keys for its own monitor, so that monitors of the program
#: leave them alone.
is_taken = False


class Keys(NamedTuple):
    """The keys that are set, checked; None for each that is not."""

    log: str | None = None
    limit: int | None = None
    guard: float | None = None
    print_every: Every | None = None
    trace: bool | None = None


def as_fraction(text: str, name: str) -> float:
    """A share of the limit. Raises ValueError, in which `name` is named, if it is not above 0 and
    at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 < value <= 1:
        return value
    raise ValueError(f"{name} must be a share of the limit, above 0 and at most 1, got {text}")


def _as_switch(text: str, name: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 (off) or 1 (on), got {text!r}")
    return text == "1"


def set_keys(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The keys that are set, by name. One that is empty is not set."""
    given = os.environ if environment is None else environment
    return {name: given[name] for name in KEYS if given.get(name, "").strip()}


def read(environment: Mapping[str, str] | None = None) -> Keys:
    """The keys as they are set now.

    Args:
        environment: where they are looked up. None, the default: os.environ.

    Raises ValueError, in one sentence that names the key, if a value makes no sense.
    """
    from memtools._base.every import parse_every  # of no use to those who ask for is_off alone

    given = set_keys(environment)
    _as_switch(given.pop("MEMTOOLS", "1").strip(), "MEMTOOLS")

    def parsed(name: str, parse: Callable[[str, str], _Parsed]) -> _Parsed | None:
        return parse(given[name].strip(), name) if name in given else None

    return Keys(
        given.get("MEMTOOLS_LOG"),
        parsed("MEMTOOLS_LIMIT", parse_bytes),
        parsed("MEMTOOLS_GUARD", as_fraction),
        parsed("MEMTOOLS_PRINT_EVERY", parse_every),
        parsed("MEMTOOLS_TRACE", _as_switch),
    )


def for_monitor() -> Keys:
    """The keys that MemoryMonitor() takes its defaults from: none of them in a program under
    `memtools run`, whose monitor has taken them.

    Raises ValueError as `read` does.
    """
    return Keys() if is_taken or is_off else read()

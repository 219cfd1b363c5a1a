"""Whether a container may be a buffer that still fills: by its name, and by the code that fills it.

A shuffle buffer, a replay list or a cache grows in a straight line until it is full, and a straight
line is all that a leak shows as well. What the program says of it is here: the container has the
name of such a thing, its owner has a maximum, or the function that adds to it takes from it as
well, or compares its length with a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from memtools import _core
from memtools._census.holders import LRU_CACHE, Local
from memtools._census.lines import BOUND, PUT, TAKE
from memtools._census.names import Name, uses_of

#: Words of names, as in `shuffle_buffer`, `samples_queue` or `_LORA_CACHE`.
_WORDS = re.compile(
    r"(?<![a-z])(buf|buffer|cache|pool|queue|replay|memo|shuffle)(s|d|r|ed|ing|ized)?(?![a-z])",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # `ReplayMemory` is two words.
_MAXIMA = re.compile(r"max_?(size|len|length|entries|items)|capacity|limit|bound|size_limit")


def may_fill(path: str, way: Sequence[Any], names: Sequence[Name]) -> bool:
    """Whether its name or its owner's maximum make a container a buffer that may still fill.

    Args:
        path: the name of the container.
        way: the container, and what holds it, one by one.
        names: the names on that way.
    """
    if type(way[0]) is LRU_CACHE:
        return False  # It says itself whether it has a bound.
    if _WORDS.search(_HUMP.sub("_", path).replace("_", " ")):
        return True
    return bool(names and names[0].name) and any(map(_has_maximum, way[1:4]))


def is_bounded(name: Name) -> bool:
    """Whether the code that fills what has this name sets an end to it."""
    return bool(name.name) and any(
        PUT in whats and not whats.isdisjoint((TAKE, BOUND)) for whats in uses_of(name).values()
    )


def _has_maximum(owner: Any) -> bool:
    """Whether an instance has an attribute such as `maxsize` above 0."""
    space = _core._instance_dict(owner) if type(owner) is not Local else None
    if type(space) is not dict or _core._module_of(space) is not None:
        return False
    return any(
        type(key) is str and type(value) is int and value > 0 and _MAXIMA.fullmatch(key.strip("_"))
        for key, value in tuple(dict.items(space))
    )

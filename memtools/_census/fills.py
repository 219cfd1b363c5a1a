"""Whether a container may be a buffer that still fills: by its name, and by the code that fills it.

A shuffle buffer, a replay list or a cache grows in a straight line until it is full, and a straight
line is all that a leak shows as well. What the program says of it is here: the container has the
name of such a thing, its owner has a maximum, or the function that adds to it takes from it as
well, or compares its length with a number. A maximum that is named as a number of entries is the
bound of a container that has such a name, or is bounded by the code, or is a library's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from memtools import _core
from memtools._census.holders import LRU_CACHE, Local
from memtools._census.lines import BOUND, PUT, TAKE
from memtools._census.names import Name, is_users, uses_of

#: Words of names, as in `shuffle_buffer`, `samples_queue` or `_LORA_CACHE`.
_WORDS = re.compile(
    r"(?<![a-z])(buf|buffer|cache|pool|queue|replay|memo|shuffle)(s|d|r|ed|ing|ized)?(?![a-z])",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # `ReplayMemory` is two words.
_MAXIMA = re.compile(
    r"max_?(size|len|length|entries|items)|capacity|limit|bound|size_limit|buffer_size"
)
_ENDLESS = 10**9  # A maximum of so many or more is as good as none.
#: Those of them that count entries, as in stable-baselines3, torchrl and replay memories by hand.
_SIZES = re.compile(r"(max|buffer|memory|replay)_?(size|len|entries|items)|capacity")


def may_fill(path: str, way: Sequence[Any], names: Sequence[Name]) -> bool:
    """Whether its name or its owner's maximum make a container a buffer that may still fill.

    Args:
        path: the name of the container.
        way: the container, and what holds it, one by one.
        names: the names on that way.
    """
    if type(way[0]) is LRU_CACHE:
        return False  # It says itself whether it has a bound.
    if _is_worded(path):
        return True
    is_named = bool(names and names[0].name)
    return is_named and any(maximum_of(one, _MAXIMA) is not None for one in way[1:4])


def capacity_of(path: str, way: Sequence[Any], names: Sequence[Name]) -> int | None:
    """The most entries that a container gets by what its owner says, such as `capacity`; None where
    it says nothing, or that may be the bound of something else. The arguments are as of
    `may_fill`."""
    if not names or not names[0].name or type(way[0]) is LRU_CACHE:
        return None
    if is_users(names[0].owner) and not _is_worded(path) and not is_bounded(names[0]):
        return None
    return next((found[1] for one in way[1:3] if (found := maximum_of(one)) is not None), None)


def _is_worded(path: str) -> bool:
    return _WORDS.search(_HUMP.sub("_", path).replace("_", " ")) is not None


def is_bounded(name: Name) -> bool:
    """Whether the code that fills what has this name sets an end to it."""
    return bool(name.name) and any(
        PUT in whats and not whats.isdisjoint((TAKE, BOUND)) for whats in uses_of(name).values()
    )


def maximum_of(owner: Any, names: re.Pattern[str] = _SIZES) -> tuple[str, int] | None:
    """The name and the value of an instance's attribute that is an int above 0, less than what
    stands for no bound, and has one of these names, by default those that count entries, such as
    `maxsize`; None if it has none."""
    space = _core._instance_dict(owner) if type(owner) is not Local else None
    if type(space) is not dict or _core._module_of(space) is not None:
        return None
    for key, value in tuple(dict.items(space)):
        if type(key) is not str or type(value) is not int or not 0 < value < _ENDLESS:
            continue
        if names.fullmatch(key.strip("_")):
            return key, value
    return None

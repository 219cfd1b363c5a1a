"""The text of PYTORCH_ALLOC_CONF: which variable torch reads, and the keys in it.

    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
         │
         └─► items at the commas outside of brackets ─► key and value

Which keys and values there may be is torch's matter, which raises an error for others when its
allocator is first used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The first that is set counts, also an empty one. torch's documentation has it the other way
#: round, and its code as here.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
#: The keys that the allocator cudaMallocAsync reads; it ignores all others.
ASYNC_KEYS = frozenset({"backend", "per_process_memory_fraction"})

Value = bool | int | float | str


def chosen(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The name and the text of the variable that torch reads; None where none is set."""
    return next(((name, environ[name]) for name in VARIABLES if name in environ), None)


def parse(text: str) -> dict[str, Value]:
    """The keys and values of the text. Of equal keys the last one counts, and spaces mean nothing,
    as for torch."""
    items = re.split(r",(?![^\[\]]*\])", "".join(text.split()))
    pairs = [item.partition(":") for item in items]
    return {key: _value(value) for key, _, value in pairs if key and value}


def _value(text: str) -> Value:
    """A bool or a number if it is written like one, else the text."""
    if text in ("True", "False"):
        return text == "True"
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text

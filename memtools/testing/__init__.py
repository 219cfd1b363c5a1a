"""Tests that keep memory flat: `assert_flat`, and the marker `memory` of pytest.

pytest imports this package at each start, so `assert_flat` is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools.testing._flat import assert_flat as assert_flat

__all__ = ["assert_flat"]


def __getattr__(name: str) -> object:
    if name != "assert_flat":
        raise AttributeError(f"module 'memtools.testing' has no attribute {name!r}")
    from memtools.testing._flat import assert_flat

    globals()[name] = assert_flat
    return assert_flat

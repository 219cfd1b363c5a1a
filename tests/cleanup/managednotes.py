"""Something to clear, and a decorator that clears it: for the tests of managed."""

from __future__ import annotations

import pytest

import memtools
from tests.cleanup.test_managed import P

CLEARED: list[str] = []


class Note:
    def clear(self) -> None:
        CLEARED.append("cleared")


NOTE = Note()
manage = memtools.managed(P, clear=[NOTE])


@pytest.fixture(autouse=True)
def nothing_cleared() -> None:
    CLEARED.clear()

"""What the tests of who grows share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


class Keeper:
    """What the loops of these tests keep things in."""

    head: Any = None
    tail: Any = None

    def __init__(self) -> None:
        self.things: Any = []


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    global KEEPER
    KEEPER = Keeper()
    yield KEEPER
    del KEEPER

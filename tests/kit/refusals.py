"""Calls that must be answered by an exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refused(error: type[BaseException], call: Callable[[], object]) -> None:
    """Fails unless the call raises this very exception: a subclass of it is another refusal, and a
    NameError in the test is none."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error, f"{raised.type.__name__}: {raised.value}"

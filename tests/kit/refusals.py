"""Calls that must be answered by an exception."""

from __future__ import annotations

from collections.abc import Callable


def refused(error: type[BaseException], call: Callable[[], object]) -> None:
    """Fails unless the call raises this very exception: a subclass of it is another refusal, and a
    NameError in the test is none. It leaves nothing to the collector: leak tests count objects."""
    try:
        call()
    except BaseException as raised:
        if type(raised) is not error:
            raise AssertionError(f"not {error.__name__}, but {raised!r}") from raised
    else:
        raise AssertionError(f"no {error.__name__}")

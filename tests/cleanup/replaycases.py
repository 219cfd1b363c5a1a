"""Calls of memtools._core.PolicyReplay, good and bad, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtools import _core

Case = Callable[[], object]
RULES = [((5,), 1, False), ((0, 2), 0, True)]
KNOWN = (2**30,) * 8


def refused(call: Case) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - any refusal; which one, other tests say
        call()


def make() -> _core.PolicyReplay:
    return _core.PolicyReplay(RULES, pressure=0.5, limit=2**40, start_ns=7)


def used() -> None:
    core = make()
    ticks, now, asked = core.advance(0, 9, 10, 10**9, KNOWN)
    assert asked
    core.done(0, now, 10**6, 5, 4, 10, 0, 0, 1)
    core.advance(1, ticks, now, 10**10, KNOWN + (3,) * 5)


CASES: dict[str, list[Case]] = {
    "PolicyReplay": [
        make,
        lambda: refused(lambda: _core.PolicyReplay(3)),  # type: ignore[arg-type]
        lambda: refused(lambda: _core.PolicyReplay([((2**50,), 0, False)])),
        lambda: refused(lambda: _core.PolicyReplay([((-1,), 0, False)])),
        lambda: refused(lambda: _core.PolicyReplay([], pressure=7.0)),
    ],
    "PolicyReplay.__new__": [make],
    "PolicyReplay.advance": [
        used,
        lambda: refused(lambda: make().advance(16, 1, 0, 0, KNOWN)),
        lambda: refused(lambda: make().advance(0, 1, 1, 0, KNOWN)),
        lambda: refused(lambda: make().advance(0, 1, 0, 0, KNOWN[1:])),
        lambda: refused(lambda: make().advance(0, 1, 0, 0, (2**70,) * 8)),
    ],
    "PolicyReplay.done": [used, lambda: refused(lambda: make().done(16, *(0,) * 8))],  # type: ignore[call-arg]
    "PolicyReplay.figures": [
        lambda: make().figures(15),
        lambda: refused(lambda: make().figures(16)),
        lambda: refused(lambda: make().figures(-1)),
    ],
}

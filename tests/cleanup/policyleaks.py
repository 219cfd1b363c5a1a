"""Calls of memtools._core's Policy, good and bad, for test_leaks.py."""

from __future__ import annotations

import gc
from collections.abc import Callable

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]
UNKNOWN = -1


def core_policy(
    act: Callable[[int, int], object],
    *,
    pressure: float = 0.85,
    max_cost: float = 0.003,
    strict: bool = False,
    together: int = 0,
    limit: int = 0,
    devices: int = 0,
    root: str = "/",
) -> _core.Policy:
    return _core.Policy(act, pressure, max_cost, strict, together, limit, devices, root)


class Actor:
    """A policy and what it calls, in a cycle, as a CleanupPolicy and its core are."""

    def __init__(self) -> None:
        self.core = core_policy(self.act)
        self.core.set_rule(0, (1, 2), 0, False)
        self.core.set_rule(1, (0, 0, 3), 31, True)

    def act(self, mask: int, clock: int) -> None:
        for action in range(16):
            if mask >> action & 1:
                self.core.done(action, 1000, 10**9, 10**8, 10**9, 10, UNKNOWN, 10)


def cycle() -> None:
    Actor()
    gc.collect(0)  # each holds 20 KB, of which the collector knows nothing


def fail(mask: int, clock: int) -> None:
    raise LookupError(mask)


SHARED = Actor().core
FAILS = core_policy(fail)
FAILS.set_rule(0, (1,), 0, False)


def bad(error: type[BaseException], call: Callable[..., object], *arguments: object) -> Case:
    return lambda: refused(error, lambda: call(*arguments))


CASES: dict[str, list[Case]] = {
    "Policy": [
        lambda: core_policy(print),
        lambda: core_policy(print, strict=True, together=4, limit=10**9, root="/nowhere"),
        lambda: core_policy(print, devices=2),
        cycle,
        bad(ValueError, lambda: core_policy(print, devices=9)),
        bad(ValueError, lambda: core_policy(print, together=2**60)),
        bad(ValueError, lambda: core_policy(print, root="/" * 9000 + "x")),
        bad(TypeError, lambda: core_policy(print, limit="much")),  # type: ignore[arg-type]
        bad(TypeError, _core.Policy),
    ],
    "Policy.tick": [
        SHARED.tick,
        lambda: SHARED.tick(1, 5),
        lambda: SHARED.tick(2, 0),
        bad(LookupError, FAILS.tick),
        bad(ValueError, SHARED.tick, 16),
        bad(ValueError, SHARED.tick, 2**70),
        bad(ValueError, SHARED.tick, 0, -1),
        bad(TypeError, SHARED.tick, "x"),
        bad(TypeError, SHARED.tick, 0, "x"),
        bad(TypeError, SHARED.tick, 0, 1, 2),
    ],
    "Policy.set_rule": [
        lambda: SHARED.set_rule(3, (5,), 1, False),
        lambda: SHARED.set_rule(3, (), 0, False),
        bad(ValueError, SHARED.set_rule, 16, (), 0, False),
        bad(ValueError, SHARED.set_rule, 0, (2**50,), 0, False),
        bad(ValueError, SHARED.set_rule, 0, (0,) * 17, 0, False),
        bad(OverflowError, SHARED.set_rule, 0, (-1,), 0, False),
        bad(TypeError, SHARED.set_rule, 0, [1], 0, False),
        bad(TypeError, SHARED.set_rule, 0),
    ],
    "Policy.done": [
        lambda: SHARED.done(0, 5, 1, 2, 3, UNKNOWN, UNKNOWN, UNKNOWN),
        lambda: SHARED.done(1, 5, UNKNOWN, UNKNOWN, UNKNOWN, 3, 2, 1),
        bad(ValueError, SHARED.done, 16, 5, 1, 2, 3, 1, 2, 3),
        bad(TypeError, SHARED.done, 0, 5, "x", 2, 3, 1, 2, 3),
        bad(TypeError, SHARED.done, 0),
    ],
    "Policy.look": [SHARED.look],
    "Policy.forget": [SHARED.forget],
    "Policy.why": [lambda: SHARED.why(0), bad(ValueError, SHARED.why, 16)],
    "Policy.ticks": [lambda: SHARED.ticks(0), bad(ValueError, SHARED.ticks, -1)],
    "Policy.figures": [lambda: SHARED.figures(0), bad(ValueError, SHARED.figures, -1)],
    "Policy.__new__": [lambda: core_policy(print)],
}
for _name in ["seconds", "looks", "look_ns"]:
    CASES[f"Policy.{_name}"] = [lambda name=_name: getattr(SHARED, name)]  # type: ignore[misc]

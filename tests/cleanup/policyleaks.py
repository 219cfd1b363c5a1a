"""Calls of memtools._core's Policy, good and bad, for test_leaks.py."""

from __future__ import annotations

import gc
from collections.abc import Callable

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]
Rule = tuple[tuple[int, ...], int, bool]
RULES: list[Rule] = [((1, 2), 0, False), ((0, 0, 3), 31, True)]


class Actor:
    """A policy and what it calls, in a cycle, as a CleanupPolicy and its core are."""

    def __init__(self, **settings: object) -> None:
        self.core = _core.Policy(self.act, RULES, **settings)  # type: ignore[arg-type]

    def act(self, mask: int, clock: int) -> None:
        for action in range(16):
            if mask >> action & 1:
                self.core.done(action, 1000, 10**9, 10**8, 10**9, 10, None, 10)


def cycle() -> None:
    Actor()
    gc.collect(0)  # each holds 20 KB, of which the collector knows nothing


def fail(mask: int, clock: int) -> None:
    raise LookupError(mask)


SHARED = Actor().core
FAILS = _core.Policy(fail, RULES)


def made(**settings: object) -> Case:
    return lambda: _core.Policy(print, RULES, **settings)  # type: ignore[arg-type]


def bad(*rules: object, error: type[BaseException] = ValueError, **settings: object) -> Case:
    return lambda: refused(error, lambda: _core.Policy(print, rules, **settings))  # type: ignore[arg-type]


CASES: dict[str, list[Case]] = {
    "Policy": [
        made(),
        made(pressure=0.5, max_cost=0, strict=True, sync_every=4, limit=10**9, root="/nowhere"),
        made(devices=2),
        cycle,
        bad(pressure=0),
        bad(max_cost=-1),
        bad(sync_every=-1),
        bad(limit=0),
        bad(limit="much", error=TypeError),
        bad(devices=9),
        bad(root="/" * 9000 + "x"),
        bad(1),
        bad(((1,), 0)),
        bad(([1], 0, False)),
        bad(((-1,), 0, False)),
        bad(((2**70,), 0, False)),
        bad(((0,) * 17, 0, False)),
        bad(((0,), 32, False)),
        bad(*RULES * 9),
        lambda: refused(TypeError, lambda: _core.Policy(1, RULES)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Policy(print, 1)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Policy()),  # type: ignore[call-arg]
    ],
    "Policy.tick": [
        SHARED.tick,
        lambda: SHARED.tick(1, 5),
        lambda: SHARED.tick(2, 0),
        lambda: refused(LookupError, FAILS.tick),
        lambda: refused(ValueError, lambda: SHARED.tick(16)),
        lambda: refused(ValueError, lambda: SHARED.tick(2**70)),
        lambda: refused(TypeError, lambda: SHARED.tick("x")),  # type: ignore[arg-type]
        lambda: refused(ValueError, lambda: SHARED.tick(0, -1)),
        lambda: refused(TypeError, lambda: SHARED.tick(0, "x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SHARED.tick(0, 1, 2)),  # type: ignore[call-arg]
    ],
    "Policy.set_rule": [
        lambda: SHARED.set_rule(3, ((5,), 1, False)),
        lambda: SHARED.set_rule(3, ((), 0, False)),
        lambda: refused(ValueError, lambda: SHARED.set_rule(16, ((), 0, False))),
        lambda: refused(ValueError, lambda: SHARED.set_rule(0, ((-1,), 0, False))),
        lambda: refused(TypeError, lambda: SHARED.set_rule(0)),  # type: ignore[call-arg]
    ],
    "Policy.done": [
        lambda: SHARED.done(0, 5, 1, 2, 3, None, None, None),
        lambda: SHARED.done(1, 5, None, None, None, 3, 2, 1),
        lambda: refused(ValueError, lambda: SHARED.done(16, 5, 1, 2, 3, 1, 2, 3)),
        lambda: refused(ValueError, lambda: SHARED.done(0, -5, 1, 2, 3, 1, 2, 3)),
        lambda: refused(ValueError, lambda: SHARED.done(0, None, 1, 2, 3, 1, 2, 3)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SHARED.done(0, 5, "x", 2, 3, 1, 2, 3)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SHARED.done(0)),  # type: ignore[call-arg]
    ],
    "Policy.look": [SHARED.look],
    "Policy.forget": [SHARED.forget],
    "Policy.why": [lambda: SHARED.why(0), lambda: refused(ValueError, lambda: SHARED.why(16))],
    "Policy.ticks": [
        lambda: SHARED.ticks(0),
        lambda: refused(ValueError, lambda: SHARED.ticks(-1)),
    ],
    "Policy.figures": [
        lambda: SHARED.figures(0),
        lambda: refused(ValueError, lambda: SHARED.figures(-1)),
    ],
    "Policy.__new__": [made()],
}
for _name in ["seconds", "looks", "look_ns"]:
    CASES[f"Policy.{_name}"] = [lambda name=_name: getattr(SHARED, name)]  # type: ignore[misc]

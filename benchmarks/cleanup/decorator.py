"""What a decorator costs on `agent.update(buffer)` when nothing is due: ours, and one by hand."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import memtools
from benchmarks.kit.harness import Samples, interleave, statement

EVERY = 10**9  # updates: nothing is due
CALLS = 5000  # in a turn


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
    """As people write it: collects at every so many updates, also after an exception."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        finally:
            self.updates += 1
            if self.updates % EVERY == 0:
                gc.collect()

    return wrapper


POLICY = memtools.CleanupPolicy(EVERY, at_epoch=False)


class Agent:
    """The same method four times."""

    def __init__(self) -> None:
        self.updates = 0
        self.kept: list[int] = []

    def bare(self, buffer: object) -> object:
        return buffer

    ours = memtools.managed(POLICY)(bare)
    clear = memtools.managed(POLICY, clear="kept")(bare)
    hand = by_hand(bare)


def costs(seconds: float) -> Samples:
    """Nanoseconds a call, by turns: `bare`; `ours`, of a policy that watches memory as it does by
    default; `clear`, which also clears a list; `hand`."""
    agent = Agent()
    names = ("bare", "ours", "clear", "hand")
    runners = {name: statement(f"agent.{name}(None)", agent=agent) for name in names}
    return interleave(runners, CALLS, seconds=seconds, first=CALLS)

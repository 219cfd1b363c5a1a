"""A call of a method, plain and decorated, when nothing is due."""

from __future__ import annotations

from typing import Any

from _cleanup_loop import by_hand
from _harness import Json, interleave, statement, timing_table
from _limits import Limit, number_limit

import memtools

CALLS = 20_000
NEVER = 2**40  # updates


class Agent:
    def __init__(self) -> None:
        self.history: list[Any] = []

    def update(self, batch: object) -> None:
        pass


def decorated(method: Any) -> Any:
    """An agent whose update is that."""
    return type("Agent", (Agent,), {"update": method})()


def measure(seconds: float) -> Json:
    policy = memtools.CleanupPolicy(gc_every=None, at_epoch=False, pressure=1.0)
    agents = {
        "undecorated": Agent(),
        "by hand": decorated(by_hand(Agent.update, NEVER)),
        "managed": decorated(memtools.managed(policy)(Agent.update)),
        "managed, clear=": decorated(memtools.managed(policy, clear="history")(Agent.update)),
        "managed, no policy": decorated(memtools.managed(None, clear="history")(Agent.update)),
    }
    runners = {name: statement("a.update(b)", a=agent, b=None) for name, agent in agents.items()}
    runners["step() beside it"] = statement(
        "a.update(b); step()", a=Agent(), b=None, step=policy.step
    )
    samples = interleave(runners, CALLS, seconds=seconds, warm=500, first=1_000)
    return {"rows": samples.summary("undecorated")}


def show(section: Json) -> None:
    print(f"decorator\n{timing_table(section['rows'], 'undecorated')}\n", flush=True)


def limits(section: Json) -> list[Limit]:
    return [
        number_limit(
            "managed adds to a call",
            40,
            "ns",
            row["difference_of_mins_ns"],
            row["median_difference_ns"],
        )
        for row in section["rows"]
        if row["name"] == "managed"
    ]

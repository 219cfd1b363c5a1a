"""The report of a cleanup policy, put together: what was counted here, and what the core knows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from memtools.cleanup.actions import NAMES, WARM_UP
from memtools.cleanup.clocks import UPDATE
from memtools.cleanup.engine import NEVER, Engine, Tally
from memtools.cleanup.report import ActionReport, PolicyReport, verdict

_PAID, _SKIPPED, _BACKOFF = 4, 5, 6  # of _core.Policy.figures


class _Base(NamedTuple):
    """Where the report began."""

    seconds: float
    updates: int
    looks: int
    own_ns: int
    tallies: dict[int, Tally]
    judged: dict[int, tuple[int, int]]  # how often it paid and was skipped


class Figures:
    """Time and reports of one policy."""

    __slots__ = ("_base", "_engine", "_past", "_stopped")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._base = _Base(0.0, 0, 0, 0, {}, {})
        self._past = 0.0  # seconds before the core's clock began anew
        self._stopped: float | None = None  # its reading at the stop

    # --- time ---

    def begin(self) -> None:
        """At a start: what was before the first update of all is not the policy's time."""
        core = self._engine.core
        used = any(core.ticks(clock) for clock in range(len(NEVER)))
        self._past = self._seconds() if used else 0.0
        self._stopped = None
        core.forget()
        self._engine.begin_costs()

    def end(self) -> None:
        self._stopped = self._engine.core.seconds

    def _seconds(self) -> float:
        now = self._engine.core.seconds
        return self._past + (now if self._stopped is None else self._stopped)

    # --- reports ---

    def reset(self) -> None:
        engine = self._engine
        self._base = _Base(
            self._seconds(),
            engine.core.ticks(UPDATE),
            engine.core.looks,
            self._own_ns(),
            dict(engine.tallies),
            {action: self._judged(action) for action in engine.tallies},
        )
        engine.forget_cycles()

    def report(self, name: str | None) -> PolicyReport:
        engine, base = self._engine, self._base
        seconds = self._seconds() - base.seconds
        updates = engine.core.ticks(UPDATE) - base.updates
        actions = [self._action(action, seconds, updates) for action in self._shown()]
        return PolicyReport(
            name,
            seconds,
            updates,
            tuple(actions),
            engine.cycles(),
            engine.gc.managed and engine.freeze_at is None,
            engine.gc.frozen,
            engine.core.looks - base.looks,
            (self._own_ns() - base.own_ns) / 1e6,
            engine.notes(),
        )

    def _own_ns(self) -> int:
        return self._engine.own_ns + self._engine.core.look_ns

    def _judged(self, action: int) -> tuple[int, int]:
        figures = self._engine.core.figures(action)
        return figures[_PAID], figures[_SKIPPED]

    def _shown(self) -> list[int]:
        """Those that can become due, and those that were done."""
        engine = self._engine
        known = {*engine.rules, *engine.callbacks.by_action, *engine.tallies}
        return [
            action for action in sorted(known) if engine.when(action) or self._ran(action).times
        ]

    def _ran(self, action: int) -> Tally:
        now = self._engine.tallies.get(action, Tally())
        return now.since(self._base.tallies.get(action, Tally()))

    def _action(self, action: int, seconds: float, updates: int) -> ActionReport:
        engine, ran = self._engine, self._ran(action)
        paid, skipped = self._judged(action)
        paid_before, skipped_before = self._base.judged.get(action, (0, 0))
        found = ActionReport(
            engine.name(action),
            engine.when(action) or ("after warm-up" if action == WARM_UP else "by hand"),
            ran.times,
            ran.ns / 1e6,
            ran.ns / 1e9 / seconds if seconds > 0 else math.nan,
            ran.host,
            ran.device,
            paid - paid_before,
            skipped - skipped_before,
            engine.core.figures(action)[_BACKOFF],
            engine.errors.get(action, ""),
            "",
        )
        if action == WARM_UP:
            return replace(found, verdict="once, so that later collects pass over what was there")
        words = verdict(
            found,
            applies=engine.why_not(action) if action in NAMES else "",
            per_update_ms=1e3 * seconds / updates if updates else 0.0,
            max_cost=engine.max_cost,
            strict=engine.strict,
        )
        return replace(found, verdict=words)

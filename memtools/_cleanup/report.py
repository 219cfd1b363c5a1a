"""What a cleanup policy did, what that cost, what it freed, and whether it pays."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from memtools._base.size import format_bytes
from memtools._base.text import aligned
from memtools._cleanup.actions import NAMES, WARM_UP, trigger_words
from memtools._cleanup.cadence import UPDATE
from memtools._cleanup.engine import MAX_COST, MUCH, Done, Engine


@dataclass(frozen=True, slots=True)
class ActionReport:
    """One action of a policy.

    Attributes:
        name: "gc", "gc_young", "empty_cache", "trim", "pool_trim", "freeze", or a callback's name.
        when: when it is due: "100 updates, 1 epoch; pressure".
        count: number of runs.
        total_ms: of all runs.
        share: of all the time; nan at the start.
        host_freed_bytes: by all runs.
        device_freed_bytes: by all runs.
        paid: runs that freed 1 % of the process's memory, on the host or on the devices.
        skipped: cadences left out because actions that do not pay had used up their time.
        backoff: how many times longer than its cadence it waits now, 1 to 64.
        error: the last exception, as text.
        verdict: whether it pays, in words.
    """

    name: str
    when: str
    count: int
    total_ms: float
    share: float
    host_freed_bytes: int
    device_freed_bytes: int
    paid: int
    skipped: int
    backoff: int
    error: str
    verdict: str

    @property
    def mean_ms(self) -> float:
        """Of one run; nan without runs."""
        return self.total_ms / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class CycleReport:
    """Collected cycles of objects, and the tensors that they held.

    Attributes:
        objects: collected objects.
        tensors: tensors among them, in inspected collections.
        tensor_bytes: memory of these tensors.
        inspected: collections that looked for tensors, after one that found much.
        examples: kinds of tensors, with the classes and functions in the same garbage:
            "[256, 256] float32 tensor, with Trainer, Hook".
    """

    objects: int
    tensors: int
    tensor_bytes: int
    inspected: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What a CleanupPolicy did so far. `str()` is a table.

    Attributes:
        seconds: since the policy began.
        updates: counted in that time.
        actions: those that can become due, and those that ran.
        cycles: what collections found.
        manages_gc: whether the policy runs Python's gc now.
        frozen_objects: objects it has frozen.
        looks: readings of memory.
        own_ms: milliseconds without the actions.
        notes: restrictions that apply here, a sentence each.
    """

    seconds: float
    updates: int
    actions: tuple[ActionReport, ...]
    cycles: CycleReport
    manages_gc: bool
    frozen_objects: int
    looks: int
    own_ms: float
    notes: tuple[str, ...] = ()

    @property
    def total_ms(self) -> float:
        """Of all actions."""
        return math.fsum(action.total_ms for action in self.actions)

    @property
    def share(self) -> float:
        """Share of time that actions and the policy took; nan at the start."""
        return (self.total_ms + self.own_ms) / 1e3 / self.seconds if self.seconds else math.nan

    def __getitem__(self, name: str) -> ActionReport:
        """The action of that name. Raises KeyError."""
        for action in self.actions:
            if action.name == name:
                return action
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts."""
        found = asdict(self) | {"total_ms": self.total_ms, "share": self.share}
        found["actions"] = [asdict(action) | {"mean_ms": action.mean_ms} for action in self.actions]
        found["cycles"]["examples"] = list(self.cycles.examples)
        found["notes"] = list(self.notes)
        return found

    def __str__(self) -> str:
        lines = [self._headline(), *table([_HEAD, *map(_row, self.actions)])]
        return "\n".join(lines + self._notes())

    def _headline(self) -> str:
        return (
            f"Cleanup policy: {self.updates:,} updates in {self.seconds:,.1f} s, "
            f"of which cleanups took {_percent(self.share)}"
        )

    def _notes(self) -> list[str]:
        lines = [f"Looks and decisions: {self.looks:,}, {self.own_ms:,.1f} ms"]
        if self.manages_gc:
            lines.append(f"Python's gc is managed: {self.frozen_objects:,} objects frozen")
        found = self.cycles
        if found.tensors:
            lines.append(
                f"Cycles held {found.tensors:,} tensors, {format_bytes(found.tensor_bytes)}, in "
                f"{found.inspected:,} collects that looked; without cycles they are freed at once:"
            )
            lines += [f"  {example}" for example in found.examples]
        return lines + [f"Note: {note}" for note in self.notes]


_HEAD = ("action", "when", "times", "ms each", "of time", "freed, host", "device", "paid", "")


def _row(action: ActionReport) -> tuple[str, ...]:
    ran = action.count > 0
    return (
        action.name,
        action.when,
        f"{action.count:,}",
        f"{action.mean_ms:,.2f}" if ran else "",
        _percent(action.share) if ran else "",
        format_bytes(action.host_freed_bytes) if ran else "",
        format_bytes(action.device_freed_bytes) if action.device_freed_bytes else "",
        f"{action.paid:,} of {action.count:,}" if ran else "",
        action.verdict,
    )


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of even columns: words to the left, figures to the right; empty columns go."""
    kept, right = _kept(rows)
    return list(aligned(kept, right, indent=""))


def _kept(rows: list[tuple[str, ...]]) -> tuple[list[list[str]], list[int]]:
    """The rows without columns that are empty, and which of the others are figures."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    right = [n for n, i in enumerate(kept) if 1 < i < len(rows[0]) - 1]
    return [[row[i] for i in kept] for row in rows], right


def verdict(action: ActionReport, *, applies: str, per_update_ms: float, strict: bool) -> str:
    """Whether an action pays, in words.

    Args:
        action: what it did.
        applies: why it cannot run, "" where it can.
        per_update_ms: the time of one update; 0.0 if there was none.
        strict: whether its cadence stays, whatever it frees.
    """
    if action.error:
        return f"failed: {action.error}"
    if not action.count:
        return applies or "not run yet"
    if action.backoff > 1 and not strict:
        words = f"{_frees(action)}: runs {action.backoff} times less often"
    elif action.share > MUCH:
        words = _costs(action, per_update_ms)
    else:
        words = _pays(action)
    if action.skipped:
        words += f"; {action.skipped:,} skipped, over the limit of {_percent(MAX_COST)}"
    return words


def _frees(action: ActionReport) -> str:
    if action.paid:
        return "frees little now"
    freed = action.host_freed_bytes + action.device_freed_bytes
    return "frees little" if freed else "frees nothing"


def _costs(action: ActionReport, per_update_ms: float) -> str:
    start = f"costs {_percent(action.share)} of the time"
    if action.paid * 2 >= action.count:
        start = f"pays, but {start}"
    if not per_update_ms:
        return f"{start}: too often"
    apart = _round(action.mean_ms / (MAX_COST * per_update_ms))
    return f"{start}: too often; every {apart:,} updates would cost {_percent(MAX_COST)}"


def _pays(action: ActionReport) -> str:
    if not action.paid:
        return f"{_frees(action)}{' so far' if action.count < 3 else ''}"
    return "pays" if action.paid * 2 >= action.count else "pays now and then"


def _round(count: float) -> int:
    """Round up to two digits, since more are not known."""
    digits = int(10 ** max(0, len(str(math.ceil(count))) - 2))
    return math.ceil(count / digits) * digits


def _percent(share: float) -> str:
    if math.isnan(share):
        return "?"
    text = f"{100 * share:.2f}" if share < 0.001 else f"{100 * share:.1f}"
    return f"{text} %"


# --- put together ---------------------------------------------------------------------------------


def report_of(engine: Engine) -> PolicyReport:
    """Return what an engine has done so far."""
    done, seconds, updates = engine.counts(), engine.seconds(), engine.core.ticks(UPDATE)
    cycles, examples = engine.cycles()
    frozen = engine.frozen_objects
    reports = []
    for action in sorted({*engine.rules, *done}):
        ran, when = done.get(action, Done()), _when(engine, action)
        if when or ran.times:
            reports.append(_action(engine, action, when, ran, seconds, updates))
    return PolicyReport(
        seconds,
        updates,
        tuple(reports),
        CycleReport(*cycles, examples),
        frozen is not None,
        frozen or 0,
        engine.core.looks,
        (engine.own_ns + engine.core.look_ns) / 1e6,
        engine.notes(),
    )


def _when(engine: Engine, action: int) -> str:
    """`100 updates, 1 epoch; pressure`; "" for never."""
    every, triggers, managed = engine.when(action)
    words = engine.clocks.words(every), trigger_words(triggers)
    return "; ".join(word for word in words if word) + " while gc is managed" * managed


def _action(
    engine: Engine, action: int, when: str, ran: Done, seconds: float, updates: int
) -> ActionReport:
    _, _, backoff = engine.core.figures(action)
    found = ActionReport(
        engine.names[action],
        when or ("after warm-up" if action == WARM_UP else "by hand"),
        ran.times,
        ran.ns / 1e6,
        ran.ns / 1e9 / seconds if seconds > 0 else math.nan,
        ran.host,
        ran.device,
        ran.paid,
        ran.skipped,
        backoff,
        engine.errors.get(action, ""),
        "",
    )
    if action == WARM_UP:
        return replace(found, verdict="once, so that later collections skip older objects")
    words = verdict(
        found,
        applies=engine.why_not(action) if action in NAMES else "",
        per_update_ms=1e3 * seconds / updates if updates else 0.0,
        strict=engine.settings.strict,
    )
    return replace(found, verdict=words)

"""What a cleanup policy did, what that cost, what it freed, and whether it pays."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from memtools._base.size import format_bytes
from memtools._base.text import aligned

MUCH = 0.01  # of the time: a schedule that costs more says so


@dataclass(frozen=True, slots=True)
class ActionReport:
    """One action of a policy: what was asked of it and what it did, since the report began."""

    name: str
    #: when it is due: "100 updates, 1 epoch; pressure"
    when: str
    count: int
    total_ms: float
    #: of all the time; nan before any has passed
    share: float
    host_freed_bytes: int
    device_freed_bytes: int
    #: times that it freed 1 % of what the process holds, on the host or on the devices
    paid: int
    #: cadences left out because what does not pay has had its part of the time
    skipped: int
    #: how many times longer it rests now, 1 to 64
    backoff: int
    #: what it raised last; "" for nothing
    error: str
    #: in words
    verdict: str

    @property
    def mean_ms(self) -> float:
        """nan where it did not run."""
        return self.total_ms / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class CycleReport:
    """Cycles of objects that were collected, and the tensors that they held."""

    objects: int
    #: tensors among them, where collects looked for them
    tensors: int
    tensor_bytes: int
    #: collects that looked for tensors: those after one that found much
    inspected: int
    #: who held them: "Trainer -> dict -> Tensor[256, 256] float32"
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What a CleanupPolicy did so far. `str()` is a table; byte figures are sums over all times."""

    name: str | None
    #: since the policy began, or its report was reset
    seconds: float
    updates: int
    actions: tuple[ActionReport, ...]
    cycles: CycleReport
    #: whether the policy runs Python's gc now, and the objects that it has frozen
    manages_gc: bool
    frozen_objects: int
    #: readings of memory to decide by
    looks: int
    #: time that looks, decisions and measuring took, beside the actions themselves
    own_ms: float
    #: what limits the policy here, a sentence each
    notes: tuple[str, ...] = ()

    @property
    def total_ms(self) -> float:
        """Of all actions."""
        return math.fsum(action.total_ms for action in self.actions)

    @property
    def share(self) -> float:
        """Of the time, actions and the policy's own; nan before any time has passed."""
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
        name = f" {self.name}" if self.name else ""
        lines = [
            f"Cleanup policy{name}: {self.updates:,} updates in {self.seconds:,.1f} s, "
            f"of which cleanups took {_percent(self.share)}"
        ]
        lines += table([_HEAD, *map(_row, self.actions)])
        return "\n".join(lines + self._notes())

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
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    right = [n for n, i in enumerate(kept) if 1 < i < len(rows[0]) - 1]
    return list(aligned([[row[i] for i in kept] for row in rows], right, indent=""))


def verdict(
    action: ActionReport, *, applies: str, per_update_ms: float, max_cost: float, strict: bool
) -> str:
    """In words. `applies` says why it cannot run, "" where it can; `strict`: its cadence stays
    whatever it frees."""
    if action.error:
        return f"failed: {action.error}"
    if not action.count:
        return applies or "not run yet"
    if action.backoff > 1 and not strict:
        words = f"{_frees(action)}: rests {action.backoff}x longer"
    elif action.share > MUCH:
        words = _costs(action, per_update_ms, max_cost)
    else:
        words = _pays(action)
    if action.skipped:
        words += f"; {action.skipped:,} skipped, over the limit of {_percent(max_cost)}"
    return words


def _frees(action: ActionReport) -> str:
    if action.paid:
        return "frees little now"
    freed = action.host_freed_bytes + action.device_freed_bytes
    return "frees little" if freed else "frees nothing"


def _costs(action: ActionReport, per_update_ms: float, max_cost: float) -> str:
    start = f"costs {_percent(action.share)} of the time"
    if action.paid * 2 >= action.count:
        start = f"pays, but {start}"
    if not per_update_ms or not max_cost:
        return f"{start}: too often"
    apart = _round(action.mean_ms / (max_cost * per_update_ms))
    return f"{start}: too often; every {apart:,} updates would cost {_percent(max_cost)}"


def _pays(action: ActionReport) -> str:
    if not action.paid:
        return f"{_frees(action)}{' so far' if action.count < 3 else ''}"
    return "pays" if action.paid * 2 >= action.count else "pays now and then"


def _round(count: float) -> int:
    """Up, to two digits: more would say more than is known."""
    digits = int(10 ** max(0, len(str(math.ceil(count))) - 2))
    return math.ceil(count / digits) * digits


def _percent(share: float) -> str:
    if math.isnan(share):
        return "?"
    text = f"{100 * share:.2f}" if share < 0.001 else f"{100 * share:.1f}"
    return f"{text} %"

"""What an accumulator did: each window, and all of them together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from memtools.grad.sums import Sum


class Sums(NamedTuple):
    """What a window's losses, and what its loss function counted besides, come to."""

    loss: Sum
    extras: Mapping[str, Sum]


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window: what came in, how large its gradient was, and what was done about it.

    With several ranks `micro_batches`, `weight` and `norm` are those of all ranks together, and
    `own_weight`, `loss` and `extras` are this rank's alone.
    """

    #: windows before this one
    index: int
    micro_batches: int
    #: units (tokens, samples, nodes) of all micro-batches and ranks; without weights, micro-batches
    weight: float
    #: 2-norm of the averaged gradient before clipping; of a callback, what it returned; nan or inf
    #: where the update was skipped; nan where it was made in backward
    norm: float
    #: what clipping by norm multiplied with, at most 1; 0 where the update was skipped
    coefficient: float
    #: the loss scale; 1 without fp16
    scale: float
    #: whether the update was left out, as the gradients were not finite
    skipped: bool
    #: elements of the gradients, before averaging
    infs: int
    nans: int
    #: the first parameter with such an element, by `model.named_parameters()`
    first_bad: str | None
    #: how the factor came into the gradients: "nothing" (it was 1), "folded" into the optimizer,
    #: "multiplied" or "skipped"
    applied: str
    #: from the end of the last micro-batch to the end of the window, the optimizer's step included
    ms: float
    #: rows that step() gives to a micro-batch; None where it was not called
    micro_batch_size: int | None = None
    #: what ran out of memory and was done again, in order
    retries: tuple[Any, ...] = ()
    #: units of this rank alone; with one rank the same as `weight`
    own_weight: float = 0.0
    _sums: Sums = field(default_factory=lambda: Sums(Sum(), {}), repr=False, compare=False)

    @property
    def loss(self) -> float:
        """The mean loss: the sum of the losses, divided by `own_weight`; without weights, the mean
        over the micro-batches. nan where this rank had none. Losses on a device are read here, and
        not before: this is what waits for them."""
        return self._sums.loss.read() / self.own_weight if self.own_weight else math.nan

    @property
    def extras(self) -> dict[str, float]:
        """The sums, by name, of what the loss function returned as its third value: divide by
        `own_weight` for a mean. Waits for a device as `loss` does."""
        return {name: found.read() for name, found in self._sums.extras.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts. Waits for a device as `loss` does."""
        found = _plain(self)
        found["retries"] = [str(retry) for retry in self.retries]
        return found | {"loss": self.loss, "extras": self.extras}

    def __str__(self) -> str:
        start = (
            f"Window {self.index}: {_micro_batches(self.micro_batches)}, weight {self.weight:,.6g}"
        )
        if self.own_weight:
            start += f", loss {self.loss:.6g}"
        if self.skipped:
            what = f"skipped: {self.infs:,} inf and {self.nans:,} nan, first in {self.first_bad}"
        else:
            what = f"norm {self.norm:.6g}, coefficient {self.coefficient:.6g}, {self.applied}"
        scale = f", scale {self.scale:,.6g}" if self.scale != 1.0 else ""
        lines = [f"{start}: {what}{scale}, {self.ms:.2f} ms"]
        return "\n".join(lines + [f"  {retry}" for retry in self.retries])


@dataclass(frozen=True, slots=True)
class AccumulatorReport:
    """All windows of a GradAccumulator so far. `str()` is a short text."""

    steps: int
    precision: str
    windows: int
    #: windows whose update was made
    updates: int
    #: windows whose update was left out, and how many of the last ones in a row
    skipped: int
    skipped_in_a_row: int
    #: skipped windows with an inf and no nan, and those with a nan
    inf_windows: int
    nan_windows: int
    #: the first parameter with an inf or a nan, in the last window that was skipped
    first_bad: str | None
    #: windows dropped by reset()
    dropped: int
    micro_batches: int
    weight: float
    #: the loss scale of the next window, and how low it has been
    scale: float
    least_scale: float
    micro_batch_size: int | None
    #: the newest 100 of what ran out of memory in step(), and how many there were
    retries: tuple[Any, ...]
    ran_out: int
    #: the last window, or None before the first
    last: WindowReport | None
    #: what could be better here, a sentence each
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts."""
        found = _plain(self)
        found["retries"] = [str(retry) for retry in self.retries]
        found["last"] = None if self.last is None else self.last.as_dict()
        found["notes"] = list(self.notes)
        return found

    def __str__(self) -> str:
        lines = [
            f"Accumulation: {self.windows:,} windows of {_micro_batches(self.steps)}, "
            f"{self.updates:,} updates, precision {self.precision}"
        ]
        if self.skipped:
            lines.append(
                f"Skipped: {self.skipped:,} windows, {self.inf_windows:,} with inf, "
                f"{self.nan_windows:,} with nan, first in {self.first_bad}; "
                f"{self.skipped_in_a_row:,} in a row now"
            )
        if self.scale != 1.0 or self.least_scale != 1.0:
            lines.append(f"Loss scale: {self.scale:,.6g}, least {self.least_scale:,.6g}")
        if self.dropped:
            lines.append(f"Dropped: {self.dropped:,} windows, by reset()")
        if self.micro_batch_size is not None:
            lines.append(f"Micro-batch: {self.micro_batch_size:,} rows")
        if self.retries:
            shown = min(self.ran_out, len(self.retries))
            newest = f", the newest {shown}" if shown < self.ran_out else ""
            lines.append(f"Out of memory: {self.ran_out:,} times{newest}")
            lines += [f"  {retry}" for retry in self.retries]
        if self.last is not None:
            lines.append(str(self.last))
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])


class Totals:
    """The sums over all windows that a report tells."""

    __slots__ = (
        "dropped",
        "first_bad",
        "inf_windows",
        "last",
        "least_scale",
        "micro_batches",
        "nan_windows",
        "ran_out",
        "retries",
        "skipped",
        "skipped_in_a_row",
        "updates",
        "weight",
        "windows",
    )

    dropped: int
    inf_windows: int
    micro_batches: int
    nan_windows: int
    ran_out: int
    skipped: int
    skipped_in_a_row: int
    updates: int
    windows: int

    #: those that are numbers, and so are part of a state
    COUNTS = (
        "dropped",
        "inf_windows",
        "micro_batches",
        "nan_windows",
        "ran_out",
        "skipped",
        "skipped_in_a_row",
        "updates",
        "windows",
    )

    def __init__(self, scale: float) -> None:
        for name in self.COUNTS:
            setattr(self, name, 0)
        self.first_bad: str | None = None
        self.last: WindowReport | None = None
        self.least_scale = scale
        self.retries: deque[Any] = deque(maxlen=100)
        self.weight = 0.0

    def add(self, window: WindowReport, next_scale: float) -> None:
        """One more window."""
        self.last = window
        self.windows += 1
        self.micro_batches += window.micro_batches
        self.weight += window.weight if math.isfinite(window.weight) else 0.0
        self.least_scale = min(self.least_scale, next_scale)
        self.keep(window.retries)
        if not window.skipped:
            self.updates += 1
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.nan_windows += window.nans > 0
        self.inf_windows += window.nans == 0
        self.first_bad = window.first_bad

    def keep(self, retries: Iterable[Any]) -> None:
        """Of a window that ended, or was given up. A run of years stays small."""
        for retry in retries:
            self.ran_out += 1
            self.retries.append(retry)

    def usual_weight(self) -> float:
        """Of a micro-batch so far; 1 before the first window's end."""
        return self.weight / self.micro_batches if self.weight else 1.0

    def state(self) -> dict[str, Any]:
        """Without the last window's report and the retries: they are this process's story."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.COUNTS}
        kept = ("first_bad", "least_scale", "weight")
        return found | {name: getattr(self, name) for name in kept}

    def checked(self, state: Any) -> dict[str, Any]:
        """The state, of the right types. Raises KeyError where something is missing."""
        found: dict[str, Any] = {name: int(state[name]) for name in self.COUNTS}
        found["first_bad"] = None if state["first_bad"] is None else str(state["first_bad"])
        return found | {name: float(state[name]) for name in ("least_scale", "weight")}

    def load(self, state: dict[str, Any]) -> None:
        """What `checked` returned."""
        for name, value in state.items():
            setattr(self, name, value)
        self.last = None
        self.retries.clear()


def _plain(report: Any) -> dict[str, Any]:
    """The public fields of a dataclass, as they are."""
    names = [one.name for one in fields(report) if not one.name.startswith("_")]
    return {name: getattr(report, name) for name in names}


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"

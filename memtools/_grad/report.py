"""The reports of a GradAccumulator: each window, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from memtools._base.size import format_bytes

if TYPE_CHECKING:
    from memtools._grad.window import Sum


#: The phase of a Retry at a monitor's watermark, before memory ran out.
WATERMARK = "watermark"


@dataclass(frozen=True, slots=True)
class Retry:
    """One micro-batch that did not fit, and how the step continued. `str()` is a line."""

    #: index of the window
    window: int
    #: index in the window
    micro_batch: int
    #: its rows; None for a whole batch of unknown size
    rows: int | None
    #: where memory ran out ("forward", "backward", "optimizer" or "another rank"), "allocator" (the
    #: device's cache had to be emptied in several windows) or "watermark" (a monitor foresaw it)
    phase: str
    #: type and first line of the error
    error: str
    #: bytes of the failed allocation
    asked: int | None
    #: what was restored
    restored: str
    #: rows of the retry
    next_rows: int | None
    #: whether it was a trial of a larger size
    probing: bool
    #: from the start of the micro-batch to the retry
    ms: float
    #: what was changed for the rest of the process
    changed: str = ""

    def __str__(self) -> str:
        rows = "the whole batch" if self.rows is None else _rows(self.rows)
        where = f"micro-batch {self.micro_batch} of {rows}"
        if self.phase == "optimizer":
            where = f"after {self.micro_batch} micro-batches"
        asked = "" if self.asked is None else f" (asked {format_bytes(self.asked)})"
        trial = ", a trial of a larger size" if self.probing else ""
        changed = f"; {self.changed}" if self.changed else ""
        restored = f"restored {self.restored}; " if self.restored else ""
        return (
            f"window {self.window}, {where}{trial}, {self.phase}: "
            f"{self.error}{asked}; {restored}{self._way_on()}{changed}; {self.ms:.1f} ms lost"
        )

    def _way_on(self) -> str:
        if self.next_rows is None:
            return "gave up"
        if self.next_rows == (self.rows or 0):
            return "tried once more after all idle memory was given back"
        return f"continued with {_rows(self.next_rows)}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


#: WindowReport.applied, in words
_APPLIED = {
    "nothing": "gradients not scaled",
    "folded": "gradients scaled by the optimizer",
    "multiplied": "gradients scaled",
}


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window: its losses, its gradient and its update.

    `micro_batches`, `weight` and `norm` are of all ranks; `own_weight`, `loss` and `extras` are of
    this rank.
    """

    #: index of the window
    index: int
    #: of all ranks
    micro_batches: int
    #: units; without weights, micro-batches
    weight: float
    #: 2-norm before clipping, or what `clip` returned; nan or inf if skipped
    norm: float
    #: the clip factor, at most 1; 0 if skipped
    coefficient: float
    #: the loss scale; 1 without fp16
    scale: float
    #: whether there was no update, as gradients were not finite
    skipped: bool
    #: infinite elements of the gradients
    infs: int
    #: nan elements
    nans: int
    #: the first parameter with such an element
    first_bad: str | None
    #: "nothing", "folded" into the optimizer, "multiplied" or "skipped"
    applied: str
    #: of the window's end, with the optimizer's step
    ms: float
    #: rows of a micro-batch of step()
    micro_batch_size: int | None = None
    #: micro-batches that ran out of memory
    retries: tuple[Retry, ...] = ()
    #: units
    own_weight: float = 0.0
    _loss: Sum = field(repr=False, compare=False, kw_only=True)
    _extras: Mapping[str, Sum] = field(repr=False, compare=False, kw_only=True)

    @property
    def loss(self) -> float:
        """The mean loss over `own_weight`, or over the micro-batches without weights; nan without a
        loss. Waits for devices."""
        return self._loss.read() / self.own_weight if self.own_weight else math.nan

    @property
    def extras(self) -> dict[str, float]:
        """The sums of the loss function by name. Waits for devices."""
        return {name: found.read() for name, found in self._extras.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, str, lists and dicts. Waits for devices."""
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
            applied = _APPLIED.get(self.applied, self.applied)
            what = f"norm {self.norm:.6g}, coefficient {self.coefficient:.6g}, {applied}"
        scale = f", scale {self.scale:,.6g}" if self.scale != 1.0 else ""
        lines = [f"{start}: {what}{scale}, {self.ms:.2f} ms"]
        return "\n".join(lines + [f"  {retry}" for retry in self.retries])


@dataclass(frozen=True, slots=True)
class AccumulatorReport:
    """All windows of a GradAccumulator so far. `str()` is a short summary."""

    #: micro-batches in a window
    steps: int
    #: "fp32", "bf16" or "fp16"
    precision: str
    #: ended windows
    windows: int
    #: of these with an update
    updates: int
    #: of these without
    skipped: int
    #: consecutive skipped windows at the end
    skipped_in_a_row: int
    #: skipped windows with an inf and no nan
    inf_windows: int
    #: skipped windows with a nan
    nan_windows: int
    #: the first bad parameter of the last skipped window
    first_bad: str | None
    #: windows dropped by reset()
    dropped: int
    #: of all windows
    micro_batches: int
    #: units; without weights, micro-batches
    weight: float
    #: the loss scale of the next window
    scale: float
    #: the lowest so far
    least_scale: float
    #: rows of a micro-batch of step()
    micro_batch_size: int | None
    #: the newest 100 of step()
    retries: tuple[Retry, ...]
    #: how often memory ran out in step()
    ran_out: int
    #: the last window
    last: WindowReport | None
    #: advice, a sentence each
    notes: tuple[str, ...] = ()
    #: how often a monitor made step() use fewer rows
    lowered: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, str, lists and dicts."""
        found = _plain(self)
        found["retries"] = [str(retry) for retry in self.retries]
        found["last"] = None if self.last is None else self.last.as_dict()
        found["notes"] = list(self.notes)
        return found

    def _sizes(self) -> str:
        """Return `2 windows of 4 micro-batches`, or, if windows had more or fewer, as those of
        `step()`, `2 windows, 6 micro-batches in all`."""
        windows = _counted(self.windows, "window")
        if self.micro_batches == self.windows * self.steps:
            return f"{windows} of {_micro_batches(self.steps)}"
        return f"{windows}, {_micro_batches(self.micro_batches)} in all"

    def __str__(self) -> str:
        lines = [
            f"Accumulation: {self._sizes()}, {_counted(self.updates, 'update')}, "
            f"precision {self.precision}"
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
        lowered = [retry for retry in self.retries if retry.phase == WATERMARK]
        lines += _listed("At the watermark", self.lowered, lowered)
        ran_out = [retry for retry in self.retries if retry.phase != WATERMARK]
        lines += _listed("Out of memory", self.ran_out, ran_out)
        if self.last is not None:
            lines.append(str(self.last))
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])


def _plain(report: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass."""
    names = [one.name for one in fields(report) if not one.name.startswith("_")]
    return {name: getattr(report, name) for name in names}


def _listed(what: str, count: int, retries: list[Retry]) -> list[str]:
    """Return a line with the count, and a line for each retry that is kept."""
    if not retries:
        return []
    newest = f", the newest {len(retries)}" if len(retries) < count else ""
    times = "once" if count == 1 else f"{count:,} times"
    return [f"{what}: {times}{newest}", *(f"  {retry}" for retry in retries)]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count:,} micro-batches"

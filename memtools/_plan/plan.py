"""Plan: the memory of one training step, known before anything runs.

    allocated                          ┌──┐ peak_bytes: what the step itself needs
        ▲                 ┌────────────┘  └───┐
        │      ┌──────────┘                   └─┐
        │ ─────┘  curve, one value an operator  └────
        └──────────────────────────────────────────► operators
          forward         | backward      | optimizer

`reserved_bytes` is more: what a model of torch's caching allocator holds in its segments for it.
A limit is compared with that, as a device does; the model gives cached segments back first, as
torch does before it is out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memtools._base.peak import Lowered, Part, in_phase
from memtools._base.size import format_bytes
from memtools._base.text import aligned, percent

RESERVED = {
    "cuda": "a model of torch's caching allocator, not yet measured on a GPU; the context and "
    "libraries' workspaces are not included",
    "cpu": "memory in use at the peak of building the model and two steps",
}


class PlanPhase(NamedTuple):
    """Successive operators of one phase of the step."""

    #: "forward", "backward", "optimizer" or "between"
    phase: str
    #: their number
    operators: int
    #: the most in use while they run
    peak_bytes: int


class PlanLimit(NamedTuple):
    """Whether the step fits into a limit."""

    #: the limit
    limit_bytes: int
    #: with torch's allocator on a device
    fits: bool
    #: the most reserved; if it does not fit, the least needed
    reserved_bytes: int
    #: the change of the program with which it fits, or ""
    fits_with: str = ""

    @property
    def left_bytes(self) -> int:
        """Negative if the step does not fit."""
        return self.limit_bytes - self.reserved_bytes

    def sentence(self) -> str:
        """`8.00 GiB: fits, 1.20 GiB left`; `6.00 GiB: does not fit, at least 2.00 GiB short; fits
        with an optimizer with fused=True`."""
        size = format_bytes(abs(self.left_bytes))
        says = f"fits, {size} left" if self.fits else f"does not fit, at least {size} short"
        says += f"; fits with {self.fits_with}" if self.fits_with else ""
        return f"{format_bytes(self.limit_bytes)}: {says}"


class PlanFit(NamedTuple):
    """The measured steps that a plan is fitted to."""

    #: such as "batch"
    argument: str
    #: its values
    measured: tuple[int, ...]
    #: lower end of the peak's interval
    low_bytes: int
    #: its upper end
    high_bytes: int

    @property
    def steps(self) -> str:
        """`fitted to measured steps of batch 8 and 16`."""
        sizes = " and ".join(map(str, self.measured))
        return f"fitted to measured steps of {self.argument} {sizes}"

    @property
    def between(self) -> str:
        """`350.0 MiB to 380.0 MiB`."""
        return f"{format_bytes(self.low_bytes)} to {format_bytes(self.high_bytes)}"


@dataclass(frozen=True)
class Plan:
    """The memory of one training step, computed before it runs.

    Sizes are of the storages that torch's operators make and use, and on the CPU of the workspaces
    of convolutions, without a device's context and its libraries' workspaces.

    Attributes:
        peak_bytes: the most bytes in use at one moment of the step.
        phase: of the peak: "forward", "backward", "optimizer" or "between".
        operator: at the peak, such as "aten.mm.default".
        line: at the peak, such as "train.py:31 in step".
        parts: of the peak, the largest first.
        curve: the bytes in use at each operator.
        phases: in their order.
        reserved_bytes: what torch's caching allocator would reserve, from a model not yet measured
            on a GPU; on the CPU, memory in use at the peak of building the model and two steps.
        limits: for each limit, whether the step fits.
        changes: of the program, that lower the peak, the most effective first.
        device: "cuda" or "cpu".
        assumed: values assumed for the step and for workspaces of convolutions.
        fit: for a fitted plan: limits and reserved_bytes then use the interval's upper end.
    """

    peak_bytes: int
    phase: str
    operator: str
    line: str
    parts: tuple[Part, ...]
    curve: tuple[int, ...] = field(repr=False)
    phases: tuple[PlanPhase, ...]
    reserved_bytes: int
    limits: tuple[PlanLimit, ...] = ()
    changes: tuple[Lowered, ...] = ()
    device: str = "cuda"
    assumed: tuple[str, ...] = ()
    fit: PlanFit | None = None

    def bytes_of(self, what: str) -> int:
        """Return the bytes of one category `what`, such as "gradients", at the peak."""
        return sum(part.bytes for part in self.parts if part.what == what)

    def sentence(self) -> str:
        """Return `The step needs 112.9 MiB on cuda at its peak, in the optimizer's step
        (aten.div.Tensor, train.py:17 in step): optimizer state 40.2 MiB, gradients 20.1 MiB`."""
        where = in_phase(self.phase)
        at = ", ".join(filter(None, (self.operator, self.line)))
        parts = ", ".join(
            f"{part.what} {format_bytes(part.bytes)}"
            for part in self.parts
            if part.bytes >= 0.01 * self.peak_bytes
        )
        fit = "" if self.fit is None else f"; {self.fit.steps}: {self.fit.between}"
        return (
            f"The step needs {format_bytes(self.peak_bytes)} on {self.device} at its peak, {where} "
            f"({at}): {parts}{fit}"
        )

    def table(self) -> str:
        """Return the sentence, parts, phases, reserved bytes, limits and changes, as lines."""
        parts = [
            [part.what, format_bytes(part.bytes), percent(part.bytes, self.peak_bytes)]
            for part in self.parts
        ]
        phases = [
            [one.phase, format_bytes(one.peak_bytes), f"{one.operators:,} operators"]
            for one in self.phases
        ]
        lines = [self.sentence(), "", "At the peak", *aligned(parts, (1, 2))]
        lines += ["", "Over the step, the peak of each phase", *aligned(phases, (1, 2)), ""]
        lines += [f"Reserved: {format_bytes(self.reserved_bytes)} ({RESERVED[self.device]})"]
        lines += [f"  {one.sentence()}" for one in self.limits]
        if self.changes:
            changes = [[format_bytes(one.peak_bytes), one.change] for one in self.changes]
            lines += [
                "",
                "With one change of the program, the peak becomes",
                *aligned(changes, (0,)),
            ]
        if self.assumed:
            lines += ["", "Assumed", *(f"  {one}" for one in self.assumed)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the peak's contents and the limits as a table."""
        if not self.limits:
            rows = [[part.what, format_bytes(part.bytes)] for part in self.parts]
            total = ["the peak", format_bytes(self.peak_bytes)]
            return markdown_table([self.device, "at the peak"], [*rows, total])
        rows = [
            [
                format_bytes(one.limit_bytes),
                "yes" if one.fits else f"with {one.fits_with}" if one.fits_with else "no",
                format_bytes(one.reserved_bytes),
            ]
            for one in self.limits
        ]
        return markdown_table([self.device, "fits", "reserved"], rows)

    def as_json(self) -> dict[str, Any]:
        """Return the same facts: sizes in bytes, stable keys."""
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "phase": self.phase,
            "operator": self.operator,
            "line": self.line,
            "parts": {part.what: part.bytes for part in self.parts},
            "phases": [one._asdict() for one in self.phases],
            "reserved_bytes": self.reserved_bytes,
            "limits": [one._asdict() | {"left_bytes": one.left_bytes} for one in self.limits],
            "changes": [one._asdict() for one in self.changes],
            "assumed": list(self.assumed),
            "fit": None if self.fit is None else self.fit._asdict(),
            "curve": list(self.curve),
        }


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(one.replace('|', '/') for one in line)} |" for line in lines)

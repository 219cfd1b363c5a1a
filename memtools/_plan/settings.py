"""Plans: one step planned in several settings, and for each limit the best one.

    batch=16 length=1024   ── no change ── 2, 4, 8 micro-batches ── checkpointing ──►
    batch=16 length=512    ── no change ── ...                       the first that fits
    batch=8  length=1024

The order is the rule: settings first, the most wanted one in front; of one setting, that with the
least work that is done again. A batch in micro-batches is the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from memtools._base.size import format_bytes
from memtools._base.text import aligned
from memtools._blocks.changes import Offer, offered
from memtools._blocks.lifetimes import Trace
from memtools._blocks.replay import replay
from memtools._plan.allocator import reserved
from memtools._plan.plan import RESERVED, Plan, markdown_table

#: How much time changes cost, by the first part of their names; others cost none.
_MICRO_BATCHES, _RUNS_AGAIN = "micro-batches", ("checkpoint", "chunks")


class PlanSetting(NamedTuple):
    """A step, planned in one setting."""

    #: of each lever by name
    values: Mapping[str, Any]
    #: the step's plan
    plan: Plan


class PlanBest(NamedTuple):
    """The best setting that fits into a limit; empty if none does."""

    #: the limit
    limit_bytes: int
    #: of each lever by name
    values: Mapping[str, Any]
    #: of the program, with which it fits
    changes: tuple[str, ...] = ()
    #: the peak
    peak_bytes: int = 0
    #: by torch's allocator
    reserved_bytes: int = 0

    def sentence(self) -> str:
        """`24.0 GiB: batch=16, length=512 with 4 micro-batches: 21.3 GiB reserved`."""
        limit = format_bytes(self.limit_bytes)
        if not self.values:
            return f"{limit}: none of these settings fits, with any of the changes"
        changes = f" with {' and '.join(self.changes)}" if self.changes else ""
        size = format_bytes(self.reserved_bytes)
        return f"{limit}: {setting_text(self.values)}{changes}: {size} reserved"


@dataclass(frozen=True)
class Plans:
    """One step, planned in several settings. `memtools.plan` with `vary` makes it.

    Attributes:
        settings: the preferred first.
        best: for each limit, the first setting that fits, with changes that cost no time before
            micro-batches, and both before a second forward pass.
        device: "cuda" or "cpu".
    """

    settings: tuple[PlanSetting, ...]
    best: tuple[PlanBest, ...]
    device: str = "cuda"

    def table(self) -> str:
        """Return all settings, the effect of each lever, and the best setting for each limit, as
        lines."""
        fit = self.settings[0].plan.fit
        rows = [
            [setting_text(values), format_bytes(plan.peak_bytes)]
            + ([] if plan.fit is None else [plan.fit.between])
            + [format_bytes(plan.reserved_bytes)]
            + ["fits" if one.fits else "-" for one in plan.limits]
            for values, plan in self.settings
        ]
        sizes = [format_bytes(one.limit_bytes) for one in self.settings[0].plan.limits]
        heads = ["setting", "peak", *([] if fit is None else ["between"]), "reserved", *sizes]
        lines = [
            f"The step on {self.device}, without changes of the program"
            + ("" if fit is None else f", {fit.steps}"),
            *aligned([heads, *rows], range(1, len(heads))),
            "",
            f"Each alone, starting from {setting_text(self.settings[0].values)}, gives the peak",
            *aligned([[format_bytes(peak), text] for text, peak in self.levers()], (0,)),
            "",
            f"Reserved: {RESERVED[self.device]}",
        ]
        if self.best:
            lines += ["", "The best that fits", *(f"  {one.sentence()}" for one in self.best)]
        notes = {note: None for one in self.settings for note in one.plan.assumed}
        lines += ["", "Assumed", *(f"  {note}" for note in notes)] if notes else []
        return "\n".join(lines)

    def levers(self) -> list[tuple[str, int]]:
        """Return (lever, peak in bytes) for each single change of the preferred setting that lowers
        the peak, the most effective first."""
        first = self.settings[0]
        found = [(one.change, one.peak_bytes) for one in first.plan.changes]
        for values, plan in self.settings:
            other = [name for name, value in values.items() if value != first.values[name]]
            if len(other) == 1 and plan.peak_bytes < first.plan.peak_bytes:
                found.append(
                    (setting_text({name: values[name] for name in other}), plan.peak_bytes)
                )
        return sorted(found, key=lambda one: one[1])

    def markdown(self) -> str:
        """Return a table of the best setting for each limit, or of all settings."""
        names = list(self.settings[0].values)
        if not self.best:
            rows = [
                [*map(str, values.values()), format_bytes(plan.peak_bytes),
                 format_bytes(plan.reserved_bytes)]
                for values, plan in self.settings
            ]  # fmt: skip
            return markdown_table([*names, "peak", "reserved"], rows)
        rows = [
            [
                format_bytes(one.limit_bytes),
                *(str(one.values.get(name, "-")) for name in names),
                " and ".join(one.changes),
                format_bytes(one.peak_bytes) if one.values else "-",
                format_bytes(one.reserved_bytes) if one.values else "-",
            ]
            for one in self.best
        ]
        return markdown_table([self.device, *names, "with", "peak", "reserved"], rows)

    def as_json(self) -> dict[str, Any]:
        """Return the same facts: sizes in bytes, stable keys."""
        return {
            "device": self.device,
            "settings": [
                {"values": dict(one.values), "plan": one.plan.as_json()} for one in self.settings
            ],
            "best": [one._asdict() | {"values": dict(one.values)} for one in self.best],
        }


def setting_text(values: Mapping[str, Any]) -> str:
    """`batch=16, length=512`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def settings_of(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All settings, the most wanted first: by the first lever, then by the second. Of numbers the
    larger ones are wanted more; of others, those that were given earlier."""
    ordered = [
        sorted(values, reverse=True) if all(map(_is_number, values)) else list(values)
        for values in vary.values()
    ]
    return [dict(zip(vary, values, strict=True)) for values in product(*ordered)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def least_changed(trace: Trace, device: str, limit: int) -> tuple[tuple[str, ...], int, int] | None:
    """(changes, peak in bytes, reserved bytes) of the changes that cost least with which a trace
    fits into a limit; None if it fits with none of them.

    Within changes that cost the same time, those without costs are taken all together first: if
    these are not enough, fewer are not.
    """

    def fitting(changes: Sequence[Offer]) -> tuple[tuple[str, ...], int, int] | None:
        after = replay(trace, [one.change for one in changes])
        if after.peak()[1] > limit:
            return None
        fits, most = reserved(after, device, limit)
        texts = tuple(one.text for one in changes)
        return (texts, after.peak(trace.steps[-1])[1], most) if fits else None

    for costly, free in _by_time(list(offered(trace, is_exact=True))):
        if (found := fitting([*free, *costly])) is not None:
            fewer = (fitting([*some, *costly]) for some in ([], *([one] for one in free)))
            return next(filter(None, fewer), found)
    return None


def _by_time(offers: Sequence[Offer]) -> Iterator[tuple[list[Offer], list[Offer]]]:
    """(changes that cost time, those that cost none) in the order of the time: none, micro-batches,
    what runs again, and both. Micro-batches come last, as all else is done in each of them."""
    kinds = [one.name.partition(":")[0] for one in offers]
    micro = [one for one, kind in zip(offers, kinds, strict=True) if kind == _MICRO_BATCHES]
    again = [one for one, kind in zip(offers, kinds, strict=True) if kind in _RUNS_AGAIN]
    free = [one for one in offers if one not in micro and one not in again]
    for runs_again in ([], *([one] for one in again)):
        for parts in ([], *([one] for one in micro)):
            yield [*runs_again, *parts], free

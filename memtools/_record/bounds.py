"""Bounds of a comparison of two records: the grammar of `--fail`, and the judgement.

    "peak=+5%,growth=+1KiB/step,leak" ──► parse_bounds() ──► Bound ... ──► judge() ──► Judgement ...

A bound is `held`, `broken`, or `unknown` if a record does not have the figure: a check that could
not look has not passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools._record.compare import Comparison, Row, in_words, number_in_words

#: the figures that a bound may have, with an example of each
EXAMPLES = {
    "peak": "peak=+5%",
    "process": "process=+20MiB",
    "device": "device=2GiB",
    "growth": "growth=+1KiB/step",
    "seconds": "seconds=+10%",
    "phase:NAME": "phase:forward=+5%",
    "leak": "leak",
}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(.*)", re.S)
_VALUED = re.compile(r"=\s*\+?\s*[0-9][^=]*$")
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MOST = 2.0**63  # A bound must be below this.


@dataclass(frozen=True)
class Bound:
    """One bound of `--fail`.

    Attributes:
        text: the bound as it was written.
        name: the name of its rows, or "leak".
        rise: whether `number` is a rise above base; otherwise it is the most that new may have.
        percent: whether `number` is in percent of base; otherwise it is in the unit of the rows.
        number: the limit; 0 for "leak".
    """

    text: str
    name: str
    rise: bool = True
    percent: bool = False
    number: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """The result of a bound: "held", "broken" or "unknown"; `text` says why. A bound is `doubtful`
    if it is held, and growth is not known well enough to exclude that it is broken."""

    bound: Bound
    result: str
    text: str
    label: str = ""
    doubtful: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "bound": self.bound.text,
            "name": self.bound.name,
            "label": self.label or None,
            "result": self.result,
            "doubtful": self.doubtful,
            "text": self.text,
        }


# --- the grammar ----------------------------------------------------------------------------------


def parse_bounds(text: str) -> list[Bound]:
    """Parse a text such as "peak=+5%,growth=+1KiB/step,leak".

    Raises ValueError, with one sentence that shows the right form, if it is not a list of bounds.
    """
    return [_bound(item) for item in _items(text)]


def _items(text: str) -> Iterator[str]:
    """The parts between commas. The name of a phase may contain commas."""
    phase = ""
    for part in text.split(","):
        item = f"{phase},{part}" if phase else part.strip()
        if item.startswith("phase:") and not _VALUED.search(item):
            phase = item
            continue
        phase = ""
        yield item
    if phase:
        yield phase


def _bound(item: str) -> Bound:
    name, equals, value = item.rpartition("=")
    name, value = name.strip(), value.strip()
    if item == "leak":
        return Bound(item, "leak")
    if not equals:
        raise ValueError(f"a bound is written like {_example(item)}, got {_quoted(item)}")
    if name == "leak":
        raise ValueError(f"leak has no value: give leak alone, got {_quoted(item)}")
    if name not in EXAMPLES and not (name.startswith("phase:") and name != "phase:"):
        names = ", ".join(EXAMPLES)
        raise ValueError(f"there is no figure {_quoted(name)}: the names are {names}")
    rise = value.startswith("+")
    number = _NUMBER.fullmatch(value[rise:].strip())
    if number is None:
        raise ValueError(_wrong(name, item))
    digits, unit = number[1], number[2].strip()
    percent = unit == "%"
    if percent and name == "growth":
        raise ValueError(
            "the growth of a run without a leak is near zero, so a percentage means nothing: give "
            f"{EXAMPLES['growth']}, got {_quoted(item)}"
        )
    if percent and not rise:
        raise ValueError(
            f"a bound in percent must be a rise above base: give {name}=+{value}, got "
            f"{_quoted(item)}"
        )
    most = float(digits) if percent else _most(name, digits, unit, item)
    if not most < _MOST:
        raise ValueError(f"a bound must be smaller: no machine has that much, got {_quoted(item)}")
    return Bound(item, name, rise, percent, most)


def _most(name: str, digits: str, unit: str, item: str) -> float:
    """The number in bytes, bytes a step, or seconds."""
    if name == "seconds":
        if unit not in _TIMES:
            raise ValueError(_wrong(name, item))
        return float(digits) * _TIMES[unit]
    if name == "growth":
        unit, _, step = (part.strip() for part in unit.partition("/"))
        if step != "step":
            raise ValueError(f"growth is per step: give {EXAMPLES['growth']}, got {_quoted(item)}")
    if not unit and float(digits):
        raise ValueError(f"a size needs a unit: give {_example(name)}, got {_quoted(item)}")
    try:
        one = parse_bytes(f"1{unit}")
    except ValueError:
        raise ValueError(_wrong(name, item)) from None
    return float(digits) * one


def _wrong(name: str, item: str) -> str:
    if name == "growth":
        forms = "growth=+1KiB/step, or growth=4KiB/step as an absolute limit"
    elif name == "seconds":
        forms = "seconds=+10%, seconds=+20ms, or seconds=0.5s as an absolute limit"
    else:
        forms = f"{name}=+5%, {name}=+20MiB, or {name}=2GiB as an absolute limit"
    return f"a bound of {shown(name)} is written {shown(forms)}, got {_quoted(item)}"


def _example(name: str) -> str:
    kind = "phase:NAME" if name.startswith("phase:") else name
    return EXAMPLES.get(kind, "peak=+5%")


def _quoted(text: str) -> str:
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"'{shown(short)}'"


# --- the judgement --------------------------------------------------------------------------------


def judge(comparison: Comparison, bounds: list[Bound]) -> list[Judgement]:
    """Judge the bounds: one judgement for each row that a bound refers to."""
    found: list[Judgement] = []
    for bound in bounds:
        if bound.name == "leak":
            found.append(_of_leaks(comparison, bound))
            continue
        rows = comparison.row(bound.name)
        found += [_of_row(bound, row) for row in rows]
        if not rows:
            what = "phase of this name" if bound.name.startswith("phase:") else bound.name
            text = f"{shown(bound.text)}: neither record has a {what}"
            found.append(Judgement(bound, "unknown", text))
    return found


def _of_row(bound: Bound, row: Row) -> Judgement:
    sides = [("base", row.base)] if bound.rise else []
    for side, value in [("new", row.new), *sides]:
        if value.number is None:
            text = f"{shown(bound.text)}: {row.label} of {side} is not known: {value.why}"
            return Judgement(bound, "unknown", text, row.label)
    room, (least, most) = bound.number, (row.new.low, row.new.high)
    if bound.rise:
        least, most = row.rise or (0.0, 0.0)
        room = (row.base.number or 0.0) * room / 100 if bound.percent else room
    broken = least > room
    doubtful = not broken and (most > room or bool(row.new.why))
    text = _sentence(bound, row, room)
    if broken and bound.rise and row.same:
        text += "; two runs of one script may differ by that much"
    return Judgement(bound, "broken" if broken else "held", text, row.label, doubtful)


def _sentence(bound: Bound, row: Row, room: float) -> str:
    new = in_words(row.new, row.unit)
    if not bound.rise:
        most = number_in_words(bound.number, row.unit)
        return f"{row.label} is {new}; the bound is {most}"
    most = f"+{bound.number:g} %" if bound.percent else f"+{number_in_words(room, row.unit)}"
    base = in_words(row.base, row.unit)
    more = row.difference or 0.0
    change = f"{'+' if more >= 0 else '-'}{number_in_words(abs(more), row.unit)}"
    if row.share is not None:
        change += f", {100 * row.share:+.1f} %"
    return f"{row.label} is {new} against {base} ({change}); the bound is {most}"


def _of_leaks(comparison: Comparison, bound: Bound) -> Judgement:
    failing = [change.new for change in comparison.leaks if change.fails and change.new]
    for side, figures in (("new", comparison.new), ("base", comparison.base)):
        verdict = figures.verdict
        if side == "base" and not failing:
            break
        if not verdict.tested and not (side == "new" and failing):
            why = verdict.short or "the record has no data about growth"
            return Judgement(bound, "unknown", f"leak: whether {side} leaks is not known: {why}")
    if failing:
        return Judgement(
            bound, "broken", f"a leak that base does not have: {failing[0].without_forecast()}"
        )
    return Judgement(bound, "held", "there is no leak that base does not have")

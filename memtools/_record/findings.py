"""The findings that stand at the end of a record: what grows, and who holds it.

    "finding" events ──────────► standing() ──► LeakFinding ...   said by the run itself
    series ──► growth.judge() ──► made_of() ──► LeakFinding ...   where the run said none

A monitor makes its findings while the program runs, and then nothing is judged again: the record
tells the newest state of each. A command that is watched from outside is judged by nobody: its
findings are made here, in the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from memtools._base.text import duration, shown
from memtools._leak.finding import RANK, LeakFinding, advice_for
from memtools._leak.judge import Part, of_part
from memtools._record.kinds import Finding

if TYPE_CHECKING:
    from memtools._record.growth import Growth
    from memtools._record.record import Record


def standing(record: Record) -> list[LeakFinding]:
    """As the run itself said them: the newest state of each, without those that are over."""
    found: dict[tuple[str, str], LeakFinding] = {}
    for event in record.events:
        if not isinstance(event.data, Finding) or event.data.grade not in RANK:
            continue
        one = _harmless(event.data)
        found.pop(one.key, None)
        if not one.over and RANK[one.grade] > RANK["quiet"]:
            found[one.key] = one
    return list(found.values())


def _harmless(event: Finding) -> LeakFinding:
    """A record may come from anywhere."""
    given: dict[str, Any] = {one.name: getattr(event, one.name) for one in fields(LeakFinding)}
    texts = {name: shown(value) for name, value in given.items() if isinstance(value, str)}
    return LeakFinding(**{**given, **texts})


def made_of(growth: Sequence[Growth]) -> list[LeakFinding]:
    """What the series say, in the form in which a run says it."""
    return [replace(one, advice=advice_for(one)) for one in map(_of_growth, growth)]


def _of_growth(growth: Growth) -> LeakFinding:
    over = f"{growth.over:,.0f} steps" if growth.per == "step" else duration(growth.over)
    what = [f"over the last {over}"] if growth.over and not growth.shared else []
    what += [f"on {growth.device}"] if growth.device else []
    grade = "fills" if growth.shared else growth.grade
    part = Part(growth.signal, growth.rate_bytes, grade=grade, since_step=growth.since)
    kind = "mapped files" if growth.shared else None
    return of_part(part, per=growth.per, kind=kind, what=", ".join(what))

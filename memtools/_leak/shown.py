"""A finding as people read it: one line in a log, two in a terminal, wherever it is shown.

    memtools: step 32  likely  list Trainer.losses  +515.2 KiB/step  limit in 300 to 420 steps
              train.py:17  self.losses.append(loss)  fix: clear it after use, or ...

Each line is a row of parts. A part that does not fit goes to the next line; the source text is
shortened before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from memtools._base.place import line_of
from memtools._base.text import wrapped
from memtools._leak.finding import LeakFinding

GAP = "  "
LEAST_SOURCE = 16  # A source text that is cut to fewer characters is left out.
MOST_SOURCE = 60  # It is cut to so many everywhere: the line is named, and this is to recognise it.
#: The colours of the grades, as numbers of the escape sequences of terminals.
COLOURS = {"suspect": "33", "growing": "1;33", "likely": "31", "leak": "1;31", "no longer": "32"}


def log_line(finding: LeakFinding) -> str:
    """The finding and its fix in one line."""
    fix = "" if finding.over or not finding.advice else f"; fix: {finding.advice}"
    return f"{finding}{fix}"


def head_of(finding: LeakFinding) -> list[str]:
    """The parts of the first line: grade, holder, rate and what is left."""
    grade = "no longer" if finding.over else finding.grade
    left = finding.freed() if finding.over and finding.freed_bytes else ""
    if not finding.over:
        left = finding.forecast()
    what = "" if finding.rate_bytes > 0 and finding.holder else finding.what
    return [part for part in (grade, finding.subject, finding.rate(), what, left) if part]


def rest_of(finding: LeakFinding, width: int | None) -> list[str]:
    """The parts of the second line: the line of the program with its source text, and the fix. Both
    are cut to fit into `width` characters, if the source text then has enough left."""
    if finding.over:
        return []
    fix = f"fix: {finding.advice}" if finding.advice else ""
    name = finding.kept_at or finding.made_at
    if not name:
        return [fix] if fix else []
    place = line_of(name) if finding.kept_at else f"allocated at {line_of(name)}"
    room = MOST_SOURCE
    if width is not None:
        beside = width - len(place) - len(GAP)
        with_fix = beside - len(fix) - len(GAP)
        room = min(room, with_fix if with_fix >= LEAST_SOURCE else beside)
    source = finding.source
    if len(source) > room:
        source = f"{source[: room - 3]}..." if room >= LEAST_SOURCE else ""
    if source:
        place += GAP + source
    return [place, fix] if fix else [place]


def added_in(finding: LeakFinding) -> str:
    """What is added, and the line that makes it, if the first two lines do not have them."""
    what = finding.what if finding.rate_bytes > 0 and finding.holder else ""
    has_two = finding.kept_at and finding.made_at not in ("", finding.kept_at)
    made = f"made at {finding.made_at}" if has_two else ""
    return "" if finding.over else ", ".join(filter(None, (what, made)))


def terminal_lines(
    finding: LeakFinding, width: int | None, *, colour: bool, step: str = ""
) -> tuple[list[str], list[str]]:
    """The lines of the head and of the rest.

    Args:
        finding: what is shown.
        width: of a line, in characters; None: as long as they are.
        colour: whether the grade is coloured.
        step: the first part, such as `step 32`; "" for none.
    """
    head, rest = head_of(finding), rest_of(finding, width)
    lines = _packed(([step] if step else []) + head, width)
    code = COLOURS.get(head[0])
    if colour and code:
        lines[0] = lines[0].replace(head[0], f"\x1b[{code}m{head[0]}\x1b[0m", 1)
    return lines, _packed(rest, width)


def _packed(parts: Sequence[str], width: int | None) -> list[str]:
    """The parts in as few lines as they take; one that is longer than a line is broken at words."""
    if width is None:
        return [GAP.join(parts)] if parts else []
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1] += GAP + part
        else:
            lines += wrapped(part, width)
    return lines

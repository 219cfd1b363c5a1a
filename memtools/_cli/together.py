"""`memtools explain run.mem --with del,checkpoint:blocks`: what several changes of the program
together make of the peak of the traced step.

    record ──► TracedPeak.kept ──► restored ──► together ──► the new peak, and where it is
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtools._cli.records import UnreadableError

if TYPE_CHECKING:
    from memtools._record.kinds import Peak
    from memtools._record.record import Record


def together(record: Record, given: str) -> tuple[str, dict[str, Any]]:
    """The text and the facts about changes that are replayed together.

    Args:
        record: of a run of which two steps were traced.
        given: the names of the changes, between commas.

    Raises UnreadableError, with one sentence, if the record has no trace, or for an unknown name.
    """
    from memtools._base.peak import in_phase
    from memtools._base.size import format_bytes
    from memtools._base.text import shown
    from memtools._blocks.changes import DEL, offered, together
    from memtools._blocks.kept import restored
    from memtools._record.peaks import peak_of

    peak = peak_of(record)
    why = _why_not(peak)
    if peak is None or peak.traced is None or why:
        raise UnreadableError(f"--with needs two traced steps: {why}")
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    try:
        trace, deaths = restored(peak.traced.kept)
        after = together(trace, names, deaths)
    except ValueError as error:
        raise UnreadableError(str(error)) from None
    texts = {one.name: one.text for one in offered(trace)} | {DEL: peak.traced.to_write()}
    texts |= {one.name: one.change for one in peak.traced.changes}  # with names of modules
    position, peak_bytes = after.peak(after.steps[-1])
    op = after.ops[position]
    before, now = format_bytes(peak.traced.peak_bytes), format_bytes(peak_bytes)
    width = max(map(len, names))
    where = f"{in_phase(op.phase)} ({shown(op.name)})"
    lines = [f"With these changes together, the peak of {before} becomes {now}, {where}:"]
    lines += [f"  {name:{width}}  {shown(texts[name])}" for name in names]
    facts = {
        "changes": [{"name": name, "change": shown(texts[name])} for name in names],
        "traced_peak_bytes": peak.traced.peak_bytes,
        "peak_bytes": peak_bytes,
        "phase": op.phase,
        "operator": shown(op.name),
    }
    return "\n".join(lines), facts


def _why_not(peak: Peak | None) -> str:
    """Why changes cannot be replayed, in words; "" if they can."""
    from memtools._base.text import shown
    from memtools._blocks.kept import MOST

    if peak is None:
        return "no step of this run was recorded"
    if peak.traced is None:
        return "nothing was traced after the step with the highest peak"
    if peak.traced.why:
        return f"they were not traced: {shown(peak.traced.why)}"
    if not peak.traced.kept:
        return f"their storages do not fit into the {MOST:,} characters of a record"
    return ""

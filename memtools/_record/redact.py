"""Mask the secrets of a record, also in texts that the program itself wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memtools._base.redact import redacted, redacted_command

if TYPE_CHECKING:
    from memtools._record.kinds import Event
    from memtools._record.record import Record


def redacted_record(record: Record) -> Record:
    """Return the record with secrets masked in its command, in the texts and fields of its events
    and in the names of its phases."""
    return replace(
        record,
        command=redacted_command(record.command),
        events=tuple(
            replace(
                event, text=redacted(event.text), data=event.data and _redacted_data(event.data)
            )
            for event in record.events
        ),
        phases=tuple(replace(phase, name=redacted(phase.name)) for phase in record.phases),
    )


def _redacted_data(data: Event) -> Event:
    traced = getattr(data, "traced", None)
    if traced is not None:  # The text of a trace has names in it, and cannot be masked.
        data = replace(data, traced=traced._replace(kept=()))  # type: ignore[call-arg]
    return replace(data, **{name: _redacted_value(value) for name, value in vars(data).items()})


def _redacted_value(value: Any) -> Any:
    """Mask the texts in a field, at any depth of tuples."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, tuple):
        parts = map(_redacted_value, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value

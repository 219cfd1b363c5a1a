"""Masks what a command line or the text of an error tells of secrets, before it is written.

    --api-key=abc      --api-key=***          HF_TOKEN=abc       HF_TOKEN=***
    --token abc        --token ***            hf_abcdefgh...     ***
    https://me:abc@h   https://***@h          sk-abcdefgh...     ***

A record is sent to colleagues and attached to reports. What looks like a secret is masked, also
where it is none: a word too few is a smaller loss than a key too many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools._record import Record

MASK = "***"

# A name that ends so has a value that nobody else may see.
_SECRET = (
    r"(?:token|password|passwd|passphrase|pwd|secret|secrets|credential|credentials|cookie|auth"
    r"|authorization|(?:api|access|secret|private|account|wandb)[-_.]?key(?:[-_.]?id)?)"
)
_OPTION = re.compile(rf"--?[\w.-]*{_SECRET}", re.I)
_ASSIGNMENT = re.compile(rf"(-{{0,2}}[\w.-]*{_SECRET}=).+", re.I | re.S)
_IN_TEXT = re.compile(
    rf"""([\w.-]*{_SECRET}["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s"',;&)}}\]]+)""", re.I
)
_AFTER_OPTION = re.compile(rf"(?<![\w-])(--?[\w.-]*{_SECRET}\s+)([^\s-]\S*)", re.I)
# Keys by which services know their own: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google,
# and JSON web tokens.
_KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_USER = re.compile(r"([A-Za-z][\w+.-]*://)[^\s/'\"]+@")
_HEADER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.I)


def redacted(text: str) -> str:
    """The text with `***` in place of what looks like a secret."""
    text = _USER.sub(rf"\1{MASK}@", text)
    text = _HEADER.sub(rf"\1 {MASK}", text)
    text = _IN_TEXT.sub(rf"\1{MASK}", text)
    text = _AFTER_OPTION.sub(rf"\1{MASK}", text)
    return _KEY.sub(MASK, text)


def redacted_command(arguments: Iterable[str]) -> tuple[str, ...]:
    """The arguments of a command, the values of options that name a secret masked."""
    shown: list[str] = []
    names_a_secret = False
    for argument in arguments:
        if names_a_secret and not argument.startswith("--"):
            shown.append(MASK)
            names_a_secret = False
            continue
        assigned = _ASSIGNMENT.fullmatch(argument)
        shown.append(f"{assigned[1]}{MASK}" if assigned else redacted(argument))
        names_a_secret = _OPTION.fullmatch(argument) is not None
    return tuple(shown)


def redacted_record(record: Record) -> Record:
    """The record with its command, the texts of its events and the names of its phases masked, as
    later versions write them."""
    return replace(
        record,
        command=redacted_command(record.command),
        events=tuple(replace(event, text=redacted(event.text)) for event in record.events),
        phases=tuple(replace(phase, name=redacted(phase.name)) for phase in record.phases),
    )

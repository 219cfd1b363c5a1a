"""Facts of `memtools doctor`: each has a value for programs and a text for people."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memtools._base.size import format_bytes

#: memtools._torch, in words
SHIM = "part compiled against torch"


@dataclass(frozen=True)
class Fact:
    """--json prints `value`, and people read `text`. If the value is None or False, the text says
    why."""

    value: str | int | bool | None
    text: str


Section = dict[str, Fact]


def known(value: str | int) -> Fact:
    return Fact(value, str(value))


def unknown(reason: str) -> Fact:
    return Fact(None, f"unknown ({reason})")


def yes(remark: str = "") -> Fact:
    return Fact(True, f"yes ({remark})" if remark else "yes")


def no(reason: str) -> Fact:
    return Fact(False, f"no ({reason})")


def size(count: int) -> Fact:
    return Fact(count, format_bytes(count))


def why(error: Exception) -> str:
    """One line about a file that could not be read."""
    if isinstance(error, FileNotFoundError):
        return f"no {error.filename}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)


def guarded(read: Callable[[], Fact]) -> Fact:
    """The fact that `read` returns, or an unknown one with the reason if it raises."""
    try:
        return read()
    except (OSError, ValueError) as error:
        return unknown(why(error))


def read_text(path: Path) -> str:
    """The text of a file of the kernel. Names of groups in it are bytes, and need not be UTF-8."""
    return path.read_text(encoding="utf-8", errors="surrogateescape").strip()


def read_number(path: Path) -> int:
    """The whole number in a file. Raises ValueError if the file has another text."""
    text = read_text(path)
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError(f"{path} says {text[:40]!r}")
    return int(text)

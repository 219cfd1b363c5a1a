"""Text for people: untrusted names made harmless, numbers with units, and tables."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

_LONGEST: Final = 80  # A message repeats this many characters of a text.


def shown(text: str) -> str:
    """The text with control, direction and other invisible characters escaped: a record may come
    from anywhere, and what stands in it must not control a terminal or a page."""
    return text if text.isprintable() else "".join(_escaped(char) for char in text)


def shown_lines(text: str) -> str:
    """As `shown`, and lines stay lines: what memtools is about to print or to log."""
    return "\n".join(map(shown, text.split("\n")))


def as_name(what: str, name: Any) -> str:
    """An argument that is a name, which reports and errors repeat.

    Args:
        what: what the sentence calls the argument.
        name: the argument.

    Raises TypeError if it is not a str, ValueError if it is empty or has characters that a terminal
    would obey, or that no encoding has.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {shown(type(name).__name__)}")
    if not name or shown(name) != name:
        raise ValueError(f"{what} must have at least one printable character, got '{brief(name)}'")
    return name


def brief(text: str) -> str:
    """Shorten a text that a caller passed for a message: one line of about 80 characters."""
    return shown(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _escaped(char: str) -> str:
    code = ord(char)
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    if code < 256:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def duration(seconds: float) -> str:
    """`"0.42 s"`, `"12.3 s"`, `"3 min 20 s"`, `"4 h 05 min"`, `"2 d 03 h"`."""
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24:02} h"


def sentence(text: str) -> str:
    """The text as a sentence: its first letter large, and a full stop."""
    return text[:1].upper() + text[1:] + "."


def tight(text: str) -> str:
    """The text with a non-breaking space between each number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|B|[KMGT]iB|us|ms|s|min|h|d)(?![\w]))", "\u00a0", text)


def percent(part: float, whole: float) -> str:
    """`"95 %"`, or `"99.6 %"` above 99, where a whole number would say that nothing is left."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.1f} %" if 99 < share < 100 or 0 < share < 1 else f"{share:.0f} %"


def aligned(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "  "
) -> Iterator[str]:
    """The lines of a table: columns are as wide as their widest cell, with two spaces between them.

    Args:
        rows: the cells of each row, as many in each.
        right: the indexes of the columns whose cells are aligned to the right.
        indent: what each line begins with.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells))
        yield (indent + "  ".join(line)).rstrip()


def wrapped(line: str, width: int | None) -> list[str]:
    """The line, broken at words if it is longer than so many characters. Rows of tables, which have
    two spaces in a row, stay as they are."""
    words = line.lstrip()
    if width is None or len(line) <= width or "  " in words:
        return [line]
    indent = " " * (len(line) - len(words) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


def count(number: float, word: str) -> str:
    """`"1 step"`, `"12,000 steps"`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"

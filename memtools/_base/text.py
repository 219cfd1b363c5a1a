"""Text for people: untrusted names made harmless, and numbers with units."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence


def shown(text: str) -> str:
    """The text with control, direction and other invisible characters escaped: a record is
    untrusted, and neither a terminal nor a page may be led by what stands in it."""
    return "".join(char if _visible(char) else _escaped(char) for char in text)


def _visible(char: str) -> bool:
    """Not one of the categories Cc, Cf, Cs, Co, Cn, Zl, Zp."""
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _escaped(char: str) -> str:
    code = ord(char)
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


def tight(text: str) -> str:
    """The text with each figure kept on one line with its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|B|[KMGT]iB|us|ms|s|min|h|d)(?![\w]))", "\u00a0", text)


def percent(part: float, whole: float) -> str:
    """`"95 %"`; `"99.6 %"` near the end, where a whole number would say that nothing is left."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.1f} %" if 99 < share < 100 or 0 < share < 1 else f"{share:.0f} %"


def aligned(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "  "
) -> Iterator[str]:
    """A line for each row, with columns as wide as their widest cell and two blanks between them.
    Cells stand at the left of their column, those of the columns `right` at its right. All rows
    have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells))
        yield (indent + "  ".join(line)).rstrip()


def count(number: float, word: str) -> str:
    """`"1 step"`, `"12,000 steps"`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"

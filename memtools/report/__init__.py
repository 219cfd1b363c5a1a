"""Make one self-contained HTML page of one or several records.

    memtools.report.write_report(memtools.read_record("run.mem"), "run.html")

The page needs jinja2, which the extra `report` installs. `memtools explain` does not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtools._base.file import replace_file
from memtools._base.size import format_bytes
from memtools._base.text import shown

if TYPE_CHECKING:
    from memtools._record.record import Record

__all__ = ["Page", "render", "write_report"]

#: A notebook shows the pictures of so many records of a page.
PICTURES = 4


class Page(str):
    """The page as text. A notebook shows pictures of the records instead.

    Args:
        text: the HTML.
        records: those on the page.
    """

    __slots__ = ("records",)
    records: tuple[Record, ...]

    def __new__(cls, text: str, records: Sequence[Record]) -> Page:
        page = super().__new__(cls, text)
        page.records = tuple(records)
        return page

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # A copy is the text alone.

    def __repr__(self) -> str:
        paths = ", ".join(shown(record.path) for record in self.records)
        return f"<page of {paths}, {format_bytes(len(self))}>"

    def _repr_html_(self) -> str:
        """Return the pictures of the first records, which a notebook shows."""
        from memtools._record.picture import card, line

        left = len(self.records) - PICTURES
        note = f"{left:,} more records are on the page" if left > 0 else ""
        pictures = [record._repr_html_() for record in self.records[:PICTURES]]
        return "".join([*pictures, card(line(note, soft=True)) if note else ""])


def render(records: Record | Sequence[Record], *, title: str | None = None) -> Page:
    """Return the page of a report as text, at most 2 MiB. Takes about 0.3 s.

    Args:
        records: a record, or several to show side by side.
        title: None: the name of the script.

    Raises MemtoolsError without jinja2, ValueError without records.
    """
    from memtools._record.record import Record
    from memtools.report._page import page

    several = [records] if isinstance(records, Record) else list(records)
    wrong = [type(one).__name__ for one in several if not isinstance(one, Record)]
    if wrong:
        raise TypeError(
            f"records must be Records, got {wrong[0]}; read one by memtools.read_record(path)"
        )
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a str or None, got {type(title).__name__}")
    if not several:
        raise ValueError("a report needs at least one record")
    return Page(page(several, title), several)


def write_report(
    records: Record | Sequence[Record],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> int:
    """Write the page of a report to a file atomically.

    Args:
        records, title: as for `render`.
        path: the file. An earlier report is replaced; another file raises FileExistsError.

    Returns the size of the file in bytes. Raises OSError, and what `render` raises.
    """
    text = render(records, title=title).encode("utf-8")
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(text)  # to a pipe or a device; a directory raises OSError
        return len(text)
    _refuse_other_files(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(target.parent))
    replace_file(target, lambda file: file.write(text), mode=0o600)
    return len(text)


def _refuse_other_files(target: Path) -> None:
    from memtools.report._page import GENERATOR

    if not target.exists():
        return
    with target.open("rb") as file:
        head = file.read(4096)
    if head and GENERATOR not in head:
        raise FileExistsError(
            f"{target} is not a report of memtools and is left as it is; name another file"
        )

"""One self-contained HTML page out of one or several records, and plain facts about a record.

    memtools.report.write_report(memtools.read_record("run.mem"), "run.html")

The page needs the extra `report` (jinja2); the facts that `memtools explain` prints need nothing.
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

#: records whose pictures a notebook shows of a page
PICTURES = 4


class Page(str):
    """The page as text. A notebook shows the still pictures of its records in place of its HTML,
    which may have 2 MiB and brings its own style: that is for a file.

    Args:
        text: the HTML.
        records: of which the page was made.
    """

    __slots__ = ("records",)
    records: tuple[Record, ...]

    def __new__(cls, text: str, records: Sequence[Record]) -> Page:
        page = super().__new__(cls, text)
        page.records = tuple(records)
        return page

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy is its text: records stay where they were read

    def __repr__(self) -> str:
        paths = ", ".join(shown(record.path) for record in self.records)
        return f"<page of {paths}, {format_bytes(len(self))}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the pictures of the first records."""
        from memtools._record.picture import card, line

        left = len(self.records) - PICTURES
        note = f"{left:,} more records are on the page" if left > 0 else ""
        pictures = [record._repr_html_() for record in self.records[:PICTURES]]
        return "".join([*pictures, card(line(note, soft=True)) if note else ""])


def render(records: Record | Sequence[Record], *, title: str | None = None) -> Page:
    """Return the page of a report as text. Takes about 0.3 s for a record of the usual size.

    Args:
        records: a record, or several that are shown side by side.
        title: the head line. None, the default: the name of the script.

    Returns the page, which has at most 2 MiB.

    Raises:
        MemtoolsError: jinja2 is not installed.
        TypeError: `records` is something else, or `title` is not a str.
        ValueError: there is no record.
    """
    from memtools._record.record import Record
    from memtools.report._page import page

    several = [records] if isinstance(records, Record) else list(records)
    wrong = [type(one).__name__ for one in several if not isinstance(one, Record)]
    if wrong:
        raise TypeError(
            f"a report takes records, got {wrong[0]}; read one by memtools.read_record(path)"
        )
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title is a str or None, got {type(title).__name__}")
    if not several:
        raise ValueError("a report needs at least one record")
    return Page(page(several, title), several)


def write_report(
    records: Record | Sequence[Record],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> int:
    """Write the page of a report to a file.

    The file appears in one step: a reader never sees half of it. An earlier report is replaced, any
    other file is not.

    Args:
        records: a record, or several that are shown side by side.
        path: the file.
        title: the head line. None, the default: the name of the script.

    Returns the size of the file in bytes.

    Raises:
        FileExistsError: there is a file of that name, and it is not a report.
        OSError: the file cannot be written. MemtoolsError, ValueError: as `render`.
    """
    text = render(records, title=title).encode("utf-8")
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(text)  # a pipe, a device; a directory refuses by itself
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
            f"{target} is no report of memtools and is left as it is; name another file"
        )

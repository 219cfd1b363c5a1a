"""Lines of memtools among the output of a program, on the standard error.

    45%|####     |                  <- the program's progress bar: its cursor stays behind it
    memtools: step 32  suspect ...  <- begins on the next line
              train.py:17  self...    <- the same message goes on

They are written to file descriptor 2, because the program may have replaced sys.stderr. A terminal
gets its encoding and colours; a pipe or a file gets ASCII.
"""

from __future__ import annotations

import contextlib
import locale
import os
import textwrap
from collections.abc import Mapping, Sequence

from memtools._base.ranks import rank_of_several

NAME = "memtools: "
LEAST_WIDTH = 40  # Lines are not broken into shorter ones than this.
_ERROR = 2


def rank_prefix(environment: Mapping[str, str] = os.environ) -> str:
    """`[rank1] ` on a rank of a job of several, whose ranks share a terminal; else ""."""
    rank = rank_of_several(environment)
    return f"[rank{rank}] " if rank else ""


def width() -> int | None:
    """The characters that a line has after memtools' name; None if it is not a terminal."""
    columns = _columns()
    return None if columns is None else max(LEAST_WIDTH, columns - len(rank_prefix() + NAME))


def has_colours(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether it is a terminal that is to have colours."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return wanted and _columns() is not None


def write_message(lines: Sequence[str]) -> None:
    """Write a message, by one call. It is not an error that the descriptor is closed, or that its
    reader has gone."""
    columns, rank = _columns(), rank_prefix()
    indent = " " * len(NAME)
    text = "".join(f"{rank}{indent if n else NAME}{line}\n" for n, line in enumerate(lines))
    encoding = "ascii" if columns is None else locale.getencoding()
    if columns is not None:
        # They end the line where it is not empty; where it is, the message takes their place.
        text = f"{' ' * (columns - 1)}\r{text}"
    write_bytes(text.encode(encoding, "backslashreplace"))


def write_text(text: str) -> None:
    """Write a line, which a terminal gets broken at words."""
    room = width()
    write_message([text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False))


def write_bytes(data: bytes) -> None:
    """Write bytes as they are."""
    with contextlib.suppress(OSError):
        os.write(_ERROR, data)


def _columns() -> int | None:
    """How wide the terminal is; None if it is not one."""
    with contextlib.suppress(OSError):
        if os.isatty(_ERROR):
            return os.get_terminal_size(_ERROR).columns or 80
    return None

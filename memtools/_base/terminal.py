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
from collections.abc import Mapping, Sequence

from memtools._base.ranks import rank_of_several
from memtools._base.text import wrapped

NAME = "memtools: "
LEAST_WIDTH = 40  # Lines are not broken into shorter ones than this.
OUTPUT, ERROR = 1, 2  # file descriptors


def rank_prefix(environment: Mapping[str, str] = os.environ) -> str:
    """`[rank1] ` on a rank of a job of several, whose ranks share a terminal; else ""."""
    rank = rank_of_several(environment)
    return f"[rank{rank}] " if rank else ""


def width() -> int | None:
    """The characters that a line has after memtools' name; None if it is not a terminal."""
    columns = columns_of(ERROR)
    return None if columns is None else max(LEAST_WIDTH, columns - len(rank_prefix() + NAME))


def has_colours(descriptor: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a descriptor is a terminal that is to have colours."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return wanted and columns_of(descriptor) is not None


def write_message(lines: Sequence[str]) -> None:
    """Write a message, by one call. It is not an error that the descriptor is closed, or that its
    reader has gone."""
    columns, rank = columns_of(ERROR), rank_prefix()
    indent = " " * len(NAME)
    text = "".join(f"{rank}{indent if n else NAME}{line}\n" for n, line in enumerate(lines))
    encoding = "ascii" if columns is None else locale.getencoding()
    if columns is not None:
        # They end the line where it is not empty; where it is, the message takes their place.
        text = f"{' ' * (columns - 1)}\r{text}"
    write_bytes(text.encode(encoding, "backslashreplace"))


def write_text(text: str) -> None:
    """Write lines as one message. A terminal gets long ones broken at words."""
    room = width()
    write_message([part for line in text.split("\n") for part in wrapped(line, room)])


def write_bytes(data: bytes) -> None:
    """Write bytes as they are."""
    with contextlib.suppress(OSError):
        os.write(ERROR, data)


def columns_of(descriptor: int) -> int | None:
    """How wide a terminal is; None if the descriptor is not one."""
    with contextlib.suppress(OSError):
        if os.isatty(descriptor):
            return os.get_terminal_size(descriptor).columns or 80
    return None

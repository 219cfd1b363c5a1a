"""Find and read the record for a command, and print text."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memtools import MemtoolsError

if TYPE_CHECKING:
    from memtools._record.record import Record

EXIT_UNREADABLE = 2
MAGIC = b"MTRECORD"
# The magic, the start in ns since 1970, and when it was closed, or 0; docs/internals/record.md has
# the layout.
HEAD = struct.Struct("<8s56xQ56xQ")


class UnreadableError(MemtoolsError):
    """A file is not a record, or cannot be read. The message is one sentence."""


def read(path: str) -> Record:
    """Read a record. Raises UnreadableError for a file that cannot be read as one."""
    from memtools._base.text import shown
    from memtools._record.reader import read_record

    try:
        if Path(path).is_dir():
            raise UnreadableError(f"{shown(path)} is a directory; give the run.mem file in it")
        return read_record(path)
    except FileNotFoundError:
        raise UnreadableError(
            f"there is no record {shown(path)}; memtools run writes one"
        ) from None
    except (OSError, ValueError) as error:
        raise UnreadableError(shown(" ".join(str(error).split()))) from None


def newest_record(folder: str | os.PathLike[str] = ".") -> str:
    """Return the path of the record that was begun last, of those in the folder whose names end in
    .mem. Raises UnreadableError if there is none.
    """
    found = [(times[0], path) for path in _candidates(folder) if (times := _times(path))]
    if found:
        return max(found)[1]
    if os.access(folder, os.W_OK):
        raise UnreadableError(
            "there is no record in this folder; give its path, or make one with memtools run"
        )
    from memtools._monitor.inprocess import temporary_record

    raise UnreadableError(
        "there is no record in this folder, which is read-only; a run in it writes "
        f"{temporary_record('PID')}: give that path"
    )


def _candidates(folder: str | os.PathLike[str]) -> list[str]:
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".mem")]
    except OSError as error:
        raise UnreadableError(f"{os.fspath(folder)}: {error.strerror}") from None
    return [os.path.normpath(os.path.join(folder, name)) for name in names]


def _times(path: str) -> tuple[int, int] | None:
    """When the record was begun and when it was closed, or 0, in ns since 1970; None for a file
    that is not a record."""
    try:
        if not os.path.isfile(path):  # Opening a pipe would wait.
            return None
        with open(path, "rb") as file:
            magic, start, closed = HEAD.unpack(file.read(HEAD.size))
    except (OSError, struct.error):
        return None
    return (start, closed) if magic == MAGIC else None


def killed_here() -> str | None:
    """The name of this folder's newest record if its process ended without closing it; else None.
    Reads the headers of the records only."""
    import fcntl

    try:
        path = newest_record()
        with open(path, "rb") as file:  # A process that writes the record holds its lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (UnreadableError, OSError):
        return None
    times = _times(path)
    return path if times is not None and times[1] == 0 else None


def printed(text: str) -> None:
    """Print to stdout. Control characters are escaped, because a record may have any names."""
    from memtools._base.text import shown_lines

    print_safe(shown_lines(text))


def print_safe(text: str) -> None:
    """Print a text without foreign control characters to stdout. Characters that the terminal's
    encoding does not have are escaped."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def complain(prog: str, reason: object) -> int:
    from memtools._base.text import shown

    sys.stdout.flush()
    print(shown(f"{prog}: {reason}"), file=sys.stderr)
    return EXIT_UNREADABLE

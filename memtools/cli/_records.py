"""Reading the records that `memtools explain` and `memtools report` are given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools._record import Record

EXIT_UNREADABLE = 2


class UnreadableError(Exception):
    """One clear sentence about a file that is no record that can be read."""


def read(path: str) -> Record:
    """Raises UnreadableError for every file that cannot be read as a record."""
    from memtools._record import read_record
    from memtools.report._words import shown

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


def printed(text: str) -> None:
    """To stdout; a name need not be printable in the terminal's encoding."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def complain(prog: str, reason: object) -> int:
    sys.stdout.flush()
    print(f"{prog}: {reason}", file=sys.stderr)
    return EXIT_UNREADABLE

"""The text of a line that a record names, as long as the file is the one that ran."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from memtools._base.notebook import file_of
from memtools._base.place import function_at, source_at
from memtools._base.text import shown

if TYPE_CHECKING:
    from memtools._record.record import Record

#: `train.py:47 in training_step`, as name_of() makes it.
_NAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?: in (?P<function>\w+))?")


def source_of(record: Record, name: str) -> str:
    """The text of the line `train.py:47 in training_step`, without its indent.

    It is "" where the file is not there, is newer than the run or has another function at that
    line: then another program would be quoted. A file is looked for from the working directory and
    from the folder of the record. The cell of a notebook has a text in the kernel that ran it.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        return ""
    file, line, function = parts["file"], int(parts["line"]), parts["function"] or ""
    if file_of(file) is not None:
        return shown(source_at(name)) if record.pid == os.getpid() else ""
    for folder in ("", os.path.dirname(record.path)):
        path = os.path.join(folder, file)
        if _is_older(path, record.start_ns) and function_at(path, line) == function:
            return shown(source_at(f"{path}:{line}"))
    return ""


def _is_older(path: str, start_ns: int) -> bool:
    try:
        return path.endswith(".py") and os.stat(path).st_mtime_ns <= start_ns
    except (OSError, ValueError):
        return False

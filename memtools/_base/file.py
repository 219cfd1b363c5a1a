"""Writing a file in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO


def replace_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a new file beside `path` and move it there: whatever happens on the way, the
    file is as it was, or complete. Raises OSError and whatever `write` raises."""
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
        os.replace(temporary, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # an interrupt may come before or after it is
            os.unlink(temporary)
        raise

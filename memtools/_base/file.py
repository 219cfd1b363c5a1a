"""Writing a file in one step, and what it is called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from memtools._base.text import brief


def as_path(what: str, path: str | os.PathLike[str]) -> str:
    """An argument that is the path of a file, as text.

    Raises TypeError if it is not a path, ValueError if no file can have that name.
    """
    text = os.fspath(path)
    try:
        is_one = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_one = False
    if not is_one:
        raise ValueError(f"{what} is not a valid file name: '{brief(text)}'")
    return text


def folder_now() -> str:
    """The current directory; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def seen_from(folder: str, path: str) -> str:
    """An absolute path as a user in that folder would type it: without the folder, where the file
    lies in it or below."""
    return path.removeprefix(folder.rstrip(os.sep) + os.sep) if folder else path


def replace_file(
    path: str | os.PathLike[str], write: Callable[[BinaryIO], object], *, mode: int = 0o666
) -> None:
    """Write a file in one step: whatever happens meanwhile, it is as it was before, or complete.

    Args:
        path: the file.
        write: fills a new file beside it, which is then moved to `path`.
        mode: who may read it, less the process's umask.

    Raises OSError, and whatever `write` raises.
    """
    folder, name = os.path.split(os.path.abspath(as_path("path", path)))
    temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "wb") as file:
            write(file)
        os.replace(temporary, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # interrupted before open or after replace
            os.unlink(temporary)
        raise

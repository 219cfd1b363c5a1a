"""Whose code a file is: memtools' own, Python's, a library's, or the user's.

site-packages/mine/                 the user's, if pip has installed it out of a folder that is on
                                    this machine (pip install ./mine)
the folder of the script that runs  the user's, also within site-packages
site-packages/memtools/             memtools' own
site-packages/, lib/python3.11/     a library's, and Python's
all others                          the user's
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from memtools._base.notebook import CELL

#: Read once at the import: in a forked worker a later read would copy pages.
_PATHS = sysconfig.get_paths()
_STANDARD = tuple({f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({f"{_PATHS[name]}/" for name in ("purelib", "platlib")})
#: The names of the folders that pip and Linux distributions install to.
_PACKAGES = ("/site-packages/", "/dist-packages/")
#: A part of the name of the folder that torch.compile writes code to.
GENERATED = "torchinductor"
#: The folder of memtools, as it was imported.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: rooms of memtools that allocate for themselves, and not for the program; and who does it for them
_OWN = (
    *(f"{PACKAGE}{room}/" for room in ("_monitor", "_base", "_census", "_leak", "_record")),
    f"{_PATHS['stdlib']}/tracemalloc.py",
)

USER, LIBRARY, STANDARD, MEMTOOLS = range(4)


def owner_of(file: str) -> int:
    """Whose code a file has: the user's, a library's, memtools' own, or that of
    the standard library, as which code without a file counts."""
    if file.startswith("<"):
        return USER if file.startswith(CELL) else STANDARD
    if is_users(file):
        return USER
    if file.startswith(_OWN):
        return MEMTOOLS
    if file.startswith((*_INSTALLED, PACKAGE)) or any(part in file for part in _PACKAGES):
        return LIBRARY
    if file.startswith(_STANDARD) or GENERATED in file:
        return STANDARD
    return USER


def library_paths() -> tuple[str, ...]:
    """Where modules of libraries lie, with a slash at the end, and what names without a file begin
    with. users_paths() comes before it."""
    return (*sorted({*_STANDARD, *_installed_in()}), "<frozen ")


def users_paths() -> tuple[str, ...]:
    """What is the user's code within the folders of libraries and of memtools: the folder of the
    script that runs, and packages that pip has installed out of a folder of this machine. The first
    call takes 1 ms, others 0.2 us."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return _users_paths(main if isinstance(main, str) else "")


def is_users(file: str) -> bool:
    """Whether a file is the user's although it may lie in a folder of libraries."""
    return file.startswith(users_paths())


def is_own(file: str) -> bool:
    """Whether a file is memtools' own."""
    return file.startswith(PACKAGE) and not is_users(file)


def is_torchs(file: str) -> bool:
    """Whether a file is torch's own."""
    return any(f"{part}torch/" in file for part in _PACKAGES)


def name_in_library(file: str) -> str:
    """The path of a library's file from the folder that pip installs to, such as
    "transformers/trainer.py"; "" for other files."""
    found = next((part for part in _PACKAGES if part in file), "")
    return file.rpartition(found)[2] if found and not is_users(file) else ""


def _installed_in() -> Iterator[str]:
    """The folders that pip installs to, with a slash at the end."""
    yield from _INSTALLED
    for path in sys.path:
        if f"{path}/".endswith(_PACKAGES):
            yield f"{path}/"


@functools.lru_cache(maxsize=4)
def _users_paths(main: str) -> tuple[str, ...]:
    found, libraries = set(), set(_installed_in())
    script = os.path.abspath(main)
    folder = os.path.dirname(script)
    tops = {*libraries, PACKAGE}
    if main and f"{folder}/".startswith(tuple(tops)):
        found.add(script if f"{folder}/" in tops else f"{folder}/")
    for folder in libraries:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.endswith(".dist-info") and _is_of_a_folder(os.path.join(folder, name)):
                    found.update(_files_of(folder, name))
    return tuple(sorted(found - {PACKAGE}))


def _is_of_a_folder(info: str) -> bool:
    """Whether pip has installed it out of a folder that is on this machine (PEP 610). Some build
    tools write the folder that they have built in, on another one."""
    try:
        with open(os.path.join(info, "direct_url.json"), encoding="utf-8") as file:
            origin = json.load(file)
        url = urlsplit(origin["url"])
        return "dir_info" in origin and url.scheme == "file" and os.path.isdir(unquote(url.path))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _files_of(folder: str, info: str) -> Iterator[str]:
    """The packages, with a slash at the end, and single modules of what is installed."""
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, info, "RECORD"), encoding="utf-8") as file:
            names = {line.partition(",")[0] for line in file}
        for name in names:
            top, slash, _ = name.partition("/")
            if name.endswith(".py") and top != ".." and not name.startswith("/"):
                yield os.path.join(folder, top + slash)

"""Which file is the shim memtools._torch for one exact torch, and where it lies.

    memtools/_torch.cpython-311-x86_64-linux-gnu.so               made when memtools was installed
    memtools/_torch-0.1.0-2.13.0+cpu-cf30153c4c13.cpython-311-x86_64-linux-gnu.so
                                                                  made by `memtools build-shim`

Which torch the first is for stands in `_build_info`; the names of the others say it: the version of
memtools, that of torch with its commit, and Python's. Where the package cannot be written to, they
lie in a folder of the user's cache that belongs to this installation alone.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from memtools._base.text import shown
from memtools._version import __version__

MODULE = "memtools._torch"
PACKAGE = Path(__file__).resolve().parents[1]
BUILD_COMMAND = "memtools build-shim"

#: The suffix of this Python's extension modules, such as ".cpython-311-x86_64-linux-gnu.so".
SUFFIX = EXTENSION_SUFFIXES[0]
COMMIT_LENGTH = 12


class Shim(NamedTuple):
    """A shim that was built, and the torch that it was built for."""

    path: Path
    torch_version: str
    torch_commit: str  #: of a file that `memtools build-shim` made, its first 12 characters
    refused: str = ""  #: why it is not loaded, whatever torch it is for, and what mends that

    def fits(self, version: str, git_version: str | None) -> bool:
        """Whether it was built for this torch."""
        commit = git_version or "unknown"
        return self.torch_version == version and commit.startswith(self.torch_commit)


def file_name(version: str, git_version: str | None) -> str:
    """The name of the file that `memtools build-shim` makes for a torch."""
    commit = (git_version or "unknown")[:COMMIT_LENGTH]
    return f"_torch-{__version__}-{version}-{commit}{SUFFIX}"


def folders() -> list[Path]:
    """Where `memtools build-shim` puts what it makes: the first that can be written to."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if not os.path.isabs(cache):
        cache = os.path.join(home, ".cache")
    if not os.path.isabs(cache):  # a user without a home
        return [PACKAGE]
    # Of this installation alone: what another environment built is not missing here.
    name = hashlib.sha256(os.fsencode(PACKAGE)).hexdigest()[:12]
    return [PACKAGE, Path(cache, "memtools", f"shim-{name}")]


def built(info: Any) -> Iterator[Shim]:
    """All shims of this installation, this version of memtools and this Python; the one that was
    made with memtools comes first. Those that others may have written are refused.

    Args:
        info: the module memtools._build_info.
    """

    if info.TORCH_VERSION is not None:
        commit = info.TORCH_GIT_VERSION or "unknown"
        yield Shim(PACKAGE / f"_torch{SUFFIX}", info.TORCH_VERSION, commit)
    form = re.compile(rf"_torch-{re.escape(__version__)}-(.+)-([^-]+){re.escape(SUFFIX)}")
    for folder in folders():
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if match := form.fullmatch(name):
                path = folder / name
                refused = why_not_ours(folder) or why_not_ours(path)
                if refused:
                    refused = f"memtools._torch is not loaded from {path}: {refused}"
                yield Shim(path, match[1], match[2], shown(refused))


def may_be_loaded(shims: list[Shim], version: str, git_version: str | None) -> bool:
    """Whether one of them would be loaded for this torch, or was to be before something changed: a
    program that goes on without a shim then says so."""
    return any(not one.refused or one.fits(version, git_version) for one in shims)


def why_not_ours(path: Path) -> str:
    """Which users other than this one and root can write the file, which is loaded as native code,
    and how to end that; "" if none can. A folder of the cache is asked, and the one that it lies
    in."""
    for one in (path, path.parent):
        if one.is_relative_to(PACKAGE) or one == PACKAGE.parent:
            continue  # A user who can write to the package does not need a shim to change it.
        try:
            found = one.stat()
        except OSError as error:
            return f"{one} cannot be looked at ({error.strerror})"
        others = 0o002 if found.st_gid == os.getegid() else 0o022
        if found.st_uid not in (0, os.geteuid()):
            return f"{one} belongs to another user (uid {found.st_uid}); remove it"
        if found.st_mode & others:
            mode = found.st_mode & 0o7777
            return f"other users may write to {one} (mode {mode:04o}); run chmod go-w {one}"
    return ""


def load(shim: Shim) -> Any:
    """Import a shim as the module memtools._torch.

    Raises ImportError if it does not load.
    """
    if shim.path.name == f"_torch{SUFFIX}":
        return importlib.import_module(MODULE)
    loader = ExtensionFileLoader(MODULE, str(shim.path))
    spec = importlib.util.spec_from_file_location(MODULE, shim.path, loader=loader)
    assert spec is not None  # it is made of the loader that is given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module

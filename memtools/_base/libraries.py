"""Whose code a file is: the folders of Python's own library, and of packages that are installed."""

from __future__ import annotations

import sys
import sysconfig

#: read here, once: what a module does later a forked worker may do, whose pages it would copy
_PATHS = sysconfig.get_paths()
#: in the name of the folder that torch.compile writes code to
GENERATED = "torchinductor"


def library_paths() -> tuple[str, ...]:
    """Where modules of libraries lie, with a slash at the end, and what names without a file begin
    with."""
    found = {_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for path in sys.path:
        if path.endswith(("/site-packages", "/dist-packages")):
            found.add(path)
    return (*sorted(f"{path}/" for path in found), "<frozen ")

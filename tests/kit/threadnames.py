"""Names of this process's threads, as the kernel lists them."""

from __future__ import annotations

import contextlib
from pathlib import Path

PF_EXITING = 4


def thread_names() -> list[str]:
    """Of those that are not about to be gone: one that was joined is listed for a moment more, but
    it has told the kernel of its end before it told who joins it. One that ends meanwhile has no
    name."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if not int(rest.split()[6]) & PF_EXITING:
                names.append(name)
    return names

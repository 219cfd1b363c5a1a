"""How much memory a process really has, by the system's own account, and its peak from outside.

Resident size counts a page once for every address that maps it, so that it reads n times too much
where n samples share a prompt. Here a page counts once: anonymous pages by their proportional
share, and the pages of memory files by what the file holds, mapped or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INTERVAL_S = 0.001


class Memory(NamedTuple):
    """Bytes of a process."""

    physical: int  # anonymous pages and memory files, each page once
    anonymous: int
    memory_files: int
    pss: int  # all of smaps_rollup's Pss: libraries too
    resident: int  # VmRSS: aliases count each time
    page_tables: int

    def less(self, before: Memory) -> Memory:
        return Memory(*(now - then for now, then in zip(self, before, strict=True)))


def memory(process: int | str = "self") -> Memory:
    folder = Path("/proc", str(process))
    rollup = _kib(folder / "smaps_rollup")
    status = _kib(folder / "status")
    files = _memory_files(folder)
    return Memory(
        rollup["Pss_Anon"] + files,
        rollup["Pss_Anon"],
        files,
        rollup["Pss"],
        rollup["Rss"],
        status["VmPTE"],
    )


def _kib(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file, in bytes."""
    cells = (line.split() for line in path.read_text().splitlines())
    return {c[0].rstrip(":"): int(c[1]) * 1024 for c in cells if len(c) == 3 and c[2] == "kB"}


def _memory_files(folder: Path) -> int:
    """What the files made by memfd_create hold, each file once."""
    held: dict[int, int] = {}
    for entry in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "memfd:" in os.readlink(entry):
                status = entry.stat()
                held[status.st_ino] = status.st_blocks * 512
    return sum(held.values())


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """The largest `Memory.physical` within the block, sampled by another process every ms.

    The dictionary is filled when the block ends: physical bytes before, at the peak, and samples.
    """
    command = [sys.executable, "-S", __file__, str(os.getpid())]
    result: dict[str, int] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout
        first = json.loads(it.stdout.readline())  # it watches from here on
        yield result
        answer, _ = it.communicate()
    last = json.loads(answer)
    result |= {"before": first["physical"], "peak": last["physical"], "samples": last["samples"]}


def watch(process: int) -> None:
    """Writes the first sample, then the largest, once the standard input is closed."""
    folder = Path("/proc", str(process))
    most, samples = physical(folder), 1
    print(json.dumps({"physical": most}), flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        most, samples = max(most, physical(folder)), samples + 1
    print(json.dumps({"physical": most, "samples": samples}))


def physical(folder: Path) -> int:
    """As Memory.physical where no process shares anonymous pages, and a hundred times as fast."""
    return _kib(folder / "status")["RssAnon"] + _memory_files(folder)


if __name__ == "__main__":
    watch(int(sys.argv[1]))

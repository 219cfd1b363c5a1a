"""Make python.inv, the names of Python's documentation that the site of memtools links to.

    python docs/_inventories/shorten.py /usr/share/doc/python3.11/html/objects.inv

The inventory comes from the Debian package python3.11-doc. Only the types, functions and exceptions
of some modules are kept, because the whole of it is thirty times as large. What a signature or a
docstring names and the file does not have is a warning when the site is built: add its module to
MODULES and run this again.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("py:class", "py:exception", "py:function", "py:module")
#: modules whose names are kept; "" for the built-in names
MODULES = (
    "",
    "asyncio",
    "collections",
    "collections.abc",
    "contextlib",
    "datetime",
    "functools",
    "io",
    "logging",
    "os",
    "pathlib",
    "tracemalloc",
    "types",
    "typing",
    "warnings",
)
_LINE = re.compile(r"(\S+)\s+(\S+:\S+)\s+-?\d+\s+\S+\s+.*")


def shortened(inventory: bytes) -> bytes:
    """An inventory of version 2 with the lines of KINDS and MODULES alone."""
    head, packed = inventory.split(b"zlib.\n", 1)
    kept = []
    for line in zlib.decompress(packed).decode().splitlines():
        found = _LINE.fullmatch(line)
        if found and found[2] in KINDS:
            module = found[1] if found[2] == "py:module" else found[1].rpartition(".")[0]
            if module in MODULES:
                kept.append(line)
    return head + b"zlib.\n" + zlib.compress("".join(f"{line}\n" for line in kept).encode(), 9)


def main() -> None:
    """Write python.inv beside this file."""
    short = shortened(Path(sys.argv[1]).read_bytes())
    (HERE / "python.inv").write_bytes(short)
    print(f"Wrote python.inv ({len(short) / 1024:.1f} KiB)")


if __name__ == "__main__":
    main()

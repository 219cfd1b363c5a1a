"""Which pages of a range of addresses are in memory, and whether they count as this process's.

array of 586 MiB   |xxxxxxx-------------------------------|   mincore(2): 12.7 MiB are resident
                    written  never written, no memory yet
"""

from __future__ import annotations

import ctypes
import mmap
import re
from typing import NamedTuple

_CHUNK = 1 << 28  # So many bytes are asked for at once: a byte of the answer is a page.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-[0-9a-f]+ .w.([ps]) \S+ (\S+) \d+ *(.*)\nSize: +(\d+) kB\n"
    r"(?:\w+: +\d+ kB\n)*?Rss: +(\d+) kB$",
    re.MULTILINE,
)
_PART, _LAST_LINE = 1 << 13, "\nVmFlags:"  # characters read at once; the last line of a mapping
_FILES_OF_MEMORY = re.compile(r"/dev/shm/|/memfd:|/dev/zero|/SYSV")


class Mapping(NamedTuple):
    """A mapping that can be written.

    Attributes:
        begin: its address.
        size: its bytes.
        resident: those in memory.
        is_shared: whether it is shared memory, such as a file of /dev/shm.
    """

    begin: int
    size: int
    resident: int
    is_shared: bool


def mappings(smaps: str = "/proc/self/smaps") -> list[Mapping]:
    """The mappings of this process that can be written and have memory: those of no file, and
    shared memory. Pages of other files are taken back where memory is short.

    Takes some milliseconds. Empty where that cannot be read. It is read in small parts, so that the
    text takes no large block of malloc's heap.
    """
    found, rest = [], ""
    try:
        with open(smaps, encoding="utf-8", errors="replace") as file:
            while part := file.read(_PART):
                text, end, rest = (rest + part).rpartition(_LAST_LINE)
                found += _mappings_in(text)
                rest = end + rest
    except OSError:
        return []
    return found + _mappings_in(rest)


def _mappings_in(text: str) -> list[Mapping]:
    found = []
    for begin, share, device, path, size, resident in _MAPPING.findall(text):
        is_shared = share == "s" and _FILES_OF_MEMORY.match(path) is not None
        if is_shared or (share == "p" and device == "00:00" and path in ("", "[heap]")):
            found.append(Mapping(int(begin, 16), 1024 * int(size), 1024 * int(resident), is_shared))
    return found


def resident_bytes(begin: int, size: int) -> int | None:
    """How many bytes of a range of addresses are in memory, counted in pages; None where that is
    not known, such as of a range that is no longer mapped. Takes about 5 ns a page."""
    first, end, found = begin - begin % mmap.PAGESIZE, begin + size, 0
    buffer = (ctypes.c_ubyte * (min(_CHUNK, end - first) // mmap.PAGESIZE + 1))()
    try:
        mincore = ctypes.CDLL(None).mincore
    except AttributeError:
        return None
    while first < end:
        part = min(_CHUNK, end - first)
        pages = -(-part // mmap.PAGESIZE)
        if mincore(ctypes.c_void_p(first), ctypes.c_size_t(part), buffer) != 0:
            return None
        found += memoryview(buffer)[:pages].tobytes().count(1)
        first += part
    return min(size, found * mmap.PAGESIZE)

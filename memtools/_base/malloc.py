"""Whose malloc this process calls, how it is set, and glibc's arenas.

/proc/self/maps ── where malloc and its kin lie ──► the file that serves: glibc, musl, jemalloc...
/proc/self/environ ─► GLIBC_TUNABLES, then MALLOC_*      what glibc read when the process began
mallopt, done here ─► remembered: glibc cannot be asked
malloc_info ────────► arenas, their bytes, how many of them are idle
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MALLOCS = {
    "glibc": r"libc(-[0-9.]+)?\.so(\.6)?",
    "musl": r"(ld-musl|libc\.musl)-.*",
    "jemalloc": r"libjemalloc.*",
    "tcmalloc": r"libtcmalloc.*",
    "mimalloc": r"libmimalloc.*",
    "snmalloc": r"libsnmalloc.*",
    "AddressSanitizer": r"lib(clang_rt\.)?asan.*",
}
#: The functions that every allocator in the place of malloc must have.
FUNCTIONS = ("malloc", "calloc", "realloc", "free")
#: name here: (variable, name in GLIBC_TUNABLES, least value)
TUNABLES = {
    "arena_max": ("MALLOC_ARENA_MAX", "glibc.malloc.arena_max", 1),
    "arena_test": ("MALLOC_ARENA_TEST", "glibc.malloc.arena_test", 1),
    "trim_threshold": ("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", 0),
    "mmap_threshold": ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", 0),
    "mmap_max": ("MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max", 0),
    "top_pad": ("MALLOC_TOP_PAD_", "glibc.malloc.top_pad", 0),
}
#: Any of them set: glibc leaves both thresholds where they are.
END_THE_DYNAMIC = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")
MALLOPT = {"trim_threshold": -1, "mmap_threshold": -3, "arena_max": -8}  # <malloc.h>
ARENA_TEST = 8  # On 64 bits glibc makes 8 arenas before it counts the cores, once.
ARENAS_A_CORE = 8
LARGE_BLOCK = 1 << 20
KEPT_AT_THE_END = 16 << 20
BY_MALLOPT = "mallopt, by memtools"

_done_here: dict[str, int] = {}  # The settings made by mallopt in this process.


@dataclass(frozen=True)
class Serving:
    """The allocator behind malloc."""

    #: "glibc", "musl", "jemalloc", ..., or the name of the file
    name: str
    #: of glibc, "2.36"
    version: str | None
    #: of the file; None where /proc/self/maps cannot be read
    path: str | None
    #: other known allocators that are mapped and do not serve
    others: tuple[str, ...]


@dataclass(frozen=True)
class Heap:
    """What malloc_info() reports, in bytes."""

    #: their number
    arenas: int
    #: of all arenas, without blocks mapped one by one
    arena_bytes: int
    #: of these, in no allocated block
    idle_bytes: int
    #: of these, in arenas other than the main one
    idle_elsewhere: int
    #: of blocks mapped one by one
    mapped_bytes: int


def name_of(path: str) -> str | None:
    """The allocator that a file of this name is."""
    base = os.path.basename(path)
    return next((name for name, pattern in MALLOCS.items() if re.fullmatch(pattern, base)), None)


def serving(
    maps: str, addresses: Sequence[int], version: str | None, executable: str = ""
) -> Serving:
    """The allocator by the text of /proc/self/maps, the addresses of its functions, glibc's
    version, if it is here, and the program's own file.

    A program that is linked to a fixed place, as the Python of Debian is, has an address of its own
    for each function that it takes the address of, from where it goes on to the library: such an
    address counts only where all of them lie in the program.
    """
    found, mapped = dict[int, str](), set[str]()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        mapped.add(fields[5])
        low, high = (int(bound, 16) for bound in fields[0].split("-"))
        found |= {at: fields[5] for at in addresses if low <= at < high}
    files = [found[at] for at in addresses if at in found]
    path = next((file for file in files if file != executable), files[0] if files else None)
    named = name_of(path) if path else ("glibc" if version else None)
    name = named or (os.path.basename(path) if path else "unknown")
    others = sorted(
        file for file in mapped if file != path and name_of(file) not in (None, "glibc", "musl")
    )
    return Serving(name, version if name == "glibc" else None, path, tuple(others))


def find_serving() -> Serving:
    """Of this process; reads /proc/self/maps, some 0.1 ms to a few ms by the files mapped."""
    libc = ctypes.CDLL(None)
    addresses = [ctypes.cast(libc[name], ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
        executable = os.readlink("/proc/self/exe")
    except OSError:
        maps = executable = ""
    return serving(maps, addresses, _glibc_version(libc), executable)


def _glibc_version(libc: ctypes.CDLL) -> str | None:
    try:
        ask = libc.gnu_get_libc_version
    except AttributeError:
        return None
    ask.restype = ctypes.c_char_p
    return str(ask().decode())


# --- settings -------------------------------------------------------------------------------------


def environment_at_start() -> Mapping[str, str]:
    """What the C library saw. A program that writes its title over it leaves os.environ's word."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        raw = b""
    # glibc 2.36 and others end each tunable in place, so that what follows looks like a variable.
    raw = re.sub(rb"\0(?=glibc\.)", b":", raw)
    pairs = [os.fsdecode(item).partition("=") for item in raw.split(b"\0") if b"=" in item]
    found = {name: value for name, _, value in pairs}
    return found if found.keys() & os.environ.keys() or not os.environ else dict(os.environ)


def number(text: str) -> int | None:
    """As glibc reads it: decimal, 0x or octal, up to the first letter that does not belong."""
    match = re.match(r"[ \t]*\+?(0[xX][0-9a-fA-F]+|[0-9]+)", text)
    if match is None:
        return None
    digits = match[1]
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    octal = re.match(r"0[0-7]*", digits)
    return int(octal[0], 8) if octal else int(digits)


def tunables(text: str) -> dict[str, str]:
    """GLIBC_TUNABLES as names and values, the last of equal ones; malformed parts left out."""
    pairs = [part.partition("=") for part in text.split(":")]
    return {name: value for name, equals, value in pairs if equals}


def from_environment(environ: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """What glibc took, and from which variable: GLIBC_TUNABLES wins."""
    inner = tunables(environ.get("GLIBC_TUNABLES", ""))
    found = {}
    for name, (variable, tunable, least) in TUNABLES.items():
        for source, text in (
            ("GLIBC_TUNABLES", inner.get(tunable)),
            (variable, environ.get(variable)),
        ):
            value = None if text is None else number(text)
            if value is not None and value >= least:
                found[name] = (value, source)
                break
    return found


def settings(environ: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """The same, with what was set from here since."""
    here = {name: (value, BY_MALLOPT) for name, value in _done_here.items()}
    return from_environment(environ) | here


def mallopt(name: str, value: int) -> bool:
    """Whether glibc took it."""
    if ctypes.CDLL(None).mallopt(MALLOPT[name], ctypes.c_int(value)) != 1:
        return False
    _done_here[name] = value
    return True


def map_large_blocks() -> bool:
    """Have glibc map blocks of 1 MiB and more one by one, so that they go back to the system when
    they are freed. Only where malloc is glibc's and its thresholds are not set; True where that
    was done now. It holds until the process ends: glibc cannot go back to its own way."""
    if any(name in _done_here for name in END_THE_DYNAMIC):
        return False
    try:
        if find_serving().name != "glibc":
            return False
        found = settings(environment_at_start())
    except (OSError, MemoryError):
        return False
    if any(name in found for name in END_THE_DYNAMIC):
        return False
    done = mallopt("mmap_threshold", LARGE_BLOCK)
    return done and mallopt("trim_threshold", KEPT_AT_THE_END)


# --- arenas ---------------------------------------------------------------------------------------


def malloc_info() -> str | None:
    """glibc's own account, as XML; None where there is none. Holds each arena's lock for a moment:
    a tenth of a millisecond to several, by the free blocks in it."""
    libc = ctypes.CDLL(None)
    try:
        info, open_memstream, fclose, free = (
            libc.malloc_info, libc.open_memstream, libc.fclose, libc.free,
        )  # fmt: skip
    except AttributeError:  # musl has none
        return None
    open_memstream.restype = ctypes.c_void_p
    fclose.argtypes = free.argtypes = [ctypes.c_void_p]
    info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    text, length = ctypes.c_void_p(), ctypes.c_size_t()
    stream = open_memstream(ctypes.byref(text), ctypes.byref(length))
    if not stream:
        return None
    failed = info(0, stream)
    fclose(stream)
    try:
        return None if failed or not text else ctypes.string_at(text, length.value).decode()
    finally:
        free(text)


def idle() -> tuple[int | None, bool]:
    """The bytes of freed blocks that the heap keeps, None if malloc does not report them; and
    whether the thresholds for that were set."""
    try:
        xml = malloc_info() if find_serving().name == "glibc" else None
        found = settings(environment_at_start())
    except (OSError, MemoryError):
        return None, False
    is_set = any(name in found for name in END_THE_DYNAMIC)
    return None if xml is None else read_heap(xml).idle_bytes, is_set


def read_heap(xml: str) -> Heap:
    """Parse the XML of malloc_info(). Raises ValueError if it is something else."""
    heaps = re.findall(r'<heap nr="\d+">(.*?)</heap>', xml, re.S)
    if not heaps:
        raise ValueError(f"malloc_info() reports no heap: {xml[:60]!r}")
    idle = [sum(_sizes(heap, r"total type=\"(?:fast|rest)\"")) for heap in heaps]
    held = [sum(_sizes(heap, r"system type=\"current\"")) for heap in heaps]
    mapped = sum(_sizes(xml[xml.rindex("</heap>") :], r"total type=\"mmap\""))
    return Heap(len(heaps), sum(held), sum(idle), sum(idle[1:]), mapped)


def _sizes(xml: str, tag: str) -> list[int]:
    return [int(size) for size in re.findall(rf'<{tag}[^>]*\bsize="(\d+)"', xml)]

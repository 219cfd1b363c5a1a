"""A saved GateHistory: a frame with a checksum, and a body without pickle.

    frame    b"MTGATES\\x01"   u64 length of the body   u32 CRC-32 of the body
    body     u64 max_entries  u64 max_bytes  u32 trim  u32 keep  i32 dtype  u32 top_k
             u32 statistics  u32 0  u64 experts  u64 appended  u64 entries that are held
             where experts > 0 and statistics are kept:
                 u64 entries counted  u64 entries between two marks  u64 marks
                 the totals and every mark, of  u64 tokens  u64 nonfinite
                 f64 importance[experts]  u64 load[experts]
             of each entry  u32 rows  u32 dtype
             the records, oldest first, one after another

Little-endian. A file is not trusted: nothing in it is executed, and each length is compared with
the bytes that are there. csrc/core/gate/state.c checks the entries themselves.
"""

from __future__ import annotations

import os
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from memtools import _core
from memtools._base.file import as_path, replace_file

if TYPE_CHECKING:
    from memtools._gate.history import GateHistory

_History = TypeVar("_History", bound="GateHistory")

MAGIC = b"MTGATES\x01"  # the last byte is the version
_FRAME = struct.Struct("<8sQI")
_HEAD = struct.Struct("<QQIIiIIIQQQ")
_COUNTS = struct.Struct("<QQQ")
# Options are numbers in a file: the places of their words here.
TRIMS, KEEPS = ("half", "oldest"), ("all", "topk")
DTYPES = ("float32", "float64", "float16", "bfloat16")
MOST_MARKS, MOST_TOP_K, MOST_ENTRIES = 128, 64, 2**63 - 1
_LINE: Final = 8  # bytes of an entry's rows and dtype


def write(path: str | os.PathLike[str], body: bytes) -> None:
    """Write a saved history in one step: a crash leaves the old file or the new one."""
    frame = _FRAME.pack(MAGIC, len(body), zlib.crc32(body))
    replace_file(path, lambda file: file.writelines((frame, body)))


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the body of a file that `write` wrote.

    Raises ValueError if the file is damaged, not a saved history, or of a later version.
    """
    with open(as_path("path", path), "rb") as file:  # open() takes a descriptor, and closes it
        data = file.read()
    if len(data) < _FRAME.size or not data.startswith(MAGIC[:-1]):
        raise ValueError(f"{os.fspath(path)!r} is not a saved gate history")
    magic, length, checksum = _FRAME.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(
            f"{os.fspath(path)!r} has format {magic[-1]}, this memtools reads 1; upgrade memtools"
        )
    body = data[_FRAME.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise ValueError(
            f"{os.fspath(path)!r} is damaged: {len(body)} of {length} bytes, or changed"
        )
    return body


def dump(history: GateHistory) -> bytes:
    """Return the body of a history. Waits for gates that are still on their way from a device."""
    experts, appended, counted, span, sums, index, records = history._state()
    dtype = -1 if history.dtype is None else DTYPES.index(history.dtype)
    head = _HEAD.pack(
        history.max_entries,
        history.max_bytes,
        TRIMS.index(history.trim),
        KEEPS.index(history.keep),
        dtype,
        history.top_k,
        history.statistics,
        0,
        experts,
        appended,
        len(index) // _LINE,
    )
    counts = _COUNTS.pack(counted, span, counted // span) if sums else b""
    return b"".join((head, counts, sums, index, records))


def parse(kind: type[_History], body: bytes) -> _History:
    """Return the history of a body; it counts in no budget.

    Raises ValueError if `dump` cannot have written it, MemoryError if there is not enough address
    space for its limits.
    """
    rest = memoryview(body)
    if len(rest) < _HEAD.size:
        _refuse("it ends inside the header")
    head = _HEAD.unpack_from(rest)
    max_entries, max_bytes, trim, keep, dtype, top_k, statistics, zero, experts, appended, n = head
    if max_entries == 0 or max_bytes == 0:
        _refuse("a limit of zero")
    if trim >= len(TRIMS) or keep >= len(KEEPS) or statistics > 1 or zero != 0:
        _refuse("an unknown option")
    if not -1 <= dtype < len(DTYPES):
        _refuse("an unknown dtype")
    if not 1 <= top_k <= MOST_TOP_K:
        _refuse("a top_k out of range")
    if max(appended, max_entries, max_bytes, experts) > MOST_ENTRIES:
        _refuse("more entries, experts or bytes than possible")
    rest = rest[_HEAD.size :]
    counted = span = 0
    sums = memoryview(b"")
    if statistics and experts > 0:
        counted, span, sums, rest = _split_statistics(rest, experts)
    if n * _LINE > len(rest):
        _refuse("it ends inside the index")
    history = _core.GateHistory.__new__(
        kind,
        max_entries,
        max_bytes,
        TRIMS[trim],
        KEEPS[keep],
        None if dtype < 0 else DTYPES[dtype],
        top_k,
        bool(statistics),
    )
    index, records = rest[: n * _LINE], rest[n * _LINE :]
    history._restore(experts, appended, counted, span, sums, index, records)
    return history


def _split_statistics(rest: memoryview, experts: int) -> tuple[int, int, memoryview, memoryview]:
    """How many entries are counted, how many are between two marks, the sums, and what follows."""
    words = 2 + 2 * experts  # of the totals, and of each mark
    if len(rest) < _COUNTS.size + 8 * words:
        _refuse("it ends inside the statistics")
    counted, span, marks = _COUNTS.unpack_from(rest)
    if not 0 < span <= MOST_ENTRIES or marks > MOST_MARKS or counted // span != marks:
        _refuse("statistics that contradict themselves")
    end = _COUNTS.size + 8 * words * (marks + 1)
    if end > len(rest):
        _refuse("it ends inside the statistics")
    sums = rest[_COUNTS.size : end]
    rows = sums.cast("Q")
    total, *ends = [rows[i * words : (i + 1) * words] for i in range(marks + 1)]
    for earlier, later in pairwise([*ends, total]):
        # Counts only grow: a window is the difference of two marks.
        for part in (slice(2), slice(2 + experts, None)):
            if any(a > b for a, b in zip(earlier[part], later[part], strict=True)):
                _refuse("statistics that contradict themselves")
    return counted, span, sums, rest[end:]


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"GateHistory.load(): not a gate history: {why}")

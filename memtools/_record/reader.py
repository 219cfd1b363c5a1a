"""Read a run.mem: one that was closed, one whose writer was killed, or one that is being written.

    file ──copy──► bytes ──► header and columns ──► rows, buckets, events, phases ──► Record

csrc/core/record/layout.h and series.h define the layout, and the order in which it is written.
Nothing in the file is trusted: counts are compared with their limits, the length with the counts,
and each row, event and phase with its stamp and its check; texts must be UTF-8. A part that is not
whole is left out and counted.
"""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from operator import mul
from struct import iter_unpack, unpack_from

from memtools._base.file import as_path
from memtools._record import kinds
from memtools._record.events import signal_name
from memtools._record.record import (
    UNKNOWN,
    Buckets,
    Column,
    Record,
    RecordEvent,
    RecordPhase,
    Samples,
)

_MAGIC, _VERSION = b"MTRECORD", 2
# Bytes of the header's fields up to its check, of the header, where the command begins and how long
# it may be, of a column, of a text, and of the longest payload.
_PEEK, _HEADER, _COMMAND_AT, _COMMAND = 128, 2048, 256, 1792
_COLUMN, _TEXT, _PAYLOAD = 64, 192, 1 << 16
# Words of an event and of a phase with their checks, and of the state before the rows.
_EVENT, _PHASE, _STATE = 32, 16, 8
_IS_PAYLOAD = 1 << 32  # This bit of an event's form marks a payload.
_FOLDS_AT, _MOST_FOLDS, _MOST_SIGNAL = 56, 40, 64
_COPIES = 64  # A copy is taken again so often if the buckets were folded meanwhile.
_COUNTS = (  # of the header: minimum, maximum, divisor, and what is wrong with another
    (1, 64, 1, "a number of columns outside 1 to 64"),
    (1, 1 << 24, 1, "a number of rows outside 1 to 16,777,216"),
    (2, 1 << 16, 2, "a number of buckets that is not even and 2 to 65,536"),
    (1, 1 << 16, 1, "a number of events outside 1 to 65,536"),
    (1, 1 << 12, 1, "a number of phases outside 1 to 4,096"),
    (0, 1 << 24, 8, "bytes for payloads that are not a multiple of 8 up to 16 MiB"),
)


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a `run.mem`, also one that a kill cut off or that is still being written.

    Takes about 50 ms for the default size. Nothing in the file is trusted.

    Args:
        path: the file; OSError if it cannot be read, ValueError if it is not a record, is damaged,
            or is of a later version.
    """
    path = as_path("path", path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            written = _is_locked(file)
            data = _copy(file, path)
        finally:
            os.close(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    return parse(data, path, written=written)


def parse(data: bytes, path: str, *, written: bool = False) -> Record:
    """The record that a copy of the file at `path` holds."""
    at = _layout(data, len(data), path)
    head = unpack_from("<20Q", data)
    if head[14] != _checksum(data, at):
        raise _unreadable(path, "the header or the columns were changed")
    columns = _columns(data, at, path)
    names = [column.name for column in columns]
    closed, phases = head[16:18]
    if phases > at.phases:
        raise _unreadable(path, "more phases than possible")
    words = memoryview(data).cast("Q")
    rows = _Ring(words, at.series + _STATE, at.rows, at.row)
    samples, folds, buckets = _buckets(words, at, rows, path)
    total = max(samples, rows.end)
    first = max(0, total - at.rows)
    numbers = sorted(k for k in rows.places if k >= first)
    events = _Events(data, words, at)
    lost = total - first - len(numbers)
    lost += events.total - events.first - len(events.whole) - events.gone
    end = [] if closed else _end_by_signal(events.total, *head[18:])
    time_ns, *values = rows.columns(numbers)
    return Record(
        path=path,
        nbytes=len(data),
        start_ns=head[8],
        clock_ns=head[9],
        closed_ns=closed or None,
        written=written,
        pid=head[10],
        page_bytes=head[11],
        command=_command(data[_COMMAND_AT : _COMMAND_AT + head[12]]),
        columns=columns,
        total=total,
        unreadable=lost,
        samples=Samples(_view(numbers), time_ns, dict(zip(names, values, strict=True))),
        buckets=_bucket_columns(buckets, samples, folds, names),
        events=(*events.whole, *end),
        events_total=events.total + len(end),
        phases=tuple(_phases(words, data, at, phases)),
        events_gone=events.gone,
    )


def _end_by_signal(number: int, signal: int, time_ns: int) -> list[RecordEvent]:
    """The end event of a process that a signal has ended, which could only mark that; empty for a
    number that is not a signal."""
    if not 0 < signal <= _MOST_SIGNAL:
        return []
    end = kinds.End(signal=signal_name(signal))
    return [RecordEvent(number, time_ns, 0, None, end.KIND, end.sentence(), end)]


def _command(data: bytes) -> tuple[str, ...]:
    """The arguments; bytes that are not text in the run's encoding are escaped."""
    arguments = data.decode("utf-8", "backslashreplace").split("\0")
    return tuple(arguments[:-1] if data.endswith(b"\0") else arguments if data else ())


def _unreadable(path: str, why: str) -> ValueError:
    return ValueError(f"{path!r} is not a record that can be read: {why}")


# --- the file -------------------------------------------------------------------------------------


def _is_locked(file: int) -> bool:
    """Whether a process writes the file. The lock is shared, so that readers do not take each other
    for the writer, and released at once. On a file system without locks the answer is False."""
    locked = False
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = True
        fcntl.flock(file, fcntl.LOCK_UN)
    return locked


def _copy(file: int, path: str) -> bytes:
    """Copy the file in ascending order. If the number of folds has changed meanwhile, the buckets
    may be mixed, and the copy is taken again. That happens once at most, unless a writer never
    pauses: each fold is twice as far away as the last one."""
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise _unreadable(path, "it is not a regular file")
    at = _layout(_pread(file, min(about.st_size, _PEEK), 0, path), about.st_size, path)
    for _ in range(_COPIES):
        data = _pread(file, at.bytes, 0, path)
        now = _pread(file, 8, 8 * at.series, path)
        if data[8 * at.series + 7] == now[7]:
            return data
    raise _unreadable(path, "it changes faster than it can be read")


def _pread(file: int, size: int, at: int, path: str) -> bytes:
    parts = []
    while size:
        part = os.pread(file, size, at)
        if not part:
            raise _unreadable(path, "it became shorter while it was read")
        parts.append(part)
        at += len(part)
        size -= len(part)
    return b"".join(parts)


# --- the fixed part -------------------------------------------------------------------------------


class _Layout:
    """The counts of a header, and the word at which each part begins."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.columns, self.rows, self.buckets, self.events, self.phases, self.payloads = counts
        self.row = 3 + self.columns
        self.bucket = 2 + 3 * self.columns
        self.series = (_HEADER + self.columns * _COLUMN) // 8
        series = _STATE + self.rows * self.row + 2 * self.buckets * self.bucket
        self.events_at = self.series + (series + 7) // 8 * 8
        self.phases_at = self.events_at + self.events * _EVENT
        self.payloads_at = self.phases_at + self.phases * _PHASE
        self.bytes = 8 * self.payloads_at + self.payloads


def _layout(head: bytes, size: int, path: str) -> _Layout:
    """The layout of a file of `size` bytes with this head."""
    if head[:8] != _MAGIC:
        raise _unreadable(path, "it does not begin like one")
    if len(head) < _PEEK:
        raise _unreadable(path, "it ends inside the header")
    version, nbytes, *counts = unpack_from("<8Q", head, 8)
    command, payloads = unpack_from("<2Q", head, 96)
    if version > _VERSION:
        raise ValueError(
            f"{path!r} has a later version of the format ({version}), this memtools reads "
            f"{_VERSION}; upgrade memtools"
        )
    if version < _VERSION:
        raise _unreadable(path, f"it has version {version} of the format, not {_VERSION}")
    counts = [*counts[:5], payloads]
    for (least, most, multiple, fault), count in zip(_COUNTS, counts, strict=True):
        if not least <= count <= most or count % multiple:
            raise _unreadable(path, fault)
    at = _Layout(counts)
    if nbytes != at.bytes:
        raise _unreadable(path, "a length that does not fit its counts")
    if command > _COMMAND:
        raise _unreadable(path, "a command longer than its place")
    if size != at.bytes:
        why = "it is cut off" if size < at.bytes else "there are bytes after its end"
        raise ValueError(f"{path!r} is not a whole record: {why}, {size} of {at.bytes} bytes")
    return at


def _checksum(data: bytes, at: _Layout) -> int:
    fixed = memoryview(data)
    crc = zlib.crc32(fixed[:112])
    return zlib.crc32(fixed[_COMMAND_AT : _HEADER + at.columns * _COLUMN], crc)


def _columns(data: bytes, at: _Layout, path: str) -> tuple[Column, ...]:
    found = []
    for begin in range(_HEADER, 8 * at.series, _COLUMN):
        name, unit = _field(data, begin, 32), _field(data, begin + 32, 16)
        faults = {
            "a column without a name": name == "",
            "a column's name of more than 31 bytes": data[begin : begin + 32].count(0) == 0,
            "a column's unit of more than 15 bytes": data[begin + 32 : begin + 48].count(0) == 0,
            "a column's name or unit that is not UTF-8": name is None or unit is None,
            "a column with more than it may have": any(data[begin + 48 : begin + _COLUMN]),
        }
        for fault, is_there in faults.items():
            if is_there:
                raise _unreadable(path, fault)
        assert name is not None
        assert unit is not None
        found.append(Column(name, unit))
    if len({column.name for column in found}) < len(found):
        raise _unreadable(path, "two columns of one name")
    return tuple(found)


def _field(data: bytes, at: int, size: int) -> str | None:
    """The text of a field that is padded with zero bytes; None if it is not UTF-8."""
    return _decoded(data[at : at + size].partition(b"\0")[0])


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


# --- checks and rings -----------------------------------------------------------------------------


@cache
def _factors() -> list[int]:
    return [((i + 1) * 0x9E3779B97F4A7C15 & UNKNOWN) | 1 for i in range(_PAYLOAD // 8)]


def _check(words: Iterable[int]) -> int:
    """The check of words that were written together. A mixture of two writes has another one."""
    total: int = sum(map(mul, words, _factors()))
    return total & UNKNOWN


class _Ring:
    """A ring of `count` slots of `size` words. The first word of a slot is 1 + the number of the
    row or event in it, the last word is the check of the words before it. `places` has the slot of
    each number that is whole; `end` is 1 + the largest number."""

    def __init__(self, words: memoryview, at: int, count: int, size: int) -> None:
        self._words, self._size = words[at : at + count * size], size
        stamps = self._words[::size].tolist()
        checks = self._words[size - 1 :: size].tolist()
        self.places = {
            stamp - 1: place
            for place, (stamp, total, check) in enumerate(
                zip(stamps, self._totals(count), checks, strict=True)
            )
            if stamp and total == check and (stamp - 1) % count == place
        }
        self.end = 1 + max(self.places, default=-1)

    def _totals(self, count: int) -> list[int]:
        """The check that each slot must have. All slots are added up at once, as one large number
        in which each slot has 192 bits; the product of two words needs 128 of them."""
        lanes = memoryview(bytearray(24 * count)).cast("Q")
        total = 0
        for i, factor in enumerate(_factors()[: self._size - 1]):
            lanes[::3] = self._words[i :: self._size]
            total += int.from_bytes(lanes, "little") * factor
        return memoryview(total.to_bytes(24 * count, "little")).cast("Q")[::3].tolist()

    def __contains__(self, number: int) -> bool:
        return number in self.places

    def __getitem__(self, number: int) -> list[int]:
        begin = self.places[number] * self._size
        return self._words[begin : begin + self._size].tolist()

    def columns(self, numbers: list[int]) -> list[memoryview]:
        """The words of these slots, without stamp and check, as one column for each word."""
        runs: list[list[int]] = []  # ranges of slots that lie side by side
        for place in map(self.places.__getitem__, numbers):
            if runs and runs[-1][1] == place:
                runs[-1][1] = place + 1
            else:
                runs.append([place, place + 1])
        found = []
        for i in range(1, self._size - 1):
            column = self._words[i :: self._size]
            data = b"".join(column[begin:end].tobytes() for begin, end in runs)
            found.append(memoryview(data).cast("Q"))
        return found


# --- samples --------------------------------------------------------------------------------------


def _view(numbers: Sequence[int]) -> memoryview:
    return memoryview(array("Q", numbers))


def _buckets(
    words: memoryview, at: _Layout, rows: _Ring, path: str
) -> tuple[int, int, list[list[int]]]:
    """Return the number of samples in the buckets, the number of folds, and the words of each
    bucket.

    A writer that was killed, or that went on while the copy was taken, leaves rows that the state
    does not count yet. They are added here; adding one twice changes nothing.
    """
    state = words[at.series]
    folds, samples = state >> _FOLDS_AT, state & ((1 << _FOLDS_AT) - 1)
    full = at.buckets << folds
    if folds > _MOST_FOLDS or samples > full or (folds and samples < full // 2):
        raise _unreadable(path, "a number of samples that does not fit its buckets")
    bank = at.series + _STATE + at.rows * at.row + (folds & 1) * at.buckets * at.bucket
    used = (samples + (1 << folds) - 1) >> folds
    part = words[bank : bank + used * at.bucket]
    found = [list(bucket) for bucket in iter_unpack(f"{at.bucket}Q", part)]
    while samples in rows and folds < _MOST_FOLDS:
        if samples == at.buckets << folds:
            found = [_merged(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
            folds += 1
        _add(found, rows[samples], is_first=samples & ((1 << folds) - 1) == 0)
        samples += 1
    return samples, folds, found


def _merged(a: list[int], b: list[int]) -> list[int]:
    merged = [a[0], b[1]]
    for i in range(2, len(a), 3):
        last = a[i + 2] if b[i + 2] == UNKNOWN else b[i + 2]
        merged += min(a[i], b[i]), _most(a[i + 1], b[i + 1]), last
    return merged


def _most(a: int, b: int) -> int:
    return max(a, b) if UNKNOWN not in (a, b) else min(a, b)


def _add(buckets: list[list[int]], row: list[int], *, is_first: bool) -> None:
    """Add a sample to the last bucket, or begin a new one."""
    time_ns, *values = row[1:-1]
    sample = [time_ns, time_ns, *(value for value in values for _ in range(3))]
    if is_first:
        buckets.append(sample)
    else:
        buckets[-1] = _merged(buckets[-1], sample)


def _bucket_columns(
    buckets: list[list[int]], samples: int, folds: int, names: list[str]
) -> Buckets:
    counts = [1 << folds] * len(buckets)
    columns: list[Sequence[int]] = [()] * (2 + 3 * len(names))
    if buckets:
        counts[-1] = samples - (len(buckets) - 1 << folds)
        columns = list(map(list, zip(*buckets, strict=True)))
    for i in range(2, len(columns), 3):
        # Words that contradict each other, which no writer leaves, are not a reading.
        for k, (least, most, newest) in enumerate(zip(*columns[i : i + 3], strict=True)):
            if not least <= newest <= most < UNKNOWN:
                for column in columns[i : i + 3]:
                    column[k] = UNKNOWN  # type: ignore[index]
    first_ns, last_ns, *readings = map(_view, columns)
    least, most, last = (dict(zip(names, readings[i::3], strict=True)) for i in range(3))
    return Buckets(1 << folds, first_ns, last_ns, _view(counts), least, most, last)


# --- events and phases ----------------------------------------------------------------------------


class _Events:
    """The events that are whole. Long payloads share a ring of their own, in which newer payloads
    overwrite older ones: an event whose payload was overwritten is gone."""

    def __init__(self, data: bytes, words: memoryview, at: _Layout) -> None:
        self._data, self._words, self._at = data, words, at
        ring = _Ring(words, at.events_at, at.events, _EVENT)
        self.total, self.first = ring.end, max(0, ring.end - at.events)
        self.gone = 0
        self._room = (
            at.payloads
        )  # that is left for the payloads of older events, which do not overlap
        numbers = sorted((k for k in ring.places if k >= self.first), reverse=True)
        found = [self._event(k, ring[k]) for k in numbers]
        self.whole = [event for event in reversed(found) if event is not None]

    def _event(self, number: int, slot: list[int]) -> RecordEvent | None:
        at = 8 * (self._at.events_at + number % self._at.events * _EVENT)
        form = slot[6]
        body: str | bytes | None = None
        if form & _IS_PAYLOAD:
            size = form & ~_IS_PAYLOAD
            body = self._data[at + 56 : at + 56 + size] if size <= _TEXT else self._long(size, slot)
        elif form <= _TEXT:
            raw = self._data[at + 56 : at + 56 + form]
            body = None if b"\0" in raw else _decoded(raw)
        kind = _field(self._data, at + 32, 16)
        if kind is None or body is None:
            return None
        data, text = kinds.read(kind, body) if isinstance(body, bytes) else (None, body)
        step = None if slot[3] == UNKNOWN else slot[3]
        return RecordEvent(number, slot[1], slot[2], step, kind, text, data)

    def _long(self, size: int, slot: list[int]) -> bytes | None:
        """A payload that does not fit into its slot. The slot has its place and its check."""
        if size > _PAYLOAD:
            return None
        count, place, check = (size + 7) // 8, slot[7], slot[8]
        self._room -= 8 * count
        begin = self._at.payloads_at + place
        fits = self._room >= 0 and 8 * (place + count) <= self._at.payloads
        if fits and _check(self._words[begin : begin + count]) == check:
            return self._data[8 * begin : 8 * begin + size]
        self.gone += 1
        return None


def _phases(words: memoryview, data: bytes, at: _Layout, count: int) -> list[RecordPhase]:
    found = []
    for begin in range(at.phases_at, at.phases_at + count * _PHASE, _PHASE):
        halves = [words[begin + i : begin + i + 5].tolist() for i in (5, 10)]
        whole = [half for half in halves if half[0] and _check(half[:4]) == half[4]]
        name = _field(data, 8 * begin, 40)
        if whole and name:
            _, passages, ns, peak, _ = max(whole, key=lambda half: half[0])  # the newer half
            found.append(RecordPhase(name, passages, ns / 1e9, None if peak == UNKNOWN else peak))
    return found

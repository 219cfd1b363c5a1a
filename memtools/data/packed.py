"""PackedList: many small records in one buffer that worker processes share."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pickle
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from memtools._base.mapping import Descriptor, map_file
from memtools._base.number import any_whole_number, repr_of
from memtools._base.size import format_bytes

_CHUNK = 1 << 20  # bytes that are gathered before they are written to the buffer
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
# The first byte of a record says what follows it.
_PICKLE, _BYTES, _STR, _INT64, _FLOAT64, _ARRAY = range(6)
_RAW_KINDS = (
    "biufc"  # elements of NumPy whose bytes are all: bool, integers, floats, complex numbers
)


class PackedList(Sequence[Any]):
    """A read-only list whose records lie in one buffer, which all workers of a DataLoader share.

    A worker that reads an item of a list writes to the item's reference count, and the system
    copies its page: after an epoch, each worker has its own copy of the whole list. Here a record
    is bytes in a buffer. It becomes an object when it is read, a new one each time, and no page is
    copied.

    Records may be bytes, str, int, float, NumPy arrays, and whatever `pickle` takes, such as tuples
    and dicts. Arrays come back as copies, which can be written to.

    The buffer is memory without a name (a memfd), so the size of /dev/shm does not limit it. Forked
    workers have it already. Spawned ones get its descriptor: a pickled PackedList takes some
    hundred bytes, and can be unpickled once, while the process that pickled it lives; later that
    raises pickle.UnpicklingError. The buffer is sealed against writing, and freed when the last
    process that uses it ends.

    Args:
        records: any iterable. A generator is read once, without making a list of its records.

    Slices are PackedLists over the same buffer. Raises TypeError if `records` is not an iterable of
    records or if one cannot be pickled (the message has its index), MemoryError if the system has
    no memory for them, or refuses the memfd. Exceptions from the iterable propagate unchanged.
    """

    __slots__ = ("_buffer", "_range")

    def __init__(self, records: Iterable[Any]) -> None:
        if isinstance(records, (str, bytes, bytearray)) or not isinstance(records, Iterable):
            got = type(records).__name__
            raise TypeError(f"PackedList takes an iterable of records, got {got}")
        self._buffer = _Buffer(_written(records))
        self._range = range(len(self._buffer.starts) - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, which slices share."""
        return self._buffer.records.nbytes

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int, /) -> Any: ...
    @overload
    def __getitem__(self, index: slice, /) -> PackedList: ...
    def __getitem__(self, index: int | slice, /) -> Any:
        if isinstance(index, slice):
            return _of(self._buffer, self._range[index])
        try:
            at = self._range[index]
        except (IndexError, TypeError):
            number, count = any_whole_number("index", index), len(self._range)
            told = f"index {repr_of(number)} is out of range: there are {count:,} records"
            raise IndexError(told) from None
        return self._buffer.read(at)

    def __iter__(self) -> Iterator[Any]:
        return map(self._buffer.read, self._range)

    def __reversed__(self) -> Iterator[Any]:
        return map(self._buffer.read, reversed(self._range))

    def __repr__(self) -> str:
        count = len(self)
        size = format_bytes(self.nbytes)
        return f"PackedList({count:,} record{'s' * (count != 1)}, {size})"

    def __copy__(self) -> PackedList:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedList:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _of, (self._buffer, self._range)


class _Buffer:
    """A sealed memfd, mapped for reading, and where its records start.

    [ record | record | ... | start of each record, and the end of the last | how many records ]
    """

    __slots__ = ("descriptor", "records", "starts")

    def __init__(self, fd: int) -> None:
        self.descriptor = Descriptor(fd)  # for processes that are not forked
        size = os.fstat(fd).st_size
        # With its pages: they are memory already, and no read waits for the first use of one.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            memory = map_file(fd, size, flags=flags, writes=False)
        except OSError as error:
            raise _no_memory(size, error) from error
        self.records = memoryview(memory).cast("B").toreadonly()
        count = int.from_bytes(self.records[-8:], sys.byteorder)
        self.starts = self.records[-8 * (count + 2) : -8].cast("Q")

    def read(self, at: int) -> Any:
        """A new object for the record."""
        first, end = self.starts[at], self.starts[at + 1]
        content = self.records[first + 1 : end]
        match self.records[first]:
            case 1:
                return bytes(content)
            case 2:
                return str(content, "utf-8", "surrogatepass")
            case 3:
                return _INT.unpack(content)[0]
            case 4:
                return _FLOAT.unpack(content)[0]
            case 5:
                return _array(content)
        return pickle.loads(content)

    # Slices that are pickled together have one buffer, and its descriptor is sent once.
    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        fd = self.descriptor.get()
        if fd is None:
            raise pickle.PicklingError(
                "the program has closed the descriptor of this PackedList (os.closerange?); make "
                "the list again, or start workers by fork"
            )
        return _received, (DupFd(fd),)


def _of(buffer: _Buffer, records: range) -> PackedList:
    made = PackedList.__new__(PackedList)
    made._buffer, made._range = buffer, records
    return made


def _received(descriptor: Any) -> _Buffer:
    """What a pickled buffer becomes in another process."""
    try:
        received = descriptor.detach()
    except (EOFError, OSError) as error:
        raise pickle.UnpicklingError(
            "a PackedList can be unpickled once, while the process that pickled it lives; pickle "
            "it again there"
        ) from error
    return _Buffer(received)


def _no_memory(size: int, error: OSError) -> MemoryError:
    return MemoryError(
        f"the system has no memory for {format_bytes(size)} of packed records ({error.strerror}); "
        "pack fewer, or on a machine with more memory"
    )


def _no_file(error: OSError) -> MemoryError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        why, remedy = "has no descriptor left for", "close files, or raise the limit by ulimit -n"
    else:
        why, remedy = "may not call", "allow it in the seccomp profile of the container or sandbox"
    return MemoryError(
        f"PackedList(): this process {why} memfd_create ({error.strerror}); {remedy}"
    )


def _written(records: Iterable[Any]) -> int:
    """The descriptor of a new buffer with all records."""
    try:
        descriptor = os.memfd_create("memtools-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _no_file(error) from error
    try:
        _write(descriptor, records)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, records: Iterable[Any]) -> None:
    starts, chunk, end = array("Q", [0]), bytearray(), 0
    for index, record in enumerate(records):
        before = len(chunk)
        _encode(record, index, chunk)
        end += len(chunk) - before
        starts.append(end)
        if len(chunk) >= _CHUNK:
            _flush(descriptor, chunk, end)
            chunk.clear()
    _flush(descriptor, chunk, end)
    _flush(descriptor, starts, end)
    _flush(descriptor, array("Q", [len(starts) - 1]), end)


def _flush(descriptor: int, data: bytearray | array[int], so_far: int) -> None:
    with memoryview(data) as view, view.cast("B") as rest:
        done = 0
        while done < len(rest):
            try:
                done += os.write(descriptor, rest[done:])
            except OSError as error:
                raise _no_memory(so_far, error) from error


def _encode(record: Any, index: int, out: bytearray) -> None:
    """Append the record's bytes."""
    kind = type(record)
    if kind is bytes:
        out.append(_BYTES)
        out += record
    elif kind is str:
        out.append(_STR)
        out += record.encode("utf-8", "surrogatepass")
    elif kind is int and -(2**63) <= record < 2**63:
        out.append(_INT64)
        out += _INT.pack(record)
    elif kind is float:
        out.append(_FLOAT64)
        out += _FLOAT.pack(record)
    elif _is_raw_array(record):
        head = f"{record.dtype.str} {' '.join(map(str, record.shape))}".encode()
        out.append(_ARRAY)
        out.append(len(head))
        out += head
        out += record.tobytes()
    else:
        try:
            pickled = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(
                f"record {index:,} is a {kind.__name__} and cannot be pickled ({error}); pack "
                "bytes, str, numbers, NumPy arrays, or tuples and dicts of them"
            ) from error
        out.append(_PICKLE)
        out += pickled


def _is_raw_array(record: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(record) is numpy.ndarray and record.dtype.kind in _RAW_KINDS


def _array(content: memoryview) -> Any:
    import numpy

    data = 1 + content[0]
    dtype, *shape = str(content[1:data], "ascii").split()
    made = numpy.empty(tuple(map(int, shape)), dtype)
    if made.size:
        made.reshape(-1).view("u1")[:] = content[data:]
    return made

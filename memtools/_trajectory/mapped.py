"""The memory-mapped file of a store: blocks of fields behind two headers that say what they are.

    ├─ header ─┬─ header ─┬─ counts ─┤  block of a field  │  block of the next  │
    0        30 KiB     60 KiB     64 KiB       each begins at a page

    header: ├─ frame: stamp, checksum ─┬─ JSON: T, samples, fields ─┤

The space of a block is taken from the disk before it is mapped (`posix_fallocate`), so that a disk
that is full is an OSError here, and never a SIGBUS in a copy. How many entries a field has stands
in the counts, which are mapped as well. A new header is written over the older of the two, and the
whole one with the higher stamp counts: a process that is killed at any moment leaves a file that
can be opened, without the field that it was about to add.

Of a named file the descriptor is kept, for the lock and for further blocks. A file without a name
is one for each block, and no descriptor is kept.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import struct
import tempfile
import zlib
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge
from memtools._base.file import as_path
from memtools._base.mapping import Descriptor, Memory, flush, map_file
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    import torch

MAGIC: Final = b"MTTRAJ\x00\x02"  # The last byte is the version.
HEADER: Final = 64 << 10
COUNTS: Final = 60 << 10  # The counts begin here: u64 each, in the order of the fields.
ROOM: Final = COUNTS // 2  # The size of each header.
_FRAME: Final = struct.Struct("<8sIIQQ")  # Magic, checksum, bytes of JSON, stamp, bytes of file.
_CHECKED: Final = 12  # The checksum (CRC-32) covers the header from this byte on.
MOST_FIELDS: Final = (HEADER - COUNTS) // ctypes.sizeof(ctypes.c_uint64)


class Blocks:
    """Blocks of files without a name, which are gone with the last tensor over each. Each has a
    file of its own."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path, self.size, self._process = as_path("overflow", folder), HEADER, os.getpid()

    def add(self, nbytes: int) -> tuple[int, Memory]:
        """Add a block. Returns where it would begin in a file of all, and its memory.

        Raises OSError if the disk is full or the file may not be so large.
        """
        offset, size = self.size, _pages(nbytes)
        with tempfile.TemporaryFile(dir=self.path) as file:
            _take_space(file.fileno(), 0, size, self.path)
            block = map_file(file.fileno(), size)
        self.size = offset + size
        return offset, block

    def cut(self, size: int) -> None:
        """Forget blocks whose fields could not be added."""
        self.size = size

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, whose writes would be seen by the parent."""
        return os.getpid() != self._process

    def flush(self) -> None:
        """Do nothing: no other process can open these files."""

    def close(self) -> None:
        """Memory of blocks lives until the last tensor over it does."""


class MappedFile:
    """A named file, open for reading and writing, and locked. Blocks are added at its end."""

    __slots__ = ("_blocks", "_counts", "_descriptor", "_head", "_process", "_stamp", "path", "size")

    def __init__(self, descriptor: Descriptor, fd: int, path: str, size: int, stamp: int) -> None:
        """Take over an open file of at least `HEADER` bytes. Raises OSError."""
        self.path, self.size, self._stamp, self._process = path, size, stamp, os.getpid()
        self._blocks: dict[int, Memory] = {}  # by where they begin
        self._head = map_file(fd, HEADER)
        self._counts = (ctypes.c_uint64 * MOST_FIELDS).from_buffer(self._head, COUNTS)
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> MappedFile:
        """Make a new file that only its owner may read.

        Raises FileExistsError if it is there, OSError if it cannot be made.
        """
        path = as_path("file", path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST,
                "the file exists and is not overwritten: remove it, or open it with "
                "TrajectoryStore.open()",
                path,
            ) from None
        try:
            descriptor = Descriptor(fd)
            _lock(fd, path)
            _take_space(fd, 0, HEADER, path)
            return cls(descriptor, fd, path, HEADER, 0)
        except BaseException:
            os.unlink(path)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> tuple[MappedFile, dict[str, Any], list[int]]:
        """Open a file that is there. Returns it, what its header says, and the counts.

        Raises ValueError if it is not a trajectory, of another version, cut short or damaged;
        BlockingIOError if it is open elsewhere, OSError if it cannot be opened.
        """
        path = as_path("file", path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        descriptor = Descriptor(fd)
        _lock(fd, path)
        head = os.pread(fd, HEADER, 0)
        stamp, whole, described = _newest(path, head, os.fstat(fd).st_size)
        mapped = cls(descriptor, fd, path, whole, stamp)
        return mapped, described, list(mapped._counts)

    def _fd(self) -> int:
        """Raises OSError if the program has closed the descriptor: its number may be another file's
        now."""
        fd = self._descriptor.get()
        if fd is None:
            why = "the program has closed the descriptor of this trajectory (os.closerange?)"
            raise OSError(errno.EBADF, f"{why}, so that it cannot grow; open it again", self.path)
        return fd

    def add(self, nbytes: int) -> tuple[int, Memory]:
        """Add a block at the end. Returns where it begins, and its memory.

        Raises OSError if the disk is full or the file may not grow; then it is as it was.
        """
        fd, offset, size = self._fd(), self.size, _pages(nbytes)
        try:
            _take_space(fd, offset, size, self.path)
            block = map_file(fd, size, offset=offset)
        except BaseException:
            os.ftruncate(fd, offset)
            raise
        self.size = offset + size
        self._blocks[offset] = block
        return offset, block

    def map(self, offset: int, nbytes: int) -> Memory:
        """The memory of a block that is there. Raises OSError."""
        block = self._blocks[offset] = map_file(self._fd(), _pages(nbytes), offset=offset)
        return block

    def cut(self, size: int) -> None:
        """Take blocks away whose fields could not be added: the file is `size` bytes long again."""
        fd = self._descriptor.get()
        if fd is not None:
            os.ftruncate(fd, size)
        self.size = size
        self._blocks = {at: block for at, block in self._blocks.items() if at < size}

    def describe(self, described: dict[str, Any]) -> None:
        """Write what the file holds. Raises ValueError if that is too long for the header."""
        text = json.dumps(described, separators=(",", ":")).encode()
        if _FRAME.size + len(text) > ROOM or len(described["fields"]) > MOST_FIELDS:
            raise ValueError(
                f"a file has room for {MOST_FIELDS} fields and {format_bytes(ROOM)} of names and "
                f"shapes, got {len(described['fields'])} fields and {format_bytes(len(text))}; use "
                "fewer fields or shorter names"
            )
        stamp = self._stamp + 1
        checked = _FRAME.pack(MAGIC, 0, len(text), stamp, self.size)[_CHECKED:] + text
        begin = stamp % 2 * ROOM
        head = MAGIC + zlib.crc32(checked).to_bytes(4, "little") + checked
        ctypes.memmove(ctypes.addressof(self._head) + begin, head, len(head))
        self._stamp = stamp

    def count(self, index: int, entries: int) -> None:
        """Write how many entries a field has, by one store. A process may be killed between two
        stores, and struct's pack_into() writes zeros first."""
        self._counts[index] = entries

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, whose writes would be seen by the parent."""
        return os.getpid() != self._process

    def flush(self) -> None:
        """Write everything to the disk, blocks before counts. Raises OSError."""
        for block in self._blocks.values():
            flush(block)
        flush(self._head)

    def close(self) -> None:
        """Let the file go. Memory of blocks lives until the last tensor over it does."""
        self._blocks.clear()
        fd = self._descriptor.get()
        if fd is not None and not self.is_of_parent:
            fcntl.flock(fd, fcntl.LOCK_UN)  # or a forked child that has it would keep the lock
        self._descriptor.close()


def _lock(fd: int, path: str) -> None:
    """Lock the file for one writer. Raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "another process, or another TrajectoryStore, has this trajectory open"
        raise BlockingIOError(error.errno, f"{why}; close it there first", path) from None


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def tensor_over(block: Memory | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory of a block, which it keeps alive. None: it has no values."""
    made: torch.Tensor
    library = bridge.connect().torch
    with library.inference_mode(False):  # under which it could not be trained on later
        if block is None:
            made = library.empty(shape, dtype=dtype, device="cpu")
        else:
            made = library.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)
    return made


def _take_space(fd: int, offset: int, nbytes: int, path: str) -> None:
    """Take space of the disk. Raises OSError, in a sentence of its own where there is not enough of
    it; what was taken of it then is the caller's to cut off."""
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise OSError(error.errno, _no_space(fd, nbytes, error), path) from error


def _no_space(fd: int, nbytes: int, error: OSError) -> str:
    if error.errno == errno.EFBIG:
        why, remedy = "the limit of a file's size", "raise `ulimit -f`"
    elif error.errno == errno.EDQUOT:
        why, remedy = "the quota of this user", "free some of it"
    else:
        room = os.fstatvfs(fd)
        why = f"the disk gives ({format_bytes(room.f_bavail * room.f_frsize)} are free)"
        remedy = "free some of it, or keep the file on another disk"
    return f"the file needs another {format_bytes(nbytes)}, more than {why}; {remedy}"


def _newest(path: str, head: bytes, size: int) -> tuple[int, int, dict[str, Any]]:
    """The stamp of the newer header that is whole, the bytes of the file and what it says. Raises
    ValueError if there is none, or it says what cannot be."""
    frames = [head[at : at + ROOM] for at in (0, ROOM)]
    known = [frame for frame in frames if frame.startswith(MAGIC[:-1]) and len(frame) >= len(MAGIC)]
    if not known:
        raise ValueError(f"{path!r} was not written by a TrajectoryStore")
    if all(frame[: len(MAGIC)] != MAGIC for frame in known):
        raise ValueError(
            f"{path!r} has format {known[0][len(MAGIC) - 1]}, this memtools reads {MAGIC[-1]}; use "
            "the version that wrote it, or sample again"
        )
    found = max(filter(None, map(_parts, frames)), key=lambda parts: parts[0], default=None)
    if found is None and len(head) == HEADER:
        _damaged(path, "its header was changed")
    if found is None or size < found[1] or len(head) < HEADER:
        whole = HEADER if found is None else found[1]
        raise ValueError(
            f"{path!r} is cut short: {format_bytes(size)} of {format_bytes(whole)} are there; copy "
            "it again, or sample again"
        )
    stamp, whole, text = found
    try:
        described = json.loads(text)
    except (ValueError, RecursionError):
        _damaged(path, "its header cannot be read")
    if not isinstance(described, dict):
        _damaged(path, "its header is not an object")
    return stamp, whole, described


def _parts(frame: bytes) -> tuple[int, int, bytes] | None:
    """The stamp, the bytes of the file and the JSON of a header; None where it is not whole."""
    if len(frame) < _FRAME.size:
        return None
    magic, checksum, length, stamp, whole = _FRAME.unpack_from(frame)
    text = frame[_FRAME.size : _FRAME.size + length]
    is_whole = magic == MAGIC and len(text) == length
    if not is_whole or zlib.crc32(frame[_CHECKED : _FRAME.size] + text) != checksum:
        return None
    return stamp, whole, text


def _damaged(path: str, why: str) -> NoReturn:
    raise ValueError(f"{path!r} is damaged: {why}; sample again")

"""The memory-mapped file of a store: blocks of fields behind a header that says what they are.

    ├─ frame ─┬─ JSON: T, samples, fields ─┬─ counts ─┤  block of a field  │  block of the next  │
    0         32                           60 KiB     64 KiB       each begins at a page

The space of a block is taken from the disk before it is mapped (`posix_fallocate`), so that a disk
that is full is an OSError here, and never a SIGBUS in a copy. How many entries a field has stands
in the counts, which are mapped as well: a process that is killed leaves a file that can be opened.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import tempfile
import zlib
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    import torch

MAGIC: Final = b"MTTRAJ\x00\x01"  # the last byte is the version
HEADER: Final = 64 << 10
COUNTS: Final = 60 << 10  # where the counts begin: u64 each, in the order of the fields
_FRAME: Final = struct.Struct("<8sQII")  # magic, bytes of the whole file, bytes of JSON, its CRC-32
_COUNT: Final = struct.Struct("<Q")
MOST_FIELDS: Final = (HEADER - COUNTS) // _COUNT.size


class MappedFile:
    """A file of its own, open for reading and writing. Blocks are added at its end."""

    __slots__ = ("_blocks", "_counts", "_fd", "_process", "path", "size")

    def __init__(self, fd: int, path: str, size: int) -> None:
        """Take over an open file of at least `HEADER` bytes. Raises OSError."""
        self.path, self.size, self._process = path, size, os.getpid()
        self._blocks: dict[int, mmap.mmap] = {}  # by where they begin
        self._counts = mmap.mmap(fd, HEADER)
        self._fd = fd  # from here on it is closed together with this object

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> MappedFile:
        """Make a new file that only its owner may read.

        Raises FileExistsError if it is there, OSError if it cannot be made.
        """
        path = os.fspath(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST,
                "a trajectory is not written over what is there: remove the file, or open it with "
                "TrajectoryStore.open()",
                path,
            ) from None
        try:
            return cls._begin(fd, path)
        except BaseException:
            os.unlink(path)
            raise

    @classmethod
    def unnamed(cls, folder: str | os.PathLike[str]) -> MappedFile:
        """Make a file without a name, which is gone when it is closed. Raises OSError."""
        with tempfile.TemporaryFile(dir=folder) as file:
            return cls._begin(os.dup(file.fileno()), os.fspath(folder))

    @classmethod
    def _begin(cls, fd: int, path: str) -> MappedFile:
        try:
            _take_space(fd, 0, HEADER, path)
            return cls(fd, path, HEADER)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> tuple[MappedFile, dict[str, Any], list[int]]:
        """Open a file that is there. Returns it, what its header says, and the counts.

        Raises ValueError if it is not a trajectory, of another version, cut short or damaged;
        OSError if it cannot be opened.
        """
        path = os.fspath(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, HEADER, 0)
            described = _described(path, head, size)
            counts = [
                _COUNT.unpack_from(head, COUNTS + i * _COUNT.size)[0] for i in range(MOST_FIELDS)
            ]
            return cls(fd, path, _FRAME.unpack_from(head)[1]), described, counts
        except BaseException:
            os.close(fd)
            raise

    def add(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """Add a block at the end. Returns where it begins, and its memory.

        Raises OSError if the disk is full or the file may not grow; then it is as it was.
        """
        offset = self.size
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            _take_space(self._fd, offset, size, self.path)
            block = mmap.mmap(self._fd, size, offset=offset)
        except BaseException:
            os.ftruncate(self._fd, offset)
            raise
        self.size = offset + size
        self._blocks[offset] = block
        return offset, block

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """The memory of a block that is there. Raises OSError."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._blocks[offset] = mmap.mmap(self._fd, size, offset=offset)
        return block

    def cut(self, size: int) -> None:
        """Take blocks away whose fields could not be added: the file is `size` bytes long again."""
        os.ftruncate(self._fd, size)
        self.size = size
        self._blocks = {at: block for at, block in self._blocks.items() if at < size}

    def describe(self, described: dict[str, Any]) -> None:
        """Write what the file holds. Raises ValueError if that is too long for the header."""
        text = json.dumps(described, separators=(",", ":")).encode()
        if _FRAME.size + len(text) > COUNTS or len(described["fields"]) > MOST_FIELDS:
            raise ValueError(
                f"a file has room for {MOST_FIELDS} fields and {format_bytes(COUNTS)} of names and "
                f"shapes, got {len(described['fields'])} fields and {format_bytes(len(text))}; use "
                "fewer fields or shorter names"
            )
        frame = _FRAME.pack(MAGIC, self.size, len(text), zlib.crc32(text))
        self._counts[: _FRAME.size + len(text)] = frame + text

    def count(self, index: int, entries: int) -> None:
        """Write how many entries a field has."""
        _COUNT.pack_into(self._counts, COUNTS + index * _COUNT.size, entries)

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, whose writes would be seen by the parent."""
        return os.getpid() != self._process

    def flush(self) -> None:
        """Write everything to the disk, blocks before counts. Raises OSError."""
        for block in self._blocks.values():
            block.flush()
        self._counts.flush()

    def close(self) -> None:
        """Let the file go. Memory of blocks lives until the last tensor over it does."""
        self._blocks.clear()
        if self._fd >= 0:
            self._counts.close()
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def tensor_over(
    block: mmap.mmap | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
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


def _described(path: str, head: bytes, size: int) -> dict[str, Any]:
    """What a header says. Raises ValueError if it is not one, or says what cannot be."""
    if len(head) < _FRAME.size or not head.startswith(MAGIC[:-1]):
        raise ValueError(f"{path!r} is not a trajectory that a TrajectoryStore has written")
    magic, whole, length, checksum = _FRAME.unpack_from(head)
    if magic != MAGIC:
        raise ValueError(
            f"{path!r} has format {magic[-1]}, this memtools reads {MAGIC[-1]}; use the version "
            "that wrote it, or sample again"
        )
    if size < whole or len(head) < HEADER:
        raise ValueError(
            f"{path!r} is cut short: {format_bytes(size)} of {format_bytes(max(whole, HEADER))} "
            "are there; copy it again, or sample again"
        )
    text = head[_FRAME.size : _FRAME.size + length]
    if _FRAME.size + length > COUNTS or zlib.crc32(text) != checksum:
        _damaged(path, "its header was changed")
    described = json.loads(text)
    if not isinstance(described, dict):
        _damaged(path, "its header is not an object")
    return described


def _damaged(path: str, why: str) -> NoReturn:
    raise ValueError(f"{path!r} is damaged: {why}; sample again")

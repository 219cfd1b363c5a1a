"""The frame around a saved history: magic, version, length and checksum.

b"MTGATES\\x01"   u64 length of the body   u32 CRC-32 of the body   body (csrc/core/gate/file.h)
"""

from __future__ import annotations

import os
import struct
import zlib

from memtools._base.file import as_path, replace_file

MAGIC = b"MTGATES\x01"  # the last byte is the version
_FRAME = struct.Struct("<8sQI")


def write(path: str | os.PathLike[str], body: bytes) -> None:
    """Write a saved history in one step: a crash leaves the old file or the new one."""
    frame = _FRAME.pack(MAGIC, len(body), zlib.crc32(body))
    replace_file(path, lambda file: file.writelines((frame, body)))


def read(path: str | os.PathLike[str]) -> bytes:
    """The body of a file that `write` wrote.

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

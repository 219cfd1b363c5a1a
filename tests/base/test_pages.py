"""Which pages of a range of addresses are in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from memtools._base.pages import Mapping, mappings, resident_bytes

np = pytest.importorskip("numpy")
KIB, PAGE = 1 << 10, mmap.PAGESIZE

ROWS = [
    ("rw-p 00000000 00:00 0 ", Mapping(0, 80 * KIB, 40 * KIB, False)),
    ("rw-p 00000000 00:00 0                  [heap]", Mapping(1, 80 * KIB, 40 * KIB, False)),
    ("rw-s 00000000 00:1a 77   /dev/shm/sem (deleted)", Mapping(2, 80 * KIB, 40 * KIB, True)),
    ("rw-s 00000000 00:01 77   /memfd:rows (deleted)", Mapping(3, 80 * KIB, 40 * KIB, True)),
    ("rw-p 00000000 00:00 0                  [stack]", None),
    ("---p 00000000 00:00 0 ", None),
    ("rw-s 00000000 08:01 77   /data/rows.bin", None),
    ("rw-p 00000000 08:01 77   /data/rows.bin", None),
]


def test_memory_of_no_file_and_shared_memory_count(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "".join(
            f"7f{n:010x}-7f{n + 1:010x} {row}\nSize:  80 kB\nKernelPageSize:  4 kB\nRss:  40 kB\n"
            f"Pss:  40 kB\nVmFlags: rd wr mr\n"
            for n, (row, _) in enumerate(ROWS)
        )
    )
    wanted = [one._replace(begin=0x7F0000000000 + one.begin) for _, one in ROWS if one]
    assert mappings(str(smaps)) == wanted
    assert mappings(str(tmp_path / "none")) == []


def test_what_was_written_is_resident() -> None:
    region = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = np.frombuffer(region, np.uint8).__array_interface__["data"][0]
    assert resident_bytes(begin, 64 * PAGE) == 0
    for page in (0, 1, 9):
        region[page * PAGE] = 1
    assert resident_bytes(begin, 64 * PAGE) == 3 * PAGE
    assert resident_bytes(begin + 5, 7) == 7, "no more than was asked for"
    assert resident_bytes(begin + 2 * PAGE, PAGE) == 0
    assert resident_bytes(16 * PAGE, PAGE) is None, "it is not mapped"

"""Sizes as people write them: one parser reads them for every argument, option and setting."""

from __future__ import annotations

import re

import pytest

import memtools
from memtools._base.size import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64 MiB", 64 << 20),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("64 MB", 64_000_000),
        ("64 mb", 64_000_000),
        ("1.5 GiB", 3 << 29),
        ("2 TB", 2 * 10**12),
        ("512 B", 512),
        ("512", 512),
        (512, 512),
    ],
)
def test_sizes_are_read_in_each_spelling(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "64 Mb",
            "max_bytes is in bytes, and Mb is a unit of bits: write 64 MiB or 64 MB, got '64 Mb'",
        ),
        (
            "1.5Gib",
            "max_bytes is in bytes, and Gib is a unit of bits: write 1.5 GiB or 1.5 GB, got "
            "'1.5Gib'",
        ),
        (
            "64 M",
            "max_bytes is in bytes, and M may mean MiB (1,048,576 bytes) or MB (1,000,000 bytes): "
            "write 64 MiB or 64 MB, got '64 M'",
        ),
        (
            "8k",
            "max_bytes is in bytes, and k may mean KiB (1,024 bytes) or KB (1,000 bytes): "
            "write 8 KiB or 8 KB, got '8k'",
        ),
        ("12 apples", "max_bytes must be a number of bytes or like \"64 MiB\", got '12 apples'"),
    ],
)
def test_a_unit_that_is_not_of_bytes_is_refused_with_the_right_ones(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        memtools.GateHistory(max_bytes=text)

"""Byte sizes as people write them."""

from __future__ import annotations

import re

from memtools._base.number import LARGEST, shown

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_LONGEST = 20  # Digits; 2**63 has 19.
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, name: str = "size", like: str = "64 MiB") -> int:
    """The bytes that a size argument means.

    Args:
        size: a number of bytes, or a text like "64 MiB", "1.5 GiB" or "2 GB" (2 * 10**9).
        name: the argument's name, for errors.
        like: how it may be written, for errors.

    Raises TypeError if it is neither an int nor a text, ValueError if it is less than one byte or
    more than 2**63 - 1, not written like a size, in bits ("64 Mb"), or in a unit that may mean two
    ("64 M").
    """
    if isinstance(size, str):
        match = _PATTERN.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is not None and (why := _ambiguous(match[2])):
            number, letter = match[1], match[2][0].upper()
            raise ValueError(
                f"{name} is in bytes, and {why}: write {number} {letter}iB or {number} {letter}B, "
                f"got {size!r}"
            )
        if match is None or unit is None:
            raise ValueError(f'{name} must be a number of bytes or like "{like}", got {size!r}')
        whole = _times(match[1], unit)
    elif isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f'{name} must be an int or like "{like}", got {type(size).__name__}')
    else:
        whole = size
    if whole < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {_cut(size)}")
    if whole > LARGEST:
        raise ValueError(f"{name} must be at most 2**63 - 1 bytes, got {_cut(size)}")
    return whole


def _times(number: str, unit: int) -> int:
    """So many units in bytes; of a number that is far too large, one that is too large as well."""
    if len(number.partition(".")[0].lstrip("0")) > _LONGEST:
        return LARGEST + 1
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def _cut(size: int | str) -> str:
    if isinstance(size, str):
        return repr(size if len(size) <= 2 * _LONGEST else f"{size[:_LONGEST]}...")
    return shown(size).replace(",", "")


def _ambiguous(unit: str) -> str:
    """Why a unit is refused though its first letter is known: `Mb is a number of bits`; else ""."""
    if re.fullmatch("[KMGT]i?b", unit):
        return f"{unit} is a unit of bits"
    if re.fullmatch("[KMGTkmgt]i?", unit):
        two = (f"{unit[0].upper()}{end}" for end in ("iB", "B"))
        sizes = " or ".join(f"{one} ({_UNITS[one.upper()]:,} bytes)" for one in two)
        return f"{unit} may mean {sizes}"
    return ""


def format_bytes(count: float) -> str:
    """A size in binary units: `"512 B"`, `"64.0 MiB"`, `"1.46 GiB"`, `"23.5 GiB"`.

    Bytes are a whole number. KiB and MiB have one decimal, GiB and TiB have two below 10 and one
    above.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(abs(count), 0 if unit == "B" else 1) < 1024:
            break
        count /= 1024
    else:
        unit = "TiB"
    digits = 0 if unit == "B" else 2 if unit in ("GiB", "TiB") and abs(count) < 9.995 else 1
    return f"{count:.{digits}f} {unit}"

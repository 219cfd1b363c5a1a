"""Find the messages of a text of any size, a piece at a time.

    file ──► piece of 1 MiB, after the last 16 KiB of the one before
         ──► where is an anchor?  one search in C for each, in lower case
         ──► the line around it, and the lines above and below ──► message.py ──► OomMessage

Of each anchor at most so many places are looked at, and of a text at most so many messages are
kept, the first and the last ones. So neither a log of 1 GB nor a text that is made of anchors alone
takes more than its reading. Line numbers count "\\n".

What is not an out-of-memory is recognised here as well, to say what it is.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Final

from memtools._base.text import shown
from memtools._oom.message import (
    ANCHORS,
    FORMS,
    Form,
    OomMessage,
    merged,
    messages_in,
    plain,
    without_prefix,
)

#: bytes of a piece; of what lies before and after a place; of the longest line that is read whole
PIECE, AROUND, LINE = 1 << 20, 8 << 10, 2 << 10
#: Places of an anchor that are looked at: so MANY of a text, and FEW from either end of each piece
#: after that. Of forms that say most there are more: a run of many ranks has many of them.
MANY, MANY_HEAVY, FEW, HEAVY = 60, 600, 3, 90
#: bytes of a line that is not read whole, before and after a place
BEFORE, AFTER = 120, 1500
#: messages that are kept, from either end
KEPT: Final = 400
#: lines that the kernel writes of a kill
PROCESSES: Final = 10_000
#: Lines within which messages are about one end.
NEAR: Final = 500

#: errors that are not about memory: an anchor, and what it is
_NOT_MEMORY: Final = {
    b"device-side assert": "a CUDA error: device-side assert (an index that is out of range, such "
    "as a label or a token)",
    b"an illegal memory access": "a CUDA error: illegal memory access (a kernel read or wrote "
    "outside of its tensors)",
    b"misaligned address": "a CUDA error: misaligned address",
    b"no kernel image is available": "a CUDA error: torch was not built for this GPU",
    b"invalid device ordinal": "a CUDA error: no device has that number",
    b"device-side assertion": "a CUDA error: device-side assert",
    b"unspecified launch failure": "a CUDA error: a kernel failed",
    b"busy or unavailable": "a CUDA error: another process uses the device",
    b"cublas_status_execution_failed": "a cuBLAS error: a kernel failed",
    b"cublas_status_invalid_value": "a cuBLAS error: wrong arguments",
    b"cudnn_status_execution_failed": "a cuDNN error: a kernel failed",
    b"cudnn_status_internal_error": "a cuDNN error: internal error",
    b"caught collective operation timeout": "an NCCL timeout: one rank did not arrive",
    b"expected all tensors to be on the same device": "tensors on different devices",
    b"due to time limit": "Slurm's time limit",
    b"due to preemption": "preemption by Slurm",
    b"segmentation fault": "a segmentation fault in native code",
    b"code 139": "a segmentation fault in native code (exit code 139)",
    b"code -11": "a segmentation fault in native code (exit code -11)",
    b"exitcode: -11": "a segmentation fault in native code (exit code -11)",
    b"code 134": "an abort in native code (exit code 134)",
    b"exitcode: -6": "an abort in native code (exit code -6)",
    b"out of resource: shared memory": "a Triton kernel that needs more shared memory per "
    "multiprocessor than the GPU has (fewer num_stages, or "
    "smaller blocks)",
    b"sigterm": "a SIGTERM, which is a request to exit",
    b"no space left on device": "a full disk",
    b"too many open files": "too many open files",
    b"keyboardinterrupt": "a KeyboardInterrupt",
}
_SETTING: Final = b"expandable_segments"
_ON: Final = re.compile(
    r"(?P<hint>try setting )?PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF[\"']?\]?\)? {0,3}[=:,] {0,3}[\"']?"
    r"[^\s\"']{0,120}?expandable_segments:(?P<value>True|False|true|false|1|0)\b"
    r"(?! to avoid)|expandable_segments[\"']?[=:] ?(?P<other>True|False)\b(?! to avoid)"
)
_EXCEPTION: Final = re.compile(
    r"^(?:[A-Za-z_]\w{0,40}\.){0,6}([A-Z]\w{0,50}(?:Error|Exception|Interrupt|Exit|Warning))"
    r"(?::|\s{0,9}$)"
)


@dataclass
class Log:
    """What was found in a text.

    Attributes:
        messages: the first and the last ones, in their order.
        count: of how many messages that were found.
        is_all: whether all places were looked at. A text that is made of messages has more.
        lines, size: how long the text is.
        expandable: whether the allocator's expandable segments are on; None if it does not say so.
        not_memory: the last error that is about something else, and its line.
        exception: the name of the last exception, and its line.
        mention: the line that mentions "out of memory" last.
        readable: False for bytes that are not a text.
    """

    messages: list[OomMessage] = field(default_factory=list)
    count: int = 0
    is_all: bool = True
    lines: int = 0
    size: int = 0
    expandable: bool | None = None
    not_memory: tuple[str, int] | None = None
    exception: tuple[str, int] | None = None
    mention: int | None = None
    readable: bool = True

    @property
    def main(self) -> OomMessage | None:
        """The message that says most about how it ended: of those near the last one, the first of
        the heaviest form; of a rank that has several of them, the last."""
        if not self.messages:
            return None
        last = self.messages[-1].line
        near = [one for one in self.messages if one.line >= last - NEAR]
        heaviest = max(one.weight for one in near)
        found = [one for one in near if one.weight == heaviest]
        return next(iter({one.rank: one for one in found}.values()))


def search(file: BinaryIO, first: bytes = b"") -> Log:
    """What a text says of memory.

    Args:
        file: it, from where it is to be read on.
        first: what was read of it before.
    """
    log, found = Log(), _Found()
    for piece in _pieces(file, first):
        head = piece.data[:4096]
        if piece.offset == 0 and head.count(0) > len(head) // 10:
            log.readable = False  # a file of another kind; a log may have a few of them
            break
        _look(piece, log, found)
    log.messages = found.messages()
    log.count = found.count
    return log


# --- pieces ---------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """A part of a text: `data`, of which places in `begin` to `end` are looked at; `lines` is the
    number of line ends before it, `offset` where it begins in the text."""

    data: bytes
    begin: int
    end: int
    lines: int
    offset: int


def _pieces(file: BinaryIO, first: bytes) -> Iterator[_Piece]:
    decoder = None
    kept, lines, offset, done = b"", 0, 0, 0
    new, is_last = first, False
    while not is_last:
        read = file.read(PIECE - len(new)) if len(new) < PIECE else b""
        is_last = len(new) < PIECE and not read
        new += read
        if len(new) < PIECE and not is_last:
            continue  # a pipe gives less than what was asked for
        if offset == 0 and new[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")  # PowerShell's
        if decoder is not None:
            new = decoder.decode(new, is_last).encode("utf-8", "replace")
        data = kept + new
        end = len(data) if is_last else max(done, len(data) - AROUND)
        yield _Piece(data, done, end, lines, offset)
        cut = max(0, end - AROUND)
        lines += data.count(b"\n", 0, cut)
        offset += cut
        kept, done, new = data[cut:], end - cut, b""


class _Found:
    """The first and the last messages of a text, each once."""

    def __init__(self) -> None:
        self.head: list[OomMessage] = []
        self.tail: deque[OomMessage] = deque(maxlen=KEPT)
        self.count = 0
        self.looks: Counter[bytes] = Counter()

    def add(self, message: OomMessage) -> None:
        last = self.tail[-1] if self.tail else self.head[-1] if self.head else None
        if last is not None and _are_one(last, message):
            both = merged(last, message) if message.kind == "kernel" else last
            self._drop()
            message = replace(both, line=last.line)
        else:
            self.count += 1
        (self.head if len(self.head) < KEPT else self.tail).append(message)

    def _drop(self) -> None:
        (self.tail if self.tail else self.head).pop()

    def messages(self) -> list[OomMessage]:
        """In their order, and without those that another handler printed again."""
        found: dict[object, OomMessage] = {}
        for one in [*self.head, *self.tail]:
            sizes = tuple(one.figures.items())
            if len(sizes) < 3:
                found[len(found), one.line] = one
                continue
            key = one.kind, sizes
            other = found.get(key)
            if other is None or (one.rank is not None and other.rank is None):
                found[key] = one
            elif one.rank != other.rank and one.rank is not None:
                found[(*key, one.rank)] = one
        return sorted(found.values(), key=lambda one: one.line)


def _are_one(last: OomMessage, message: OomMessage) -> bool:
    """Whether two messages, one below the other, are parts of one."""
    if message.rank != last.rank or message.kind != last.kind:
        return False
    if message.kind == "kernel":
        # "Killed process" is the last line of a kill, below a list of all processes.
        return last.virtual is None and message.line - last.line < PROCESSES
    return (
        message.kind == "torch"
        and message.backend is None
        and last.backend is not None
        and message.line - last.line <= 3
        and message.requested == last.requested
    )


# --- places ---------------------------------------------------------------------------------------


def _look(piece: _Piece, log: Log, found: _Found) -> None:
    data = piece.data
    lower = data.lower()
    spots: dict[int, list[Form]] = {}
    for anchor, forms in ANCHORS.items():
        many = MANY_HEAVY if any(form.weight >= HEAVY for form in forms) else MANY
        places = max(FEW, (many - found.looks[anchor]) // 2)
        some, is_all = _spots(lower, anchor, piece.begin, piece.end, places)
        found.looks[anchor] += len(some)
        log.is_all = log.is_all and is_all
        for spot in some:
            spots.setdefault(spot, []).extend(forms)
    seen = set[int]()
    number, counted = piece.lines + 1, 0
    for spot in sorted(spots):
        start, stop, is_whole = _line_at(data, spot)
        key = start if is_whole else spot
        if key in seen:
            continue
        seen.add(key)
        number += data.count(b"\n", counted, start)
        counted = max(counted, start)
        line = _text(data[start:stop])
        known = _forms_of(lower[start:stop]) if is_whole else spots[spot]
        before = _text(data[max(0, start - AROUND) : max(0, start - 1)]).split("\n")
        after = _text(data[stop + 1 : stop + 1 + AROUND]).split("\n") if is_whole else []
        column = None if is_whole else len(_text(data[start:spot]))
        for message in _of_line(before, line, after, number, known, column):
            found.add(message)
    _other_errors(piece, lower, log)
    log.lines = piece.lines + data.count(b"\n", 0, piece.end) + (data[-1:] not in (b"\n", b""))
    log.size += piece.end - piece.begin


def _spots(
    lower: bytes, anchor: bytes, begin: int, end: int, places: int
) -> tuple[list[int], bool]:
    """The first and the last places of an anchor that begin in a range, and whether that is all."""
    stop = end + len(anchor) - 1
    found: list[int] = []
    at = lower.find(anchor, begin, stop)
    while at >= 0 and len(found) < places:
        found.append(at)
        at = lower.find(anchor, at + len(anchor), stop)
    if at < 0:
        return found, True
    last: list[int] = []
    at = lower.rfind(anchor, found[-1] + 1, stop)
    while at >= 0 and len(last) < places:
        last.append(at)
        at = lower.rfind(anchor, found[-1] + 1, at)
    return found + last[::-1], at < 0


def _line_at(data: bytes, spot: int) -> tuple[int, int, bool]:
    """Where the line of a place begins and ends, and whether that is all of it: of a very long line
    only what is near. A progress bar's "\\r" ends a line as well."""
    begin = max(data.rfind(end, max(0, spot - LINE), spot) for end in (b"\n", b"\r"))
    end = data.find(b"\n", spot, spot + 2 * LINE)
    is_whole = (begin >= 0 or spot < LINE) and (end >= 0 or len(data) - spot <= 2 * LINE)
    if not is_whole:
        return max(0, begin + 1, spot - BEFORE), min(len(data), spot + AFTER), False
    return begin + 1, end if end >= 0 else len(data), True


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _forms_of(line: bytes) -> list[Form]:
    """The forms of which a line has an anchor, in the order of FORMS."""
    found = {form.kind for anchor, forms in ANCHORS.items() if anchor in line for form in forms}
    return [form for form in FORMS if form.kind in found]


def _of_line(
    before: list[str],
    line: str,
    after: list[str],
    number: int,
    forms: list[Form],
    column: int | None,
) -> list[OomMessage]:
    """The messages of a line, of the form that says most."""
    lines = line.split("\n") if column is None else [line]
    found = list(messages_in(before, lines[0], [*lines[1:], *after], number, forms, column))
    best = max(found, key=lambda one: one.weight, default=None)
    return [one for one in found if best is not None and one.kind == best.kind]


def _other_errors(piece: _Piece, lower: bytes, log: Log) -> None:
    data = piece.data
    best = -1
    for anchor, what in _NOT_MEMORY.items():
        at = lower.rfind(anchor, piece.begin, piece.end)
        if at > best:
            best = at
            log.not_memory = what, piece.lines + 1 + data.count(b"\n", 0, at)
    at = lower.rfind(b"out of memory", piece.begin, piece.end)
    if at >= 0:
        log.mention = piece.lines + 1 + data.count(b"\n", 0, at)
    at = data.rfind(b"Error", piece.begin, piece.end)
    for _ in range(20):
        if at < 0:
            break
        start, stop, _ = _line_at(data, at)
        match = _EXCEPTION.match(without_prefix(plain(_text(data[start:stop])))[1])
        if match is not None:
            log.exception = shown(match[1]), piece.lines + 1 + data.count(b"\n", 0, at)
            break
        at = data.rfind(b"Error", piece.begin, max(piece.begin, start))
    for at in _spots(lower, _SETTING, piece.begin, piece.end, 20)[0]:
        near = _text(data[max(0, at - 200) : at + 60])
        for match in _ON.finditer(near):
            if not match["hint"]:
                value = match["value"] or match["other"]
                log.expandable = value.lower() in ("true", "1")

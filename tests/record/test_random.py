"""Records with any values, fields and bytes: each command shows one or refuses it in a sentence."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import operator
import resource
import signal
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from memtools import _cli as cli
from memtools import _core, read_record
from memtools._base.text import shown, shown_lines
from memtools._record.kinds import KINDS, End, Event, payload
from tests.kit.long import LONG
from tests.record.test_kinds import SENTENCES
from tests.record.test_kinds import events as typed
from tests.report.reportcases import COLUMNS, HOSTILE, write

pytestmark = pytest.mark.slow

SMALL = {"rows": 16, "buckets": 8, "events": 64, "phases": 4, "payloads": 2**14}
LARGE = SMALL | {"rows": 400, "buckets": 64}
BOUNDS = "peak=+5%,process=2GiB,device=+1MiB,growth=+1KiB/step,seconds=+10%,phase:train=+5%,leak"
MORE_BYTES, SECONDS = 2**28, 60  # what one command may take
FOLDER = tempfile.TemporaryDirectory()
PATH, BASE = f"{FOLDER.name}/run.mem", f"{FOLDER.name}/base.mem"


@contextlib.contextmanager
def within_limits() -> Iterator[None]:
    """Much more memory or time than a small record needs is a failure."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGALRM, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_BYTES, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def exit_code(*command: str) -> int:
    """The exit code. What the command raises, and what it should not print, fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with within_limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(command)
    text, errors = out.getvalue(), err.getvalue().splitlines()
    assert shown_lines(text) == text
    assert [*map(shown, errors)] == errors
    assert all(line.startswith(f"memtools {command[0]}: ") for line in errors)
    if not text:
        assert (code > 0, len(errors)) == (True, 1)
    elif command[0] != "compare":  # which also tells of bounds that it cannot judge
        assert (code, errors) == (0, [])
    if text and "--json" in command:
        json.loads(text, parse_constant=refused)
    return code


def all_commands() -> list[int]:
    """Their exit codes, of the record PATH beside BASE."""
    if not Path(BASE).exists():
        write(BASE, steps=60, sizes=SMALL)
    to = ("--force", "-o", f"{FOLDER.name}/exported")
    codes = [
        exit_code("explain", PATH),
        exit_code("explain", PATH, "--json"),
        exit_code("watch", PATH, "--once", "--json"),
        exit_code("report", PATH, BASE, "--redact", "--json"),
        exit_code("compare", PATH, BASE),
        exit_code("compare", BASE, PATH, "--json", "--fail", BOUNDS),
    ]
    for form in ("jsonl", "trace"):
        codes.append(exit_code("export", PATH, "--to", form, *to))
        text = Path(to[-1]).read_text() if codes[-1] == 0 else ""
        for line in filter(None, text.split("\n") if form == "jsonl" else [text]):
            json.loads(line, parse_constant=refused)
    if codes[0] == 0:
        with within_limits():
            record = read_record(PATH)
            assert shown_lines(str(record)) == str(record)
            assert record._repr_html_()
    return codes


# --- values and fields ----------------------------------------------------------------------------

TEXT = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)).map(
    lambda text: text.encode("utf-8", "ignore").decode().replace("\0", "")
)
NUMBER = st.one_of(st.integers(0, 2**64 - 2), st.sampled_from([0, 1, 2**30, 2**63, 2**64 - 2]))
VALUE = st.one_of(st.none(), NUMBER)
NAMES = [name for name, _ in COLUMNS] + ["cuda0_allocated", "cuda0_total", "cuda999_x", "other"]
SENTENCE = st.from_regex(
    r"(exit|limit|gc|freed)[ :,]{1,2}[0-9]{1,30}[.0-9]* (GiB|ms|B)", fullmatch=True
)
ODD: list[Any] = [
    None, True, 0, -1, 1, 2, 2**62, 2**63 - 1, -(2**62), 0.5, -0.5, 5e-324, 9e18, 1e400, "", "step",
    "second", "leak", "likely", "heap", "x" * 3000, *HOSTILE, [], [1, 2], [[]], [None, None], {},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in `value`, and each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def fields_of(event: Event, changes: list[tuple[int, Any]]) -> bytes:
    """The event as it stands in a record, with other values in some places."""
    found = json.loads(payload(event.KIND, event))
    for where, value in changes:
        all_places = [(found, one.name) for one in dataclasses.fields(event)] + [*places(found)]
        container, key = all_places[where % len(all_places)]
        container[key] = copy.deepcopy(value)
    return json.dumps(found).encode()


def begins(**fields: Any) -> tuple[tuple[str, bytes], int, int, int]:
    return ("start", json.dumps(fields).encode()), 0, 0, 0


CHANGES = st.lists(st.tuples(st.integers(0, 500), st.sampled_from(ODD)), max_size=2)
BODY = st.one_of(
    st.tuples(st.sampled_from([*KINDS, "phase", "what"]), TEXT | SENTENCE),
    st.builds(
        lambda event, changes: (event.KIND, fields_of(event, changes)),
        typed | st.sampled_from([*SENTENCES]),
        CHANGES,
    ),
)


@settings(max_examples=2500 if LONG else 60, deadline=None)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True),
    st.lists(st.tuples(NUMBER, st.lists(VALUE, min_size=8, max_size=8))),
    st.lists(st.tuples(BODY, st.none() | NUMBER, NUMBER, NUMBER), max_size=8),
    st.lists(st.tuples(TEXT, st.integers(0, 2**63), VALUE), max_size=4),
    st.booleans(),
)
@example(["rss", "children_private"], [(0, [1, 2**64 - 2])], [], [], False)
@example(["available"], [(0, [9])], [begins(machine_bytes=0)], [], False)
def test_a_record_of_any_values_and_fields_is_shown(names, rows, bodies, phases, evenly):
    """`evenly`: as a run of equal steps has them, in which growth can be judged."""
    columns = [(name, "B") for name in names]
    with _core.RecordWriter(PATH, columns, **SMALL, command=HOSTILE) as writer:
        for k, (time_ns, values) in enumerate(rows):
            writer.append(10**15 + 10**7 * k if evenly else time_ns, values[: len(names)])
        for (kind, body), step, time_ns, took in bodies:
            if body and len(body) < 2**14:
                writer.event(kind, body, step=step, time_ns=time_ns, duration_ns=took)
        for name, took, peak in phases:
            if name:
                writer.phase(name, took, peak)
    codes = all_commands()
    assert {*codes[:5], *codes[6:]} == {0}


# --- bytes ----------------------------------------------------------------------------------------

WORD = 2**64 - 1
FACTORS = [((i + 1) * 0x9E3779B97F4A7C15 & WORD) | 1 for i in range(2**13)]
HEADER, COLUMN, EVENT, PHASE = 2048, 64, 32, 16  # the last two in words


class Layout:
    """Where what lies in a record; csrc/core/record/layout.h has it."""

    def __init__(self, data: bytes) -> None:
        _, _, columns, rows, buckets, events, phases = struct.unpack_from("<7Q", data, 8)
        self.fixed, self.crc = HEADER + columns * COLUMN, 112
        self.row, self.rows = columns + 3, rows
        series = -(-(8 + rows * self.row + 2 * buckets * (2 + 3 * columns)) // 8) * 8
        at = self.fixed // 8
        self.series, self.events, self.phases = at, at + series, at + series + EVENT * events
        self.payloads = self.phases + PHASE * phases

    def starts(self) -> list[int]:
        """Of the parts, in bytes."""
        words = [0, HEADER // 8, self.series, self.events, self.phases, self.payloads]
        return [8 * at for at in words]

    def make_whole(self, data: bytearray) -> None:
        """Make all checks right again, so that a reader believes what was changed."""
        words = list(struct.unpack(f"<{len(data) // 8}Q", data))
        for at in range(self.series + 8, self.series + 8 + self.rows * self.row, self.row):
            check(words, at, self.row - 1)
        for at in range(self.events, self.phases, EVENT):
            long = words[at + 6] >> 32 == 1 and 192 < words[at + 6] & 0xFFFFFFFF <= 2**16
            if long:
                size = ((words[at + 6] & 0xFFFFFFFF) + 7) // 8
                words[at + 8] = sum_of(words, self.payloads + words[at + 7] % 2**16, size)
            check(words, at, EVENT - 1)
        for at in range(self.phases, self.payloads, PHASE):
            check(words, at + 5, 4)
            check(words, at + 10, 4)
        data[:] = struct.pack(f"<{len(words)}Q", *words)
        crc = zlib.crc32(data[HEADER : self.fixed], zlib.crc32(data[: self.crc] + data[256:HEADER]))
        struct.pack_into("<Q", data, self.crc, crc)


def sum_of(words: list[int], at: int, size: int) -> int:
    return sum(map(operator.mul, words[at : at + size], FACTORS)) & WORD


def check(words: list[int], at: int, size: int) -> None:
    if words[at]:  # a stamp
        words[at + size] = sum_of(words, at, size)


@functools.cache
def records() -> dict[str, tuple[bytes, Layout]]:
    """Whole ones, by what became of the run."""
    fields = [(event.KIND, payload(event.KIND, event)) for event in SENTENCES]
    cases: dict[str, dict[str, Any]] = {
        "finished": {"events": [*fields, ("end", payload("end", End(code=0)))], "device": True,
                     "steps": 600, "grows": 2**16, "sizes": LARGE},
        "killed": {"events": fields, "steps": 600, "grows": 2**18, "sizes": LARGE, "close": False},
        "without steps": {"events": fields, "steps": 40, "counted": False, "limit": None},
        "short": {"steps": 1, "close": False},
    }  # fmt: skip
    found = {
        name: Path(write(PATH, **({"sizes": SMALL} | case))).read_bytes()
        for name, case in cases.items()
    }
    ended = bytearray(found["killed"])
    struct.pack_into("<QQ", ended, 144, signal.SIGSEGV, 10**15)
    found["by a signal"] = bytes(ended)
    return {name: (data, Layout(data)) for name, data in found.items()}


def place(data: bytearray, layout: Layout, part: int, offset: int) -> int:
    starts = [*layout.starts(), len(data)]
    return min(starts[part] + offset % max(1, starts[part + 1] - starts[part]), len(data) - 8)


JSON = [
    b"9" * 30,
    b"-1",
    b"0",
    b"null",
    b"true",
    b'"',
    b"[",
    b"{",
    b"1e308",
    b"Infinity",
    b"\\ud800",
]


def damage(data: bytearray, layout: Layout, how: str, at: int, number: int) -> None:
    some = number.to_bytes(8, "little")
    if how == "flip":
        data[at] ^= 1 << number % 8
    elif how == "word":
        data[at // 8 * 8 : at // 8 * 8 + 8] = some
    elif how == "cut":
        del data[at : at + number % 4096 + 1]
    elif how == "insert":
        data[at:at] = some * (number % 64 + 1)
    elif how == "copy":
        other = place(data, layout, number % 6, number >> 3) // 8 * 8
        at = at // 8 * 8
        block = data[other : other + 256][: len(data) - at]
        data[at : at + len(block)] = block
    else:  # the value of a field
        found = max(data.find(b'":', at), data.rfind(b'":', 0, at))  # after it, or else before it
        new = JSON[number % len(JSON)]
        if found >= 0:
            data[found + 2 : found + 2 + len(new)] = new[: len(data) - found - 2]


NUMBERS = st.one_of(
    st.integers(0, WORD),
    st.integers(0, 300),
    st.sampled_from([2**32 + 9, 2**40, 2**56, 41 << 56, 2**63, WORD - 1, WORD]),
)
PARTS = st.sampled_from([3, 3, 3, 5, 5, 2, 2, 4, 1, 0])  # most often the events


def edits(*kinds: str, most: int) -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    one = st.tuples(st.sampled_from(kinds), PARTS, st.integers(0, 10**6), NUMBERS)
    return st.lists(one, min_size=1, max_size=most)


IN_PLACE = edits("flip", "word", "word", "copy", "field", "field", most=6)


@settings(max_examples=5000 if LONG else 60, deadline=None)
@given(
    st.sampled_from(["finished", "killed", "without steps", "by a signal", "short"]),
    st.one_of(IN_PLACE, IN_PLACE, IN_PLACE, edits("cut", "insert", most=2)),
    st.sampled_from([True, True, True, False]),
)
def test_a_damaged_record_is_shown_or_refused_in_one_sentence(name, changes, is_whole):
    whole, layout = records()[name]
    data = bytearray(whole)
    for how, part, offset, number in changes:
        if len(data) > 8:
            damage(data, layout, how, place(data, layout, part, offset), number)
    if is_whole and len(data) == len(whole):
        layout.make_whole(data)
    Path(PATH).unlink(missing_ok=True)
    Path(PATH).write_bytes(data)
    codes = all_commands()
    readable = codes[0] == 0
    event("shown" if readable else "refused")
    assert codes[:4] == [0 if readable else 2] * 2 + [0 if readable else 1] + [0 if readable else 2]


def test_the_checks_of_a_record_are_made_right() -> None:
    for data, layout in records().values():
        again = bytearray(data)
        layout.make_whole(again)
        assert again == data

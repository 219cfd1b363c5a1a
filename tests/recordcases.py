"""Calls of memtools._core's RecordWriter and record_read, good and bad, for test_leaks.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest

from memtools import _core

Case = Callable[[], object]
FOLDER = tempfile.TemporaryDirectory()
PATH = os.path.join(FOLDER.name, "case.mem")
OTHER = os.path.join(FOLDER.name, "other")
SMALL = {"rows": 4, "buckets": 2, "events": 2, "phases": 2}


def make(path: str = PATH) -> _core.RecordWriter:
    return _core.RecordWriter(path, ["a", ("b", "B")], **SMALL)


WRITER = make(os.path.join(FOLDER.name, "open.mem"))
LEFT = make(os.path.join(FOLDER.name, "left.mem"))  # to the end of the process


def refused(call: Case) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - any refusal; which one, other tests say
        call()


def no_record() -> None:
    with open(OTHER, "w") as file:
        file.write("x")
    refused(lambda: make(OTHER))
    refused(lambda: _core.record_read(OTHER))
    os.unlink(OTHER)


CASES: dict[str, list[Case]] = {
    "record_read": [
        lambda: _core.record_read(WRITER.path),
        lambda: refused(lambda: _core.record_read(PATH + ".none")),
        lambda: refused(lambda: _core.record_read(1)),  # type: ignore[arg-type]
        no_record,
    ],
    "RecordWriter": [
        make,
        lambda: refused(lambda: make(WRITER.path)),
        lambda: refused(lambda: _core.RecordWriter(PATH, [])),
        lambda: refused(lambda: _core.RecordWriter(PATH, ["a", "a"])),
        lambda: refused(lambda: _core.RecordWriter(PATH, ["a" * 32])),
        lambda: refused(lambda: _core.RecordWriter(PATH, [("a", "B", "c")])),  # type: ignore[list-item]
        lambda: refused(lambda: _core.RecordWriter(PATH, [1])),  # type: ignore[list-item]
        lambda: refused(lambda: _core.RecordWriter(PATH, ["a"], rows=-1)),
        lambda: refused(lambda: _core.RecordWriter(PATH, ["a"], command=["a", 1])),  # type: ignore[list-item]
        lambda: refused(lambda: _core.RecordWriter(PATH, ["a"], command=["\ud800\udfff"])),
    ],
    "RecordWriter.__new__": [make],
    "RecordWriter.append": [
        lambda: WRITER.append(None, [1, None]),
        lambda: WRITER.append(5, (2**64 - 2, 2**40)),
        lambda: refused(lambda: WRITER.append(1, [1])),
        lambda: refused(lambda: WRITER.append(1, [1, -1])),
        lambda: refused(lambda: WRITER.append(1, [1, 1.5])),  # type: ignore[list-item]
        lambda: refused(lambda: WRITER.append(1)),  # type: ignore[call-arg]
    ],
    "RecordWriter.event": [
        lambda: WRITER.event("k", "t" * 300, step=2**40, time_ns=3, duration_ns=7),
        lambda: refused(lambda: WRITER.event("k", "\0")),
        lambda: refused(lambda: WRITER.event("k", "\ud800")),
        lambda: refused(lambda: WRITER.event("k", "t", step=-1)),
    ],
    "RecordWriter.phase": [
        lambda: WRITER.phase("train", 2**40, 2**40),
        lambda: refused(lambda: WRITER.phase("", 1)),
        lambda: refused(lambda: WRITER.phase("x", "1")),  # type: ignore[arg-type]
    ],
    "RecordWriter.flush": [WRITER.flush],
    "RecordWriter._close_at_exit": [LEFT._close_at_exit],
    "RecordWriter.close": [lambda: make().close()],
    "RecordWriter.__enter__": [WRITER.__enter__],
    "RecordWriter.__exit__": [lambda: make().__exit__(None, None, None)],
    "RecordWriter.closed": [lambda: WRITER.closed],
    "RecordWriter.nbytes": [lambda: WRITER.nbytes],
    "RecordWriter.path": [lambda: WRITER.path],
}

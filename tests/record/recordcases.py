"""Calls of memtools._core's RecordWriter, good and bad, for test_leaks.py."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]
FOLDER = tempfile.TemporaryDirectory()
PATH = os.path.join(FOLDER.name, "case.mem")
OTHER = os.path.join(FOLDER.name, "other")
SMALL = {"rows": 4, "buckets": 2, "events": 2, "phases": 2}


def make(path: str = PATH) -> _core.RecordWriter:
    return _core.RecordWriter(path, ["a", ("b", "B")], **SMALL)


WRITER = make(os.path.join(FOLDER.name, "open.mem"))
LEFT = make(os.path.join(FOLDER.name, "left.mem"))  # to the end of the process


def no_record() -> None:
    with open(OTHER, "w") as file:
        file.write("x")
    refused(FileExistsError, lambda: make(OTHER))
    os.unlink(OTHER)


def kept() -> None:
    """A record that nobody closed makes room for the next."""
    make(PATH + ".kept").close()
    with open(PATH + ".kept", "rb+") as file:
        file.seek(128)
        file.write(bytes(8))  # when it was closed
    with make(PATH + ".kept") as writer:
        assert writer.kept is not None
        os.unlink(writer.kept)


def watched() -> None:
    before = _core._watch_end(print, print)
    _core._watch_end(None, before)


class Called:
    """What is called by a function that is heard."""

    def __call__(self, number: int) -> int:
        return self(number - 1) if number else 0


def heard() -> None:
    for told in (id, len):  # one of them fails
        assert _core._watch_calls(Called.__call__, told, threading.get_ident())
        assert not _core._watch_calls(Called.__call__, told, 0)
        with contextlib.suppress(TypeError):
            Called()(3)
        _core._watch_calls(None, None, 0)
    told_all: list[object] = []
    assert _core._watch_calls(Called.__call__, told_all.append, threading.get_ident(), True)
    Called()(number=0)
    _core._watch_calls(None, None, 0, True)
    assert len(told_all) == 1


CASES: dict[str, list[Case]] = {
    "RecordWriter": [
        make,
        no_record,
        lambda: refused(OSError, lambda: make(WRITER.path)),
        lambda: refused(ValueError, lambda: _core.RecordWriter(PATH, [])),
        lambda: refused(ValueError, lambda: _core.RecordWriter(PATH, ["a", "a"])),
        lambda: refused(ValueError, lambda: _core.RecordWriter(PATH, ["a" * 32])),
        lambda: refused(ValueError, lambda: _core.RecordWriter(PATH, [("a", "B", "c")])),  # type: ignore[list-item]
        lambda: refused(TypeError, lambda: _core.RecordWriter(PATH, [1])),  # type: ignore[list-item]
        lambda: refused(ValueError, lambda: _core.RecordWriter(PATH, ["a"], rows=-1)),
        lambda: refused(TypeError, lambda: _core.RecordWriter(PATH, ["a"], command=["a", 1])),  # type: ignore[list-item]
        lambda: refused(
            UnicodeEncodeError, lambda: _core.RecordWriter(PATH, ["a"], command=["\ud800\udfff"])
        ),
    ],
    "RecordWriter.__new__": [make],
    "RecordWriter.append": [
        lambda: WRITER.append(None, [1, None]),
        lambda: WRITER.append(5, (2**64 - 2, 2**40)),
        lambda: refused(ValueError, lambda: WRITER.append(1, [1])),
        lambda: refused(ValueError, lambda: WRITER.append(1, [1, -1])),
        lambda: refused(TypeError, lambda: WRITER.append(1, [1, 1.5])),  # type: ignore[list-item]
        lambda: refused(TypeError, lambda: WRITER.append(1)),  # type: ignore[call-arg]
    ],
    "RecordWriter.event": [
        lambda: WRITER.event("k", "t" * 300, step=2**40, time_ns=3, duration_ns=7),
        lambda: WRITER.event("k", b"t" * 65536),
        lambda: refused(ValueError, lambda: WRITER.event("k", b"t" * 65537)),
        lambda: refused(ValueError, lambda: WRITER.event("k", "\0")),
        lambda: refused(UnicodeEncodeError, lambda: WRITER.event("k", "\ud800")),
        lambda: refused(ValueError, lambda: WRITER.event("k", "t", step=-1)),
    ],
    "RecordWriter.phase": [
        lambda: WRITER.phase("train", 2**40, 2**40),
        lambda: refused(ValueError, lambda: WRITER.phase("", 1)),
        lambda: refused(TypeError, lambda: WRITER.phase("x", "1")),  # type: ignore[arg-type]
    ],
    "RecordWriter._close_at_exit": [
        lambda: LEFT._close_at_exit(b"", 1),
        lambda: LEFT._close_at_exit(b"x" * 2000, 2**63),
        lambda: refused(ValueError, lambda: LEFT._close_at_exit(b"x" * 65537, 1)),
        lambda: refused(TypeError, lambda: LEFT._close_at_exit(b"", "")),  # type: ignore[arg-type]
    ],
    "RecordWriter._mark_signals": [
        lambda: make()._mark_signals(),
        lambda: refused(TypeError, lambda: LEFT._mark_signals(1)),  # type: ignore[call-arg]
    ],
    "RecordWriter.kept": [lambda: WRITER.kept, kept],
    "RecordWriter.close": [lambda: make().close()],
    "RecordWriter.__enter__": [WRITER.__enter__],
    "RecordWriter.__exit__": [lambda: make().__exit__(None, None, None)],
    "excepthook": [
        lambda: _core.excepthook(ValueError, ValueError(), None),
        lambda: refused(TypeError, lambda: _core.excepthook(ValueError)),  # type: ignore[call-arg]
    ],
    "_watch_end": [
        watched,
        lambda: refused(TypeError, lambda: _core._watch_end(None)),  # type: ignore[call-arg]
    ],
    "_watch_calls": [
        heard,
        lambda: refused(TypeError, lambda: _core._watch_calls(print, print, 0)),
        lambda: refused(TypeError, lambda: _core._watch_calls(watched, 3, 0)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core._watch_calls(None)),  # type: ignore[call-arg]
    ],
    "_set_last_command": [  # what it takes, it keeps to the end of the process
        lambda: refused(ValueError, lambda: _core._set_last_command((), b"")),
        lambda: refused(ValueError, lambda: _core._set_last_command((b"a", b"\0"), b"")),
        lambda: refused(ValueError, lambda: _core._set_last_command((b"a",), b"\0")),
        lambda: refused(TypeError, lambda: _core._set_last_command((b"a", "b"), b"")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core._set_last_command([b"a"], b"")),  # type: ignore[arg-type]
    ],
    "_run_last_command": [lambda: _core._run_last_command(False)],
    "RecordWriter.closed": [lambda: WRITER.closed],
    "RecordWriter.nbytes": [lambda: WRITER.nbytes],
    "RecordWriter.path": [lambda: WRITER.path],
}

"""The record and the complaints of a monitor: nothing in here ends a training run."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memtools import _core
from memtools._base.file import folder_now, seen_from
from memtools._base.notice import logger, notice
from memtools._base.redact import redacted_command
from memtools._base.size import format_bytes
from memtools._record.kinds import End, Event, payload

_REMEDIES = {
    errno.ENOSPC: "free space there, or name another place, such as one in /dev/shm",
    errno.EDQUOT: "free space there, or name another place, such as one in /dev/shm",
    errno.EROFS: "the file system is read-only; name another place, such as one in /tmp",
    errno.EACCES: "name a place where this user may write, such as one in /tmp",
    errno.EPERM: "name a place where this user may write, such as one in /tmp",
    errno.ENOENT: "make its directory first, or name another place",
    errno.ENOTDIR: "make its directory first, or name another place",
    errno.EMFILE: "close files, or raise the limit by ulimit -n",
    errno.ENFILE: "the machine has no file descriptors left; close files",
    errno.EBUSY: "give each process a record of its own",
    errno.EISDIR: "name a file in it, such as run.mem",
    errno.EEXIST: "it is not a record, and is left as it is; name another place",
}


EVENTS, LONG_BYTES = 1024, 256 << 10  # of the newest, that a record has place for
MOST_RECORDS = 99  # of one name, in a folder
MANY_KEPT = 10  # records of killed runs: from here on they are counted


def ranked(path: str, environment: Mapping[str, str] = os.environ) -> str:
    """On rank 3 of a job of several ranks, run.rank3.mem for run.mem: each rank writes a record of
    its own. A file name that has the rank's number in it already is kept."""
    rank = environment.get("RANK", "")
    if not rank.isdecimal() or environment.get("WORLD_SIZE") == "1":
        return path
    folder, name = os.path.split(path)
    if rank in re.findall(r"\d+", name):
        return path
    stem, ending = os.path.splitext(name)
    return os.path.join(folder, f"{stem}.rank{rank}{ending}")


def open_record(
    path: str | os.PathLike[str],
    columns: Sequence[tuple[str, str]],
    command: Sequence[str] | None = None,
    announce: Callable[[str], None] = notice,
) -> _core.RecordWriter:
    """The writer of a new record, of this process's command unless another is given.

    Where somebody writes a record of that name now, this one gets the next name that is free:
    run-2.mem. One that was not closed is kept under another name: run.1.mem. Each is announced. The
    writer's path is absolute: the program may change its directory.
    Raises OSError with the path, why, and what to do.
    """
    path, folder = os.path.abspath(path), folder_now()
    shown = redacted_command(sys.orig_argv if command is None else command)
    try:
        writer = _first_free(path, columns, shown)
    except OSError as error:
        text = f"the record cannot be made: {refusal(error, path)}, or pass log=None"
        raise type(error)(error.errno or 0, text, path) from error
    if writer.path != path:
        who = "the monitor of memtools run" if _is_of_the_run(path) else "another monitor"
        name, own = seen_from(folder, path), seen_from(folder, writer.path)
        announce(f"{who} writes {name} already; the record of this monitor is {own}")
    if writer.kept is not None:
        name, kept = seen_from(folder, path), seen_from(folder, writer.kept)
        text = f"the run that wrote {name} was cut off; its record is kept as {kept}"
        announce(text + _many_kept(path))
    return writer


def _many_kept(path: str) -> str:
    """How many records of this name are kept and what they take, where they are many: nobody but
    the user removes one."""
    folder, name = os.path.split(path)
    stem, ending = os.path.splitext(name)
    kept = re.compile(re.escape(stem) + r"\.\d{1,4}" + re.escape(ending))
    try:
        with os.scandir(folder or ".") as files:
            sizes = [file.stat().st_size for file in files if kept.fullmatch(file.name)]
    except OSError:
        return ""
    if len(sizes) < MANY_KEPT:
        return ""
    taken = f"{len(sizes):,} records of runs that were cut off take {format_bytes(sum(sizes))} now"
    return f"; {taken}: remove what is not needed"


def _first_free(
    path: str, columns: Sequence[tuple[str, str]], command: Sequence[str]
) -> _core.RecordWriter:
    """The record under the first of the names run.mem, run-2.mem and so on that nobody writes."""
    stem, ending = os.path.splitext(path)
    name, n = path, 1
    while True:
        try:
            return _core.RecordWriter(
                name, columns, command=command, events=EVENTS, payloads=LONG_BYTES
            )
        except OSError as error:
            if error.errno != errno.EBUSY or n == MOST_RECORDS:
                raise
        n += 1
        name = f"{stem}-{n}{ending}"


def _is_of_the_run(path: str) -> bool:
    run = sys.modules.get("memtools._monitor.inprocess")
    of_run = None if run is None else run.record_path()
    return of_run is not None and os.path.realpath(path) == os.path.realpath(of_run)


def refusal(error: OSError, path: str) -> str:
    """Why the record cannot be made, and what to do."""
    number = error.errno or 0
    remedy = _REMEDIES.get(number, "name another place")
    if number == errno.ENOENT and os.path.islink(path):
        remedy = "a symbolic link is there that leads to nothing; remove it, or name another place"
    return f"{os.strerror(number) if number else error}; {remedy}"


class Log:
    """The record that a run's events and phases go to. It warns once of each kind of failure.

    A record keeps the newest events alone, and nobody can complete it where the process is killed.
    So what `lasting` tells is written again each time that half of the place has been written:

        start . . finding . . . . . . . . start finding . . . . . . . .
              └── overwritten by and by ─┘└─ half of the place ─┘
    """

    __slots__ = ("_bytes", "_complaints", "_events", "_step", "_writer", "lasting", "writes")

    def __init__(self, writer: _core.RecordWriter | None, step: Callable[[], int]) -> None:
        self._writer, self._step = writer, step
        #: False where there is no record: callers may save themselves the work
        self.writes = writer is not None
        self._complaints: set[str] = set()
        #: the kinds and bodies of events that have to be among the newest ones of the record
        self.lasting: Callable[[], Iterable[tuple[str, object]]] = tuple
        self._events = self._bytes = 0  # since these were written

    @property
    def path(self) -> str | None:
        return None if self._writer is None else self._writer.path

    def event(
        self,
        kind: str,
        body: object,
        *,
        time_ns: int | None = None,
        duration_ns: int = 0,
        **more: object,
    ) -> None:
        """An event at the present step: a text, in which a zero byte is shown as one, or an object
        or mapping with the fields that memtools/_record/kinds.py lists, and `more` of them."""
        if self._writer is None or not self.writes:
            return
        step = self._step()

        def write(writer: Any) -> None:
            if isinstance(body, str):
                what: str | bytes = body.replace("\0", "\\0").encode("utf-8", "replace").decode()
            else:
                what = payload(kind, body, **more)
            writer.event(kind, what, step=step, time_ns=time_ns, duration_ns=duration_ns)
            self._events, self._bytes = self._events + 1, self._bytes + len(what)

        self._try(write)
        if self._events >= EVENTS // 2 or self._bytes >= LONG_BYTES // 2:
            self._again()

    def _again(self) -> None:
        """Write what has to last, after whatever has come meanwhile."""
        self._events = self._bytes = 0
        try:
            for kind, body in self.lasting():
                self.event(kind, body)
        except Exception as error:
            self.complain("lasting", f"what stands could not be recorded again: {error}")

    def phase(self, name: str, ns: int, peak: int | None) -> None:
        if self._writer is None or not self.writes:
            return
        try:
            self._writer.phase(name, ns, peak)
        except Exception as error:
            self._broken(error)

    def close(self) -> None:
        if self._writer is not None:
            self._try(lambda writer: writer.close())
        self.writes = False

    def close_at_exit(self, failed: End | None, time_ns: int) -> None:
        """The end event, of that time and with the exit code, and the close are left to the end of
        the process. Where the code is 1, `failed` says why; None: nobody knows."""
        if self._writer is not None:
            data = b"" if failed is None else payload(End.KIND, failed)
            self._try(lambda writer: writer._close_at_exit(data, time_ns))
        self.writes = False

    def abandon(self) -> None:
        """Write nothing more: in a forked child, where the record is the parent's."""
        self._writer, self.writes = None, False

    def _try(self, what: Callable[[Any], None]) -> None:
        try:
            what(self._writer)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """A record that fails once is left alone: one of which parts are missing would mislead.

        A closed one is no fault: another thread, or a signal handler, has stopped the monitor."""
        self.writes = False
        if self._writer is None or not self._writer.closed:
            self.complain("record", f"nothing more is recorded: {error}")

    def warn(self, key: str, event: Event, *, aloud: bool = True) -> None:
        """Write the event and, `aloud`, its sentence to the logger; once for each key."""
        if key not in self._complaints:
            self._complaints.add(key)
            if aloud:
                logger.warning("%s", event.sentence())
            self.event(event.KIND, event)

    def complain(self, key: str, text: str) -> None:
        """Give notice, once for each key."""
        if key not in self._complaints:
            self._complaints.add(key)
            notice(text)

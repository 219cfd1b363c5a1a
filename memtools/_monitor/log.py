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
from memtools._base.ranks import rank_of_several
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
    errno.EEXIST: "it, or its .previous.mem, is not a record that may be replaced; name another "
    "place",
}


EVENTS, LONG_BYTES = 1024, 256 << 10  # A record keeps so many of the newest events, and bytes.
MOST_RECORDS = 99  # A folder may have so many records of one name.
MANY_KEPT = 10  # From so many records of killed runs on, a notice says how many there are.


def ranked(path: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return run.rank3.mem for run.mem on rank 3 of a job of several ranks: each rank writes a
    record of its own. A file name that contains the rank's number already is kept."""
    rank = rank_of_several(environment)
    if not rank:
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
    """Return the writer of a new record, of this process's command unless another is given.

    If another process writes a record of that name now, this one gets the next free name, such as
    run-2.mem. A record that was not closed is kept under another name, such as run.1.mem. One that
    was closed is kept as run.previous.mem, in place of the one before it. All of this is announced;
    the last goes to the log where the caller announces by warnings. The writer's path is absolute,
    because the program may change its directory.
    Raises OSError with the path, the reason, and what to do.
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
        if os.path.splitext(writer.kept)[0].endswith(".previous"):
            tell = logger.info if announce is notice else announce  # It happens at each start.
            tell(f"{name} of the run before is kept as {kept}")
        else:
            text = f"the run that wrote {name} was cut off; its record is kept as {kept}"
            announce(text + _many_kept(path))
    return writer


def _many_kept(path: str) -> str:
    """How many records of this name are kept and what they take, if they are many: only the user
    removes them."""
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
    """Open the record under the first of the names run.mem, run-2.mem and so on that is free."""
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
    """The record of a run's events and phases. It warns once of each kind of failure.

    A record keeps only the newest events, and nothing completes it if the process is killed. So the
    `pinned_events` are written again each time that half of its room has been written:

        start . . finding . . . . . . . . start finding . . . . . . . .
              └── overwritten by and by ─┘└── half of the room ─┘
    """

    __slots__ = ("_bytes", "_complaints", "_events", "_step", "_writer", "pinned_events", "writes")

    def __init__(self, writer: _core.RecordWriter | None, step: Callable[[], int]) -> None:
        self._writer, self._step = writer, step
        #: False if there is no record, so that callers need not prepare an event
        self.writes = writer is not None
        self._complaints: set[str] = set()
        #: returns the kinds and bodies of events that must survive in the record
        self.pinned_events: Callable[[], Iterable[tuple[str, object]]] = tuple
        self._events = self._bytes = 0  # written since the pinned events were

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
        """Write an event of the present step: a text, in which a zero byte is escaped, or an object
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
            self._write_pinned()

    def _write_pinned(self) -> None:
        """Write the pinned events again."""
        self._events = self._bytes = 0
        try:
            for kind, body in self.pinned_events():
                self.event(kind, body)
        except Exception as error:
            self.complain("pinned", f"the findings could not be recorded again: {error}")

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
        """Leave the end event, of that time and with the exit code, and the close to the end of the
        process. If the code is 1, `failed` says why; None: that is not known."""
        if self._writer is not None:
            data = b"" if failed is None else payload(End.KIND, failed)
            self._try(lambda writer: writer._close_at_exit(data, time_ns))
        self.writes = False

    def abandon(self) -> None:
        """Write nothing more, in a forked child: the record is the parent's."""
        self._writer, self.writes = None, False

    def _try(self, what: Callable[[Any], None]) -> None:
        try:
            what(self._writer)
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """Write nothing more after a failure: a record that lacks parts would mislead.

        A closed record is not a failure: another thread, or a signal handler, has stopped the
        monitor."""
        self.writes = False
        if self._writer is None or not self._writer.closed:
            self.complain("record", f"nothing more is recorded: {error}")

    def warn(self, key: str, event: Event, *, printed: bool = True) -> None:
        """Write the event and, if `printed`, its sentence to the logger; once for each key."""
        if key not in self._complaints:
            self._complaints.add(key)
            if printed:
                logger.warning("%s", event.sentence())
            self.event(event.KIND, event)

    def complain(self, key: str, text: str) -> None:
        """Give notice, once for each key."""
        if key not in self._complaints:
            self._complaints.add(key)
            notice(text)

"""JsonlWriter: a line of JSON every n steps, in files of a bounded size.

memory.jsonl     the newest, grows to max_bytes
memory.jsonl.1   what it was before: each rotation moves every file by one
memory.jsonl.2   ... and the one beyond `keep` is gone
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import logging
import math
import os
import stat
import threading
import time
import warnings
from typing import Self

from memtools._base.file import as_path
from memtools._base.mapping import file_of
from memtools._base.metrics import MetricsSource, check_source
from memtools._base.number import whole_number
from memtools._base.size import format_bytes, parse_bytes

_LEAST = 4096


_NOT_OURS: list[io.FileIO] = []  # files whose descriptor the program has closed and used again


_OPEN = functools.partial(os.open, mode=0o600)  # its owner's, as the record is


class _File(io.FileIO):
    meant: tuple[int, int] | None  # the file that was opened


def _opened(path: str) -> _File:
    """The file, which has its descriptor from the start: an interrupt leaves none behind. For
    reading too, or to open a pipe would wait for its reader."""
    file = _File(path, "a+", opener=_OPEN)
    file.meant = file_of(file.fileno())
    os.set_blocking(file.fileno(), False)  # nor does a line wait for one
    return file


class JsonlWriter:
    """Writes `{"time": ..., "step": ..., "memory/host_rss_bytes": ...}`, one object a line.

    Each line is written by one system call, so that a later kill loses none. Times are seconds
    since 1970; a value that is nan or infinite is written as null. Only the constructor raises
    errors of the file: if a line cannot be written later, for example because the disk is full, it
    counts in `lost`, the log gets one warning, and the next line is tried again. A forked child
    writes nothing. Give each rank a file of its own.

        with monitor, JsonlWriter("memory.jsonl", monitor, every=10) as lines:
            for batch in batches:
                train(batch)
                monitor.step()
                lines.step()

    Args:
        path: the file, which is continued if it is there.
        source: the monitor, or another object with `metrics()`.
        every: how many steps lie between two lines, at least 1, which is the default.
        max_bytes: the size at which a new file is begun, at least 4 KiB, as an int or like
            `"64 MiB"`, the default.
        keep: how many older files are kept beside it, at least 1; 3 by default.
        expert: write all figures; False, the default, writes the usual ones.

    Raises:
        OSError: the file cannot be opened.
        TypeError, ValueError: an argument is of another type, or out of its range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        source: MetricsSource,
        every: int = 1,
        *,
        max_bytes: int | str = "64 MiB",
        keep: int = 3,
        expert: bool = False,
    ) -> None:
        check_source(source, "JsonlWriter")
        every, keep = whole_number("every", every), whole_number("keep", keep)
        self._most = parse_bytes(max_bytes, "max_bytes")
        if self._most < _LEAST:
            asked = format_bytes(self._most)
            raise ValueError(f"max_bytes is at least 4 KiB, got {asked}")
        self._source, self._every, self._keep, self._expert = source, every, keep, expert
        self._path = os.path.abspath(as_path("path", path))  # the program may change its directory
        self._lock = threading.RLock()  # a signal's handler may come here while a line is written
        self._pid = os.getpid()
        self._steps = self._lines = self._lost = 0
        self._is_failing = False
        self._file = _opened(self._path)
        self._look()

    def _look(self) -> None:
        """What the open file is like, and whether its last line was cut off."""
        file = self._file.fileno()
        status = os.fstat(file)
        self._is_regular = stat.S_ISREG(status.st_mode)
        self._size = status.st_size if self._is_regular else 0
        self._is_torn = self._size > 0 and os.pread(file, 1, self._size - 1) != b"\n"

    @property
    def path(self) -> str:
        """The file of the newest lines."""
        return self._path

    @property
    def lines(self) -> int:
        """How many were written."""
        return self._lines

    @property
    def lost(self) -> int:
        """How many could not be written."""
        return self._lost

    def step(self, n: int = 1) -> None:
        """Count n steps, and write a line when `every` are over. Call it after `monitor.step()`.

        Raises TypeError if `n` is not an int, ValueError if it is below 0.
        """
        before = self._steps // self._every
        self._steps += whole_number("n", n, 0)
        if self._steps // self._every > before:
            self.write()

    def write(self) -> None:
        """Write a line now. Does nothing after `close()` and in a forked child."""
        if self._file.closed or os.getpid() != self._pid:
            return
        line = _line(time.time(), self._steps, self._source.metrics(self._expert))
        with self._lock:
            if self._file.closed:  # meanwhile
                return
            try:
                self._check_file()
                if self._is_regular and self._size and self._size + len(line) > self._most:
                    self._rotate()
                self._put(line)
            except OSError as error:
                self._lose(error)
            except ValueError:  # a closed file is asked for its descriptor
                if not self._file.closed:
                    raise
            else:
                self._lines, self._is_failing = self._lines + 1, False

    def _check_file(self) -> None:
        """The program may have closed the descriptor, and its number may be another file's now.
        Raises OSError, and from then on the writer has no file."""
        if file_of(self._file.fileno()) == self._file.meant:
            return
        lost, self._file = self._file, _File(os.devnull)
        self._file.close()
        _NOT_OURS.append(lost)  # which would close the program's file
        raise OSError(errno.EBADF, "the program has closed the descriptor; make a new JsonlWriter")

    def _put(self, line: bytes) -> None:
        data = b"\n" + line if self._is_torn else line
        try:
            done = os.write(self._file.fileno(), data)
            if done == len(data):
                self._size, self._is_torn = self._size + done, False
                return
        except BaseException:  # an interrupt: nobody knows whether it came before the line
            if self._is_regular and not self._file.closed:
                self._look()
            raise
        self._take_back(done)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _take_back(self, done: int) -> None:
        """A part of a line was written: cut it off, or let the next line begin anew."""
        self._is_torn = True
        with contextlib.suppress(OSError):
            file = self._file.fileno()
            if self._is_regular and os.fstat(file).st_size == self._size + done:
                os.ftruncate(file, self._size)
                self._look()

    def _rotate(self) -> None:
        """The new file is made first: where that fails, nothing has moved."""
        fresh = f"{self._path}.new"
        file = _opened(fresh)
        try:
            file.truncate(0)
            for i in range(self._keep, 0, -1):
                older = f"{self._path}.{i - 1}" if i > 1 else self._path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(older, f"{self._path}.{i}")
            os.replace(fresh, self._path)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise
        self._file, file = file, self._file
        if file.closed:  # by a signal's handler, meanwhile
            self._file.close()
        self._size, self._is_torn = 0, False
        file.close()
        self._look()

    def _lose(self, error: OSError) -> None:
        self._lost += 1
        if not self._is_failing:
            self._is_failing = True
            logging.getLogger("memtools").warning(
                "%s: a line of metrics is lost (%s); training goes on, later lines are tried",
                self._path,
                error.strerror or error,
            )

    def close(self) -> None:
        """Close the file. May be called again, from any thread and from a signal's handler."""
        with self._lock, contextlib.suppress(OSError):
            if not self._file.closed:
                self._check_file()
                self._file.close()

    def __del__(self) -> None:
        """As a file that is forgotten open."""
        file: io.FileIO | None = getattr(self, "_file", None)
        if file is None or file.closed:
            return
        if os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        lost = f", {self._lost:,} lost" if self._lost else ""
        return f"JsonlWriter({self._path!r}, {self._lines:,} lines{lost})"


def _line(now: float, step: int, metrics: dict[str, float]) -> bytes:
    values = {"time": round(now, 3), "step": step, **{k: _plain(v) for k, v in metrics.items()}}
    return json.dumps(values).encode() + b"\n"


def _plain(value: float) -> float | int | None:
    """JSON has neither NaN nor infinity; bytes are whole numbers."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else value

"""How this process is about to end, as far as the interpreter knows: by an uncaught exception.

sys.last_value is not used, because pytest, IPython and debuggers set it for exceptions that end
nothing, but for Ctrl-C that another package's hook has printed: nothing else shows that (see
interrupt()). The exit code is known last of all, to exit(): see RecordWriter._close_at_exit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from memtools import _core
from memtools._base import malloc
from memtools._base.limits import limits_of_process
from memtools._base.oom import MUCH_IDLE, Shortage, shortage
from memtools._base.redact import redacted
from memtools._record.kinds import End, Limit

ROOM = 192 - len("exit: ")  # An end event has so many bytes for an exception, in one line.


class Ending:
    """What is known of the end; `uncaught` is what ends the process if its exit code is 1."""

    def __init__(self) -> None:
        self.uncaught: End | None = None
        self.interrupted = False  # the uncaught one is a KeyboardInterrupt: Python ends by SIGINT
        #: bytes of freed memory that malloc kept when the host's memory ran out, if they are in the
        #: way; None if they are not, or that is not known
        self.idle_heap: int | None = None
        #: limits of the process that refused what the exception that ends it asked for
        self.acted: list[Limit] = []
        #: functions that are called first when an exception was not caught
        self.on_uncaught: list[Callable[[], None]] = []

    def note_exception(self, error: BaseException) -> None:
        for call in self.on_uncaught:
            call()
        self.uncaught = End(exception=type(error).__name__)
        self.interrupted = isinstance(error, KeyboardInterrupt)
        self.uncaught = end_by(error)
        self.note_limits(error)
        found = shortage(error)
        if found is not None and found.of_host:
            # Now, while the traceback keeps alive what the program had.
            idle, thresholds_are_set = malloc.idle()
            is_in_the_way = idle is not None and idle >= MUCH_IDLE and not thresholds_are_set
            self.idle_heap = idle if is_in_the_way else None

    def note_limits(self, error: BaseException) -> None:
        """Note which limits refused what was asked for, while the exception keeps that alive."""
        self.acted = []
        with contextlib.suppress(Exception):
            self.acted = limits_met(error, shortage(error))


def limits_met(error: BaseException, found: Shortage | None, root: str = "/") -> list[Limit]:
    """The limits of the process by which `error` was raised, with what was in use of each: of the
    limits of memory the one with the least room, if it had less than was asked for."""
    if found is not None:
        return _memory_limits_met(found, root) if found.of_host else []
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return _met("RLIMIT_FSIZE", 0)
    thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if thread or (isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN):
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        threads = _tasks_of_user(root)
        # A thread also wants room for its stack, and a control group may count processes.
        if threads is not None and most != resource.RLIM_INFINITY and threads >= most:
            return _met("RLIMIT_NPROC", threads)
    return []


def _met(name: str, used: int) -> list[Limit]:
    limit = resource.getrlimit(getattr(resource, name))[0]
    return [] if limit == resource.RLIM_INFINITY else [Limit(name, limit, used)]


def _memory_limits_met(found: Shortage, root: str) -> list[Limit]:
    limits = limits_of_process(root)
    least = min((limit - counted for counted, limit in limits.values()), default=0)
    return [
        Limit(name, limit, counted)
        for name, (counted, limit) in limits.items()
        if (limit - counted == least if found.asked is None else limit - counted < found.asked)
    ]


def _tasks_of_user(root: str) -> int | None:
    """Threads of all visible processes of this user, which RLIMIT_NPROC counts; None for root, whom
    it does not bind."""
    if os.geteuid() == 0:
        return None
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.join(root, "proc")):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                    count += len(os.listdir(os.path.join(entry.path, "task")))
    return count


ending = Ending()
_before: list[Any] = []  # the hook that was there before the newest watch()


def watch(*, whole_program: bool = False) -> None:
    """Note uncaught exceptions from now on. With `whole_program`, for a program that has not begun
    yet, also if it puts sys.__excepthook__ back."""
    if sys.excepthook is not _core.excepthook:
        _before[:] = [sys.excepthook]
        _core._watch_end(ending.note_exception, sys.excepthook)
        sys.excepthook = _core.excepthook
    if whole_program:
        sys.__excepthook__ = _core.excepthook  # type: ignore[assignment]


def unwatch() -> None:
    """Restore sys.excepthook, unless another hook was set since, or it is watched for a whole
    program."""
    if sys.excepthook is not _core.excepthook or sys.__excepthook__ is _core.excepthook:
        return
    sys.excepthook = _before[0]  # first: an interrupt after the call below would lose it
    _core._watch_end(None, None)


def interrupt() -> End | None:
    """Return the end by Ctrl-C if that ends the program, else None. Another package's hook may have
    printed it without calling ours: then the interpreter's last exception is used, but not at a
    prompt, where Ctrl-C ends nothing."""
    if hasattr(sys, "ps1"):
        return None
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    is_another_hook = sys.excepthook is not _core.excepthook
    if ending.uncaught is None and is_another_hook and isinstance(last, KeyboardInterrupt):
        ending.note_exception(last)
    return ending.uncaught if ending.interrupted else None


def keep_interrupt() -> None:
    """Have the interpreter end by SIGINT after Ctrl-C. It does so unless code was executed from a
    string since, as dataclasses do, which an import at the end may use."""
    if ending.interrupted:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def end_by(error: BaseException) -> End:
    """The end by an exception, with the first line of its text, or by sys.exit()."""
    if isinstance(error, SystemExit):
        return end_with(error.code)
    name = type(error).__name__
    return End(exception=name, text=first_line(text_of(error), ROOM - len(f"exception {name}: ")))


def text_of(error: BaseException) -> str:
    """The text of an exception. Of a DataLoader's it is that of its cause, which alone names the
    signal that ended a worker, or includes its last line, which has the worker's exception."""
    text = str(error).strip()
    if "DataLoader worker" not in text:
        return text
    if "exited unexpectedly" in text and "by signal" in str(error.__cause__):
        return str(error.__cause__)
    lines = text.splitlines()
    if len(lines) > 1 and text.startswith("Caught "):
        return f"{lines[0]} {lines[-1]}"
    return text


def end_with(code: object) -> End:
    """The end by sys.exit(code): a text, which Python prints, is code 1."""
    if code is None or isinstance(code, int):
        return End(code=(code or 0) & 0xFF)
    return End(code=1, text=first_line(code, ROOM - len("code 1: ")))


def first_line(message: object, room: int) -> str:
    """The first line of the text, secrets masked, in so many bytes, cut between two words."""
    lines = str(message).strip().splitlines()
    data = redacted(lines[0]).encode("utf-8", "replace") if lines else b""
    if len(data) <= room:
        return data.decode()
    cut = data[: room - len(" ...")].decode("utf-8", "ignore")
    return f"{cut.rpartition(' ')[0] or cut} ..."

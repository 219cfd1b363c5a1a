"""Forked children of a test, and what another thread or process is waited for."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def start_child(work: Callable[[], object], seconds: int = 120) -> int:
    """The process id of a forked child that does `work`, and ends by SIGALRM where it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return child


def in_child(work: Callable[[], object], seconds: int = 120) -> int:
    """What a forked child ends with: 0 when `work` returned, 1 when it raised, and the negative
    number of a signal, which is SIGALRM's where it hangs."""
    return os.waitstatus_to_exitcode(os.waitpid(start_child(work, seconds), 0)[1])


def wait_for(done: Callable[[], bool], seconds: float = 60) -> None:
    """For what another thread or process does: fails when it never does."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def seen_meanwhile(work: Callable[[], object], read: Callable[[], object]) -> set[object]:
    """What `read` has returned while a forked child did `work`."""
    child, status, seen = start_child(work), (0, 0), set[object]()
    while status[0] == 0:
        seen.update(read() for _ in range(100))
        status = os.waitpid(child, os.WNOHANG)
    assert status[1] == 0
    return seen

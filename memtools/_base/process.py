"""What memtools does when the process forks or ends, and how it starts threads in it. This is the
only file that registers such handlers.

A handler can never be taken back, so each call is registered once, however often it is asked for.
Handlers are functions of modules: a bound method would keep its object alive for ever.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

_registered: set[tuple[object, ...]] = set()


def at_fork(in_child: Callable[[], None], in_parent: Callable[[], None] | None = None) -> None:
    """Register functions that each later fork calls: `in_child` in the child, and `in_parent` in
    this process."""
    if (in_child, in_parent) in _registered:
        return
    _registered.add((in_child, in_parent))
    if in_parent is None:
        os.register_at_fork(after_in_child=in_child)
    else:
        os.register_at_fork(after_in_child=in_child, after_in_parent=in_parent)


def at_exit(function: Callable[..., object], *args: object) -> None:
    """Register a call of `function(*args)` at the interpreter's end. The last one registered is
    called first."""
    call = (function, *map(id, args))  # atexit keeps the arguments, so that the numbers stay theirs
    if call in _registered:
        return
    _registered.add(call)
    atexit.register(function, *args)


def before_children_end(function: Callable[[], object]) -> None:
    """Have multiprocessing call a function at the interpreter's end before it ends the children
    that it has started here. Does nothing as long as the program has not imported it."""
    util, call = sys.modules.get("multiprocessing.util"), (function, os.getpid())
    if util is None or call in _registered:
        return
    _registered.add(call)
    util.Finalize(None, function, exitpriority=100)  # before pools end, which have less


#: Signals that a thread gets for its own faults.
OWN_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """A `with` block in which the caller's thread gets no signal, and no thread that starts in it
    ever does. A signal that the program has blocked, to wait for it by sigwait(), would otherwise
    go to such a thread, and end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN_FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_thread(function: Callable[..., object], *args: object) -> None:
    """Start a thread of memtools' own, which gets no signal and is unknown to `threading`. It runs
    when this returns: a program that fills its memory next takes nothing that the start needs.
    Raises RuntimeError if the system gives no thread."""
    begun = _thread.allocate_lock()
    begun.acquire()

    def run() -> None:
        begun.release()
        function(*args)

    with signals_blocked():
        _thread.start_new_thread(run, ())
        begun.acquire()

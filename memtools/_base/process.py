"""What memtools does when the process forks or ends: the only file that registers handlers for it.

A handler can never be taken back, so each call is registered once, however often it is asked for.
Handlers are functions of modules: a bound method would keep its object alive for ever.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

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

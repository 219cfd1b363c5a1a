"""What a program lets a cleanup policy call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools.cleanup.actions import DEVICE, FIRST_CALLBACK, HOST, NAMES, WARM_UP
from memtools.cleanup.clocks import Every
from memtools.monitor.guards import accepted

if TYPE_CHECKING:
    from memtools import _core

MOST = WARM_UP - FIRST_CALLBACK


class CleanupCall(NamedTuple):
    """What a callback of `CleanupPolicy.add` is told."""

    #: what was counted last: "update", "epoch", or a phase's name; "cleanup" when asked for by hand
    clock: str
    #: how often that was counted
    ticks: int
    #: "cadence", "host pressure", "device pressure": what is due
    reasons: tuple[str, ...]


class CleanupHandle:
    """A callback that waits. `cancel()` ends that, at any time, also from within it."""

    __slots__ = ("_callbacks", "action", "call", "every", "name", "triggers")

    def __init__(
        self,
        callbacks: Callbacks,
        name: str,
        action: int,
        rule: tuple[Every, int],
        call: Callable[..., Any],
    ) -> None:
        self._callbacks = callbacks
        self.name, self.action, self.call = name, action, call
        self.every, self.triggers = rule

    @property
    def active(self) -> bool:
        """False after `cancel()`."""
        return self._callbacks.by_action.get(self.action) is self

    def cancel(self) -> None:
        """Twice is fine."""
        self._callbacks.cancel(self)

    def __repr__(self) -> str:
        return f"<cleanup callback {self.name!r}{'' if self.active else ', cancelled'}>"


class Callbacks:
    """Those of a policy. A number stays with its name: the figures of an action go by numbers."""

    __slots__ = ("_core", "_numbers", "by_action")

    def __init__(self, core: _core.Policy) -> None:
        self._core = core
        self._numbers: dict[str, int] = {}
        self.by_action: dict[int, CleanupHandle] = {}

    @property
    def names(self) -> dict[int, str]:
        """Of all that ever were, by action."""
        return {number: name for name, number in self._numbers.items()}

    def check(self, name: str, callback: Any, pressure: bool) -> Callable[..., Any]:
        """The callback, to be called with a CleanupCall. Raises TypeError and ValueError."""
        if type(name) is not str:
            raise TypeError(f"add(): a name is a str, got {type(name).__name__}")
        if not name.strip() or not name.isprintable() or len(name) > 40:
            raise ValueError(
                f"add(): a name has 1 to 40 characters that can be shown, got {name!r}"
            )
        if name in NAMES.values():
            raise ValueError(f"add(): {name!r} is one of memtools' own actions; take another name")
        number = self._numbers.get(name)
        if number in self.by_action:
            raise ValueError(f"add(): there is a callback {name!r} already; cancel() it first")
        if number is None and len(self._numbers) == MOST:
            raise ValueError(f"add(): a policy knows {MOST} names of callbacks at most")
        if not isinstance(pressure, bool):
            raise TypeError(f"add(): pressure is True or False, got {type(pressure).__name__}")
        return accepted(callback, "add()", "a CleanupCall")

    def add(
        self, name: str, call: Callable[..., Any], every: Every, pressure: bool
    ) -> CleanupHandle:
        number = self._numbers.setdefault(name, FIRST_CALLBACK + len(self._numbers))
        rule = every, (HOST | DEVICE if pressure else 0)
        handle = CleanupHandle(self, name, number, rule, call)
        self.by_action[number] = handle
        self._core.set_rule(number, *rule, False)
        return handle

    def cancel(self, handle: CleanupHandle) -> None:
        if self.by_action.get(handle.action) is handle:
            del self.by_action[handle.action]
            self._core.set_rule(handle.action, (0,) * len(handle.every), 0, False)

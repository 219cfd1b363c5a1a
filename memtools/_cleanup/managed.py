"""managed: a function each call of which is an update of a policy, and what is cleared after it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Union

from memtools import _core
from memtools._base import decorate
from memtools._base.environment import is_off
from memtools._cleanup import clearing
from memtools._cleanup.clearing import Clear, Names

if TYPE_CHECKING:
    from memtools._cleanup.policy import CleanupPolicy

_F = TypeVar("_F", bound=Callable[..., Any])
_UPDATE = 0  # The number of the clock that counts updates.
_POLICY = Union["CleanupPolicy", _core.Policy, None]


def managed(policy: _POLICY, *, clear: Clear = ()) -> Managing:
    """Count each outermost call of a function as one update of a policy, which cleans up where the
    call ends.

        class Agent:
            @memtools.managed(policy, clear=("model.gate_history", "model.aux_loss"))
            def update(self, buffer): ...

        with memtools.managed(policy, clear=[model.gate_history]):   # or for a block
            ...

    Serves functions, methods, classmethods and staticmethods; coroutines and generators too, which
    are one update from their first step to their end. Signature, name, documentation and pickling
    stay. A call inside another one of the same policy, on its thread, is a part of that update. A
    call that raised, or a generator that was closed early, does not count. A region compiled by
    torch.compile is one update, when it has run.

    What `clear` names is cleared after every call, one that raised and one inside another too, and
    before the policy acts. A name such as "model.gate_history" begins at the parameter of that
    name, if the function has it, else at an attribute of its first argument, mostly self; "0" is an
    item and "*" is all of them: "model.blocks.*.gate_history". For objects that are at hand, put
    the object itself, or (object, "name"), which is one target and not two; in a `with` block only
    objects can be named. An object is cleared by its clear(), or else its reset(); a tensor or a
    number is replaced by None.

    Args:
        policy: a CleanupPolicy; None if there is only something to clear.
        clear: names and objects to clear.

    Raises:
        TypeError: `policy` is not a CleanupPolicy, something cannot be cleared, or the decorator is
            put above something that is not a function.
        ValueError: a name is malformed, or the function has no parameter at which it could begin.

    With the environment key MEMTOOLS=0 a function is returned as it is, unless there is something
    to clear.

    A call raises, after it is done, AttributeError for a name that does not exist and TypeError
    for something that cannot be cleared; if the function itself raised, that exception propagates,
    with a note. So does what an action of the policy raises, such as MemoryPressure.

    Costs some 20 ns a call on a method, where nothing is due and nothing is to be cleared; 1 us for
    each name to clear, 0.3 us for `bound = agent.update; bound(buffer)` and for classmethods, 4 us
    for coroutines and generators, and 0.6 us for each step of them.
    """
    core = policy if isinstance(policy, _core.Policy) else getattr(policy, "_core", None)
    if policy is not None and not isinstance(core, _core.Policy):
        kind = f"{type(policy).__name__} {getattr(policy, '__name__', '')}".strip()
        raise TypeError(
            f"managed() takes a CleanupPolicy, or None to clear only, got {kind}; write "
            "@memtools.managed(policy)"
        )
    return Managing(core, clearing.parsed(clear))


class Managing:
    """What `managed` returns: a decorator, and a context manager that may be entered several times,
    also on several threads. As a `with` block in a coroutine it spans what other tasks of its
    thread do meanwhile; decorate the coroutine instead."""

    __slots__ = ("_entered", "_gate", "_policy", "_targets")

    def __init__(self, policy: _core.Policy | None, targets: list[clearing.Target]) -> None:
        self._policy, self._targets = policy, targets
        self._gate = _gate_of(policy)
        self._entered: list[tuple[int, int]] = []  # by which thread, and its native number

    def __call__(self, function: _F) -> _F:
        """`function`, managed; keeps its name, signature and documentation."""
        return decorate.decorated(function, "managed()", self._wrapped)

    def _wrapped(self, function: Callable[..., Any]) -> Any:
        if is_off and not self._targets:
            return function
        names = Names(function, self._targets) if self._targets else None
        gate, policy = self._gate, self._policy

        def scope(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
            return _Call(gate, policy, names, args, kwargs)

        stepping = decorate.stepping(function, scope)
        if stepping is not None:
            return decorate.named_after(stepping, function)
        core = _core.Managed(function, policy, names)
        decorate.named_after(core, function)
        twin = decorate.twin(core, gate, function, names)
        core._traced = decorate.named_after(twin, function)
        return core

    def __enter__(self) -> Managing:
        for target in self._targets:
            target.check_block()
        self._entered.append((threading.get_ident(), self._gate._begin()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        token = decorate.latest_of_thread(self._entered)
        self._gate._end(token)
        _finish(Names(None, self._targets), (), {}, error)
        if error is None and token and self._policy is not None:
            self._policy.tick(_UPDATE)


_gates: weakref.WeakValueDictionary[int, _core.Managed] = weakref.WeakValueDictionary()


def _gate_of(policy: _core.Policy | None) -> _core.Managed:
    """One for each policy, which it keeps alive, and so its number: a compiled region assigns to it
    once. Also what opens outermost calls where no function is called."""
    gate = _gates.get(id(policy))
    if gate is None:
        gate = _gates[id(policy)] = _core.Managed(_nothing, policy)
    return gate


def _nothing() -> None: ...


def _finish(
    names: Names | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: BaseException | None,
) -> None:
    """Clear all targets. An error is raised, or added as a note to an exception that passes."""
    if names is None:
        return
    try:
        names(args, kwargs)
    except Exception as failed:
        if error is None:
            raise
        error.add_note(f"while it passed, clearing failed: {type(failed).__name__}: {failed}")


class _Call:
    """A call of a coroutine or a generator, with the steps in which it runs."""

    __slots__ = ("_args", "_gate", "_kwargs", "_names", "_outermost", "_policy", "_token")

    def __init__(
        self,
        gate: _core.Managed,
        policy: _core.Policy | None,
        names: Names | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._gate, self._policy, self._names = gate, policy, names
        self._args, self._kwargs = args, kwargs
        self._outermost: bool | None = None  # until the first step
        self._token = 0

    def __enter__(self) -> _Call:
        return self

    def enter(self) -> None:
        self._token = self._gate._begin()
        if self._outermost is None:
            self._outermost = self._token != 0

    def leave(self) -> None:
        self._gate._end(self._token)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _finish(self._names, self._args, self._kwargs, error)
        if error is None and self._outermost and self._policy is not None:
            self._policy.tick(_UPDATE)

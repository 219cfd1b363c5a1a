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
    """Count each outermost call of a function as an update of a policy, which then cleans up.

        class Agent:
            @memtools.managed(policy, clear=("model.gate_history", "model.aux_loss"))
            def update(self, buffer): ...

        with memtools.managed(policy, clear=[model.gate_history]):   # or for a block
            ...

    Works on functions, methods, classmethods, staticmethods, coroutines and generators. A nested
    call of the same policy on the same thread is part of the outer update, and so is a region
    compiled by torch.compile. A call that raises does not count.

    `clear` is cleared after every call, also after an exception and in nested calls, before the
    policy acts, by clear() or reset(); a tensor or a number becomes None. A name such as
    "model.gate_history" starts at the parameter of that name, else at an attribute of the first
    argument; "0" is an item, "*" all items: "model.blocks.*.gate_history". A target may also be an
    object or (object, "name"); a `with` block takes only these.

    Args:
        policy: a CleanupPolicy; None to clear only, as with MEMTOOLS=0.
        clear: names and objects to clear.

    Raises TypeError if a target cannot be cleared, ValueError for a malformed name or one that
    matches no parameter. After it has run, a call raises AttributeError for a missing name and
    TypeError for a target that cannot be cleared; an exception of the function wins, with a note.

    Costs about 20 ns per call of a method, 1 us per name to clear, and 4 us per coroutine or
    generator with 0.6 us per step.
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
        error.add_note(
            f"while this exception propagated, clearing failed: {type(failed).__name__}: {failed}"
        )


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

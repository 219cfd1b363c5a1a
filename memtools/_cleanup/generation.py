"""generation: marks a part of the program that generates, for monitors and for a policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memtools import _core
from memtools._base import decorate, running
from memtools._base.notice import notice
from memtools._cleanup.sampled import graph_of_result

if TYPE_CHECKING:
    from memtools._cleanup.policy import CleanupPolicy
    from memtools._kv.pool import KVPool

_F = TypeVar("_F", bound=Callable[..., Any])
_PHASE = "generation"
_MONITORS = 0  # The key of all monitors; no object has this id().
LOOKS = 8  # Results with a small graph that are examined before the search ends.


def generation(pool: KVPool | None = None, policy: CleanupPolicy | None = None) -> Generating:
    """Mark generation as the phase "generation", at whose end a policy may act.

        @memtools.generation(pool=pool, policy=policy)
        def rollout(model, prompts): ...

        with memtools.generation(policy=policy):
            ...

    Running MemoryMonitors measure it as a phase. At its end the policy's clock "generation" ticks:
    `CleanupPolicy(empty_cache_every={"generation": 1})`.

    Works on functions, methods, coroutines and generators; nested generations on one thread are
    part of the outer one. Does nothing within a torch.compile region. Warns once if the result of a
    decorated function carries an autograd graph of 1 MiB or more.

    Args:
        pool: a KVPool whose idle pages the policy's pool_trim returns.
        policy: None marks the phase in monitors only.

    Costs about 10 us and the cost of the phase; 1 us per step of a coroutine or generator.
    """
    if pool is not None and not isinstance(pool, _core.KVPool):
        kind = getattr(pool, "__name__", type(pool).__name__)
        raise TypeError(
            f"generation() takes a KVPool as pool, got {kind}; write "
            "@memtools.generation(pool=..., policy=...), or @memtools.generation()"
        )
    if policy is not None and not (hasattr(policy, "phase") and hasattr(policy, "watch")):
        raise TypeError(f"generation() takes a CleanupPolicy, got {type(policy).__name__}")
    if pool is not None and policy is not None:
        policy.watch(pool)
    return Generating(policy)


class Generating:
    """What `generation` returns: a decorator, and a context manager that may be entered several
    times, also inside itself and on several threads."""

    __slots__ = ("_entered", "_looks", "_policy")

    def __init__(self, policy: CleanupPolicy | None) -> None:
        self._policy = policy
        self._looks = LOOKS
        self._entered: list[tuple[int, _Generation]] = []

    def __call__(self, function: _F) -> _F:
        """`function` as a generation; keeps its name, signature and documentation."""
        return decorate.decorated(function, "generation()", self._wrapped)

    def _wrapped(self, function: Callable[..., Any]) -> Any:
        policy = self._policy

        def scope(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Generation:
            return _Generation(policy)

        def called(*args: Any, **kwargs: Any) -> Any:
            if decorate.compiling():
                return function(*args, **kwargs)
            with _Generation(policy) as call:
                call.enter()
                try:
                    result = function(*args, **kwargs)
                finally:
                    call.leave()
            if self._looks:
                text = self._graph_of(result, function)
                if text:
                    notice(text)
            return result

        return decorate.named_after(decorate.stepping(function, scope) or called, function)

    def _graph_of(self, result: Any, function: Callable[..., Any]) -> str | None:
        """The warning about a result that carries a graph. It is given once, and small graphs are
        looked at a few times only."""
        text = graph_of_result(result, getattr(function, "__name__", "generation"))
        if text is not None:
            self._looks = 0 if text else self._looks - 1
        return text

    def __enter__(self) -> Generating:
        call = _Generation(self._policy)
        call.enter()
        self._entered.append((threading.get_ident(), call))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call = decorate.latest_of_thread(self._entered)
        call.leave()
        call.__exit__(kind, error, traceback)


class _Here(threading.local):
    """What generates on this thread now: the id() of each policy, and _MONITORS."""

    def __init__(self) -> None:
        self.open: set[int] = set()


_here = _Here()


class _Generation:
    """One call or block; begins at the first enter()."""

    __slots__ = ("_keys", "_mine", "_phases", "_policy", "_set")

    def __init__(self, policy: CleanupPolicy | None) -> None:
        self._policy = policy
        self._phases: ExitStack | None = None  # The phases that the outermost call has opened.
        self._keys = {_MONITORS} if policy is None else {_MONITORS, id(policy)}
        self._mine: set[int] = set()  # The keys that enter() has added, until leave().
        self._set = _here.open

    def __enter__(self) -> _Generation:
        return self

    def enter(self) -> None:
        self._set = _here.open
        self._mine = self._keys - self._set
        self._set |= self._mine
        if self._phases is None:
            try:
                self._begin()
            except BaseException:
                self.leave()
                raise

    def _begin(self) -> None:
        with ExitStack() as opened:
            # The first to begin is the last to end: monitors leave the cleanup out.
            if self._policy is not None and id(self._policy) in self._mine:
                opened.enter_context(self._policy.phase(_PHASE))
            if _MONITORS in self._mine:
                for phase in running.phases(_PHASE):
                    opened.enter_context(phase)
            self._phases = opened.pop_all()

    def leave(self) -> None:
        self._set -= self._mine

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._phases is None:
            return
        if kind is GeneratorExit:  # A caller may close a stream early.
            kind = error = traceback = None
        self._phases.__exit__(kind, error, traceback)

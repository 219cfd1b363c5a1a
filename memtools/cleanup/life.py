"""From start to stop of a cleanup policy: its time, Python's gc, and how its ranks agree."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from memtools._base import torch as bridge
from memtools.cleanup.actions import WARM_UP
from memtools.cleanup.clocks import UPDATE
from memtools.cleanup.engine import NEVER, Engine
from memtools.cleanup.figures import Figures
from memtools.cleanup.ranks import agree


class Life:
    """Of one policy; held by its native half, so that the policy itself may die."""

    __slots__ = (
        "__weakref__",
        "_agreement",
        "_depth",
        "_engine",
        "_figures",
        "_lock",
        "_manage_gc",
        "_ranks",
        "_warmup",
    )

    def __init__(
        self, engine: Engine, figures: Figures, manage_gc: bool, warmup: int, ranks: Any
    ) -> None:
        self._engine, self._figures = engine, figures
        self._manage_gc, self._warmup, self._ranks = manage_gc, warmup, ranks
        self._agreement: Any = None
        self._depth = 0
        self._lock = threading.RLock()  # a signal handler may stop it while it starts
        engine.agree = self.agree
        _lives.add(self)
        _install()

    @property
    def running(self) -> bool:
        return self._depth > 0

    def start(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            try:
                self._begin()
            except BaseException:
                self.close()
                raise

    def _begin(self) -> None:
        engine = self._engine
        self._agreement = None  # another process group may be there by now
        self.agree()
        self._figures.begin()
        if self._manage_gc:
            engine.gc.begin()
            engine.freeze_at = engine.core.ticks(UPDATE) + self._warmup
            if self._warmup:
                # The first multiple of the count that is wanted is that count.
                engine.core.set_rule(WARM_UP, (engine.freeze_at, *NEVER[1:]), 0, False)
            else:
                engine.freeze()

    def stop(self) -> None:
        with self._lock:
            if self._depth == 1:
                self.close()
            elif self._depth:
                self._depth -= 1

    def close(self) -> None:
        """However often it was started; gc is as it was found, whatever else fails."""
        with self._lock:
            if self._depth == 0:
                return
            try:
                self._engine.end()
                self._figures.end()
                self._engine.events.flush()
            finally:
                self._engine.gc.end()
                self._depth = 0

    def agree(self) -> Any:
        """How the ranks agree; None where this one decides alone."""
        if self._ranks is False:
            return None
        if self._ranks is None:
            self._warn_of_ranks()
            return None
        if self._agreement is None:
            self._agreement = agree(None if self._ranks is True else self._ranks)
        return self._agreement

    def _warn_of_ranks(self) -> None:
        dist = bridge.process_group()
        if dist is not None and dist.get_world_size() > 1:
            self._engine.complain(
                "ranks",
                f"each of {dist.get_world_size()} ranks decides alone when to clean up, and the "
                "others wait for it; pass ranks=True, or ranks=False if that is meant",
            )

    def after_fork(self) -> None:
        """In the child: threads that held a lock are not here."""
        self._lock = threading.RLock()
        self._engine.after_fork()


_lives: weakref.WeakSet[Life] = weakref.WeakSet()
_installed: list[bool] = []


def _install() -> None:
    """Once in a process and its forks."""
    if not _installed:
        _installed.append(True)
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for life in list(_lives):
        life.after_fork()

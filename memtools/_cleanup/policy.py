"""CleanupPolicy: gc, empty_cache and trim when they pay, and what they cost."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from memtools._base.environment import is_off
from memtools._base.handle import Handle
from memtools._cleanup.actions import EMPTY_CACHE, GC, NAMES, POOL_TRIM, TRIM
from memtools._cleanup.cadence import (
    EPOCH,
    MICRO_BATCH,
    UPDATE,
    VALIDATION,
    Cadence,
    Settings,
    Span,
)
from memtools._cleanup.engine import Cleaned, Engine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from memtools._cleanup.report import PolicyReport
    from memtools._kv.pool import KVPool


class CleanupPolicy:
    """Runs gc, empty_cache and malloc_trim on a schedule or under memory pressure, and backs off
    if they free nothing.

        policy = memtools.CleanupPolicy(gc_every=100)
        with policy:
            for epoch in range(epochs):
                with policy.epoch():
                    for batch in loader:
                        update(batch)
                        policy.step()
        print(policy.report())

    `with policy:` takes over Python's garbage collector: after two updates it freezes all objects
    with gc.freeze() and turns automatic collection off, until the end of the block.

    Actions run in `step()`, at epochs and at the ends of phases, never during a CUDA graph capture.
    An action that frees less than 1 % of the process's memory twice in a row waits twice as long,
    up to 64 times; actions that do not pay may take 0.3 % of the time. Exceptions are reported
    once, as a RuntimeWarning; only MemoryPressure and BaseExceptions propagate.

    A cadence is a number of updates, or a dict of counts: "update", "micro_batch", "validation"
    (its micro-batches), "epoch" (its begin and its end) and names of phases (their ends), such as
    `{"update": 500, "generation": 1}`. With MEMTOOLS=0 a policy only counts.

    Args:
        gc_every: the cadence of full garbage collections.
        empty_cache_every: the cadence of freeing torch's cached device blocks.
        trim_every: the cadence of returning malloc's idle pages.
        pool_trim_every: the cadence of returning idle pages of watched KVPools.
        at_epoch: also run gc, empty_cache and trim where an epoch begins and ends, with the devices
            synchronised.
        pressure: the share of the limit above which memory is short.
        strict: keep the cadences whatever they cost.
        limit: the memory that this process may use, or like "12 GiB"; lower limits of the container
            and the machine count too.
        ranks: True (all) or a process group: these ranks clean up at the same step. False: each
            rank decides alone, as with None, which warns if there are several.
    """

    __slots__ = ("__weakref__", "_core", "_engine")

    _root = "/"  # The folder under which proc and sys are read; tests set another one.

    def __init__(
        self,
        gc_every: Cadence = 100,
        empty_cache_every: Cadence = None,
        *,
        trim_every: Cadence = None,
        pool_trim_every: Cadence = None,
        at_epoch: bool = True,
        pressure: float = 0.85,
        strict: bool = False,
        limit: int | str | None = None,
        ranks: bool | ProcessGroup | None = None,
    ) -> None:
        settings = Settings(
            gc_every,
            empty_cache_every,
            trim_every,
            pool_trim_every,
            at_epoch,
            pressure,
            strict,
            limit,
        )
        if isinstance(ranks, (str, int)) and not isinstance(ranks, bool):
            raise TypeError(
                f"ranks must be a bool, a process group or None, got {type(ranks).__name__}"
            )
        self._engine = Engine(settings, ranks, self._root)
        self._core = self._engine.core
        weakref.finalize(
            self, self._engine.close
        )  # Decorated functions may keep the native half alive.

    # --- in the loop ---

    def step(self, n: int = 1) -> None:
        """Count `n` updates (0 to 2**48) and do what is due. Takes about 50 ns if nothing is."""
        self._core.tick(UPDATE, n)

    def micro_batch(self, validation: bool = False) -> None:
        """Count a micro-batch that has ended, of training or of `validation`."""
        self._core.tick(VALIDATION if validation else MICRO_BATCH)

    def epoch(self) -> Span:
        """Mark an epoch, as a context manager or a decorator.

        Counts at its begin, and at its end without an exception.
        """
        return Span(self._core, EPOCH, "epoch()", self._engine.complain)

    def phase(self, name: str) -> Span:
        """Name a part of the program, as a context manager or a decorator; it counts when it ends.

        Args:
            name: the name, for cadences. ValueError if it is empty, a built-in clock such as
                "update", or a thirteenth name.
        """
        clock = self._engine.clocks.phase(name)
        return Span(self._core, clock, f"phase({name!r})", self._engine.complain)

    # --- what else is cleaned up ---

    def add(
        self, name: str, callback: Any, every: Cadence = None, *, pressure: bool = False
    ) -> Handle:
        """Call `callback` on a schedule, or under memory pressure.

        It is measured and backs off like the built-in actions.

        Args:
            name: for the report and for cleanup(); 1 to 40 printable characters. At most 10 names,
                each once.
            callback: called with a CleanupCall, or without arguments.
            every: its cadence.
            pressure: whether to call it when memory is short, too.
        """
        return self._engine.add(name, callback, every, pressure)

    def watch(self, pool: KVPool) -> None:
        """Trim this `pool` as well, for as long as it lives."""
        self._engine.pools.add(pool)

    def cleanup(self, *actions: str) -> tuple[Cleaned, ...]:
        """Run actions now, by name; by default gc, pool_trim, empty_cache and trim, without those
        that have nothing to work on, such as empty_cache without CUDA.

        Returns what each action did. Raises ValueError for an unknown name, RuntimeError in a
        callback of this policy and during a CUDA graph capture.
        """
        engine = self._engine
        known = {name: a for a, name in NAMES.items() if a in engine.rules}
        known |= {added.name: a for a, added in engine.callbacks.items()}
        for name in actions:
            if name not in known:
                raise ValueError(
                    f"cleanup(): an action must be one of {', '.join(known)}; got {name!r}"
                )
        usual = [GC, EMPTY_CACHE, TRIM, POOL_TRIM]
        return engine.clean([known[name] for name in actions] if actions else usual)

    # --- life ---

    def start(self) -> None:
        """Start a run: reset time and back-off, and take over Python's gc, until `stop()`.

        Raises RuntimeError if `ranks` needs a process group and there is none.
        """
        self._engine.start()

    def stop(self) -> None:
        """Restore gc to its state before `start()`."""
        self._engine.stop()

    def __enter__(self) -> CleanupPolicy:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Between start and stop."""
        return self._engine.running

    def worker_init(self, worker_id: int) -> None:
        """Set up gc in a data-loading worker: `DataLoader(worker_init_fn=policy.worker_init)`.

        Freezes the objects that the worker starts with, so that collections do not copy pages
        shared with the parent. gc is on in the worker if it was before the policy took it over.
        Takes a millisecond. `worker_id` is not used.
        """
        if not is_off:
            gc.freeze()

    def __reduce__(self) -> tuple[Any, ...]:
        """A policy of the same settings: for workers. Callbacks, pools and ranks stay behind."""
        settings = self._engine.settings
        return _remade, ({key: getattr(settings, key) for key in Settings.__slots__},)

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        return f"CleanupPolicy({state}, {self._core.ticks(UPDATE):,} updates)"

    # --- what it did ---

    def report(self) -> PolicyReport:
        """Return what each action did, cost and freed, and whether it pays. Takes about 0.1 ms."""
        from memtools._cleanup.report import report_of

        return report_of(self._engine)


def _remade(settings: dict[str, Any]) -> CleanupPolicy:
    return CleanupPolicy(**settings, ranks=False)

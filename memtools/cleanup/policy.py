"""CleanupPolicy: gc, empty_cache and trim when they pay, and what they cost."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from memtools import _core
from memtools._base.size import parse_bytes
from memtools.cleanup.actions import (
    EMPTY_CACHE,
    GC,
    GC_YOUNG,
    LATER,
    NAMES,
    POOL_TRIM,
    TRIGGERS,
    TRIM,
)
from memtools.cleanup.clocks import EPOCH, MICRO_BATCH, UPDATE, VALIDATION, Cadence
from memtools.cleanup.engine import Cleaned, Engine
from memtools.cleanup.figures import Figures
from memtools.cleanup.gcstate import worker_setup
from memtools.cleanup.life import Life
from memtools.cleanup.settings import check, together
from memtools.cleanup.spans import Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from memtools.cleanup.callbacks import CleanupHandle
    from memtools.cleanup.report import PolicyReport
    from memtools.kv.pool import KVPool

YOUNG_EVERY: Final = 10  # updates between young collects while gc is managed
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class CleanupPolicy:
    """When to collect cycles, empty torch's cache and give memory back: at the cadence asked for,
    under pressure, and less and less where that frees nothing.

        policy = memtools.CleanupPolicy(gc_every=100)
        with policy:
            for epoch in range(epochs):
                with policy.epoch():
                    for batch in loader:
                        update(batch)
                        policy.step()
        print(policy.report())

    Within `with policy:` it runs Python's gc: after the first updates everything alive is put
    aside (gc.freeze), automatic collections are off, and collects of what is younger come at steps
    of its own choice. At the end all is as it was found. Used without the `with`, it leaves gc as
    it is and does the rest.

    Actions run in `step()`, at epochs and phases, on the thread that calls them: one at a time,
    never during a CUDA graph capture. An action that frees less than 1 % of what the process holds
    twice in a row rests twice as long, up to 64 times; what does not pay takes `max_cost` of the
    time at most. What actions and callbacks raise is said once, as a RuntimeWarning, and training
    goes on; only HostMemoryPressure and what is no Exception come out.

    A cadence is an int, in updates, or a dict of what to count: "update", "micro_batch",
    "validation" (its micro-batches), "epoch" (its begin and its end count one each), and names of
    phases, at their ends: `{"update": 500, "generation": 1}`. None: never by cadence.

    Args:
        gc_every: full collects.
        empty_cache_every: torch's cached device blocks go back to the driver.
        young_every: collects of the two young generations; None: every 10 updates while gc is
            managed, else never.
        trim_every: malloc's idle pages go back to the system.
        pool_trim_every: idle pages of the KVPools that the policy watches go back.
        at_epoch: gc, empty_cache and trim where an epoch begins and ends; its devices are
            synchronised there.
        pressure: part of the container's limit, or of a device, from which memory is short.
        manage_gc: whether `with policy:` runs Python's gc.
        warmup: updates before everything alive is put aside.
        max_cost: part of the time that what does not pay may take.
        strict: keep the cadences, whatever that costs and frees.
        limit: what this process may use, as an int or like "12 GiB"; the container's and the
            machine's limits count where they are lower.
        ranks: True (all ranks) or a process group: cleanups are agreed, so that all ranks do the
            same at the same step. False: each decides alone. None: the same, and a RuntimeWarning
            where there are several.
        pools: KVPools to trim, held weakly.
        name: for texts.

    Raises:
        TypeError, ValueError: an argument that makes no sense; it is named.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "_engine",
        "_figures",
        "_life",
        "_manage_gc",
        "_settings",
        "name",
    )

    _root = "/"  # under which proc and sys are read; tests have their own

    def __init__(
        self,
        gc_every: Cadence = 100,
        empty_cache_every: Cadence = None,
        *,
        young_every: Cadence = None,
        trim_every: Cadence = None,
        pool_trim_every: Cadence = None,
        at_epoch: bool = True,
        pressure: float = 0.85,
        manage_gc: bool = True,
        warmup: int = 2,
        max_cost: float = 0.003,
        strict: bool = False,
        limit: int | str | None = None,
        ranks: bool | ProcessGroup | None = None,
        pools: Iterable[KVPool] = (),
        name: str | None = None,
    ) -> None:
        pools = tuple(pools)
        self._settings = {
            key: value
            for key, value in locals().items()
            if key not in ("self", "pools", "ranks", "__class__")
        }
        check(self._settings, ranks)
        bound = None if limit is None else parse_bytes(limit, "limit")
        engine = self._engine = Engine(self._root, max_cost, strict)
        epoch = {"epoch": 1} if at_epoch else {}
        every = engine.clocks.every
        cadences = {
            GC: every(gc_every, "gc_every", **epoch),
            GC_YOUNG: every(young_every, "young_every"),
            EMPTY_CACHE: every(empty_cache_every, "empty_cache_every", **epoch),
            TRIM: every(trim_every, "trim_every", **epoch),
            POOL_TRIM: every(pool_trim_every, "pool_trim_every"),
        }
        if manage_gc and young_every is None:
            engine.young = every(YOUNG_EVERY, "young_every")
        self.name, self._manage_gc = name, manage_gc
        every_together = together([*cadences.values(), engine.young]) if ranks else 0
        rules = {action: (found, TRIGGERS[action]) for action, found in cadences.items()}
        self._core = _core.Policy(
            engine.act,
            [(found, triggers, action in LATER) for action, (found, triggers) in rules.items()],
            pressure=float(pressure),
            max_cost=float(max_cost),
            strict=strict,
            sync_every=every_together,
            limit=bound,
            devices=engine.devices,
            root=self._root,
        )
        engine.begin(self._core, rules)
        self._figures = Figures(engine)
        for pool in pools:
            engine.pools.add(pool, "pools=")
        self._life = Life(engine, self._figures, manage_gc, warmup, ranks)
        weakref.finalize(self, self._life.close)  # the native half may live on in functions

    # --- in the loop ---

    def step(self, n: int = 1) -> AbstractContextManager[None]:
        """The end of an update, or of n: what is due is done here, on this thread. Takes 100 ns
        where nothing is.

        `with policy.step():` works as well; the cleanup comes before the block.

        Raises ValueError and TypeError for n that is no count.
        """
        self._core.tick(UPDATE, n)
        return _NOTHING

    def micro_batch(self, validation: bool = False) -> None:
        """The end of a micro-batch, of training or of validation."""
        self._core.tick(VALIDATION if validation else MICRO_BATCH)

    def epoch(self) -> Span:
        """An epoch, as a context manager or a decorator: counts where it begins and where it ends,
        not where an exception ends it. The bare call counts nothing, and is said once."""
        return Span(self._engine, EPOCH, True, "epoch()")

    def phase(self, name: str) -> Span:
        """A part of the program, as a context manager or a decorator, that counts where it ends.
        Cadences name it: `gc_every={"generation": 1}`.

        Raises TypeError and ValueError for a name that is none, or more than 12 different ones.
        """
        return Span(self._engine, self._engine.clocks.phase(name), False, f"phase({name!r})")

    # --- what else is cleaned up ---

    def add(
        self, name: str, callback: Any, every: Cadence = None, *, pressure: bool = False
    ) -> CleanupHandle:
        """Call `callback` at a cadence, with `pressure` also when memory is short. It gets a
        CleanupCall, or nothing if it takes no argument. What it frees and costs is in the report,
        and it rests like every action that frees nothing.

        Returns a handle with `cancel()`. Raises TypeError and ValueError.
        """
        engine = self._engine
        call = engine.callbacks.check(name, callback, pressure)
        return engine.callbacks.add(name, call, engine.clocks.every(every, "every"), pressure)

    def watch(self, pool: KVPool) -> None:
        """Trim this pool as well, for as long as it lives; it is held weakly. Twice is fine.

        Raises TypeError for what is no KVPool, ValueError for a closed one.
        """
        self._engine.pools.add(pool)

    def cleanup(self, *actions: str) -> tuple[Cleaned, ...]:
        """Do these now, by name; without names gc, pool_trim, empty_cache and trim. What has
        nothing to work on, such as empty_cache without CUDA, is left out.

        Returns what each did. Raises ValueError for a name that is none, RuntimeError in a
        callback of this policy and during a CUDA graph capture.
        """
        known = {NAMES[action]: action for action in TRIGGERS}
        known |= {handle.name: a for a, handle in self._engine.callbacks.by_action.items()}
        for name in actions:
            if name not in known:
                raise ValueError(f"cleanup(): an action is one of {', '.join(known)}; got {name!r}")
        usual = [GC, EMPTY_CACHE, TRIM, POOL_TRIM]
        return self._engine.clean([known[name] for name in actions] if actions else usual)

    # --- life ---

    def start(self) -> None:
        """Begin: time and back-off anew, and Python's gc is managed. Each start() wants a stop().

        Raises what `ranks` does: RuntimeError where there is no process group.
        """
        self._life.start()

    def stop(self) -> None:
        """End: gc is as it was found. Without a start() nothing happens."""
        self._life.stop()

    def __enter__(self) -> CleanupPolicy:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Between start and stop."""
        return self._life.running

    def worker_init(self, worker_id: int) -> None:
        """For `DataLoader(worker_init_fn=policy.worker_init)`: in the worker gc is on if it was
        before the policy managed it, and what the worker was born with is put aside, so that its
        collects copy no pages of the parent. Takes a millisecond."""
        if self._manage_gc:
            worker_setup()

    def __reduce__(self) -> tuple[Any, ...]:
        """A policy of the same settings: for workers. Callbacks, pools and ranks stay behind."""
        return _remade, (self._settings,)

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name}, "
        state = "running" if self.running else "not running"
        return f"CleanupPolicy({name}{state}, {self._core.ticks(UPDATE):,} updates)"

    # --- what it did ---

    def report(self) -> PolicyReport:
        """What each action did, cost and freed, and whether it pays. Takes some 0.1 ms."""
        return self._figures.report(self.name)

    def reset_report(self) -> None:
        """Report from here on. What was learnt, such as back-off, stays."""
        self._figures.reset()


def _remade(settings: Mapping[str, Any]) -> CleanupPolicy:
    return CleanupPolicy(**settings, ranks=False)

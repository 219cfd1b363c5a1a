"""What a cleanup policy does when something is due, from its start to its stop.

_core.Policy ──► Engine.act(mask, clock): ranks agree? no graph is captured? no other thread acts?
                    │ yes
                    ▼
             each action, measured ──► _core.Policy.done ──► back-off, budget
                                   ├─► Events ──► running monitors
                                   └─► counts() ──► report
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from memtools import _core
from memtools._base import process, running
from memtools._base.decorate import as_callback
from memtools._base.devices import seen_devices
from memtools._base.environment import is_off
from memtools._base.handle import Handle
from memtools._base.size import parse_bytes
from memtools._base.torch import process_group
from memtools._census.cycles import Inspector
from memtools._cleanup.actions import (
    CADENCE,
    DEVICE,
    EMPTY_CACHE,
    FIRST_CALLBACK,
    GC,
    GC_YOUNG,
    HOST,
    LATER,
    NAMES,
    ORDER,
    PAYS,
    POOL_TRIM,
    REASONS,
    TRIGGERS,
    TRIM,
    UNKNOWN,
    WARM_UP,
    Outcome,
    Pools,
    Readings,
    capturing,
    devices_in_use,
    measured,
    synchronize,
    work_of,
)
from memtools._cleanup.cadence import (
    EPOCH,
    MOST_CLOCKS,
    NEVER,
    UPDATE,
    Cadence,
    Clocks,
    Every,
    Settings,
    together,
)
from memtools._cleanup.collector import ManagedGc
from memtools.errors import MemoryPressure

WARM_UP_UPDATES = 2  # Updates before gc is frozen.
YOUNG_EVERY: Final = 10  # Updates between young collections while gc is managed.
MAX_COST = 0.003  # The share of the time that actions that do not pay may take.
WARN_SECONDS, WARN_UPDATES = 5.0, 100  # No warning about costs comes before these.
MUCH = 0.01  # A schedule that takes more than this share of the time is reported.
MOST_EXAMPLES: Final = 8
MOST_CALLBACKS: Final = WARM_UP - FIRST_CALLBACK
CHEAP = 0.001  # The share of the time that young collections may take without paying.
SOME: Final = (
    0.001  # An action that frees this share of the memory is kept, though it does not pay.
)

YOUNG: Final[Every] = (YOUNG_EVERY, *NEVER[1:])

#: How ranks agree: (actions asked for, whether this rank can act, its step) -> actions to do now.
Agree = Callable[[int, bool, int], int]


class Cleaned(NamedTuple):
    """The result of one action of `CleanupPolicy.cleanup`."""

    #: the action
    name: str
    #: milliseconds
    ms: float
    #: on the host
    host_freed_bytes: int
    #: on all devices
    device_freed_bytes: int
    #: its exception as text
    error: str


class CleanupCall(NamedTuple):
    """The argument of a callback of `CleanupPolicy.add`."""

    #: "update", "epoch", a phase's name, or "cleanup" for cleanup()
    clock: str
    #: ticks of that clock
    ticks: int
    #: of "cadence", "host pressure" and "device pressure"
    reasons: tuple[str, ...]


class Callback(NamedTuple):
    """A callback of a policy: its name in the report, and the function."""

    name: str
    call: Callable[[CleanupCall], object]


class Done(NamedTuple):
    """The sums of an action: runs, nanoseconds, bytes freed, and how often the core counted that it
    paid or was skipped."""

    times: int = 0
    ns: int = 0
    host: int = 0
    device: int = 0
    paid: int = 0
    skipped: int = 0


class CycleCounts(NamedTuple):
    """Objects and tensors in cycles that were collected, and how many collections looked."""

    objects: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    inspected: int = 0


# --- events ---------------------------------------------------------------------------------------

FIRST_NS: Final = 1_000_000_000
PART: Final = 20  # Events of one kind are this part of the time since the first one apart.


@dataclass(slots=True)
class _Sum:
    """The sums of one kind of action since its last event; the next comes at `due` or later."""

    due: int
    count: int = 0
    ns: int = 0
    host: int = 0
    device: int = 0
    note: str = ""
    why: str = ""


class Events:
    """Writes the actions of a policy as events to every running MemoryMonitor.

    A record keeps its last 1,024 events, and a policy may act ten times a second for days. So each
    kind of action gets an event at most once a second, later every 5 % of the time so far: what it
    did in between is added up in the next one. A week of a busy action is some 250 events.
    """

    __slots__ = ("_begin", "_sums")

    def __init__(self) -> None:
        self._begin = 0
        self._sums: dict[str, _Sum] = {}

    def add(self, name: str, outcome: Outcome, why: str) -> None:
        """Add an action that has just run."""
        now = time.monotonic_ns()
        self._begin = self._begin or now
        if name not in self._sums:
            self._sums[name] = _Sum(0)
        sum_ = self._sums[name]
        sum_.count += 1
        sum_.ns += outcome.ns
        sum_.host += outcome.host.freed
        sum_.device += outcome.device.freed
        sum_.note, sum_.why = outcome.note, why
        if now >= sum_.due:
            self._sums[name] = _Sum(now + max(FIRST_NS, (now - self._begin) // PART))
            if running.monitors:
                _write(name, sum_, now - outcome.ns)

    def flush(self) -> None:
        """Write what was added up since the last events."""
        now = time.monotonic_ns()
        for name, sum_ in list(self._sums.items()):
            if sum_.count:
                self._sums[name] = _Sum(sum_.due)
                _write(name, sum_, now)

    def forget(self) -> None:
        """Drop the sums in a forked child: they belong to the parent's record."""
        self._begin = 0
        self._sums.clear()


def _write(name: str, sum_: _Sum, begin_ns: int) -> None:
    notes = [sum_.note] * bool(sum_.note and sum_.count == 1) + [sum_.why] * bool(sum_.why)
    notes += [f"{sum_.count:,} times"] * (sum_.count > 1)
    fields = {
        "actions": (name,),
        "ms": (sum_.ns / 1e6,),
        "notes": tuple(notes),
        "host_freed_bytes": sum_.host,
        "device_freed_bytes": sum_.device,
    }
    running.event("cleanup", fields, time_ns=begin_ns, duration_ns=sum_.ns)


# --- the engine -----------------------------------------------------------------------------------


class Engine:
    """The acting half of a policy. The native half keeps it alive, so that the CleanupPolicy itself
    can be collected."""

    def __init__(self, settings: Settings, ranks: Any, root: str) -> None:
        self.settings = settings
        self.clocks = Clocks()
        self.gc = ManagedGc()
        self.pools = Pools()
        self.events = Events()
        self._readings = Readings(root)
        self._ranks = ranks
        self._agree: Agree | None = None
        #: devices that the core watches
        self._devices = len(seen_devices(root))
        #: by action: when it is due, and what triggers it
        self.rules: dict[int, tuple[Every, int]] = {}
        #: of memory, what the newest young collection has freed that was measured
        self._young_gain = 1.0
        self.callbacks: dict[int, Callback] = {}
        #: by action. A callback's name keeps its number, so that figures survive remove() and add()
        self.names: dict[int, str] = dict(NAMES)
        self._make_core(root)

        #: between start and stop
        self._depth = 0
        self._life = threading.RLock()  # a signal handler may stop it while it starts
        #: updates after which gc is frozen, as the core counts; None: it is, or is not to be
        self._freeze_at: int | None = None
        self._manages_gc = False
        self._postponed = False  # a collection was left to the one after warm-up
        self._past = 0.0  # Seconds of earlier runs, before the core's clock was restarted.
        self._stopped: float | None = None  # its reading at the stop

        self._done: dict[int, Done] = {}
        self._base: dict[int, Done] = {}  # where the costs began that are held against the time
        self._first_update = 0
        self.own_ns = 0
        self.errors: dict[int, str] = {}
        self._cycles = CycleCounts()
        #: One for each kind: young collections that find nothing say nothing about full ones.
        self._inspectors = {GC: Inspector(), GC_YOUNG: Inspector()}
        self._examples: Counter[str] = Counter()
        self._complaints: set[str] = set()
        self._lock = threading.Lock()
        self._thread = 0  # that holds the lock
        _engines.add(self)
        process.at_fork(_forked)

    def _make_core(self, root: str) -> None:
        with_, every = self.settings, self.clocks.every
        limit = 0 if with_.limit is None else parse_bytes(with_.limit, "limit")
        epoch = {"epoch": 1} if with_.at_epoch else {}
        cadences = {
            GC: every(with_.gc_every, "gc_every", **epoch),
            GC_YOUNG: NEVER,
            EMPTY_CACHE: every(with_.empty_cache_every, "empty_cache_every", **epoch),
            TRIM: every(with_.trim_every, "trim_every", **epoch),
            POOL_TRIM: every(with_.pool_trim_every, "pool_trim_every"),
        }
        self.core = _core.Policy(
            self.act,
            float(with_.pressure),
            MAX_COST,
            with_.strict,
            together(cadences.values()) if self._ranks else 0,
            limit,
            self._devices,
            root,
        )
        for action, found in cadences.items():
            self.set_rule(action, found, TRIGGERS[action])

    # --- rules ---

    def set_rule(self, action: int, every: Every, triggers: int) -> None:
        """Set when an action is due from now on; never if MEMTOOLS=0 has turned memtools off."""
        self.rules[action] = every, triggers
        if not is_off:
            self.core.set_rule(action, every, triggers, action in LATER)

    def add(self, name: str, callback: Any, every: Cadence, pressure: bool) -> Handle:
        """A callback; see CleanupPolicy.add."""
        if type(name) is not str:
            raise TypeError(f"add(): a name must be a str, got {type(name).__name__}")
        if not name.strip() or not name.isprintable() or len(name) > 40:
            raise ValueError(
                f"add(): a name must have 1 to 40 characters that can be shown, got {name!r}"
            )
        if name in NAMES.values():
            raise ValueError(
                f"add(): {name!r} is one of memtools' own actions; choose another name"
            )
        numbers = {known: number for number, known in self.names.items()}
        action = numbers.get(name, FIRST_CALLBACK + len(numbers) - len(NAMES))
        if action in self.callbacks:
            raise ValueError(f"add(): a callback {name!r} exists already; remove it first")
        if action == FIRST_CALLBACK + MOST_CALLBACKS:
            raise ValueError(f"add(): a policy knows {MOST_CALLBACKS} names of callbacks at most")
        if not isinstance(pressure, bool):
            raise TypeError(f"add(): pressure must be True or False, got {type(pressure).__name__}")
        added = Callback(name, as_callback(callback, "add()", "a CleanupCall"))
        cadence = self.clocks.every(every, "every")
        self.names[action] = name
        self.callbacks[action] = added
        self.set_rule(action, cadence, HOST | DEVICE if pressure else 0)
        return Handle(lambda: self._remove(action, added), f"<cleanup callback {name!r}>")

    def _remove(self, action: int, added: Callback) -> None:
        if self.callbacks.get(action) is added:
            self.callbacks.pop(action, None)
            self.set_rule(action, NEVER, 0)

    def when(self, action: int) -> tuple[Every, int, bool]:
        """Return an action's cadence and triggers, and whether only while gc is managed."""
        if action == GC_YOUNG:
            return YOUNG, 0, True
        return *self.rules.get(action, (NEVER, 0)), False

    def why_not(self, action: int) -> str:
        """Return why a built-in action has nothing to do; "" if it has."""
        if action == EMPTY_CACHE and not devices_in_use():
            return "no CUDA in this process"
        if action == POOL_TRIM and not self.pools.alive():
            return "no pool is watched"
        return ""

    # --- start and stop ---

    @property
    def running(self) -> bool:
        return self._depth > 0

    def start(self) -> None:
        with self._life:
            self._depth += 1
            if self._depth > 1:
                return
            try:
                self._begin()
            except BaseException:
                self.close()
                raise

    def _begin(self) -> None:
        self._agree = None  # another process group may be there by now
        self._agreement()
        if self._ranks is None:
            self._warn_of_ranks(process_group())
        # What was before the first update of all is not the policy's time.
        used = any(self.core.ticks(clock) for clock in range(MOST_CLOCKS))
        self._past = self.seconds() if used else 0.0
        self._stopped = None
        self.core.forget()
        self._base = dict(self._done)
        self._first_update = self.core.ticks(UPDATE)
        if not is_off:
            self.gc.begin()
            self._manages_gc = True
            self._freeze_at = self._first_update + WARM_UP_UPDATES
            # The first multiple of the count that is wanted is that count.
            self.core.set_rule(WARM_UP, (self._freeze_at,), 0, False)

    def stop(self) -> None:
        with self._life:
            if self._depth == 1:
                self.close()
            elif self._depth:
                self._depth -= 1

    def close(self) -> None:
        """End all runs and restore gc, whatever else fails."""
        with self._life:
            if self._depth == 0:
                return
            try:
                self._freeze_at, self._postponed = None, False
                self._decline(WARM_UP)
                self.set_rule(GC_YOUNG, NEVER, 0)
                self._stopped = self.core.seconds
                self.events.flush()
            finally:
                self._manages_gc = False
                self.gc.end()
                self._depth = 0

    def _agreement(self) -> Agree | None:
        """Return how the ranks agree; None if this rank decides alone."""
        if self._ranks and self._agree is None:
            from memtools._cleanup.ranks import Agreement

            self._agree = Agreement(None if self._ranks is True else self._ranks)
        return self._agree

    def _warn_of_ranks(self, dist: Any) -> None:
        """`dist` is torch.distributed, None without a process group."""
        if dist is not None and dist.get_world_size() > 1:
            self.complain(
                "ranks",
                f"each of {dist.get_world_size()} ranks decides alone when to clean up, and the "
                "others wait for it; pass ranks=True, or ranks=False if this is intended",
            )

    def after_fork(self) -> None:
        """Replace locks in a forked child, since the threads that held them are gone."""
        self._life, self._lock, self._thread = threading.RLock(), threading.Lock(), 0
        self._manages_gc = False
        self.events.forget()

    # --- what the core calls ---

    def act(self, mask: int, clock: int) -> None:
        """Do what is due. What is not done here stays asked for."""
        begin = time.perf_counter_ns()
        agree = self._agreement() if self._ranks else None
        if self._ranks is None and (dist := process_group()) is not None:
            self._warn_of_ranks(dist)
        can = self._thread != threading.get_ident() and not capturing()
        if agree is not None:
            mask = agree(mask, can, self.core.ticks(UPDATE))
        elif not can:
            return
        if not mask or not self._lock.acquire(blocking=agree is not None):
            return
        spent = 0
        try:
            self._thread = threading.get_ident()
            if clock == EPOCH and mask >> EMPTY_CACHE & 1:
                self._synchronize()
            for action in ORDER:
                if mask >> action & 1:
                    spent += self._do_due(action, clock)
        finally:
            self._thread = 0
            self._lock.release()
            self.own_ns += time.perf_counter_ns() - begin - spent
        self._complain_of_cost()

    def _do_due(self, action: int, clock: int) -> int:
        """Do one action that is due. Returns the nanoseconds that its work took."""
        why = self.core.why(action)
        double = action == GC and why == CADENCE and self._freeze_at is not None
        if double and not self._postponed and not self.settings.strict:
            # Warm-up ends by a full collection: the first epoch's, two updates before, is left to
            # it.
            self._postponed, work = True, None
        else:
            work = self._work(action, clock, REASONS[why])
        if work is None:
            self._decline(action)
            return 0
        return self._do(action, work, ", ".join(REASONS[why])).ns

    def _synchronize(self) -> None:
        """Wait for the devices outside of the actions: it is not a cost of a cleanup."""
        try:
            synchronize()
        except (
            Exception
        ) as error:  # An error of earlier work on the device, which the program will get as well.
            self._failed(EMPTY_CACHE, error)

    def _decline(self, action: int) -> None:
        """Drop the request for an action that cannot run now; it is due again at its next time."""
        self.core.set_rule(action, NEVER, 0, False)
        if action in self.rules:
            self.set_rule(action, *self.rules[action])

    # --- actions ---

    def _work(
        self, action: int, clock: int | None, reasons: tuple[str, ...]
    ) -> Callable[[], Any] | None:
        """What an action is to do; None where there is nothing to be done. `clock` is what ticked,
        None for a cleanup by hand."""
        if action == WARM_UP:
            return self.gc.freeze if self._freeze_at is not None else None
        if action in self._inspectors:
            # To look into what is collected takes a full collection, which is cheap once gc is
            # frozen.
            looks = action == GC or (self._manages_gc and self._freeze_at is None)
            return work_of(action, self.pools, looks and self._inspectors[action].due())
        if action in TRIGGERS:
            return None if self.why_not(action) else work_of(action, self.pools, False)
        added = self.callbacks.get(action)  # another thread may remove it now
        if added is None:
            return None
        name = "cleanup" if clock is None else self.clocks.names[clock]
        call = CleanupCall(name, 0 if clock is None else self.core.ticks(clock), reasons)
        return lambda: added.call(call)

    def _do(self, action: int, work: Callable[[], Any], why: str) -> Outcome:
        before = self._done.get(action, Done())
        outcome = measured(action, work, self._readings, before.ns // max(1, before.times))
        host, device = outcome.host, outcome.device
        self._done[action] = before._replace(
            times=before.times + 1,
            ns=before.ns + outcome.ns,
            host=before.host + host.freed,
            device=before.device + device.freed,
        )
        if action == WARM_UP:
            # Freezing happens once, so its cost is not charged to the budget of the other actions.
            self._freeze_at = None
            self._decline(WARM_UP)
            if self.gc.managed:
                self.set_rule(GC_YOUNG, YOUNG, 0)
        elif action == GC_YOUNG and self._is_insurance(outcome):
            self._decline(action)
        else:
            on_host, on_device = (
                host if host.total else UNKNOWN,
                device if device.total else UNKNOWN,
            )
            self.core.done(action, outcome.ns, *on_host, *on_device)
        if (found := outcome.collected) is not None:
            self._inspectors[action].saw(found, outcome.gain, device.freed)
            objects, tensors, size, inspected = self._cycles
            self._cycles = CycleCounts(
                objects + found.objects,
                tensors + (found.tensors or 0),
                size + (found.tensor_bytes or 0),
                inspected + (found.tensors is not None),
            )
            for example in found.examples:
                if len(self._examples) < MOST_EXAMPLES or example in self._examples:
                    self._examples[example] += 1
        self.events.add("malloc_trim" if action == TRIM else self.names[action], outcome, why)
        if outcome.error is not None:
            self._failed(action, outcome.error)
        return outcome

    def _is_insurance(self, outcome: Outcome) -> bool:
        """While automatic gc is off, young collections are what keeps cycles from piling up. As
        long as they are cheap, or free some, they need not pay, and so are neither backed off nor
        held back. One that found something while malloc's bytes were not read is taken to free
        what the last one freed that was measured: how busy the machine is decides neither."""
        if not self._manages_gc or outcome.gain >= PAYS:
            return False
        found = outcome.collected is not None and outcome.collected.objects > 0
        if outcome.knows_heap or not found:
            self._young_gain = outcome.gain
        elif self._young_gain >= SOME:
            return True
        cheap = self._cost_ns(GC_YOUNG) <= CHEAP * 1e9 * self.core.seconds
        return cheap or outcome.gain >= SOME

    def _cost_ns(self, action: int) -> int:
        """Nanoseconds that an action has taken since the start."""
        return self._done.get(action, Done()).ns - self._base.get(action, Done()).ns

    def _failed(self, action: int, error: BaseException) -> None:
        if isinstance(error, MemoryPressure):
            raise error
        name = self.names[action]
        self.errors[action] = f"{type(error).__name__}: {error}"
        self.complain(
            f"action {name}",
            f"cleanup {name} failed with {self.errors[action]}; training continues, and this is "
            "reported once",
        )

    # --- by hand ---

    def clean(self, actions: list[int]) -> tuple[Cleaned, ...]:
        """Run these actions now, one at a time with those that are due on other threads."""
        if is_off:
            return ()
        if self._thread == threading.get_ident():
            raise RuntimeError("cleanup() cannot be called from one of this policy's own callbacks")
        if capturing():
            raise RuntimeError("cleanup() during a CUDA graph capture would spoil the graph")
        cleaned = []
        with self._locked():
            for action in [action for action in ORDER if action in actions]:
                work = self._work(action, None, ())
                if work is None:
                    continue
                done = self._do(action, work, "by hand")
                error = "" if done.error is None else self.errors[action]
                cleaned.append(
                    Cleaned(
                        self.names[action],
                        done.ns / 1e6,
                        done.host.freed,
                        done.device.freed,
                        error,
                    )
                )
        return tuple(cleaned)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    # --- what it reports ---

    def complain(self, key: str, text: str) -> None:
        """A RuntimeWarning at the program's line, once for each key."""
        if key not in self._complaints:
            from memtools._base.notice import notice

            self._complaints.add(key)
            notice(text)

    def _complain_of_cost(self) -> None:
        seconds, updates = self.core.seconds, self.core.ticks(UPDATE) - self._first_update
        if seconds < WARN_SECONDS or updates < WARN_UPDATES:
            return
        costs = {action: self._cost_ns(action) for action in ORDER if action != WARM_UP}
        share = sum(costs.values()) / 1e9 / seconds
        if share > MUCH:
            most = max(costs, key=lambda action: costs[action])
            self.complain(
                "cost",
                f"cleanups have taken {100 * share:.1f} % of the time so far, most of it for "
                f"{self.names[most]}: print(policy.report()) says what pays; use a longer "
                f"cadence{(' or strict=False' if self.settings.strict else '')}",
            )

    def seconds(self) -> float:
        """Seconds of all runs so far."""
        now = self.core.seconds
        return self._past + (now if self._stopped is None else self._stopped)

    def counts(self) -> dict[int, Done]:
        """The sums of each action so far."""
        done = {}
        for action, ran in self._done.items():
            paid, skipped, _ = self.core.figures(action)
            done[action] = ran._replace(paid=paid, skipped=skipped)
        return done

    def cycles(self) -> tuple[CycleCounts, tuple[str, ...]]:
        """The objects that collections found, and examples of them, the most frequent first."""
        return self._cycles, tuple(text for text, _ in self._examples.most_common())

    @property
    def frozen_objects(self) -> int | None:
        """Objects that were put aside while gc is managed; None while it is not."""
        return self.gc.frozen if self.gc.managed and self._freeze_at is None else None

    def notes(self) -> tuple[str, ...]:
        """The limits of this policy, a sentence each."""
        rules = tuple(self.rules.values())  # another thread may add one meanwhile
        wanted = {name for every, _ in rules for name in self.clocks.phases_of(every)}
        found = [
            f"no phase {name!r} has ended yet, and something is due by it: is it in "
            f"policy.phase({name!r})?"
            for name in sorted(wanted)
            if self.core.ticks(UPDATE) and not self.core.ticks(self.clocks.phase(name))
        ]
        if len(seen_devices()) > self._devices:
            found.append(
                "device pressure and idle caches are not watched: the policy was made before torch "
                "was imported; make it after that"
            )
        return tuple(found)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_engines):
        engine.after_fork()

"""What a cleanup policy does when something is due: the actions, their figures, and who is told.

_core.Policy ──► act(mask, clock): ranks agree? no graph is captured? nobody else acts?
                    │ yes
                    ▼
             each action, measured ──► _core.Policy.done ──► back-off, budget
                                   ├─► events of running monitors
                                   └─► report
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from memtools import _core
from memtools._base.devices import seen_devices
from memtools._census.cycles import Inspector
from memtools.cleanup.actions import (
    CADENCE,
    EMPTY_CACHE,
    GC,
    GC_YOUNG,
    LATER,
    NAMES,
    ORDER,
    PAYS,
    POOL_TRIM,
    REASONS,
    TRIGGERS,
    TRIM,
    WARM_UP,
    Meter,
    Outcome,
    Pools,
    Work,
    built_in,
    capturing,
    devices_in_use,
    measured,
    synchronize,
    trigger_words,
)
from memtools.cleanup.callbacks import Callbacks, CleanupCall
from memtools.cleanup.clocks import EPOCH, UPDATE, Clocks, Every
from memtools.cleanup.events import Events
from memtools.cleanup.gcstate import ManagedGc
from memtools.cleanup.report import MUCH, CycleReport
from memtools.errors import HostMemoryPressure
from memtools.monitor.log import Log, callers

WARN_SECONDS, WARN_UPDATES = 5.0, 100  # before which a share of the time says little
MOST_EXAMPLES = 8
CHEAP = 0.001  # of the time: what young collects may take without having to pay
SOME = 0.001  # of the memory: what one frees that is needed, though it does not pay by itself
NEVER: Final[Every] = (0,) * 16

Agree = Callable[[int, bool, int], int]


class Cleaned(NamedTuple):
    """What an action did that was asked for by hand."""

    name: str
    ms: float
    host_freed_bytes: int
    device_freed_bytes: int
    #: what it raised; "" for nothing
    error: str


class Tally(NamedTuple):
    """What an action did, added up."""

    times: int = 0
    ns: int = 0
    host: int = 0
    device: int = 0

    def plus(self, done: Outcome) -> Tally:
        freed = done.host.freed, done.device.freed
        return Tally(
            self.times + 1, self.ns + done.ns, self.host + freed[0], self.device + freed[1]
        )

    def since(self, before: Tally) -> Tally:
        return Tally(*(now - then for now, then in zip(self, before, strict=True)))


class Engine:
    """The acting half of a policy."""

    def __init__(self, root: str, max_cost: float, strict: bool) -> None:
        #: devices that the core watches
        self.devices = len(seen_devices(root))
        self.core: _core.Policy
        self.callbacks: Callbacks
        self.clocks = Clocks()
        self.gc = ManagedGc()
        self.pools = Pools(())
        self.events = Events()
        self.meter = Meter(root)
        self.max_cost, self.strict = max_cost, strict
        self.agree: Callable[[], Agree | None] = lambda: None
        self.rules: dict[int, tuple[Every, int]] = {}
        #: when gc is managed, what gc_young is to be; None: as it is
        self.young: Every | None = None
        #: updates after which gc is frozen, as the core counts; None: it is, or is not to be
        self.freeze_at: int | None = None
        self.tallies: dict[int, Tally] = {}
        self._base: dict[int, Tally] = {}  # where the costs began that are held against the time
        self._first_update = 0
        self._postponed = False  # a collect was left to the one after warm-up
        self.own_ns = 0
        self.errors: dict[int, str] = {}
        self.objects = self.tensors = self.tensor_bytes = self.inspected = 0
        #: each by itself: quiet young collects say nothing of full ones
        self._inspectors = {GC: Inspector(), GC_YOUNG: Inspector()}
        self._examples: Counter[str] = Counter()
        self._told = Log(None, lambda: 0)
        self._lock = threading.Lock()
        self._thread = 0  # that holds the lock

    # --- rules ---

    def begin(self, core: _core.Policy, rules: dict[int, tuple[Every, int]]) -> None:
        self.core, self.rules = core, rules
        self.callbacks = Callbacks(core)

    def set_rule(self, action: int, every: Every) -> None:
        """A cadence; what triggers the action stays."""
        triggers = TRIGGERS.get(action, 0)
        self.rules[action] = every, triggers
        self.core.set_rule(action, every, triggers, action in LATER)

    def begin_costs(self) -> None:
        """They are held against the time from here on."""
        self._base = dict(self.tallies)
        self._first_update = self.core.ticks(UPDATE)

    def cost_ns(self, action: int) -> int:
        before = self._base.get(action, Tally())
        return self.tallies.get(action, Tally()).since(before).ns

    def when(self, action: int) -> str:
        """`100 updates, 1 epoch; pressure`; "" for never."""
        handle = self.callbacks.by_action.get(action)
        every, triggers = self.rules.get(action, (NEVER, 0))
        if handle is not None:
            every, triggers = handle.every, handle.triggers
        if action == GC_YOUNG and self.young is not None:
            return f"{self.clocks.words(self.young)} while gc is managed"
        words = self.clocks.words(every), trigger_words(triggers)
        return "; ".join(word for word in words if word)

    def name(self, action: int) -> str:
        return NAMES.get(action) or self.callbacks.names[action]

    # --- what the core calls ---

    def act(self, mask: int, clock: int) -> None:
        """Does what is due. What is not done here stays asked for."""
        begin = time.perf_counter_ns()
        mine = self._thread == threading.get_ident()
        agree = self.agree()
        if agree is not None:
            mask = agree(mask, not mine and not capturing(), self.core.ticks(UPDATE))
        if not mask or (agree is None and capturing()):
            return
        if not self._lock.acquire(blocking=agree is not None):
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
        """Nanoseconds that the work itself took."""
        why = self.core.why(action)
        reasons = tuple(text for bit, text in REASONS.items() if why & bit)
        call = CleanupCall(self.clocks.names[clock], self.core.ticks(clock), reasons)
        work = None if self._is_double(action, why) else self._work(action, call)
        if work is None:
            self._decline(action)
            return 0
        return self._do(action, work, ", ".join(reasons)).ns

    def _synchronize(self) -> None:
        """Apart from the actions: waiting for the device's work is no cost of a cleanup."""
        try:
            synchronize()
        except Exception as error:  # the device's own, of work before: the program will meet it
            self._failed(EMPTY_CACHE, error)

    def _is_double(self, action: int, why: int) -> bool:
        """Warm-up ends by a full collect: the first epoch's, two updates before, is left to it."""
        double = action == GC and why == CADENCE and self.freeze_at is not None
        if not double or self._postponed or self.strict:
            return False
        self._postponed = True
        return True

    def _decline(self, action: int) -> None:
        """It cannot be done here and now; asked for again when it is due again."""
        rule = self.rules.get(action)
        self.core.set_rule(action, NEVER, 0, False)
        if rule is not None:
            self.core.set_rule(action, *rule, action in LATER)

    # --- actions ---

    def why_not(self, action: int) -> str:
        """Why a built-in action has nothing to work on; "" where it has."""
        if action == EMPTY_CACHE and not devices_in_use():
            return "no CUDA in this process"
        if action == POOL_TRIM and not self.pools.alive():
            return "no pool is watched"
        return ""

    def _work(self, action: int, call: CleanupCall) -> Work | None:
        """None where there is nothing to be done."""
        if action == WARM_UP:
            return self.gc.freeze if self.freeze_at is not None else None
        if action in TRIGGERS:
            return None if self.why_not(action) else self._built_in(action)
        handle = self.callbacks.by_action.get(action)  # another thread may cancel it now
        return None if handle is None else lambda: handle.call(call)

    def _built_in(self, action: int) -> Work:
        """To look into what is collected takes a full collect; that is cheap once gc is frozen."""
        frozen = self.gc.managed and self.freeze_at is None
        looks = action in self._inspectors and self._inspectors[action].due()
        return built_in(action, self.pools, looks and (frozen or action == GC))

    def _do(self, action: int, work: Work, why: str) -> Outcome:
        sums = self.tallies.get(action, Tally())
        outcome = measured(action, work, self.meter, sums.ns // max(1, sums.times))
        self.tallies[action] = sums.plus(outcome)
        if action == WARM_UP:
            self._frozen()
        elif self._is_insurance(outcome):
            self._decline(action)
        else:
            self.core.done(action, outcome.ns, *outcome.host.known, *outcome.device.known)
        self._note(outcome)
        self.events.add("malloc_trim" if action == TRIM else self.name(action), outcome, why)
        if outcome.error is not None:
            self._failed(action, outcome.error)
        return outcome

    def freeze(self) -> None:
        """The end of warm-up, at once."""
        with self._locked():
            self._do(WARM_UP, self.gc.freeze, "")

    def _frozen(self) -> None:
        """What it cost is no habit, so the budget of the others does not have to bear it."""
        self.freeze_at = None
        self._decline(WARM_UP)
        if self.young is not None and self.gc.managed:
            self.set_rule(GC_YOUNG, self.young)

    def end(self) -> None:
        """gc is not managed any more."""
        self.freeze_at, self._postponed = None, False
        self._decline(WARM_UP)
        if self.young is not None:
            self.set_rule(GC_YOUNG, NEVER)

    def _is_insurance(self, outcome: Outcome) -> bool:
        """As gc is off, young collects are what keeps cycles from piling up. As long as they are
        cheap, or free some, they need not pay, and so are neither backed off nor held back."""
        if outcome.action != GC_YOUNG or not self.gc.managed or outcome.gain >= PAYS:
            return False
        cheap = self.cost_ns(GC_YOUNG) <= CHEAP * 1e9 * self.core.seconds
        return cheap or outcome.gain >= SOME

    def _note(self, outcome: Outcome) -> None:
        found = outcome.collected
        if found is None:
            return
        self._inspectors[outcome.action].saw(found, outcome.gain, outcome.device.freed)
        self.objects += found.objects
        self.inspected += found.tensors is not None
        self.tensors += found.tensors or 0
        self.tensor_bytes += found.tensor_bytes or 0
        for example in found.examples:
            if len(self._examples) < MOST_EXAMPLES or example in self._examples:
                self._examples[example] += 1

    def _failed(self, action: int, error: BaseException) -> None:
        if isinstance(error, HostMemoryPressure):
            raise error
        name = self.name(action)
        self.errors[action] = _said(error)
        self._told.complain(
            f"action {name}",
            f"cleanup {name} failed with {_said(error)}; training goes on, and this is said once",
            stacklevel=callers() + 1,
        )

    # --- by hand ---

    def clean(self, actions: list[int]) -> tuple[Cleaned, ...]:
        """Does these now, one at a time with what is due on other threads."""
        if self._thread == threading.get_ident():
            raise RuntimeError("cleanup() was called by a callback of the same policy's cleanup")
        if capturing():
            raise RuntimeError("cleanup() during a CUDA graph capture would spoil the graph")
        call = CleanupCall("cleanup", 0, ())
        done = []
        with self._locked():
            for action in [action for action in ORDER if action in actions]:
                work = self._work(action, call)
                if work is not None:
                    done.append(self._cleaned(self._do(action, work, "by hand")))
        return tuple(done)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def _cleaned(self, outcome: Outcome) -> Cleaned:
        error = "" if outcome.error is None else _said(outcome.error)
        freed = outcome.host.freed, outcome.device.freed
        return Cleaned(self.name(outcome.action), outcome.ns / 1e6, *freed, error)

    # --- what it says ---

    def complain(self, key: str, text: str) -> None:
        self._told.complain(key, text, stacklevel=callers() + 1)

    def _complain_of_cost(self) -> None:
        seconds, updates = self.core.seconds, self.core.ticks(UPDATE) - self._first_update
        if seconds < WARN_SECONDS or updates < WARN_UPDATES:
            return
        costs = {action: self.cost_ns(action) for action in ORDER if action != WARM_UP}
        share = sum(costs.values()) / 1e9 / seconds
        if share > MUCH:
            most = max(costs, key=lambda action: costs[action])
            self.complain(
                "cost",
                f"cleanups have taken {100 * share:.1f} % of the time so far, most of it for "
                f"{self.name(most)}: print(policy.report()) says what pays; take a longer cadence"
                f"{' or strict=False' if self.strict else ''}",
            )

    def notes(self) -> tuple[str, ...]:
        """What limits this policy, a sentence each."""
        wanted = {name for every, _ in self.rules.values() for name in self.clocks.named(every)}
        found = [
            f"no phase {name!r} has ended yet, and something is due by it: is it in "
            f"policy.phase({name!r})?"
            for name in sorted(wanted)
            if self.core.ticks(UPDATE) and not self.core.ticks(self.clocks.phase(name))
        ]
        if len(seen_devices()) > self.devices:
            found.append(
                "device pressure and idle caches are not watched: the policy was made before torch "
                "was imported; make it after that"
            )
        return tuple(found)

    def cycles(self) -> CycleReport:
        examples = tuple(text for text, _ in self._examples.most_common())
        return CycleReport(self.objects, self.tensors, self.tensor_bytes, self.inspected, examples)

    def forget_cycles(self) -> None:
        self.objects = self.tensors = self.tensor_bytes = self.inspected = 0
        self._examples.clear()

    def after_fork(self) -> None:
        """In the child: a thread that acted is not here, and events are the parent's."""
        self._lock, self._thread = threading.Lock(), 0
        self.events.forget()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

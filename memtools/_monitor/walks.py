"""Walks of the heap while something grows, and what they show of growth that no container explains.

GrowthCensus.look ──► holders, and how much all that the program reaches takes
                                 │ that does not grow, and what is in use does, evenly
                                 ▼
                      collect garbage: cycles, or Python objects that C code keeps, or the C heap

A walk of a large heap takes long. Depth decides whether the next one is quick: whether it leaves
out what lies far from the names of the program and is not longer than before.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol, TypeVar

from memtools._census.holders import Holder
from memtools._census.longer import Lengths
from memtools._leak.growth import slope_of
from memtools._leak.judge import C_HEAP, CYCLES, PYTHON, THRESHOLDS, keeps_graphs
from memtools._leak.series import Looks, key_of
from memtools._monitor.newobjects import Counts, NewObjects
from memtools._monitor.sensor import Sensor

_T = TypeVar("_T")
GRACE_NS = 1_500_000_000  # Looks may take so much in any run, ...
SHARE = 0.01  # ... and this share of its time.
LONG_NS = GRACE_NS // 10  # Where a whole walk takes longer, some are quick ...
LONGEST_NS = GRACE_NS // 4  # ... and where it takes longer than this, the second one is.
MOST_NAMES = 1024  # The gains of so many holders are known, those that were named last.
MORE_THREADS = 4  # Threads become more if each of so many walks has seen more of them.


class Budget:
    """The processor time that looks may take: 1.5 s in any run, and 1 % of its time."""

    def __init__(self) -> None:
        self._begun_ns, self.spent_ns = time.monotonic_ns(), 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Spend what the block takes of this thread's time."""
        begun = time.thread_time_ns()
        try:
            yield
        finally:
            self.spent_ns += time.thread_time_ns() - begun

    def wait_ns(self, ns: int) -> int:
        """In how many nanoseconds of the run `ns` more can be spent; 0: now."""
        allowed = GRACE_NS + int(SHARE * (time.monotonic_ns() - self._begun_ns))
        return max(0, int((self.spent_ns + ns - allowed) / SHARE))


class Depth:
    """Whether the next walk is whole or quick.

        a whole walk takes     walk 1     2      3      4      5 ...
        up to 150 ms              whole  whole  whole  whole  whole
        up to 375 ms              whole  whole  whole  quick  quick
        more                      whole  quick  quick  quick  quick

    How long a whole walk takes is the shorter time of the two newest: another program may have
    slowed one of them.

    Quick walks go on while their holders explain the growth. Once three in a row have not, or the
    first one has lost what whole ones have found, all are whole: a container is compared with what
    the walk before has seen of it.
    """

    def __init__(self) -> None:
        #: processor time that a whole walk takes; 0 before the first
        self.whole_ns = 0
        self._newest_ns = self._quick_ns = 0
        self._walks = self._in_vain = 0
        self._are_whole, self._was_quick = False, False

    @property
    def is_quick(self) -> bool:
        """Whether the next walk is a quick one."""
        if self._walks == 0 or self._are_whole or self.whole_ns < LONG_NS:
            return False
        return self._walks >= THRESHOLDS.named_looks or self.whole_ns > LONGEST_NS

    @property
    def next_ns(self) -> int:
        """Processor time that the next walk takes; 0 where nothing like it was made yet."""
        return self._quick_ns if self.is_quick else self.whole_ns

    def walked(self, ns: int, *, explained: bool, was_explained: bool) -> bool:
        """Note that the next walk was made.

        Args:
            ns: the processor time that it took.
            explained: whether its holders explain the growth.
            was_explained: whether those of the walk before do.

        Returns whether it counts. A quick walk that has lost what a whole one has found does not.
        """
        is_quick, is_first = self.is_quick, not self._was_quick
        self._walks, self._was_quick = self._walks + 1, is_quick
        if not is_quick:
            self.whole_ns, self._newest_ns = min(ns, self._newest_ns or ns), ns
            return True
        self._quick_ns = ns
        self._in_vain = 0 if explained else self._in_vain + 1
        is_lost = is_first and was_explained and not explained
        self._are_whole = is_lost or self._in_vain >= THRESHOLDS.named_looks
        return not is_lost


class CensusLike(Protocol):
    """The methods of GrowthCensus that are used here."""

    looks: int
    cut: bool
    reached_bytes: int

    def look(self, step: int, *, quick: bool = False) -> None: ...
    def holders(self) -> tuple[Holder, ...]: ...


class HeapWalks:
    """The census of a run, and the collections of garbage that it needs.

    Args:
        make: makes the census, for the first walk; None: the heap is not walked.
        sensor: does not count what is done here.
        budget: the time that walks may take.
        complain: reports a failure, by a key and a text.
        collects: whether garbage may be collected here; True by default. On another thread than the
            program's it must not be, because the program's finalizers would run there.
    """

    def __init__(
        self,
        make: Callable[[], CensusLike] | None,
        sensor: Sensor,
        budget: Budget,
        complain: Callable[[str, str], None],
        *,
        collects: bool = True,
    ) -> None:
        self._make, self._sensor, self._budget, self._complain = make, sensor, budget, complain
        self._collects = collects
        self._census: CensusLike | None = None
        #: who holds what grows, as of the newest walk
        self.holders: tuple[Holder, ...] = ()
        self._depth = Depth()
        self._threads: list[int] = []  # how many threads there were at the newest walks
        #: how long a walk that is wanted has to wait, because it takes too much; 0: it does not
        self.wait_ns = 0
        #: by the name of a holder: since which step its gain is counted, what it had gained before,
        #: and the step and the gain of the newest walk
        self._gains: dict[str, tuple[int, int, int, int]] = {}
        self._reached: list[tuple[int, int]] = []  # (step, bytes) that each whole walk has reached
        self._in_use = 0  # bytes in use at the newest collection
        self._collections = 0  # those before the first look, and those made here since
        self._unheld = ""  # what `unheld` has returned last
        self._counts: Counts | None = None  # of objects, once growth without a holder is seen
        #: which objects become more without a holder that a walk finds, in words
        self.new_objects = ""
        self._lengths: Lengths | None = None  # those of objects of extensions, from then on
        #: objects of extensions that become longer meanwhile
        self.longer: tuple[Holder, ...] = ()

    @property
    def cost_ns(self) -> int:
        """Processor time that a whole walk takes, or nearly a whole one."""
        return self._depth.whole_ns

    @property
    def are_on(self) -> bool:
        """Whether the heap is walked. That ends with the first walk that fails."""
        return self._make is not None

    @property
    def is_collected(self) -> bool:
        """Whether garbage is collected by Python, or by the program since the first look."""
        return gc.isenabled() or _collections() > self._collections

    def begin(self, *, is_start: bool = True) -> None:
        """Collect garbage before the first look of a program: that of its start is freed at some
        time, which may hide the growth of a hundred steps. What it frees is not counted."""
        if self._collects and is_start:
            with self._sensor.left_out():
                gc.collect()
        self._collections = _collections()

    def begun(self) -> None:
        """Note what is in use at the first look."""
        self._in_use = self._sensor.use()

    def _can_compare(self) -> bool:
        """Whether counts of objects can be afforded, which take some four walks."""
        return self._budget.wait_ns(4 * self.cost_ns) == 0

    def walk(self, step: int, *, has_holders: bool) -> bool:
        """Walk the heap, the first time in any case, then while something grows. What the census
        itself keeps does not count.

        Args:
            step: the step of the walk.
            has_holders: whether a finding that names a holder stands.

        Returns whether there was a walk.
        """
        self.wait_ns = 0
        if self._make is None:
            return False
        if self._census is not None:
            if not has_holders and not self._sensor.grows():
                return False
            self.wait_ns = self._budget.wait_ns(self._depth.next_ns)
            if self.wait_ns > 0:
                return False
        begun, before = time.thread_time_ns(), self.holders
        try:
            with self._sensor.left_out():
                self._look(step, self._make)
        except Exception as error:
            self._make, self._census, self.holders = None, None, ()
            if not isinstance(error, MemoryError) or not has_holders:
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
                self._complain("census", f"no longer looking for holders: {why}")
            return False  # else memory is nearly used up, and its holder is known
        counts = self._depth.walked(
            time.thread_time_ns() - begun,
            explained=self._explain(step, self.holders),
            was_explained=bool(before) and self._explain(step, before),
        )
        if not counts:
            self.holders = before
        return counts

    def _explain(self, step: int, holders: Sequence[Holder]) -> bool:
        """Whether these holders gain most of what grows in use, now or since they began to."""
        use, held = self._sensor.paces(step)["use"], sum(one.rate_bytes for one in holders)
        if holders:
            since = min(one.since_step or 0 for one in holders)
            use = min(use, self._sensor.points.slope("use", since))
        return held >= THRESHOLDS.explained * use or keeps_graphs(holders)

    def _look(self, step: int, make: Callable[[], CensusLike]) -> None:
        is_first = self._census is None
        if self._census is None:
            self._census = make()
        self._census.look(step, quick=self._depth.is_quick)
        self.holders = self._census.holders()
        self._threads = [*self._threads[1 - MORE_THREADS :], threading.active_count()]
        if self._sensor.is_shared and not self._threads_become_more():
            self.holders = tuple(one for one in self.holders if one.kind != "calls")
        self._sensor.points.note(step, self._gained(step))
        if self._census.cut:
            if is_first or self._depth.is_quick:
                return  # Who gains may be known without the rest.
            self._complain("cut", "the heap is too large to walk completely: parts were left out, "
                                  "and their contents are unknown")  # fmt: skip
        else:
            self._reached = [*self._reached[-63:], (step, self._census.reached_bytes)]

    def _threads_become_more(self) -> bool:
        """Whether there were more threads at each of the newest walks. A walk on one thread sees
        calls that run on others, at random, but these go on only where the threads do."""
        is_known = len(self._threads) == MORE_THREADS
        return is_known and all(a < b for a, b in pairwise(self._threads))

    def _gained(self, step: int) -> dict[str, int]:
        """What each holder has gained in all, by its name among the signals. Where a census counts
        from a later step on, its gain of before is what it was at the walk before."""
        gained = {}
        for holder in self.holders:
            if holder.since_step is None or holder.since_step + holder.steps != step:
                continue
            since, before, at, size = self._gains.get(key_of(holder), (holder.since_step, 0, 0, 0))
            if since != holder.since_step:
                before += size - round(holder.rate_bytes * max(0, at - holder.since_step))
            now = before + holder.new_bytes
            self._gains.pop(key_of(holder), None)  # which puts the newest name last
            self._gains[key_of(holder)] = holder.since_step, before, step, holder.new_bytes
            gained[key_of(holder)] = now
        for name in list(self._gains)[:-MOST_NAMES]:
            del self._gains[name]
        return gained

    def collect(self) -> Callable[[], None] | None:
        """Return a function that collects garbage before the lines of traced steps are read, so
        that garbage does not count for them; None if there is no time for that."""
        if not self._collects or self.cost_ns == 0 or self._budget.wait_ns(self.cost_ns) > 0:
            return None
        return self._collect_now

    def _collect_now(self) -> None:
        with self._budget.spending(), self._sensor.left_out():
            gc.collect()
        self._collections += 1
        self._in_use = self._sensor.use()

    def _read_in_use(self) -> int:
        return sum(signal.read() or 0 for signal in self._sensor.in_use())

    def unheld(self, seen: Looks, held: float) -> str:
        """Classify growth that no container explains, where holders gain `held` bytes a step now:
        C_HEAP, PYTHON, CYCLES, or "" if that is not known. Before it is called the C heap's the
        garbage is collected: if half of the growth goes with it, it was garbage. It is Python's
        where Python's own blocks grow, or where objects that only C code keeps become more and
        weigh as much."""
        if self._census is None or self._census.looks < THRESHOLDS.named_looks:
            return ""
        was_known = self._unheld in (C_HEAP, PYTHON)
        if self._census.cut and not was_known:
            return ""  # not all of the heap was searched for a holder
        each = THRESHOLDS.confirmed_steps * self._threads[-1]
        if self._sensor.is_shared and seen.step - seen.steps[0] < each:
            return (
                ""  # each thread has caches and an arena of its own, which fill in its first steps
            )
        use = seen.pace("use")
        rest = use - held
        if rest < max(THRESHOLDS.least_rate, THRESHOLDS.least_share * use):
            return ""
        if keeps_graphs(self.holders):
            return ""  # graphs keep what cannot be measured
        whole = [point for point in self._reached if point[0] >= seen.since]
        if len(whole) < 2 and not was_known:
            return ""
        if len(whole) > 1 and slope_of(whole) - held >= THRESHOLDS.explained * rest:
            return ""  # objects hold it, and no container is longer for it
        if self._counts is None and not self._unheld and self._can_compare():
            self._counts = self._counted(lambda: Counts(seen.step))
            self._lengths = self._counted(lambda: Lengths(seen.step)) if self._collects else None
            if self._counts is not None:
                return ""  # A later look tells which objects have become more since this one.
        counted = seen.step if self._counts is None else self._counts.step
        if self._sensor.is_shared and 0 < seen.step - counted < THRESHOLDS.confirmed_steps:
            return ""  # other threads have objects of their own, now more and now fewer
        if not seen.of_c(held, goes_on=was_known):
            return CYCLES if self._unheld == CYCLES else ""
        if was_known:
            if self.longer and self._budget.wait_ns(self.cost_ns) == 0:
                self._find_longer(seen.step)
            return self._unheld  # found before, and it goes on
        if not self._collects or self._budget.wait_ns(self.cost_ns) > 0:
            return ""
        before, grown = self._sensor.use(), self._sensor.use() - self._in_use
        with self._sensor.left_out():  # the program would still have it, and goes on to make more
            had = self._read_in_use()
            gc.collect()
            freed = had - self._read_in_use()
        self._collections += 1
        self._in_use = before
        is_garbage = freed >= THRESHOLDS.garbage * grown * rest / use
        self._unheld = CYCLES if is_garbage else self._kept(seen, rest, held)
        return self._unheld

    def _counted(self, count: Callable[[], _T]) -> _T | None:
        """What counting objects returns; None where it fails, for want of memory for example."""
        try:
            with self._sensor.left_out():
                return count()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._complain("counts", f"cannot tell which objects grow in number: {why}")
            return None

    def _kept(self, seen: Looks, rest: float, held: float) -> str:
        """C_HEAP or PYTHON, and which objects become more."""
        least = THRESHOLDS.explained * rest
        is_pythons = seen.pace("python") - held >= least
        since = seen.points.pace("use", seen.since).since
        self._find_longer(seen.step)
        found = self._counted(lambda: self._compare(seen.step, least, since))
        if found is not None:
            self.new_objects = found.what
            is_pythons |= found.rate_bytes >= least
        return PYTHON if is_pythons else C_HEAP

    def _find_longer(self, step: int) -> None:
        """Read the lengths again. What does not become longer any more is not the holder."""
        lengths = self._lengths
        if lengths is not None:
            self.longer = self._counted(lambda: lengths.longer(step)) or ()

    def _compare(self, step: int, least: float, since: int) -> NewObjects | None:
        """What has become more since the counts, which are freed here: that must not be counted."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts.found(step, least, since)


def _collections() -> int:
    """How many times garbage has been collected in this process, of any age."""
    return sum(generation["collections"] for generation in gc.get_stats())

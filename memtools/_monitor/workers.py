"""What grows in the workers of this process, as they have found out themselves: see worker.py.

    LeakWatch ──► WorkerReports.ask() ──► page ──► workers look at their heaps
              ◄── findings(step) ◄─────── page ◄── holders with bytes a batch of each worker

A worker's rate is one of its own batches. How many of these make a step of the program is found
out here, by counting both. Workers of a DataLoader take turns: each of N has a batch at every N-th
step, or more often if several batches make a step. That is exact, whereas the counts of workers
that run ahead are some batches off.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from memtools._base import sentences
from memtools._base.libraries import users_paths
from memtools._census.holders import Holder
from memtools._census.keepers import Keepers
from memtools._leak.finding import COLLECTOR_IS_OFF, RANK, LeakFinding
from memtools._leak.judge import (
    CYCLES,
    THRESHOLDS,
    Part,
    at_most_growing,
    graded,
    of_holder,
    of_part,
)
from memtools._monitor import worker
from memtools._monitor.worker import Page

AHEAD = 3  # A worker's count may be off by so many batches: two are ready, one is being made.
BETWEEN = 1.5  # Above so many batches a turn it may have one or two of them.
NEAR = 0.1  # A count that differs from whole turns by at most this share of it is that many turns.
IDLE = 8  # After so many turns without a batch a worker belongs to a loader that is not in use.
MISSED = 2  # So many looks of a worker that do not name a holder show that it does not grow.


@dataclass
class _Known:
    """A worker as it was when it first reported: batches, step and time; and its newest pace."""

    pid: int
    batches: int
    step: int
    ns: int
    pace: tuple[float, str] | None = None


@dataclass
class _Answer:
    """The newest finding of something in a worker, and at which of the worker's looks that was."""

    finding: LeakFinding
    look: int


class _InUse:
    """Bytes in use of workers, by the name that findings have of each. A worker that follows one of
    its name goes on from there, as the next epoch does where each has workers of its own."""

    def __init__(self) -> None:
        self._each: dict[int, tuple[str, int, int]] = {}  # by pid: name, first and newest bytes
        self._before: dict[str, int] = {}  # by name: what those that have ended had gained

    def update(self, sizes: dict[int, int], names: dict[int, str]) -> dict[str, int]:
        """What each name has gained so far. `sizes` are those of the processes that live."""
        for pid in [pid for pid in self._each if pid not in sizes]:
            name, first, newest = self._each.pop(pid)
            self._before[name] = self._before.get(name, 0) + newest - first
        for pid, size in sizes.items():
            if pid in names:
                first = self._each[pid][1] if pid in self._each else size
                self._each[pid] = names[pid], first, size
        gained = {name: self._before.get(name, 0) for name, _, _ in self._each.values()}
        for name, first, newest in self._each.values():
            gained[name] += newest - first
        return gained


@dataclass
class _Shared:
    """The page of this process."""

    pid: int
    page: Page
    users: set[int]  # ids of the WorkerReports


_shared: list[_Shared] = []


class WorkerReports:
    """Asks the workers of this process, and reads their reports. Several monitors share a page.

    The page is shared memory that takes 4 KiB, and 4 KiB for each worker that has reported.
    """

    def __init__(self) -> None:
        """Make the page, and pass it to all processes that start from now on. Raises OSError if the
        kernel has no memfd, or the process no more descriptors."""
        if not _shared or _shared[0].pid != os.getpid():  # a fork's are its parent's
            _shared[:] = [_Shared(os.getpid(), Page.new(), set())]
        self._page = _shared[0].page
        self._asked = False
        self._known: dict[int, _Known] = {}
        self._answers: dict[int, dict[tuple[str, str], _Answer]] = {}  # by pid and holder
        self._in_use, self._keepers = _InUse(), Keepers()
        self._turns: dict[int, int] = {}  # of workers that look, as of the newest call
        #: the name that findings have of each worker that has reported, by pid
        self.names: dict[int, str] = {}
        _shared[0].users.add(id(self))
        users_paths()  # A look asks for them, and finds them in what it has of its parent.
        worker.publish(self._page)

    def close(self) -> None:
        """Ask no more. Workers go on as if they had never been asked. May be called twice."""
        if not _shared or _shared[0].page is not self._page or _shared[0].pid != os.getpid():
            return
        self._asked = False
        users = _shared[0].users
        users.discard(id(self))
        if users:
            return
        self._page.ask(False)
        _shared.clear()
        worker.withdraw()
        self._page.close()

    def ask(self) -> None:
        """Have workers find out what grows in them, because the memory of children grows. They
        report from the third of their looks on, some six batches later. Costs next to nothing if
        they are asked already."""
        if not self._asked:
            self._asked = True
            self._page.ask(True)

    def rest(self) -> None:
        """Have workers stop looking, and drop what their looks have kept, because the memory of
        children does not grow any more."""
        if self._asked:
            self._asked = False
            self._known.clear()
            self._page.ask(False)

    def looking(self) -> bool:
        """Whether a worker looks at its heap now. For that time it takes 10 MiB and more, which are
        not growth: the memory of children must not be read then."""
        return self._asked and self._page.looking()

    def have_looked(self) -> bool:
        """Whether a worker has looked at its heap since the call before, or does so now: a peak of
        that time may be the look's."""
        before, self._turns = self._turns, self._page.turns() if self._asked else {}
        return self._turns != before or self.looking()

    def in_use(self) -> dict[str, int]:
        """What the workers that have reported have gained since then, in bytes in use, by the name
        that findings have of them."""
        if not self._asked:
            return {}
        sizes = self._page.in_use()
        if not self.names.keys() >= sizes.keys():
            self.names.update((pid, _name_of(report)) for pid, _, report in self._page.read())
        return self._in_use.update(sizes, self.names)

    def findings(self, step: int, grade: str = "suspect") -> tuple[LeakFinding, ...]:
        """Return what grows in workers, each with the rate of its own worker.

        Args:
            step: the program's step now; 0 if it makes none: rates are then per second.
            grade: what the leak test says of the memory of children, at least `suspect` if a worker
                has seen it grow in 16 steps of the program. A container that only ever gained is
                evidence, and raises it by one.
        """
        worker.invite()
        if not self._asked:
            return ()
        now, listed = time.monotonic_ns(), list[LeakFinding]()
        for pid, batches, report in self._page.read():
            known = self._known.get(pid)
            if known is None or known.batches > batches:  # or another process with its pid
                known = self._known[pid] = _Known(pid, batches, step, now)
            found = _findings_of(report, known, batches, step, now, grade, self._keepers)
            listed += self._with_answers(pid, found, report)
        return tuple(listed)

    def _with_answers(
        self, pid: int, found: list[LeakFinding], report: dict[str, Any]
    ) -> list[LeakFinding]:
        """What a worker has found, at its newest look or at the one before. One look that does not
        name it does not show that it has ended: that container may have come to its end, and
        another one grow. Two do."""
        answers = self._answers.setdefault(pid, {})
        look = report.get("looks")
        if type(look) is not int:
            return []
        for one in found:
            answers[one.key] = _Answer(one, look)
        known = {key: one for key, one in answers.items() if look - one.look < MISSED}
        self._answers[pid] = known
        return [one.finding for one in known.values()]


def _by_code(given: dict[str, Any], keepers: Keepers) -> dict[str, Any]:
    """What the program's code says of a holder that a worker reports, as fields of Holder. Workers
    have the same code, and do not read it: a forked one would copy its pages."""
    way = given.get("way")
    if way is None:
        return {"may_fill": given["may_fill"]}
    kept, changes = keepers.find_packed(given["path"], way), way[0]
    fills = given["may_fill"] or (kept.may_fill and not changes)
    known = kept._replace(may_fill=fills)._asdict()
    del known["capacity"]  # The worker has said it.
    return known


def _findings_of(
    report: dict[str, Any],
    known: _Known,
    batches: int,
    step: int,
    now: int,
    grade: str,
    keepers: Keepers,
) -> list[LeakFinding]:
    """What one worker names; nothing if its report is not one of this version's."""
    try:
        if report["looks"] < THRESHOLDS.named_looks:
            return []
        pace = _pace(report, known, batches, step, now)
        if pace is None:
            return []
        found = [
            _finding_of(report, one, known, *pace, grade, keepers) for one in report["holders"]
        ]
        garbage = _of_garbage(report, known, *pace, grade)
        return [one for one in (*found, garbage) if one is not None]
    except (KeyError, TypeError, ValueError):
        return []


def _pace(
    report: dict[str, Any], known: _Known, batches: int, step: int, now: int
) -> tuple[float, str] | None:
    """Batches of this worker in a step, or in a second; None if that is not known yet."""
    steps, passed = step - known.step, batches - known.batches
    if steps <= 0:
        seconds = (now - known.ns) / 1e9
        return (passed / seconds, "s") if step == 0 and passed > 0 and seconds > 0 else None
    each, workers = passed / steps, report["workers"]
    if workers and (passed or steps <= IDLE * workers):
        turns = steps / workers
        if abs(passed - turns) <= AHEAD:
            each = 1 / workers
            if passed > BETWEEN * turns:  # it runs ahead, or has two in each turn
                return known.pace
        else:
            batches_a_turn = round(passed / turns)
            if abs(passed - batches_a_turn * turns) <= max(AHEAD, NEAR * passed):
                each = batches_a_turn / workers
    known.pace = (each, "step") if each > 0 else None
    return known.pace


def _finding_of(
    report: dict[str, Any],
    given: dict[str, Any],
    known: _Known,
    each: float,
    per: str,
    grade: str,
    keepers: Keepers,
) -> LeakFinding | None:
    """One of the holders that a worker names, which has `each` batches in a step, or in a second.
    None if it does not matter, or nothing shows yet that it grows."""
    names = ("path", "kind", "length", "capacity", "new_objects", "new_bytes", "what")
    since = known.step if per == "step" else None
    holder = Holder(
        **{name: given[name] for name in names},
        steps=max(1, given["batches"]),
        since_step=since,
        only_gained=given["only_gained"],
        **_by_code(given, keepers),
    )
    steps = holder.steps / each if per == "step" else holder.steps
    if steps >= THRESHOLDS.certain_steps and RANK[grade] < RANK["suspect"]:
        grade = "suspect"
    rate, is_bounded = holder.rate_bytes * each, holder.capacity is not None
    shows = is_bounded or holder.only_gained or RANK[grade] >= RANK["suspect"]
    if rate < THRESHOLDS.least_rate or not shows:
        return None
    raised = graded(grade, 1.0, only_gained=holder.only_gained, bounded=is_bounded)
    at_most, still_fills = at_most_growing(holder, grade, raised)
    process = _name_of(report)
    what = _what(holder, each / holder.steps, "step" if per == "step" else "second")
    what = ", ".join(filter(None, (what, still_fills)))
    return replace(of_holder(at_most, "children", holder, rate, what), per=per, process=process)


def _of_garbage(
    report: dict[str, Any], known: _Known, each: float, per: str, grade: str
) -> LeakFinding | None:
    """Cycles of a worker: bytes in use grow, and most of them are those of objects that nothing
    reaches. Where Python's collector is on, a collection has to have freed them before that is
    certain; then they stop growing by themselves. None if it is not so."""
    given = report.get("garbage")
    if not given or given["batches"] <= 0 or given["objects"] < given["batches"]:
        return None
    rate = given["bytes"] / given["batches"] * each
    if rate < THRESHOLDS.least_rate or given["bytes"] < THRESHOLDS.explained * given["used"]:
        return None
    if not given["collects"]:
        grade, what, cause = graded(grade, 1.0, only_gained=True), COLLECTOR_IS_OFF, "collector"
    elif rate < THRESHOLDS.least_c_heap * THRESHOLDS.least_rate:
        return None
    elif given["grown"] <= 0 and given["batches"] >= THRESHOLDS.certain_steps * min(1.0, each):
        grade, what, cause = "suspect", "none were collected yet", ""
    elif given["grown"] > 0 and given["freed"] >= THRESHOLDS.garbage * given["grown"]:
        grade, what, cause = "fills", "", ""
    else:
        return None
    since = known.step if per == "step" else None
    part = Part("children", rate, grade=grade, since_step=since)
    found = of_part(part, per=per, kind=CYCLES, what=what, cause=cause)
    return replace(found, process=_name_of(report))


def _name_of(report: dict[str, Any]) -> str:
    """`worker 0`, or the name of a process that is not a DataLoader's."""
    number = report.get("worker")
    return f"worker {report.get('name') if number is None else number}"


def _what(holder: Holder, pace: float, unit: str) -> str:
    """`2 new [64] float32 tensors a step`, or how full a container with a bound is. `pace` is the
    part of what the worker has seen come that comes in a step of the program, or in a second."""
    if holder.capacity is not None:
        now = "" if holder.length is None else f"{holder.length:,} of "
        return f"{now}at most {holder.capacity:,}"
    if not holder.new_objects:
        return ""
    return sentences.of_new(holder.new_objects * pace, holder.what, unit)

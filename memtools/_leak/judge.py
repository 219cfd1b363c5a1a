"""The judge: makes LeakFindings of how parts of memory grow and who gains in them.

    monitor: points of its looks ─► series.py (Looks) ────┐
    assert_flat: readings of a test ─► testing/_growth.py ┼─► Part, Evidence ──► LeakFinding ...
    a record: its series ─► _record/growth.py ────────────┘

This is the only place where growth becomes a finding, and THRESHOLDS are the only numbers that
decide it. Everything here is arithmetic on numbers that the caller has read. The most certain
growth comes first: containers with a bound, containers without one, growth without a holder,
children, shared memory and devices.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._leak.finding import (
    COLLECTOR_IS_OFF,
    FIRST_WRITES,
    FITS,
    LITTLE,
    RANK,
    TOO_LARGE,
    WORKERS,
    Key,
    LeakFinding,
)

if TYPE_CHECKING:
    from memtools._census.arrays import Owner
    from memtools._census.holders import Holder
    from memtools._leak.jumps import Stairs

GRAPH = "autograd graph"
C_HEAP = "C heap"
PYTHON = "Python objects"
CYCLES = "cycles"
IDLE_HEAP = "idle heap"
OUTSIDE = "outside malloc"
#: The parts of memory in which a census names holders.
OF_CENSUS = ("use", "shm", "device")
_MOST_NAMED = 2  # so many objects of extensions of which one may be the holder
#: The kind of growth without a known holder, by part of memory.
_KINDS = {"shm": "shared memory", "children": "children"}


@dataclass(frozen=True)
class Thresholds:
    """The numbers that decide what is growth, what explains it, and when it has ended. A "share" is
    a share of the bytes a step by which a part of memory grows, unless it says otherwise."""

    least_rate: float = 1024.0
    """Growth of fewer bytes a step is not reported, and holders that gain less are not named."""

    explained: float = 0.5
    """Holders that gain at least this share of a part's growth explain it."""

    most_added: float = 0.2
    """What malloc adds to what holders gain by their own figures is at most this share of them."""

    most_shared: float = 1 / 3
    """What holders' own figures count, and memory does not have, is at most this share of them:
    objects of several holders, for example."""

    exact: float = 0.02
    """Growth is exact if its standard error is at most this share of it."""

    noisy: float = 0.2
    """If the standard error is at least this share, holders' own figures alone count."""

    certain_errors: float = 3.0
    """Growth of more than this many standard errors is not noise."""

    least_share: float = 0.1
    """A container that gains less than this share is a hint at who takes the rest, not a holder."""

    near: float = 0.15
    """A slope that differs from what holders gain by at most this share of it is theirs."""

    named_looks: int = 3
    """A census names holders from this look on."""

    one_process: float = 0.8
    """A child process that takes at least this share of what all children take is named."""

    steady_rises: int = 4
    """A container that gained at this many looks is named, however small its share is."""

    even_intervals: int = 4
    """The C heap has to grow in this many intervals between looks, and by about the same."""

    even: float = 0.6
    """Intervals are about the same if the smallest is at least this share of the largest."""

    straight_error: float = 0.1
    """Where several threads make the steps, the line through the looks has a standard error of at
    most this share of its slope if it is the C heap that grows."""

    slows: float = 0.85
    """If the later intervals show less than this share of the earlier ones, something fills."""

    least_c_heap: float = 4.0
    """The C heap is reported from this many least rates on: the caches of C code grow by less."""

    rss_from: float = 1.5
    """If resident memory grows at least this many times as fast as what C code has in use, the
    growth of resident memory is what it costs: small blocks pin what is freed around them."""

    rss_to: float = 8.0
    """Above this many times, resident memory grows by something else, such as fragmentation."""

    foreseen: float = 10.0
    """Freed memory that malloc keeps, and other growth that is not in use, is reported where the
    limit is at most so many times as many steps away as it was seen to grow: it may end before."""

    likely_steps: float = 1e6
    """A suspect without a holder is little if the limit is more steps away: few runs are longer,
    and what a program takes as it starts grows by about as much."""

    garbage: float = 0.5
    """If a collection frees at least this share of what has grown, it was garbage."""

    confirmed_looks: int = 3
    """A suspect that was seen at this many looks is growing ..."""

    confirmed_steps: int = 32
    """... if they lie at least this many steps apart."""

    certain_steps: int = 16
    """A container of a worker that only gained for this many steps is suspect by itself."""

    alike: float = 1.25
    """Two rates of one part of memory that differ by at most this factor are one growth."""

    faster: float = 2.5
    """A part of memory that has become faster by more than this factor since the newest walk has
    got another holder, which the next walk finds."""

    goes_on: float = 0.5
    """Growth goes on if the newest readings show at least this share of its rate."""

    ended: float = 0.25
    """Growth has ended if the newest readings show less than this share of its rate ..."""

    ended_steps: int = 64
    """... over at least this many steps ..."""

    ended_share_of_run: float = 0.1
    """... and at least this share of the steps of the run."""

    ended_c_heap: float = 0.5
    """The C heap's growth has ended below this share of what it was when it was first reported."""

    filled: float = 0.7
    """Containers with a bound that take at least this share of a part's growth explain it: it ends
    by itself."""

    least_rate_of_phase: float = 64 * 1024
    """Growth of fewer bytes a step of a phase, such as an evaluation, does not matter: it ends with
    the phase."""

    least_rate_by_time: float = 10 * 1024
    """Growth of fewer bytes a second, in the record of a program without steps, does not matter."""

    cleared: float = 0.5
    """A fall by at most this share of all that was gained is a collection of garbage."""

    record_readings: int = 256
    """The leak test judges a series of a record from this many readings on."""

    line_readings: int = 8
    """A series of a record with fewer readings is judged by a line through at least this many."""

    straight: float = 0.8
    """Such a line explains at least this share of the variance of the series' end ..."""

    straight_end: float = 0.98
    """... and this share if it is a small part of the run, so that it does not begin too early."""

    least_gain: int = 2 << 20
    """Such a line gains at least this many bytes ..."""

    least_gain_share: float = 0.01
    """... and at least this share of what is in use."""

    start_seconds: float = 10.0
    """In the record of a program without steps, a rise in less time is the start of the program."""


THRESHOLDS = Thresholds()


# --- what is judged -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """How one part of memory grows.

    Attributes:
        signal: the signal by which that was seen.
        rate_bytes: bytes a step, as it goes on now.
        error: the standard error of the rate; infinite, the default, where it is not known.
        grade: what the leak test says; one of GRADES, by default "quiet".
        since_step: the step at which the growth began; None, the default, where it is not known.
        begun_bytes: bytes a step beyond the rate, of growth that began after the newest look but
            one, 0 by default.
    """

    signal: str
    rate_bytes: float
    error: float = math.inf
    grade: str = "quiet"
    since_step: int | None = None
    begun_bytes: float = 0.0

    @property
    def all_bytes(self) -> float:
        """Bytes a step, with those that have just begun to come."""
        return self.rate_bytes + self.begun_bytes


@dataclass(frozen=True)
class Children:
    """How the child processes grow.

    Attributes:
        part: their memory together.
        count: how many there are.
        steps_each: if they become more, after how many steps there is one more; None otherwise.
        growing: the names of those that grow, with their bytes a step, the fastest first.
        found: what workers have found themselves.
        in_use_bytes: bytes a step by which what they have in use has grown of late; None, the
            default, where workers do not report it.
    """

    part: Part
    count: int = 0
    steps_each: float | None = None
    growing: Sequence[tuple[str, float]] = ()
    found: Sequence[LeakFinding] = ()
    in_use_bytes: float | None = None


class Block(NamedTuple):
    """A block of memory that is not all written yet.

    Attributes:
        size: its bytes.
        resident: those that were written.
        begin: its address.
        owner: the tensors or arrays that have it; None if they are not looked for.
        signal: the part of memory that grows as it is written: "resident", the default, or "shm".
        rate_bytes: bytes a step by which it was seen to be written; 0, the default, where it was
            not looked at before.
        since_step: the step from which on it was seen; None where it was not.
    """

    size: int
    resident: int
    begin: int = 0
    owner: Owner | None = None
    signal: str = "resident"
    rate_bytes: float = 0.0
    since_step: int | None = None

    @property
    def unwritten(self) -> int:
        """Bytes that are still to come."""
        return max(0, self.size - self.resident)


@dataclass(frozen=True)
class Resident:
    """How the resident memory of the process grows, without pages of files, and what it is made of.

    All rates are of the same steps, in bytes a step.

    Attributes:
        part: the resident memory.
        use_bytes: what is in use, or the findings of it that stand if these are more.
        step: the newest of them.
        steps: how many they are.
        is_even: whether it grew in each of the last intervals between looks, by about the same, or
            what is never given back of it did.
        idle_bytes: the freed memory that malloc keeps.
        idle: how much that is now; None if that is not known.
        mapped_bytes: the memory that is mapped to be written, whether it was written yet or not.
        allocated: what malloc has given out; None if that is not known.
        block: the block of memory that fills; None where no block is known.
    """

    part: Part
    use_bytes: float
    step: int = 0
    steps: int = 0
    is_even: bool = False
    idle_bytes: float = 0.0
    idle: int | None = None
    mapped_bytes: float = 0.0
    allocated: int | None = None
    block: Block | None = None

    @property
    def rest_bytes(self) -> float:
        """What growth in use does not explain."""
        return self.part.rate_bytes - max(0.0, self.use_bytes)

    @property
    def goes_on(self) -> bool:
        """Whether it grows as it will go on: in its first steps torch allocates what it keeps, and
        not evenly."""
        return self.is_even or RANK[self.part.grade] >= RANK["growing"]

    @property
    def is_growth(self) -> bool:
        """Whether resident memory grows for certain, and at least half of that is not in use."""
        part, rest = self.part, self.rest_bytes
        is_certain = self.goes_on and rest > THRESHOLDS.certain_errors * part.error
        is_much = rest >= (1 - THRESHOLDS.explained) * part.rate_bytes > 0
        return is_certain and is_much and rest * self.steps >= THRESHOLDS.least_gain

    @property
    def is_idle(self) -> bool:
        """Whether it is freed memory that malloc keeps."""
        return self.idle_bytes >= THRESHOLDS.explained * self.rest_bytes

    @property
    def is_filling(self) -> bool:
        """Whether memory becomes resident that was mapped before: it is written for the first
        time."""
        before = self.part.rate_bytes - self.mapped_bytes
        return not self.is_idle and before >= THRESHOLDS.explained * self.rest_bytes

    @property
    def outside_bytes(self) -> float:
        """What neither growth in use nor what malloc keeps explains."""
        return self.rest_bytes - max(0.0, self.idle_bytes)

    @property
    def is_outside(self) -> bool:
        """Whether most of it is memory that neither malloc nor Python has, so that a library has it
        from the system: it is mapped as it becomes resident, or lies in a block that is too large
        for malloc's and that no tensor or array has."""
        if self.outside_bytes < THRESHOLDS.explained * self.part.rate_bytes:
            return False
        if not self.is_filling:
            return True
        block = self.block
        if block is None or block.owner is None or block.owner.name or self.allocated is None:
            return False
        return block.size > self.allocated

    def is_foreseen(self, used: tuple[int, int] | None) -> bool:
        """Whether the limit is near enough for growth that may end before.

        Args:
            used: what counts against it now, and the limit; None if they are not known.
        """
        if used is None:
            return False
        return used[1] - used[0] <= THRESHOLDS.foreseen * self.steps * self.part.rate_bytes


@dataclass(frozen=True)
class Evidence:
    """What is known of a program's growth.

    Attributes:
        use: how the memory that holders explain grows: what the process itself has in use.
        beside: "shm" and "device" where they are read. Objects may hold what grows there as well.
        children: the child processes; None, the default, where they are not read.
        holders: who gains, as a census names them.
        step: of the look; None, the default, where it is not known.
        walked: whether the census has looked at this step, or there is none; true by default.
        unlooked: if it has not, why holders of what grows are not looked for yet, in words; "", the
            default, if nothing asks for it.
        looks: how many looks there were.
        unheld: what the growth of use is that has no known holder: C_HEAP, PYTHON, CYCLES, or "",
            the default, if that is not known.
        new_objects: which objects become more meanwhile, in words; "", the default, if that is not
            known.
        c_heap_bytes: bytes a step that C code and holders take together, if `unheld` is C_HEAP.
        stairs: how the heap grows in few large jumps; None, the default, where it does not.
        is_collected: whether Python's collector or the program collects garbage.
        profiles: whether a torch profiler runs.
        declared: bytes a step that the program has declared to fill something, `math.inf` for as
            fast as it comes; and by which name.
        is_shared: whether several threads make the steps, false by default: each has caches of C
            code of its own.
        seconds: how long a step is, where steps are nothing but time; None, the default, for the
            program's own.
        least_rate: the bytes a step below which nothing is reported.
        resident: how resident memory grows; None, the default, where it is not read.
        fills: the blocks that were seen to be written for the first time; none by default.
        used: what counts against the host's limit now, and the limit; None, the default, if they
            are not known.
    """

    use: Part
    beside: Mapping[str, Part] = field(default_factory=dict)
    children: Children | None = None
    holders: Sequence[Holder] = ()
    step: int | None = None
    walked: bool = True
    unlooked: str = ""
    looks: int = 0
    unheld: str = ""
    new_objects: str = ""
    c_heap_bytes: float = 0.0
    stairs: Stairs | None = None
    is_collected: bool = True
    profiles: bool = False
    declared: tuple[float, str] = (0.0, "")
    is_shared: bool = False
    seconds: float | None = None
    least_rate: float = THRESHOLDS.least_rate
    resident: Resident | None = None
    fills: Sequence[Block] = ()
    used: tuple[int, int] | None = None

    def rate_of_fills(self, signal: str) -> float:
        """Bytes a step of a part of memory by which blocks fill."""
        return sum(one.rate_bytes for one in self.fills if one.signal == signal)


def held_of(own: float, growth: float, error: float = math.inf) -> float:
    """Bytes a step of the growth of a part of memory that its holders take together.

    Up to what malloc may add to their own figures, or what several of them may share, all of the
    growth is theirs. What differs more is of something else, and their own figures count the more,
    the more it differs, and the less exactly the growth is known. So no rate jumps where the growth
    does not.

    Args:
        own: what the holders gain by their own figures, in bytes a step.
        growth: of the part, in bytes a step.
        error: its standard error, in bytes a step; infinite, the default: not known.
    """
    if own <= 0 or growth <= 0:
        return own
    more = growth / own - 1
    most = THRESHOLDS.most_added if more > 0 else THRESHOLDS.most_shared
    taken = max(0.0, min(abs(more), 2 * most - abs(more)))
    trust = trust_in(growth, error) if math.isfinite(error) else 1.0
    return own * (1 + trust * math.copysign(taken, more))


def trust_in(rate: float, error: float) -> float:
    """How far a rate with such a standard error is to be trusted: 1 if it is exact, 0 if it is
    noisy."""
    noise = error / rate if rate > 0 else math.inf
    trust = (THRESHOLDS.noisy - noise) / (THRESHOLDS.noisy - THRESHOLDS.exact)
    return min(1.0, max(0.0, trust))


_RAISED = {"suspect": "growing", "growing": "likely", "likely": "likely", "leak": "leak"}


def graded(kind: str, explained: float, *, only_gained: bool, bounded: bool = False) -> str:
    """The grade of growth whose holder a census has named.

    A container that only ever gained, and explains the growth, is evidence: it raises the grade by
    one, and what the leak test does not see yet is `suspect`. It never makes a `leak`, which takes
    a run that is long enough to tell one from what fills.

    Args:
        kind: what the leak test says of the signal; one of GRADES.
        explained: the share of the signal's growth that the census explains, 0 or more.
        only_gained: the holder never got shorter between the looks.
        bounded: the holder has a capacity: then it `fills`.
    """
    if bounded:
        return "fills"
    if explained < THRESHOLDS.explained:
        return "suspect"
    return _RAISED.get(kind, "suspect") if only_gained else at_least_suspect(kind)


def at_least_suspect(grade: str) -> str:
    """The grade, or `suspect` if it is below that."""
    return max(grade, "suspect", key=RANK.__getitem__)


def at_most_growing(holder: Holder, kind: str, grade: str) -> tuple[str, str]:
    """The grade of a holder, and why it is no higher, in words. What may be a buffer that fills, or
    what the program empties while it goes on, is `growing` at most until the leak test calls the
    growth of its part of memory, `kind`, a leak: that takes a run that is long enough."""
    may_end = f"kept until {holder.kept_until}" if holder.kept_until else ""
    may_end = "a buffer that still fills" if holder.may_fill else may_end
    if not may_end or kind == "leak":
        return grade, ""
    return min(grade, "growing", key=RANK.__getitem__), f"a leak or {may_end}"


def keeps_graphs(holders: Sequence[Holder]) -> bool:
    """Whether one of them keeps a graph, whose bytes its size does not show."""
    return any(holder.kind == GRAPH for holder in holders)


# --- the findings ---------------------------------------------------------------------------------


def findings_of(seen: Evidence) -> list[LeakFinding]:
    """What grows, without forecasts: what the process has in use, then its children, then shared
    memory and devices, then what fills; holders with the largest rate first."""
    beside = {name: _without_fills(seen, part) for name, part in seen.beside.items()}
    seen = replace(seen, beside=beside)
    found = _of_use(seen) if seen.walked else _without_a_walk(seen)
    found += [] if seen.children is None else _of_children(seen, seen.children)
    for part in seen.beside.values():
        if not any(one.signal == part.signal for one in found) and _is_suspect(seen, part):
            found.append(of_part(part))
    for signal in {one.signal for one in seen.fills}:
        if seen.rate_of_fills(signal) > seen.declared[0]:
            found.append(_of_fills(seen, signal))
    return _with_sizes(seen, found + _of_resident(seen, found))


def _without_fills(seen: Evidence, part: Part) -> Part:
    """The part without the blocks that fill in it; what is left is noise if it is little."""
    fills = seen.rate_of_fills(part.signal)
    if fills == 0:
        return part
    rest = part.rate_bytes - fills
    return replace(part, rate_bytes=rest if rest > THRESHOLDS.near * fills else 0.0,
                   begun_bytes=0.0)  # fmt: skip


def _of_fills(seen: Evidence, signal: str) -> LeakFinding:
    """All blocks of one part of memory that fill, as one finding: the arrays of a buffer do so
    together."""
    blocks = sorted((one for one in seen.fills if one.signal == signal),
                    key=lambda one: -one.unwritten)  # fmt: skip
    owners = [one.owner for one in blocks if one.owner is not None]
    names = list(dict.fromkeys(one.name for one in owners if one.name))
    since = min(one.since_step or 0 for one in blocks)
    part = Part(signal, seen.rate_of_fills(signal), grade="fills", since_step=since)
    finding = of_part(part, kind=FIRST_WRITES, what=_written(seen, blocks))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return replace(
        finding,
        holder=" and ".join(names[:_MOST_NAMED]) + more,
        library=next((one.library for one in owners if one.library), ""),
        kept_at=next((one.kept_at for one in owners if one.kept_at), ""),
        left_bytes=sum(one.unwritten for one in blocks),
    )


def _written(seen: Evidence, blocks: Sequence[Block]) -> str:
    """`buffer_size 50,000: 1.14 GiB when full, 38.0 MiB written at step 512`."""
    bounds = [one.owner.bound for one in blocks if one.owner is not None and one.owner.bound]
    resident, size = sum(one.resident for one in blocks), sum(one.size for one in blocks)
    written = f"{format_bytes(size)} when full, {format_bytes(resident)} written"
    if seen.step is not None and seen.seconds is None:
        written += f" at step {seen.step:,}"
    return ": ".join([*bounds[:1], written])


def _with_sizes(seen: Evidence, found: Sequence[LeakFinding]) -> list[LeakFinding]:
    """The findings, of which the one with most still to come says how much is in use then, with all
    that fills. Each is marked by whether all of it fits under the limit."""
    fills = [one for one in found if one.left_bytes > 0]
    if not fills or seen.used is None:
        return list(found)
    full, limit = seen.used[0] + sum(one.left_bytes for one in fills), seen.used[1]
    largest = max(fills, key=lambda one: one.left_bytes)
    size, allowed = format_bytes(full), format_bytes(limit)
    then = "then" if len(fills) == 1 else "then, including all that fills,"
    what = f"{then} {size} of {allowed} are in use"
    if full > limit:
        what = f"{then} {size} are in use, and {allowed} are allowed"
    marked = []
    for one in found:
        text = "; ".join(filter(None, [one.what, what])) if one is largest else one.what
        cause = (TOO_LARGE if full > limit else FITS) if one.left_bytes > 0 else one.cause
        marked.append(replace(one, what=text, cause=cause))
    return marked


def _of_resident(seen: Evidence, found: Sequence[LeakFinding]) -> list[LeakFinding]:
    """The growth of resident memory that growth in use does not explain."""
    if seen.resident is None:
        return []
    held = sum(one.rate_bytes for one in found if one.part == "use")
    known = max(0.0, seen.resident.use_bytes, held) + seen.rate_of_fills("resident")
    one = replace(seen.resident, use_bytes=known)
    rest, part = one.rest_bytes, one.part
    if not one.is_growth or rest < seen.least_rate or part.rate_bytes <= seen.declared[0]:
        return []
    if one.is_outside:
        size = "" if one.block is None else format_bytes(one.block.size)
        what = f"in a block of {size} that no tensor or array has" if size else ""
        grade = at_least_suspect(part.grade)
        return [of_part(replace(part, rate_bytes=one.outside_bytes, grade=grade), kind=OUTSIDE,
                        what=what)]  # fmt: skip
    if one.is_filling:
        block = one.block
        if seen.rate_of_fills("resident") > 0:
            return []  # It is what fills as well, such as arrays that are not looked at.
        if block is None:
            return [of_part(replace(part, rate_bytes=rest, grade="fills"), kind=FIRST_WRITES)]
        if block.unwritten < rest * one.steps:
            return []  # It is nearly full, and may be memory that malloc uses again.
        fills = [block._replace(rate_bytes=rest, since_step=part.since_step)]
        return [_of_fills(replace(seen, fills=fills), "resident")]
    if not one.is_foreseen(seen.used):
        return []
    part = replace(part, rate_bytes=rest, grade="fragmentation")
    if not one.is_idle or one.idle is None:
        return [of_part(part, kind=IDLE_HEAP if one.is_idle else "")]
    when = f"at step {one.step:,}" if seen.seconds is None else "now"
    return [of_part(part, kind=IDLE_HEAP, what=f"{format_bytes(one.idle)} {when}")]


def of_part(
    part: Part, *, per: str = "step", kind: str | None = None, what: str = "", cause: str = ""
) -> LeakFinding:
    """The finding that a part of memory grows, without a known holder.

    Args:
        part: how it grows.
        per: "step", the default, or "s": what its rate refers to.
        kind: as of a LeakFinding; None, the default: that of the signal.
        what: what is added, in words; "" by default.
        cause: as of a LeakFinding; "" by default.
    """
    kind = _KINDS.get(part.signal, "") if kind is None else kind
    return LeakFinding(part.grade, part.signal, per, part.all_bytes, since_step=part.since_step,
                       kind=kind, what=what, cause=cause)  # fmt: skip


def _is_suspect(seen: Evidence, part: Part) -> bool:
    return RANK[part.grade] >= RANK["suspect"] and part.all_bytes >= seen.least_rate


def _of_use(seen: Evidence) -> list[LeakFinding]:
    """What grows in use, by who holds it."""
    use = max(0.0, seen.use.rate_bytes)
    bounded = [holder for holder in seen.holders if holder.capacity is not None]
    free = [holder for holder in seen.holders if holder.capacity is None]
    rest = use - sum(holder.rate_bytes for holder in bounded)
    if not free:  # else the rest is theirs
        rest -= min(max(0.0, rest), sum(map(_added_by_malloc, bounded)))
    free = _with_residue(free, rest)
    keeper = _of_c_memory(seen, free, rest)
    free = [keeper if keeper and one.path == keeper.path else one for one in free]
    least = max(seen.least_rate, THRESHOLDS.least_share * use)
    free = [holder for holder in free if holder.rate_bytes >= least]
    own = sum(holder.rate_bytes for holder in free)
    part, growth = _part_of(seen, rest, own)
    held = held_of(own, growth, part.error)
    if seen.stairs is not None and part is seen.use:
        held = min(held, growth)  # What a jump has got lasts until the next one.
    found = [
        replace(
            of_holder("fills", seen.use.signal, holder, holder.rate_bytes, filling_of(holder)),
            left_bytes=_left_of(holder),
        )
        for holder in bounded
    ]
    found += _of_holders(seen, free, part, own / growth if growth > 0 else math.inf, held)
    if own < THRESHOLDS.explained * rest:
        found += [
            of_holder("suspect", seen.use.signal, one, one.rate_bytes, _what_of(seen, one))
            for one in _small(seen, use)
            if one.rises >= THRESHOLDS.steady_rises
        ]
    return found + _unexplained(seen, use, rest - held)


def _without_a_walk(seen: Evidence) -> list[LeakFinding]:
    """What grows in use beyond what was held at the newest walk. The ledger keeps those holders."""
    use = max(0.0, seen.use.rate_bytes)
    if not seen.unlooked:
        return []
    return _unexplained(seen, use, use - sum(holder.rate_bytes for holder in seen.holders))


def _with_residue(holders: Sequence[Holder], use: float) -> list[Holder]:
    """What the nodes of a graph saved for backward is not walked: graphs take what nothing else
    explains, each of them by its nodes."""
    graphs = sum(one.rate_bytes for one in holders if one.kind == GRAPH)
    residue = use - sum(one.rate_bytes for one in holders if one.kind != GRAPH)
    if graphs <= 0 or residue <= graphs:
        return list(holders)
    return [
        replace(one, new_bytes=int(one.new_bytes * residue / graphs)) if one.kind == GRAPH else one
        for one in holders
    ]


def _of_c_memory(seen: Evidence, free: Sequence[Holder], rest: float) -> Holder | None:
    """The container that keeps the objects to which memory in C belongs, or the object of an
    extension that has become longer, and what it gains with that. None if there is no such memory,
    or none or several of these: memory in C that comes evenly is then that of any code."""
    keepers = _keepers_in_c(free)
    residue = rest - sum(one.rate_bytes for one in free)
    least = THRESHOLDS.least_c_heap * seen.least_rate
    if seen.unheld not in (C_HEAP, PYTHON) or len(keepers) != 1 or residue < least:
        return None
    in_c = round(residue * keepers[0].steps)
    return replace(keepers[0], new_bytes=keepers[0].new_bytes + in_c, bytes_in_c=in_c)


def _is_longer(holder: Holder) -> bool:
    """Whether it is an object of an extension that becomes longer, and no container of objects."""
    return bool(holder.extension) and holder.kind == "variable"


def _with_keepers(seen: Evidence, what: str) -> str:
    """What is known of memory in C, in words, with those of which one may keep it: `perhaps kept by
    Scores.losses or Scores.norms`."""
    names = [one.path for one in _keepers_in_c(seen.holders) if one.capacity is None]
    perhaps = f"perhaps kept by {' or '.join(names[:_MOST_NAMED])}" if len(names) > 1 else ""
    return ", ".join(filter(None, [what, perhaps]))


def _keepers_in_c(holders: Sequence[Holder]) -> list[Holder]:
    """The containers that gain objects of an extension; if there are none, the objects of an
    extension that become longer. The first may be among the second, by another name."""
    gain = [one for one in holders if one.extension and one.only_gained and one.new_objects > 0]
    return [one for one in gain if not _is_longer(one)] or gain


def of_holder(grade: str, signal: str, holder: Holder, rate: float, what: str) -> LeakFinding:
    """The finding that a holder gains `rate` bytes a step, `what` in words."""
    return LeakFinding(grade, signal, rate_bytes=rate, since_step=holder.since_step,
                       holder=holder.path, kind=holder.kind, what=what,
                       kept_at=holder.kept_at, library=holder.library, release=holder.release,
                       cause="views" if holder.view_bytes else
                       "extension" if _is_longer(holder) else "")  # fmt: skip


def filling_of(holder: Holder) -> str:
    """`40 of at most 100, 97.7 KiB when full`."""
    now = "" if holder.length is None else f"{holder.length:,} of "
    final = holder.final_bytes
    when_full = f", {format_bytes(final)} when full" if final else ""
    return f"{now}at most {holder.capacity:,}{when_full}"


def _added_by_malloc(holder: Holder) -> float:
    """Bytes a step that malloc may add to the objects of a holder: a page each at most."""
    pages = holder.new_objects * mmap.PAGESIZE / holder.steps
    return min(pages, THRESHOLDS.most_added * holder.rate_bytes)


def _left_of(holder: Holder) -> int:
    """Bytes that a container with a bound is still to get; 0 where that is not known."""
    final, length = holder.final_bytes, holder.length
    if not final or not holder.capacity or length is None:
        return 0
    return max(0, final - final * length // (holder.capacity * holder.containers))


def _what_of(seen: Evidence, holder: Holder) -> str:
    """What comes, as everywhere, and in how many containers of this name."""
    what = sentences.of_new_objects(holder, seen.seconds)
    return f"{what}, in {holder.containers:,} of them" if what and holder.containers > 1 else what


def _c_memory_of(seen: Evidence, holder: Holder, *, others: bool) -> str:
    """`and 236.0 KiB of C memory with each`; "" without. Beside others that gain it may be that of
    any code, and so it may where the objects are not seen that have it."""
    if holder.bytes_in_c == 0:
        return ""
    each = format_bytes(holder.bytes_in_c / holder.new_objects)
    what = "C memory" if seen.unheld == C_HEAP else "Python objects"
    probably = "probably " if others or _is_longer(holder) else ""
    return f"and {probably}{each} of {what} with each"


def _part_of(seen: Evidence, rest: float, own: float) -> tuple[Part, float]:
    """The part of memory in which containers gain `own` bytes a step, and its growth without that
    of containers with a bound. What they hold lies on a device or in shared memory if that grows
    faster than the rest of what is in use, and by about as much as they gain."""
    for name in ("device", "shm"):
        beside = seen.beside.get(name)
        if beside is not None and beside.rate_bytes > max(rest, THRESHOLDS.explained * own):
            return beside, beside.rate_bytes
    return seen.use, rest


def _of_holders(
    seen: Evidence, holders: Sequence[Holder], part: Part, share: float, held: float
) -> list[LeakFinding]:
    """The containers without a bound. By their own figures they gain this share of the growth of a
    part of memory; `held` bytes a step of it are theirs, each container's by its own figure."""
    total = sum(holder.rate_bytes for holder in holders)
    if seen.seconds is not None and RANK[part.grade] < RANK["suspect"]:
        # At any point of a program some container is longer than it was.
        certain = THRESHOLDS.certain_errors * seen.use.error
        most = 1 + THRESHOLDS.most_added
        if seen.use.rate_bytes <= certain or not THRESHOLDS.explained <= share <= most:
            return []
    limit, name = seen.declared
    found: list[LeakFinding] = []
    for holder in sorted(holders, key=lambda one: -one.rate_bytes):
        is_seen = 2 * holder.bytes_in_c <= holder.new_bytes  # else it is concluded
        grade = graded(part.grade, share, only_gained=holder.only_gained and is_seen)
        whole = f"each a view that keeps {format_bytes(holder.view_bytes)}"
        what = [_what_of(seen, holder), _c_memory_of(seen, holder, others=len(holders) > 1)]
        what += [whole] if holder.view_bytes else []
        what += ["in shared memory"] if part.signal == "shm" else []
        grade, still_fills = at_most_growing(holder, part.grade, grade)
        what.append(still_fills)
        if total <= limit:
            grade = "fills"
            what.append(f"declared as {name}")
        rate = holder.rate_bytes * held / total
        found.append(of_holder(grade, part.signal, holder, rate, ", ".join(filter(None, what))))
    return _joined(found)


def _joined(found: Sequence[LeakFinding]) -> list[LeakFinding]:
    """Those of one name as one, such as the entries of a dict that are replaced by larger ones."""
    same: dict[Key, list[LeakFinding]] = {}
    for one in found:
        same.setdefault(one.key, []).append(one)
    return [
        several[0] if len(several) == 1 else _together(name, several)
        for (_, name), several in same.items()
    ]


def _together(name: str, several: Sequence[LeakFinding]) -> LeakFinding:
    since = [one.since_step for one in several if one.since_step is not None]
    return replace(
        several[0],  # the fastest
        holder=f"{name} ({len(several):,} that grow in it)",
        rate_bytes=sum(one.rate_bytes for one in several),
        since_step=min(since, default=None),
        what="",
    )


def of_workers(found: Sequence[LeakFinding]) -> list[LeakFinding]:
    """What workers have found, the worst first. What several of them hold by one name is one
    finding with the sum of their rates."""
    same: dict[tuple[Key, str], list[LeakFinding]] = {}
    for one in sorted(found, key=lambda one: (-RANK[one.grade], -one.rate_bytes)):
        same.setdefault((one.key, one.per), []).append(one)
    joined = []
    for first, *others in same.values():
        several = [first, *others]
        processes = {one.process for one in several}
        if len(processes) > 1:
            first = replace(
                first,
                process=f"{len(processes):,} {WORKERS}",
                rate_bytes=sum(one.rate_bytes for one in several),
                since_step=min(
                    (one.since_step for one in several if one.since_step is not None), default=None
                ),
                what=", ".join(filter(None, (first.what, "in each"))),
            )
        joined.append(first)
    return sorted(joined, key=lambda one: (-RANK[one.grade], -one.rate_bytes))


def _unexplained(seen: Evidence, use: float, residue: float) -> list[LeakFinding]:
    """The growth of use that no container explains, if it is certain by itself. Beside containers
    that explain most of the growth it is a suspect until it is known what it is."""
    limit, _ = seen.declared
    part, grade = replace(seen.use, rate_bytes=residue, begun_bytes=0.0), seen.use.grade
    small = THRESHOLDS.least_c_heap * seen.least_rate
    if residue < (small if seen.is_shared else seen.least_rate) or use <= limit:
        return []
    if residue < (1 - THRESHOLDS.explained) * use:
        certain = THRESHOLDS.certain_errors * seen.use.error
        if 0 < seen.looks <= THRESHOLDS.even_intervals or residue < max(certain, small):
            return []
        grade = min(grade, "suspect", key=RANK.__getitem__)
    if seen.unheld == CYCLES:
        if seen.is_collected:
            return [of_part(replace(part, grade="fills"), kind=CYCLES)]
        part = replace(part, grade=at_least_suspect(grade))
        return [of_part(part, kind=CYCLES, what=COLLECTOR_IS_OFF, cause="collector")]
    if seen.unheld == C_HEAP and residue >= small:
        rate = max(0.0, seen.c_heap_bytes - (use - residue))
        part = replace(part, grade=at_least_suspect(grade), rate_bytes=rate)
        if seen.profiles:
            what, cause = "a torch profiler is running", "profiler"
        else:
            what, cause = seen.new_objects or _jumps_of(seen), "jumps" if seen.stairs else ""
            what = _with_keepers(seen, what)
        return [of_part(part, kind=C_HEAP, what=what, cause=cause)]
    if seen.unheld == PYTHON:
        part = replace(part, grade=at_least_suspect(grade))
        return [of_part(part, kind=PYTHON, what=_with_keepers(seen, seen.new_objects))]
    if RANK[grade] < RANK["suspect"]:
        return []
    if grade == "suspect" and seen.looks < THRESHOLDS.named_looks:
        return []  # The holder is known a few steps later.
    # A census has looked and found no holder: until it does, the work itself may grow.
    if seen.looks >= THRESHOLDS.even_intervals and grade == "growing":
        grade = "suspect"
    part = replace(part, grade=grade, begun_bytes=seen.use.begun_bytes)
    # The fastest of the containers that are too small to be the leak.
    fastest = _small(seen, use)[:1]
    among = [f"including {one.path}: +{format_bytes(one.rate_bytes)}/step" for one in fastest]
    if seen.unlooked:
        among = [seen.unlooked]
    what = ", ".join(filter(None, [_jumps_of(seen), *among]))
    return [of_part(part, what=what, cause=LITTLE if _is_little(seen, part) else "")]


def _is_little(seen: Evidence, part: Part) -> bool:
    """Whether a part of memory would not reach the host's limit in any likely number of steps."""
    if seen.used is None or seen.seconds is not None:
        return False
    return seen.used[0] + part.all_bytes * THRESHOLDS.likely_steps < seen.used[1]


def _jumps_of(seen: Evidence) -> str:
    """`in jumps, the next of 48.0 MiB at about step 513`; "" where it does not grow so."""
    if seen.stairs is None:
        return ""
    size, step = format_bytes(seen.stairs.next_bytes), seen.stairs.next_step
    at = f" at about step {step:,.0f}" if seen.seconds is None else ""
    return f"in jumps, the next of {size}{at}"


def _small(seen: Evidence, use: float) -> list[Holder]:
    """Containers that have gained at each look, and are a small share of the growth; the fastest
    first."""
    if seen.seconds is not None:
        return []  # at any point of a program some container is longer than it was
    small = [
        holder
        for holder in seen.holders
        if seen.least_rate <= holder.rate_bytes < THRESHOLDS.least_share * use
        and holder.capacity is None
        and holder.only_gained
    ]
    return sorted(small, key=lambda one: -one.rate_bytes)


def _of_children(seen: Evidence, children: Children) -> list[LeakFinding]:
    """What workers have found themselves, else the processes by name and number."""
    if children.found:
        return list(children.found)
    part, many, growing = children.part, "", children.growing
    if children.steps_each is not None:
        unit = "steps" if seen.seconds is None else "seconds"
        apart = children.steps_each * (seen.seconds or 1.0)
        many = f"{children.count:,} processes, one more every {apart:,.0f} {unit}"
        part = replace(part, grade=at_least_suspect(part.grade))
    elif not _is_suspect(seen, part):
        return []
    in_use = children.in_use_bytes
    if in_use is not None and in_use < THRESHOLDS.explained * part.rate_bytes:
        return []  # It is growth that has stopped, or freed memory that malloc keeps.
    part = replace(part, rate_bytes=max(0.0, part.rate_bytes))
    if many:
        return [of_part(part, kind="processes", what=many)]
    if growing and growing[0][1] >= THRESHOLDS.one_process * part.rate_bytes:
        return [replace(of_part(part), process=growing[0][0])]
    return [of_part(part, what=", ".join(name for name, _ in growing[:4]))]

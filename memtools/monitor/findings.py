"""From what a look has shown to LeakFindings: what grows, who holds it, how fast, how long is left.

    Points ──► slopes of use, children, shm, device ──┐
    LeakDetector ──► a grade for each signal ─────────┼──► findings_of(Evidence) ──► LeakFinding ...
    GrowthCensus.holders() ──► who only ever gained ──┘            │
                                                                   ▼
                              Standing.add: first_step, grades that a repetition raises, withdrawal

This is the only place where a finding is made. Everything in it is arithmetic on numbers that a
look has brought: nothing is read and nothing is said here. The order is that of certainty:
containers with a bound, containers without one, then what nobody holds, children, shared memory
and devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._census.holders import Holder
from memtools.leak.finding import (
    COLLECTOR_IS_OFF,
    EXACT,
    EXPLAINED,
    RANK,
    Key,
    LeakFinding,
    graded,
    measured,
)
from memtools.monitor.signals import Pace, Points, slope_of

LEAST_RATE = 1024.0  # bytes a step below which nothing is said of growth that nobody holds
LEAST_SHARE = 0.1  # of the growth of use: who takes less is but a hint at who takes the rest
UNEXPLAINED = 0.3  # below that a regular growth is the C heap's
NOISY = 0.2  # standard error of the slope of use by it: beyond that holders' own figures are better
NAMED = 3  # looks after which a census names somebody
STEADY = 4  # looks at which a small part of the growth has gained: then it is named as well
INTERVALS = 4  # between looks, in which a growth of the C heap has to go on
LEAST_OF_C = 4096.0  # bytes a step: below that C code's own caches cannot be told from a leak
EVEN = 0.6  # the smallest of them by the largest
SLOWS = 0.85  # of the growth before, and less: that fills, and is not yet a leak of C code
SLOWED = 0.5  # of the growth when it was first said, and less: that was no leak of C code
CONFIRMED = 3  # looks at which a suspect is there: then it is growing
CONFIRMED_STEPS = 32  # and that they lie apart, at least
CERTAIN = 3.0  # standard errors from which on a slope is no noise
DEARER = 1.5  # so many times as fast as what is in use, and resident memory tells what it costs
DEAREST = 8.0  # but so many times as fast it is something else: blocks of many sizes fragment it
NEAR = 0.15  # a slope of use that differs by less from what holders gain is explained by them
LEAST_POINTS = 3  # of a slope
ALIKE = 1.25  # two rates of one part of memory that differ by less are of the same growth
FASTER = 2.5  # between two looks: what becomes faster than that is something else
STILL = 0.25  # of its rate: growth that is below it over the last steps has ended
ENDED_STEPS, ENDED_SHARE = 64, 0.1  # those last steps: so many, or so much of the run
CLEARED = 0.5  # of all that it has gained: a fall by less is garbage that was collected
GRAPH = "autograd graph"
C_HEAP = "C heap"
_EXPLAINS = (C_HEAP, "cycles")  # kinds of findings that say more than that something grows
_HELD = ("device", "shm")  # parts beside use of which objects of the program may hold what grows
OF_PROCESS = ("use", *_HELD)  # parts that a census looks at


@dataclass(frozen=True)
class Evidence:
    """What is known after a look.

    Attributes:
        step: of the look.
        first: the step of the first look of the run.
        looks: the steps of the looks so far, without those that only watch standing findings.
        points: the signals at all looks.
        grades: what the leak test says, by signal; "use" for the heap and Python's blocks.
        walked: whether a census has looked at this step, or there is none.
        holders: what it names.
        unheld: what growth of use is that no Python object holds: "C heap", "cycles", or "" where
            that is not known.
        is_collected: whether somebody collects garbage: Python's collector, or the program.
        profiles: whether a torch profiler runs.
        declared: bytes a step that the program has declared to fill something, `math.inf` for as
            fast as it comes; and by which name.
        children: how many processes there are now, and the names of those that grow with their
            bytes a step, the fastest first.
    """

    step: int
    first: int
    looks: Sequence[int]
    points: Points
    grades: Mapping[str, str]
    walked: bool = True
    holders: Sequence[Holder] = ()
    unheld: str = ""
    is_collected: bool = True
    profiles: bool = False
    declared: tuple[float, str] = (0.0, "")
    children: tuple[int, Sequence[tuple[str, float]]] = (0, ())
    fed: Sequence[LeakFinding] = ()  # what workers have found
    #: of a step, where steps are nothing but time; None: the program's own
    seconds: float | None = None
    #: by part, where the leak test sees growth: since when, and bytes a step. It has readings
    #: between the looks too
    tested: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """Slopes are of the points from here on: the newer three quarters of the run."""
        return max(self.first, self.step // 4)

    def pace(self, name: str) -> float:
        """Bytes a step of a signal, as it goes on now."""
        return self.points.pace(name, self.since).rate

    def late(self, name: str) -> tuple[float, int | None]:
        """(bytes a step, since when) of growth that nobody has a name for. What has begun since the
        look before is in one point alone: the leak test's own readings tell how fast that is."""
        rises, rate = self.points.rises(name), self.pace(name)
        since, tested = self.tested.get(name, (0, 0.0))
        if len(self.looks) > 1 and since > max(self.since, self.looks[-2] - CONFIRMED_STEPS):
            return max(rate, tested), since
        return rate, rises[0] if rises else None


def findings_of(seen: Evidence) -> list[LeakFinding]:
    """What a look has shown, without forecasts; the largest rate of each part first."""
    found = _of_process(seen) if seen.walked else []
    found += _of_children(seen)
    for signal, kind in (("shm", "shared memory"), ("device", "")):
        if not any(one.signal == signal for one in found):
            found += _of_signal(seen, signal, kind)
    return found


def _of_process(seen: Evidence) -> list[LeakFinding]:
    """What grows in use, by who holds it."""
    use = max(0.0, _use_of(seen))
    bounded = [holder for holder in seen.holders if is_bounded(holder)]
    free = [holder for holder in seen.holders if not is_bounded(holder)]
    filled = sum(map(rate_of, bounded))
    free = _with_residue(free, use - filled)
    free = [holder for holder in free if rate_of(holder) >= LEAST_SHARE * use]
    total = sum(map(rate_of, free))
    found = [_filling(seen, holder) for holder in bounded]
    found += _held(seen, free, use - filled, total)
    if total < EXPLAINED * (use - filled):
        found += _beside(seen, use)
    return found + _unheld(seen, use, use - filled - total)


def _use_of(seen: Evidence) -> float:
    """Bytes a step of use as they come now. The slope of use has in it what a program makes once,
    as it warms up; holders have not. Where the two differ, and the newer points lie on a slope that
    the holders explain, that is the one."""
    use, since, _ = seen.points.pace("use", seen.since)
    held = sum(map(rate_of, seen.holders))
    if held < LEAST_RATE or keeps_graphs(seen.holders):
        return use
    points = seen.points.series("use", since)
    while abs(use - held) > NEAR * held and len(points) > LEAST_POINTS:
        points = points[1:]
        newer = slope_of(points)
        if abs(newer - held) <= NEAR * held:
            return newer
    return use


def rate_of(holder: Holder) -> float:
    """Bytes a step that it gains."""
    return holder.new_bytes / max(1, holder.steps)


def is_bounded(holder: Holder) -> bool:
    """Whether it ends to grow by itself."""
    return holder.capacity is not None


def keeps_graphs(holders: Sequence[Holder]) -> bool:
    """Whether one of them keeps what its size does not tell."""
    return any(holder.kind == GRAPH for holder in holders)


def _with_residue(holders: Sequence[Holder], use: float) -> list[Holder]:
    """What the nodes of a graph saved for backward is not walked: graphs take what nothing else
    explains, each of them by its nodes."""
    graphs = sum(rate_of(one) for one in holders if one.kind == GRAPH)
    residue = use - sum(rate_of(one) for one in holders if one.kind != GRAPH)
    if graphs <= 0 or residue <= graphs:
        return list(holders)
    return [
        replace(one, new_bytes=int(one.new_bytes * residue / graphs)) if one.kind == GRAPH else one
        for one in holders
    ]


def _filling(seen: Evidence, holder: Holder) -> LeakFinding:
    return LeakFinding(
        "fills",
        _of_use(seen),
        rate_bytes=rate_of(holder),
        since_step=getattr(holder, "since_step", None),
        holder=holder.path,
        kind=holder.kind,
        what=filling_of(holder),
    )


def filling_of(holder: Holder) -> str:
    """`40 of at most 100, 97.7 KiB when full`."""
    if holder.capacity is None:
        return holder.what
    now = "" if holder.length is None else f"{holder.length:,} of "
    final = holder.final_bytes
    when_full = f", {format_bytes(final)} when full" if final else ""
    return f"{now}at most {holder.capacity:,}{when_full}"


def _what_of(seen: Evidence, holder: Holder) -> str:
    """What comes, as everywhere, and in how many containers of this name."""
    what = sentences.of_new_objects(holder, seen.seconds)
    return f"{what}, in {holder.containers:,} of them" if what and holder.containers > 1 else what


def _part_held(seen: Evidence, use: float, total: float) -> str:
    """The part of memory in which holders gain `total` bytes a step: what they hold lies on a
    device or in shared memory where that grows faster than what is in use, and by about as much."""
    for part in _HELD:
        if seen.pace(part) > max(use, EXPLAINED * total):
            return part
    return "use"


def _held(seen: Evidence, holders: Sequence[Holder], use: float, total: float) -> list[LeakFinding]:
    """The containers without a bound. Where together they explain the growth of use, each gets its
    part of that: what they weigh themselves leaves out what malloc adds."""
    part = _part_held(seen, use, total)
    signal = _of_use(seen) if part == "use" else part
    slope = use if part == "use" else seen.pace(part)
    share = total / slope if slope > 0 else math.inf
    pace = seen.points.pace(part, seen.since)
    is_measured = measured(share, pace.rate, pace.error) and not _is_noisy(pace)
    scale = 1 / share if is_measured else 1.0
    base = seen.grades.get(part, "quiet")
    limit, name = seen.declared
    found: list[LeakFinding] = []
    if seen.seconds is not None and RANK[base] < RANK["suspect"] and not _is_certain(seen, share):
        return found  # at any point of a program some container is longer than it was
    for holder in sorted(holders, key=rate_of, reverse=True):
        raised = graded(base, share, only_gained=getattr(holder, "only_gained", True))
        what = _what_of(seen, holder)
        if part == "shm":
            what = ", ".join(text for text in (what, "in shared memory") if text)
        if total <= limit:
            raised = "fills"
            what = ", ".join(part for part in (what, f"declared as {name}") if part)
        found.append(
            LeakFinding(
                raised,
                signal,
                rate_bytes=rate_of(holder) * scale,
                since_step=getattr(holder, "since_step", None),
                holder=holder.path,
                kind=holder.kind,
                what=what,
            )
        )
    return _joined(found)


def _joined(found: Sequence[LeakFinding]) -> list[LeakFinding]:
    """Those of one name as one: of the entries of a dict, for example, that are made anew."""
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


def _is_noisy(pace: Pace) -> bool:
    """Whether the growth of a part of memory is known so badly that what holders weigh themselves
    tells it better: where batches have any length, for example."""
    return math.isfinite(pace.error) and pace.error > NOISY * pace.rate


def _is_certain(seen: Evidence, share: float) -> bool:
    """Whether use grows, whatever its noise, by what holders gain."""
    pace = seen.points.pace("use", seen.since)
    return pace.rate > CERTAIN * pace.error and measured(share, pace.rate)


def _unheld(seen: Evidence, use: float, residue: float) -> list[LeakFinding]:
    """Growth of use that no container explains."""
    limit, _ = seen.declared
    grade = seen.grades.get("use", "quiet")
    if residue < max(LEAST_RATE, (1 - EXPLAINED) * use) or use <= limit:
        return []
    signal = _of_use(seen)
    rate, first = seen.late("use")
    suspected = grade if RANK[grade] >= RANK["suspect"] else "suspect"
    if seen.unheld == "cycles":
        what = "" if seen.is_collected else COLLECTOR_IS_OFF
        grade = "fills" if seen.is_collected else suspected
        return [LeakFinding(grade, signal, rate_bytes=residue, since_step=first, kind="cycles",
                            what=what)]  # fmt: skip
    if seen.unheld == C_HEAP and residue >= LEAST_OF_C:
        what = "a torch profiler is running" if seen.profiles else ""
        residue, grade = _cost_of_c(seen, use - residue), suspected
        return [
            LeakFinding(grade, signal, rate_bytes=residue, since_step=first, kind=C_HEAP, what=what)
        ]
    if RANK[grade] < RANK["suspect"]:
        return []
    if grade == "suspect" and seen.walked and len(seen.looks) < NAMED:
        return []  # who holds it is known a few steps later
    # A census has looked and found nobody: as long as that is so, it may be work that grows.
    if len(seen.looks) >= INTERVALS and grade == "growing":
        grade = "suspect"
    residue += max(0.0, rate - max(use, seen.pace("use")))
    what = _among(seen, use)
    return [LeakFinding(grade, signal, rate_bytes=residue, since_step=first, what=what)]


def _among(seen: Evidence, use: float) -> str:
    """The container that gains the most of those that are too small a part of the growth to be what
    leaks, if it has gained at each look: `among it list Trainer.losses: +3.0 KiB/step`. "" where
    there is none."""
    small = _small(seen, use)
    if not small:
        return ""
    return f"among it {small[0].path}: +{format_bytes(rate_of(small[0]))}/step"


def _small(seen: Evidence, use: float) -> list[Holder]:
    """Containers that have gained at each look, and are a small part of the growth; the fastest
    first."""
    if seen.seconds is not None:
        return []  # at any point of a program some container is longer than it was
    small = [
        holder
        for holder in seen.holders
        if LEAST_RATE <= rate_of(holder) < LEAST_SHARE * use
        and not is_bounded(holder)
        and getattr(holder, "only_gained", True)
    ]
    return sorted(small, key=rate_of, reverse=True)


def _beside(seen: Evidence, use: float) -> list[LeakFinding]:
    """Where most of the growth is nobody's, such as that of a library's caches: who has gained at
    so many looks that it leaks, however much the rest grows."""
    return [
        LeakFinding(
            "suspect", _of_use(seen), rate_bytes=rate_of(holder), since_step=holder.since_step,
            holder=holder.path, kind=holder.kind, what=_what_of(seen, holder),
        )
        for holder in _small(seen, use)
        if holder.rises >= STEADY
    ]  # fmt: skip


def is_even(seen: Evidence, signal: str = "use") -> bool:
    """Whether a signal grew in each of the last intervals between looks by about the same: what C
    code keeps does so; a cache of it that fills gets slower, and work that varies does not."""
    return len(_even(seen, signal)) >= INTERVALS and not _slows_down(seen, signal)


def _slows_down(seen: Evidence, signal: str) -> bool:
    """Whether the later intervals between looks, of those that count, show clearly less than the
    earlier ones: the kernels of a library come one for each new shape, and these become fewer."""
    points = [point for point in seen.points.series(signal) if point[0] >= seen.since]
    rates = [(b - a) / (t - s) for (s, a), (t, b) in pairwise(points)]
    half = len(rates) // 2
    if half < 2:
        return False
    return median(rates[half:]) < SLOWS * median(rates[:half])


def _even(seen: Evidence, signal: str) -> list[tuple[int, int]]:
    """(step, bytes) of the newest looks between which a signal grew by about the same a step. Empty
    where it did not grow in one of the last intervals."""
    at = dict(seen.points.series(signal))
    known = [(step, at[step]) for step in seen.looks if step in at]
    rates = [(b - a) / (t - s) for (s, a), (t, b) in pairwise(known)]
    if len(rates) < INTERVALS or min(rates[-INTERVALS:]) <= 0:
        return []
    begin = len(rates) - 1
    while begin > 0 and 0 < EVEN * max(rates[begin - 1 :]) <= min(rates[begin - 1 :]):
        begin -= 1
    return known[begin:]


def _cost_of_c(seen: Evidence, held: float) -> float:
    """Bytes a step that C code takes, where others hold so many of what grows in use. Small blocks
    that stay keep what is freed around them from being used again: where resident memory goes on
    growing faster for certain, that is what it costs."""
    newest = _even(seen, "use")
    use = max(0.0, min(seen.pace("use"), slope_of(newest)) if len(newest) > 2 else seen.pace("use"))
    resident = _even(seen, "rss")
    cost = slope_of(resident) if len(resident) >= INTERVALS else 0.0
    return max(0.0, (cost if DEARER * use <= cost <= DEAREST * use else use) - held)


def _first_rise(seen: Evidence, signal: str) -> int | None:
    rises = seen.points.rises(signal)
    return rises[0] if rises else None


def _of_use(seen: Evidence) -> str:
    heap, python = seen.pace("heap"), seen.pace("python")
    return "python" if python > heap else "heap"


def _of_children(seen: Evidence) -> list[LeakFinding]:
    """What workers have found themselves, else the processes by name and number."""
    if seen.fed:
        return list(seen.fed)
    rate, (count, growing) = seen.pace("children"), seen.children
    counts = seen.points.series("count", seen.since)
    many = ""
    if len(counts) > 2 and counts[-1][1] > counts[0][1]:
        more = [b - a for (_, a), (_, b) in pairwise(counts)]
        steps = (counts[-1][0] - counts[0][0]) / (counts[-1][1] - counts[0][1])
        if min(more) >= 0 and sum(1 for n in more if n) >= 2:
            unit = "steps" if seen.seconds is None else "seconds"
            apart = steps * (seen.seconds or 1.0)
            many = f"{count:,} processes, one more every {apart:,.0f} {unit}"
    grade = seen.grades.get("children", "quiet")
    if RANK[grade] < RANK["suspect"]:
        if not many:
            return []
        grade = "suspect"
    if rate < LEAST_RATE and not many:
        return []
    process, what = "", many
    if not many and growing and growing[0][1] >= 0.8 * rate:
        process, what = growing[0][0], ""
    elif not many:
        what = ", ".join(name for name, _ in growing[:4])
    return [
        LeakFinding(
            grade, "children", rate_bytes=max(0.0, rate), what=what,
            kind="processes" if many else "children",
            process=process, since_step=_first_rise(seen, "children"),
        )
    ]  # fmt: skip


def _of_signal(seen: Evidence, signal: str, kind: str) -> list[LeakFinding]:
    grade, (rate, since) = seen.grades.get(signal, "quiet"), seen.late(signal)
    if RANK[grade] < RANK["suspect"] or rate < LEAST_RATE:
        return []
    return [LeakFinding(grade, signal, rate_bytes=rate, kind=kind, since_step=since)]


# --- from one look to the next --------------------------------------------------------------------


@dataclass
class Stand:
    """A finding that stands, and how often looks have shown it."""

    finding: LeakFinding
    looks: int = 1
    missed: int = 0
    #: bytes a step by which its part of memory grew when it was first said; 0: not known yet
    pace: float = 0.0
    #: its bytes a step as the newest walk has found them; 0 until there is one
    rate: float = 0.0

    def confirmed(self, grade: str, steps: int) -> str:
        """What was suspected for so many steps, and was seen again and again, is growing."""
        if grade != "suspect" or not self.finding.kind or self.looks < CONFIRMED:
            return grade
        return "growing" if steps >= CONFIRMED_STEPS else grade


class Standing:
    """The findings that stand. Grades rise and stay, until growth has ended."""

    def __init__(self) -> None:
        self._all: dict[Key, Stand] = {}
        self._paces: dict[str, float] = {}  # of each part, when the rates were made

    def findings(self) -> tuple[LeakFinding, ...]:
        """The worst first: by the grade, then by the rate."""
        found = [stand.finding for stand in self._all.values()]
        return tuple(sorted(found, key=lambda f: (-RANK[f.grade], -f.rate_bytes)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def has_holders(self) -> bool:
        """Whether a holder of this process's memory is among them, as a census names it."""
        return any(one.holder and one.part in OF_PROCESS for one in self.findings())

    def add(
        self, step: int, found: Sequence[LeakFinding], *, walked: bool = True
    ) -> tuple[list[LeakFinding], list[LeakFinding]]:
        """What a look has shown. Returns those of which a word is due, new ones and those of a
        higher grade; and those that end: what nobody was known to hold, now that somebody is, and
        what was the C heap's as long as it grew evenly."""
        news, named = [], {one.key: one for one in found if walked or not self._is_held(one)}
        for key, one in named.items():
            old = self._all.get(key)
            if old is None:
                made_at = one.made_at or self._made_at(one)
                stand = self._all[key] = Stand(replace(one, first_step=step, made_at=made_at))
                news.append(stand.finding)
                continue
            before, old.looks, old.missed = old.finding, old.looks + 1, 0
            first = before.first_step if before.first_step is not None else step
            grade = one.grade if "fills" in (one.grade, before.grade) else _higher(before, one)
            grade = old.confirmed(grade, step - first)
            since = before.since_step if before.since_step is not None else one.since_step
            old.finding = replace(
                one, grade=grade, first_step=first, since_step=since,
                made_at=one.made_at or before.made_at,
            )  # fmt: skip
            if grade != before.grade:
                news.append(old.finding)
        replaced = []
        explained = {one.part for one in found if one.holder or one.kind in _EXPLAINS}
        nameless = {one.part for one in found if _is_nameless(one)}
        for key, stand in list(self._all.items()):
            if key in named:
                continue
            if not walked and stand.finding.part in OF_PROCESS:
                continue  # nobody has looked
            stand.missed += 1
            others = nameless if stand.finding.kind == C_HEAP else explained
            if _is_nobodys(stand.finding) and stand.finding.part in others:
                replaced.append(self._end(key))
        return news, replaced

    def _is_held(self, one: LeakFinding) -> bool:
        """Whether it says that a part grows which somebody is known to hold: where nobody has
        looked, that still holds."""
        if one.key in self._all or not _is_nameless(one) or one.part not in OF_PROCESS:
            return False
        return any(
            stand.finding.holder and stand.finding.part == one.part for stand in self._all.values()
        )

    def _made_at(self, one: LeakFinding) -> str:
        """Where growth was made that nobody was known to hold, and that is as fast as what has got
        a name now: it is the same."""
        for stand in self._all.values():
            other = stand.finding
            if _is_nobodys(other) and other.part == one.part and not one.process:
                slower, faster = sorted((other.rate_bytes, one.rate_bytes))
                if faster <= ALIKE * slower:
                    return other.made_at
        return ""

    def go_on(self, points: Points, step: int) -> list[LeakFinding]:
        """A look without a walk: what was named goes on where memory does. Returns those of a
        higher grade."""
        news = []
        for stand in self._all.values():
            finding = stand.finding
            if not finding.holder or finding.part not in OF_PROCESS or finding.first_step is None:
                continue
            recent = points.recent(finding.part, CONFIRMED_STEPS)
            if stand.missed or recent is None or recent < EXPLAINED * self._seen_of(finding):
                continue
            stand.looks += 1
            grade = stand.confirmed(finding.grade, step - (finding.first_step or 0))
            if grade != finding.grade:
                stand.finding = replace(finding, grade=grade)
                news.append(stand.finding)
        return news

    def rated(self, paces: Mapping[str, float]) -> None:
        """Rates were made while the parts of memory grew by so many bytes a step."""
        self._paces.update(paces)
        for stand in self._all.values():
            if stand.finding.part in paces:
                stand.pace = stand.pace or paces[stand.finding.part]
                stand.rate = stand.finding.rate_bytes

    def repace(self, paces: Mapping[str, float]) -> bool:
        """Between two walks: what was named grows as much faster or slower as its part of memory
        does since the newest of them. What a worker holds keeps the rate that the worker itself has
        measured: the memory of children has in it what they take for their own looks, and give
        back. Returns whether something has become so much faster that somebody else may hold it."""
        is_another = False
        for part, now in paces.items():
            before = self._paces.get(part, 0.0)
            if before < LEAST_RATE:
                continue
            is_another |= now > before / EXPLAINED**0.5
            if now > FASTER * before:
                continue  # somebody else: the next walk tells
            share = now / before if now >= before / FASTER else 1.0  # what ends is judged by end()
            for stand in self._all.values():
                one = stand.finding
                if _is_of_worker(one) or one.part != part or not stand.rate:
                    continue  # one without a rate of a walk keeps what its own look has measured
                if one.holder and stand.rate < EXPLAINED * before:
                    continue  # the rest of its part tells nothing of it
                if not stand.missed and one.grade != "fills":
                    stand.finding = replace(one, rate_bytes=stand.rate * share)
        return is_another

    def _seen_of(self, finding: LeakFinding) -> float:
        """Bytes a step of it that its part of memory shows: what C code costs may be more."""
        if finding.kind != C_HEAP:
            return finding.rate_bytes
        return min(finding.rate_bytes, self._paces.get(finding.part, math.inf))

    def end(self, points: Points, step: int) -> list[LeakFinding]:
        """The findings that no longer grow, which stand no more."""
        over = []
        for key, stand in list(self._all.items()):
            if self._has_ended(stand, points, step):
                over.append(self._end(key))
        return over

    def _has_ended(self, stand: Stand, points: Points, step: int) -> bool:
        finding = stand.finding
        if _is_of_worker(finding):
            return stand.missed >= 2
        name = finding.part
        rises = points.rises(name)
        apart = [b - a for a, b in pairwise(rises)]
        window = max(ENDED_STEPS, ENDED_SHARE * step, 2 * max(apart[-4:], default=0))
        known = points.steps[-1] - points.steps[0]
        if known < CONFIRMED_STEPS:
            return False
        is_held = bool(finding.holder) and not stand.missed  # as the newest walk has seen
        since = finding.since_step if finding.since_step is not None else points.steps[0]
        garbage = CLEARED * finding.rate_bytes * (step - since) if is_held else 0
        recent = points.recent(name, min(int(window), known), but_a_fall=garbage)
        if recent is None:
            return False
        least = max(LEAST_RATE / 4, STILL * self._seen_of(finding))
        if is_held and self._is_lost_in_noise(finding, points, step):
            return False  # the next walk tells
        if recent < least or (finding.kind == C_HEAP and recent < SLOWED * stand.pace):
            return True
        return stand.missed >= 2 or (stand.missed == 1 and recent < 2 * least)

    @staticmethod
    def _is_lost_in_noise(finding: LeakFinding, points: Points, step: int) -> bool:
        """Whether its part of memory varies so much that it may go on at its rate unseen."""
        pace = points.pace(finding.part, max(points.steps[0], step // 4))
        if not math.isfinite(pace.error) or pace.error <= EXACT * finding.rate_bytes:
            return False
        return abs(pace.rate - finding.rate_bytes) <= CERTAIN * pace.error

    def _end(self, key: Key) -> LeakFinding:
        return replace(self._all.pop(key).finding, over=True)

    def present(self) -> tuple[LeakFinding, ...]:
        """Those that the newest look has shown, without those that may be about to end."""
        return tuple(stand.finding for stand in self._all.values() if stand.missed == 0)

    def each(self, change: Mapping[Key, LeakFinding]) -> None:
        """Take the place of findings that stand by others of the same key."""
        for key, finding in change.items():
            if key in self._all:
                self._all[key].finding = finding


def _is_nameless(finding: LeakFinding) -> bool:
    """Whether it says that something grows, and not what."""
    return not finding.holder and finding.kind in ("", "children", "shared memory")


def _is_nobodys(finding: LeakFinding) -> bool:
    """Whether nobody is known to hold it."""
    return _is_nameless(finding) or finding.kind == C_HEAP


def _is_of_worker(finding: LeakFinding) -> bool:
    """Whether a worker has looked for itself, and found it; else it is seen from outside."""
    return bool(finding.process and finding.holder)


def _higher(a: LeakFinding, b: LeakFinding) -> str:
    return max(a.grade, b.grade, key=RANK.__getitem__)

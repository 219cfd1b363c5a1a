"""Where it was made: the lines of the program whose memory stays, found by tracing a few steps.

    LeakWatch.look ── a finding stands, and its line is not known ──► Tracing.begin
          │ at the end of each step
          └──► Tracing.turn ──► TraceWindow: what lives of what the traced steps have made
                                     ├─ Python's and NumPy's blocks: tracemalloc, on for these steps
                                     ├─ torch's blocks: its own reports (memtools._core.Blocks)
                                     └─ the C heap, where these explain nothing: heaplines.py
                                                  │ by line, at three boundaries
                                                  ▼
                  places_of(findings, sites) ──► made_at of each finding that they explain

A line is named if what lives of it grows from the first boundary to the last, and if the lines
together make 0.5 to 1.5 times the growth that the finding tells. What every step makes and lets go
of is there at both boundaries, and cancels; so does a buffer that is made anew, but for what it has
become longer. Where the lines do not explain the growth nothing is said of it.

Where a program makes no steps, a tick of time is one, on a thread of ours, and Progress
(progress.py) tells how long a window is to be and how much slower the program gets.

The program's own tracemalloc is left alone. Ours is off after the last boundary, when the monitor
stops, in a forked child, and where a traced step does not end in time.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from memtools import _core
from memtools._base import process
from memtools._base.libraries import USER, owner_of
from memtools._leak.finding import RANK, Key, LeakFinding
from memtools._leak.judge import C_HEAP, GRAPH
from memtools._monitor.heaplines import HEAP_LINES, SLOWEST, HeapLines
from memtools._monitor.places import Living, Place, Site, name_of, place_of
from memtools._monitor.progress import MOST_TABLES, Progress
from memtools._monitor.unheard import unheard

PROBE = 1  # step, traced by one frame, that tells how many frames the program can bear
#: (frames that tracemalloc keeps, how many times what one frame costs they cost at most): the line
#: of an outer frame takes long to find where its code is long. Four do not reach the user's line in
#: a deep library; and as steps differ, one frame gets some room, too
FRAMES = ((16, 8.0), (4, 6.0), (1, 1.5))
#: times as long as a plain one: a step that is slower by one frame is not traced on
SLOWEST_PROBE = 1 + (SLOWEST - 1) / FRAMES[-1][1]
DEAR_SHARE = 0.05  # of a tick: what is in use is read at each of them
SHORT_NS = 1_000_000  # a step that is shorter counts as that: its time is mostly noise
PLAIN = 3  # newest steps, whose shortest tells how long a plain one takes: one may collect garbage
PARTS, PARTS_BY_TIME = 2, 6  # of a window: at any moment blocks live that are let go of soon
FALLS = 0.1  # of its growth: what lives of a line that is kept does not become less
FIRST = 1  # step after which what lives is noted first: by then a buffer has been made anew
TRACED = 2  # steps from there on
LONGER = 8  # where the growth of these explained nothing
ONE_LUMP = 60  # where the growth came at once, and nobody knows when it comes again
LEAST_OF_LUMPS, MOST_OF_LUMPS = 7, 60  # steps
PERIODS = 2.2  # of lumps, that a window has in it
READ_STEPS = 40  # in which growth is read at each step, to see whether it comes in lumps
TWICE = 2.0  # as large as the lump before: buffers get larger by a part, or by themselves
LUMP_SHARE, LUMP_TIMES = 0.5, 2.5  # of the largest rise, and of the mean of all: then it is a lump
ATTEMPTS = 4  # for one finding
#: of them, counted from 0, that ask for the lines of the C heap: where no object holds what grows
#: this comes soon, as what tracemalloc sees is objects'
OF_C_HEAP, OF_OTHERS = (1, 3), (3,)
MOST_WINDOWS = 8  # of a run
APART = 16  # steps between two windows, and before what nobody holds is traced: it may get a name
LEAST, MOST = 0.5, 1.5  # of a finding's rate, which the lines that explain it make together
#: of a graph's rate: its nodes take as much again as the tensors that they keep, and are no blocks
LEAST_OF_GRAPH = 0.25
ENOUGH = 0.9  # of it, from which on no further line is looked for
ALIKE = 1.5  # two rates that differ by less may be of the same
SECOND = 0.2  # of what the lines make together, from which on a second one is said
EVEN = 0.25  # the smaller of the two halves of a window by the larger, where growth is even
APPEARED = 0.1  # of what lives of a line half-way: less before that is not the block that is larger
OF_A_BLOCK = 512  # bytes that a tensor's own objects take beside its storage
MOST_SITES = 256  # of torch's, the largest
LONGEST_S = 60.0  # that a traced step may take: then its window ends, whatever the program does
FIRST_COST_NS = 30_000_000  # what a window is taken to cost before one was opened
MOST_NS = 500_000_000  # that all windows of a run may take of the processor at their boundaries

PROGRAMS_OWN = "the program runs tracemalloc itself"
TOO_SLOW = f"tracemalloc would make a step take more than {SLOWEST:.0f} times as long"
SLOWS = f"tracemalloc would make the program more than {SLOWEST:.0f} times as slow"
TOO_MANY = "the program makes more blocks than can be listed without a long pause"
UNKNOWN = "it cannot be told how much slower tracemalloc makes the program"
TOO_DEAR = "it takes too long to read what is in use five times a second"
CUT = "the window was closed before its end"
STOPPED = "the program has stopped tracemalloc, or started its own"
TRACEMALLOC, TORCH, DISPATCH = "tracemalloc", "torch's reports", "a dispatch mode of torch"


class BlocksLike(Protocol):
    """What a window needs of memtools._core.Blocks, which hears of torch's blocks on the host."""

    @property
    def is_on(self) -> bool: ...
    def trace(self, on: bool) -> None: ...
    def turn(self) -> int: ...
    def sites(self, first: int, last: int) -> list[tuple[int, int, int]]: ...
    def frames(self, site: int) -> tuple[tuple[str, int, str], ...]: ...
    def site_of(self, address: int, /) -> int | None: ...


class ReportsLike(Protocol):
    """What a run has of them: memtools._blocks.reports.HostBlocks."""

    @property
    def blocks(self) -> BlocksLike: ...
    @property
    def reason(self) -> str: ...
    def join(self) -> bool: ...
    def in_use(self) -> int | None: ...
    def dispatched(self) -> BlocksLike | None: ...


# --- what lives of what was made ------------------------------------------------------------------


class _PythonBlocks:
    """Python's and NumPy's blocks, by tracemalloc.

    Args:
        blocks: of torch; storages that are not among them count as well. None, the default: none.
    """

    name, stopped = TRACEMALLOC, STOPPED

    def __init__(self, blocks: BlocksLike | None = None) -> None:
        import tracemalloc

        self._blocks = blocks
        self._module: Any = tracemalloc
        self._is_on = False
        self._frames = 1
        self._start: Callable[..., Any] = tracemalloc.start
        self._is_too_slow = False

    def begin(self) -> str:
        """Start tracing, by one frame; "" or why not."""
        if self._module.is_tracing():
            return PROGRAMS_OWN
        self._start = self._module.start
        return "" if self._begin(1) else PROGRAMS_OWN

    def _begin(self, frames: int) -> bool:
        """False where the program, on another thread, has started its own meanwhile."""
        self._module.start = self._hand_over
        if self._module.is_tracing():
            self._module.start = self._start
            return False
        self._frames, self._is_on = frames, True  # first: a child forked right now turns it off
        self._start(frames)
        return True

    def go_on(self, slower: float) -> str:
        """Begin anew with as many frames as the program can bear, where a step took so many times
        as long with one; "" or why not."""
        if self._is_too_slow:
            return TOO_SLOW
        if not self.is_ours:
            return STOPPED
        self.end()
        for frames, times in FRAMES:
            if 1 + times * max(0.0, slower - 1) <= SLOWEST:
                return "" if self._begin(frames) else STOPPED
        return TOO_SLOW

    def _hand_over(self, *args: Any, **kwargs: Any) -> None:
        """What the program starts while ours is on is the program's from here on."""
        self.end()
        self._start(*args, **kwargs)

    @property
    def is_ours(self) -> bool:
        """Whether what is traced now was started here."""
        module = self._module
        is_on = self._is_on and module.is_tracing()
        return is_on and bool(module.get_traceback_limit() == self._frames)

    def living(self, is_last: bool) -> Living | None:
        """None where the program has stopped it, or started its own. Storages that torch's reports
        do not tell are looked for at the last boundary alone, as that takes long."""
        if not self.is_ours:
            return None
        found: Living = {}
        # Snapshot.statistics() makes an object for each block: 20 times as long, while it is on.
        for stack, size in _core._traced():
            self._add(found, [Place(*frame) for frame in stack], size)
        if not self.is_ours:  # stopped on another thread, meanwhile
            return None
        heard = self._blocks
        if is_last and heard is not None and heard.is_on:
            for frames, size in unheard(lambda address: heard.site_of(address) is not None):
                self._add(found, [Place(*frame) for frame in frames], size)
        return found

    def _add(self, found: Living, frames: Sequence[Place], size: int) -> None:
        """Of a stack that was cut short a library's line is not named: who has called is not seen,
        and it may be memtools itself."""
        place = place_of(frames)
        is_cut = len(frames) == self._frames < FRAMES[0][0]
        if place is not None and not (is_cut and owner_of(place.file) != USER):
            found[place] = found.get(place, 0.0) + size

    def turn(self) -> None:
        """A traced step has ended: of no matter here."""

    def give_up(self) -> None:
        """On another thread, inside of the step that tells how slow it is: it is too slow."""
        self._is_too_slow = self.is_ours
        self.end()

    def end(self) -> None:
        """Stop tracing, if it is ours. May be called twice, and on another thread."""
        is_ours, self._is_on = self.is_ours, False
        if is_ours:
            self._module.stop()
        if self._module.start == self._hand_over:
            self._module.start = self._start


class _TorchBlocks:
    """torch's blocks on the host: by its allocator's own reports, or by what operators return."""

    def __init__(self, blocks: BlocksLike, name: str = TORCH) -> None:
        self.name, self.stopped = name, ""
        self._blocks = blocks
        self._is_on = False
        self._first = self._now = 0

    def begin(self) -> str:
        """Have each block's line noted from now on; "" or why not."""
        if not self._blocks.is_on:
            return "torch's reports are off"
        self._blocks.trace(True)
        self._is_on = True
        self._first = self._now = self._blocks.turn()
        return ""

    def turn(self) -> None:
        if self._blocks.is_on:
            self._now = self._blocks.turn()

    def go_on(self, slower: float) -> str:
        """What has been made so far does not count."""
        if not self._blocks.is_on:
            return "torch's reports have ended"
        if self.name == DISPATCH and slower > SLOWEST:
            return f"{DISPATCH} makes a step take more than {SLOWEST:.0f} times as long"
        self._first = self._now
        return ""

    def give_up(self) -> None:
        """It is not slow."""

    def living(self, is_last: bool) -> Living | None:
        if not self._is_on or not self._blocks.is_on:
            return None
        found: Living = {}
        for site, size, blocks in self._blocks.sites(self._first, self._now)[:MOST_SITES]:
            place = place_of(Place(*frame) for frame in self._blocks.frames(site))
            if place is not None:
                found[place] = found.get(place, 0.0) + size + OF_A_BLOCK * blocks
        return found

    def end(self) -> None:
        is_on, self._is_on = self._is_on, False
        if is_on and self._blocks.is_on:  # not in a forked child, nor where they have been stopped
            self._blocks.trace(False)


class TraceWindow:
    """Some traced steps, from `begin` to the boundary at which `turn` returns True.

        begin    probed     first boundary     middle              last
          │ step ── │ step ──── │ step ─────────── │ ──── step ─────── │
          └ on      └ anew      └ what lives       └ what lives        └ what lives; off

    The first step tells how much slower the program gets, and so how many frames it can bear. Where
    it takes too long for even one, tracemalloc is turned off inside of it.

    Args:
        steps: traced steps from the first boundary to the last, at least 1.
        blocks: of torch; None where none are heard in this window.
        why_no_blocks: why there are no reports of torch's allocator, for the record; then `blocks`
            are what a dispatch mode hears, and tracemalloc, with which it would take 24 times as
            long as a plain step, is not used beside it. "", the default: there are, or torch is
            not used.
        unheard: whether storages that are not among the blocks count, too: for windows that follow
            one which explained nothing, as it takes a pass over all objects. Default: no.
        probe_s: seconds that the first step may take with tracemalloc. Default: LONGEST_S.
        heap: lines of the C heap, which are then all that is traced: what other sources take at a
            line is the heap's. None, the default: the other sources.
        probe: steps that tell how slow it gets, at least 1. Default: 1.
        parts: after each of so many parts of the window it is noted what lives, at least 2. With
            more than two a place whose blocks become less between does not grow. Default: 2.
    """

    def __init__(
        self,
        steps: int,
        blocks: BlocksLike | None,
        why_no_blocks: str = "",
        *,
        unheard: bool = False,
        probe_s: float = LONGEST_S,
        heap: HeapLines | None = None,
        probe: int = PROBE,
        parts: int = PARTS,
    ) -> None:
        self.steps = steps
        self.probe, self.parts = probe, parts
        #: names of what traces, and why another does not
        self.sources: tuple[str, ...] = ()
        self.why = ""
        #: steps traced so far
        self.traced = 0
        #: bytes a step by which the C heap has grown; None where its lines were not traced
        self.net: float | None = None
        #: whether it is between begin and end
        self.is_open = False
        sources: list[_PythonBlocks | _TorchBlocks | HeapLines]
        sources = [_PythonBlocks(blocks if unheard else None)]
        if heap is not None:
            sources = [heap]
        elif blocks is not None and why_no_blocks:
            sources = [_TorchBlocks(blocks, DISPATCH)]
        elif blocks is not None:
            sources.append(_TorchBlocks(blocks))
        self._sources, self._why_no_blocks, self._heap = sources, why_no_blocks, heap
        self._marks: list[tuple[int, dict[str, Living]]] = []
        #: the step at which it began, or began anew once it was known how slow tracing is
        self.begun = 0
        #: whether it is known how slow tracing is
        self.is_probed = False
        self._probe_s = probe_s
        self._probing = _thread.allocate_lock()  # around the end of the probe
        #: when the newest step began, on the monotonic clock
        self.turned = 0.0
        self._over = _thread.allocate_lock()

    def begin(self, step: int) -> bool:
        """Start what can be started; False, with `why`, where nothing can."""
        started, refused = [], [self._why_no_blocks] if self._why_no_blocks else []
        self.is_open = True
        _open.add(self)
        process.at_fork(_in_child)
        for source in self._sources:
            why = source.begin()
            if why:
                refused.append(why)
            else:
                started.append(source)
        self._sources = started
        self.sources = tuple(source.name for source in started)
        self.why = ", ".join(refused)
        self.begun, self.turned = step, time.monotonic()
        if not started:
            self.end()
            return False
        self._over.acquire()
        process.start_thread(self.wait, self._over)
        return True

    @property
    def slows(self) -> bool:
        """Whether something traces that changes what memory is in use."""
        return self.is_open and bool({TRACEMALLOC, DISPATCH, HEAP_LINES} & set(self.sources))

    def turn(
        self, step: int, collect: Callable[[], None] | None = None, slower: float = 1.0
    ) -> bool:
        """A step has ended. Returns whether it was the last one: then everything is off.

        Args:
            step: its number.
            slower: how many times as long as a plain one it has taken.
            collect: collects garbage, before what lives is noted for the last time; None: garbage
                counts as what lives.
        """
        if not self.is_open:
            return True
        self.turned = time.monotonic()
        for source in self._sources:
            source.turn()
        if not self.is_probed:
            return step >= self.begun + self.probe and self._probed(step, slower)
        self.traced = step - self.begun
        last = self.begun + FIRST + self.steps
        if step < last and not self._is_mark(step):
            return False
        if step >= last and collect is not None:
            collect()
        found = dict[str, Living]()
        for source in self._sources:
            living = source.living(step >= last)
            if living is not None:
                found[source.name] = living
            elif source.stopped not in self.why:
                self._refused(source.stopped)
        self._marks.append((step, found))
        if step < last:
            return False
        self.end()
        return True

    def _probed(self, step: int, slower: float) -> bool:
        """The first step has told how slow tracing is. Returns whether nothing traces on."""
        with self._probing:
            self.is_probed, self.begun = True, step
        going, refused = [], [self.why] if self.why else []
        for source in self._sources:
            why = source.go_on(slower)
            if why:
                refused.append(why)
                source.end()
            else:
                going.append(source)
        self._sources, self.why = going, ", ".join(refused)
        self.sources = tuple(source.name for source in going)
        if not going:
            self.end()
        return not going

    def _refused(self, why: str) -> None:
        self.why = ", ".join(reason for reason in (self.why, why) if reason)

    def drop(self, name: str, why: str) -> None:
        """Trace on without this source, for this reason; without any the window is over."""
        for source in self._sources:
            if source.name == name:
                source.end()
        self._sources = [source for source in self._sources if source.name != name]
        self.sources = tuple(source.name for source in self._sources)
        self._refused(why)
        if not self._sources:
            self.end()

    @property
    def is_divided(self) -> bool:
        """Whether it was noted in more than two parts what lived: a tick may come late, and more
        parts than there are steps are not to be had."""
        return len(self._marks) > PARTS + 1

    def wait(self, over: _thread.LockType) -> None:
        """On a thread of its own: end what takes too long, until all is over."""
        if self._probe_s < LONGEST_S:
            if over.acquire(timeout=self._probe_s):
                return
            with self._probing:
                for source in () if self.is_probed else self._sources:
                    source.give_up()
        _end_in_time(self, over)

    def look(self) -> None:
        """Note what lives, for nobody."""
        for source in self._sources:
            source.living(False)

    def _is_mark(self, step: int) -> bool:
        """Whether what lives is noted at this step: after the first one, and after each part."""
        if not self._marks:
            return True
        n = len(self._marks)
        return n < self.parts and step >= self._marks[0][0] - (-n * self.steps // self.parts)

    def end(self) -> None:
        """Turn everything off. May be called twice, and on another thread."""
        self.is_open = False
        _open.discard(self)
        for source in self._sources:
            source.end()
        with contextlib.suppress(RuntimeError):
            self._over.release()

    def sites(self) -> tuple[list[Site], list[Site], list[Site]]:
        """What grew, the most first, in the order in which it is to be believed: the places that
        grew in both halves of the window by about the same; all of them; and those that grew in the
        second half after they had appeared in the first, where one block that was there before is
        seen as a whole when it is made larger."""
        if len(self._marks) < 2:
            return [], [], []
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        half, between = self._marks[len(self._marks) // 2 if len(self._marks) > 2 else 0]
        even, grown, late = list[Site](), list[Site](), list[Site]()
        for name, living in after.items():
            if name not in before or name not in between:
                continue
            for place, size in living.items():
                old, then = before[name].get(place, 0.0), between[name].get(place, 0.0)
                each = [found.get(name, {}).get(place, 0.0) for _, found in self._marks]
                if self.is_divided and self._falls(each):
                    continue
                grown.append(Site(place, (size - old) / (last - first)))
                if half == first or min(then - old, size - then) > EVEN * max(
                    then - old, size - then
                ):
                    even.append(grown[-1])
                if old < APPEARED * then:
                    late.append(Site(place, (size - then) / (last - half)))
        if self._heap is not None and HEAP_LINES in after:
            self.net = sum(site.rate for site in grown)
            grown, late = self._heap.staying(grown), []
            in_both = {site.place for site in even}
            even = [site for site in grown if site.place in in_both]
        return _in_order(even), _in_order(grown), _in_order(late)

    @staticmethod
    def _falls(sizes: Sequence[float]) -> bool:
        """Whether what lives of a place has become less by more than a part of its growth."""
        return max(a - b for a, b in pairwise(sizes)) > FALLS * (sizes[-1] - sizes[0])


def _in_order(sites: Sequence[Site]) -> list[Site]:
    """Those that grow, the most first; a line of which two sources know is one."""
    found: dict[tuple[str, int], Site] = {}
    for site in sites:
        line = site.place.file, site.place.line
        other = found.get(line, Site(site.place, 0.0))
        place = site.place if other.place.function is None else other.place
        found[line] = Site(place, other.rate + site.rate)
    return sorted((site for site in found.values() if site.rate > 0), key=lambda site: -site.rate)


_open: set[TraceWindow] = set()  # in this process, of all monitors


def _in_child() -> None:
    """A forked child has no traced steps."""
    for window in list(_open):
        for source in window._sources:
            source.end()
    _open.clear()


def _end_in_time(window: TraceWindow, over: _thread.LockType) -> None:
    """On a thread of its own: end the window of a step that does not end."""
    left = LONGEST_S
    while not over.acquire(timeout=left):
        left = window.turned + LONGEST_S - time.monotonic()
        if left <= 0:
            window.why = f"a traced step took more than {LONGEST_S:.0f} s"
            window.end()
            return


# --- which lines explain which findings -----------------------------------------------------------


def places_of(
    findings: Sequence[LeakFinding], sites: Sequence[Site]
) -> dict[Key, tuple[Place, ...]]:
    """Where each finding was made, the place of the most first; without those that no places
    explain.

    One finding is explained by the largest sites that together make 0.5 to 1.5 times its rate, or
    0.25 to 1.5 times that of a graph, whose nodes are not seen. Of several each gets the site of
    its rate, where no other site and no other finding has that rate; the largest gets the largest
    sites where no other is as large.

    Args:
        findings: that grow at the same time, and have no place yet.
        sites: what grows, the most first.
    """
    rated = sorted((one for one in findings if one.rate_bytes > 0), key=lambda f: -f.rate_bytes)
    found: dict[Key, tuple[Place, ...]] = {}
    for one in rated if len(rated) > 1 else ():
        alike = [site for site in sites if _is_alike(site.rate, one.rate_bytes)]
        if len(alike) == 1 and sum(_is_alike(alike[0].rate, f.rate_bytes) for f in rated) == 1:
            found[one.key] = (alike[0].place,)
    if not rated or rated[0].key in found:
        return found
    if len(rated) == 1 or not _is_alike(rated[0].rate_bytes, rated[1].rate_bytes):
        least = LEAST_OF_GRAPH if rated[0].kind == GRAPH else LEAST
        places = _to_be_said(_explaining(sites, rated[0].rate_bytes, least))
        if places and not any(places[0] in others for others in found.values()):
            found[rated[0].key] = places
    return found


def _is_alike(a: float, b: float) -> bool:
    return max(a, b) <= ALIKE * min(a, b)


def _explaining(sites: Sequence[Site], rate: float, least: float) -> list[Site]:
    """The largest that together make the rate; empty where they do not."""
    found, total = list[Site](), 0.0
    for site in sites:
        if total + site.rate <= MOST * rate:
            found.append(site)
            total += site.rate
            if total >= ENOUGH * rate:
                break
    return found if total >= least * rate else []


def _to_be_said(sites: Sequence[Site]) -> tuple[Place, ...]:
    """The first, and the second where it makes much of it, too."""
    total = sum(site.rate for site in sites)
    return tuple(
        site.place for site in sites[:2] if site is sites[0] or site.rate >= SECOND * total
    )


def steps_for(readings: Sequence[int]) -> int:
    """For how many steps to trace growth whose memory in use was so at the ends of steps: where it
    comes in lumps, 2.2 times their distance, the usual or the newest one. Lumps that get larger are
    of a buffer that is made larger by a part of itself: they come farther apart, too."""
    rises = [b - a for a, b in pairwise(readings)]
    grown = sum(rises)
    if grown <= 0:
        return LONGER
    least = max(LUMP_SHARE * max(rises), LUMP_TIMES * grown / len(rises))
    lumps = [i for i, rise in enumerate(rises) if rise >= least]
    if sum(rises[i] for i in lumps) < LEAST * grown:
        return LONGER
    if len(lumps) < 2:
        return ONE_LUMP
    distances = [b - a for a, b in pairwise(lumps)]
    apart = max(distances[-1], sorted(distances)[len(distances) // 2])
    larger = (rises[lumps[-1]] / rises[lumps[0]]) ** (1 / (len(lumps) - 1))
    steps = PERIODS * apart * max(1.0, min(larger, TWICE)) ** 2
    return int(min(MOST_OF_LUMPS, max(LEAST_OF_LUMPS, steps)))


# --- when to trace --------------------------------------------------------------------------------


class Tracing:
    """When a run traces, what that has found, and what it has cost.

    All of it is for the main thread, at the end of a step, or for the one thread on which a tick of
    time is one; `close` for any.

    Args:
        reports: torch's, which begin when torch is there. None, the default: tracemalloc alone.
        why_not: the reason where nothing is to be traced, for the record; "", the default: trace.
        progress: of a program whose steps are nothing but time. None, the default: of steps.
        write: gets the fields of each event for the record.
    """

    def __init__(
        self,
        reports: ReportsLike | None = None,
        *,
        why_not: str = "",
        progress: Progress | None = None,
        write: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._reports, self._why_not, self._write = reports, why_not, write
        self._progress = progress
        self._window: TraceWindow | None = None
        self._wanted: tuple[LeakFinding, ...] = ()
        self._attempts: dict[Key, int] = {}
        self._known: set[tuple[str, int]] = set()  # files and lines that a finding has already
        self._of_heap: set[Key] = set()  # findings whose lines of the C heap are traced
        #: these cannot be traced; nor by time, as they are of the thread that makes the steps
        self._no_heap = progress is not None
        self._readings: deque[int] = deque(maxlen=READ_STEPS + 1)
        #: nanoseconds that the newest plain steps have taken, and the program's thread in them
        self._plain: deque[tuple[int, int]] = deque(maxlen=PLAIN)
        self._took_cpu_ns = 0  # the newest step
        self._next = 0  # the step from which on the next window may be opened
        self._windows = 0
        # nanoseconds of the processor at boundaries: of the newest window, and left for others
        self._cost_ns, self._left_ns = FIRST_COST_NS, MOST_NS
        self._spent_ns = 0  # of the one that is open
        self._opened = 0.0  # when, on the monotonic clock

    @property
    def is_open(self) -> bool:
        return self._window is not None

    @property
    def slows(self) -> bool:
        """Whether what is in use has in it what the tracing takes: it is not to be read now."""
        return self._window is not None and self._window.slows

    def wants(self, step: int, findings: Sequence[LeakFinding]) -> bool:
        """Whether to be called at the end of each step: a window is open, or to be opened, or
        growth is read to see how it comes."""
        if self._window is not None:
            return True
        self._wanted = tuple(one for one in findings if self._is_wanted(step, one))
        if not self._wanted or self._windows >= MOST_WINDOWS or self._cost_ns > self._left_ns:
            if self._progress is not None:
                self._progress.forget()
            return False
        if self._why_not:
            self._refuse(self._why_not)
            return False
        return True

    def _is_wanted(self, step: int, finding: LeakFinding) -> bool:
        """A suspect in this process whose line is not known. Who nobody holds may get a name."""
        if finding.made_at or finding.process or finding.over or finding.part != "use":
            return False
        if RANK[finding.grade] < RANK["suspect"] or finding.kind == "mapped files":
            return False
        if self._attempts.get(finding.key, 0) >= self._most_attempts:
            return False
        is_named = bool(finding.holder or finding.kind)
        return is_named or step >= (finding.first_step or 0) + APART

    @property
    def _most_attempts(self) -> int:
        return ATTEMPTS - self._no_heap

    def _asks_heap(self, finding: LeakFinding) -> bool:
        """Whether the next window for it is one of the C heap's lines."""
        attempts = OF_C_HEAP if finding.kind == C_HEAP else OF_OTHERS
        return not self._no_heap and self._attempts.get(finding.key, 0) in attempts

    @property
    def is_by_time(self) -> bool:
        """Whether it is to be told of each tick, by `ticked`, and not of steps, by `step_took` and
        `read`."""
        return self._progress is not None

    def ticked(self, heap: int, cost_ns: int) -> None:
        """A tick has ended, and so many bytes of the heap are in use, which took so many
        nanoseconds to read."""
        assert self._progress is not None
        if self._window is None and cost_ns > DEAR_SHARE * 1e9 * self._progress.seconds:
            self._refuse(TOO_DEAR)
        else:
            self._progress.read(heap)

    @property
    def reads(self) -> bool:
        """Whether it is to be told what is in use, by `read`."""
        is_open = self._window is not None
        is_asked = not (self._is_first or self._is_soon or self.is_by_time)
        return not is_open and is_asked and bool(self._wanted)

    @property
    def _is_first(self) -> bool:
        """Whether one of the wanted has not been traced yet: two steps may do."""
        return any(one.key not in self._attempts for one in self._wanted)

    @property
    def _is_soon(self) -> bool:
        """Whether the lines of the C heap are to be traced without a look at how growth comes: what
        is said to be C code's has come evenly."""
        return any(
            one.kind == C_HEAP and self._asks_heap(one) and self._attempts[one.key] == OF_C_HEAP[0]
            for one in self._wanted
        )

    def step_took(self, ns: int, cpu_ns: int) -> None:
        """How long the newest step has taken, without what is done at its end, and how much of the
        processor the program's thread has had in it: what tracing takes shows in that, and other
        programs' work does not."""
        self._took_cpu_ns = cpu_ns
        if self._window is None:
            self._plain.append((ns, cpu_ns))

    @property
    def _plain_ns(self) -> int:
        """Nanoseconds that a plain step takes, but not less than counts; of the newest ones: the
        shortest of many is one in which less is done."""
        return max(SHORT_NS, min((ns for ns, _ in self._plain), default=0))

    @property
    def _slower(self) -> float:
        """So many times as long as a plain step the newest one would take beside no other work."""
        plain = min((cpu_ns for _, cpu_ns in self._plain), default=0)
        return 1 + max(0, self._took_cpu_ns - plain) / self._plain_ns

    def read(self, in_use: int) -> None:
        """What is in use at the end of this step."""
        self._readings.append(in_use)

    def is_due(self, step: int) -> bool:
        """Whether a window is to be opened at the end of this step."""
        if self._window is not None or not self._wanted:
            return False
        if _open:  # another monitor's: one after the other
            return False
        if self._progress is not None:
            return step >= self._next and self._stands_out(self._progress)
        if len(self._plain) < PLAIN:
            return False
        if self._is_first:
            return True
        return step >= self._next and (self._is_soon or len(self._readings) > READ_STEPS)

    def _stands_out(self, progress: Progress) -> bool:
        """Whether a window can be opened, by what was read at the newest ticks. Where growth is
        lost in noise that counts as an attempt."""
        if progress.is_full and progress.least_ticks is None:
            self._attempt(self._wanted)
            progress.forget()
            if all(self._attempts[one.key] >= self._most_attempts for one in self._wanted):
                self._write({"why": UNKNOWN})
        return progress.is_known and progress.least_ticks is not None

    def _attempt(self, findings: Sequence[LeakFinding]) -> None:
        for one in findings:
            self._attempts[one.key] = self._attempts.get(one.key, 0) + 1

    def prepare(self) -> None:
        """Make what the first window needs, and is kept: the import of tracemalloc and what that
        makes when it is first used. So it can be told from the growth of the program."""
        importlib.import_module("tracemalloc")
        if self._windows == 0:
            window = TraceWindow(1, None)
            if window.begin(0):
                window.look()
            window.end()

    def begin(self, step: int) -> None:
        """Open a window at the end of this step."""
        begun = time.thread_time_ns()
        is_first, progress = self._is_first, self._progress
        steps, probe, parts = TRACED if is_first else steps_for(self._readings), PROBE, PARTS
        probe_s = SLOWEST_PROBE * self._plain_ns / 1e9
        if progress is not None:
            steps = progress.ticks(longest=not is_first)
            probe, probe_s, parts = progress.probe, LONGEST_S, PARTS_BY_TIME
            progress.begin()
        elif self._is_soon and not is_first:
            steps = LONGER
        of_heap = [one for one in self._wanted if self._asks_heap(one)]
        others = [one for one in self._wanted if one not in of_heap]
        heap = None if is_first or not of_heap else self._heap_lines()
        self._of_heap = {one.key for one in of_heap}
        self._attempt(others if heap is None else of_heap)
        self._windows += 1
        self._readings.clear()
        blocks, why = None, ""
        if self._reports is not None and heap is None:
            blocks = self._reports.blocks if self._reports.join() else None
            why = self._reports.reason
            # The other half is tracemalloc's. A mode is heard on the thread alone that enters it.
            if blocks is None and why and self._windows % 2 == 1 and progress is None:
                blocks = self._reports.dispatched()
        # What nobody reports takes a pass over all objects, and a reference to each tensor, whose
        # finalizers are not for another thread to run.
        has_unheard = not is_first and progress is None
        window = TraceWindow(
            steps,
            blocks,
            why,
            unheard=has_unheard,
            probe_s=probe_s,
            heap=heap,
            probe=probe,
            parts=parts,
        )
        self._opened = time.monotonic()
        try:
            started = window.begin(step)
        except BaseException:
            window.end()
            raise
        if started:
            self._window = window
        elif heap is not None:  # the other sources may still tell what they can
            self._no_heap = True
            self._write({"why": window.why})
        else:
            self._refuse(window.why)
        self._spent_ns = time.thread_time_ns() - begun

    def _heap_lines(self) -> HeapLines:
        reports = self._reports
        is_on = reports is not None and reports.join() and reports.in_use() is not None
        return HeapLines(self._plain_ns, reports.in_use if reports and is_on else None)

    def _refuse(self, why: str) -> None:
        """Nothing is traced in this run, and the record says why."""
        self._windows = MOST_WINDOWS
        self._write({"why": why})

    def turn(
        self,
        step: int,
        findings: Sequence[LeakFinding],
        collect: Callable[[], None] | None = None,
    ) -> dict[Key, str]:
        """The end of a step while a window is open. Returns what `made_at` is of the findings that
        it explains, at its last step; else nothing.

        Args:
            step: its number.
            findings: what stands.
            collect: collects garbage; None where there is no time for that.
        """
        window = self._window
        if window is None:
            return {}
        begun, found = time.thread_time_ns(), dict[Key, str]()

        def collected() -> None:
            nonlocal begun
            before = time.thread_time_ns()
            assert collect is not None
            collect()
            begun += time.thread_time_ns() - before  # whoever collects has a time for that

        try:
            if self._progress is not None:
                is_over = self._turn_by_time(step, window, self._progress)
            else:
                is_over = window.turn(step, None if collect is None else collected, self._slower)
        except BaseException:
            self.close()
            raise
        if is_over:
            self._window, self._next = None, step + APART
            found = self._explained(findings, window)
            if self._progress is not None:
                self._progress.forget()
        self._spent_ns += time.thread_time_ns() - begun
        if is_over:
            self._cost_ns = self._spent_ns
            self._left_ns -= self._spent_ns
            self._tell(window, len(found))
        return found

    def _turn_by_time(self, step: int, window: TraceWindow, progress: Progress) -> bool:
        """The end of a tick: tracemalloc goes on if the program bears it. Once that is known by one
        frame, the window gets as long as tracemalloc's memory allows."""
        tables, was_probed = progress.tables, window.is_probed
        was_on = TRACEMALLOC in window.sources
        if was_on:
            slowest = SLOWEST if was_probed or step < window.begun + window.probe else SLOWEST_PROBE
            slower, is_end = progress.slower, step >= window.begun + window.probe
            if tables > MOST_TABLES:
                window.drop(TRACEMALLOC, TOO_MANY)
            elif slower is not None and progress.is_certain and slower > slowest:
                window.drop(TRACEMALLOC, SLOWS)
            elif slower is None and not was_probed and is_end:
                window.drop(TRACEMALLOC, UNKNOWN)
        probed = step - window.begun
        is_over = window.turn(step, None, progress.slower or 1.0)
        if window.is_probed and not was_probed and TRACEMALLOC in window.sources:
            progress.begin()  # with as many frames as it bears
            steps = progress.affordable(window.steps, probed, tables)
            if steps is None:
                window.drop(TRACEMALLOC, TOO_MANY)
            else:
                window.steps = steps
        if was_on and not was_probed and TRACEMALLOC not in window.sources:
            self._windows = MOST_WINDOWS  # it would not be borne later, either
        return is_over or not window.is_open

    def _lines(self, findings: Sequence[LeakFinding], window: TraceWindow) -> list[list[Site]]:
        """What grew in a window, in the order in which it is to be believed.

        By time only that which grew in both halves, as if nothing had slowed the program. If these
        lines make more together than memory in use grows by, then some of it is let go of later
        than a window is long, and nobody knows which.
        """
        if self._progress is None:
            return list(window.sites())
        slowed = self._progress.slowed or 1.0
        even = [Site(place, rate * slowed) for place, rate in window.sites()[0]]
        grows = max(self._progress.rate, sum(one.rate_bytes for one in findings))
        is_told = window.is_divided and sum(site.rate for site in even) <= MOST * grows
        return [even] if is_told else []

    def _explained(self, findings: Sequence[LeakFinding], window: TraceWindow) -> dict[Key, str]:
        """By what has grown in a window: what `made_at` is of the findings that it explains."""
        unknown = [
            one for one in findings if one.part == "use" and not one.process and not one.made_at
        ]
        ways = self._lines(unknown, window)
        if window.net is not None:
            unknown = [
                one
                for one in unknown
                if one.key in self._of_heap
                and LEAST * one.rate_bytes <= window.net <= MOST * one.rate_bytes
            ]
        for sites in ways:
            others = [site for site in sites if site.place[:2] not in self._known]
            places = places_of(unknown, others)
            named = {key: found for key, found in places.items() if key in self._attempts}
            if named:
                self._known |= {place[:2] for found in named.values() for place in found}
                return {key: " and ".join(map(name_of, found)) for key, found in named.items()}
        return {}

    def _tell(self, window: TraceWindow, found: int) -> None:
        ms = round(self._spent_ns / 1e6, 3)
        seconds = None
        if self._progress is not None:
            seconds = round(time.monotonic() - self._opened, 3)
        self._write({"steps": window.traced, "ms": ms, "sources": window.sources,
                     "why": window.why, "found": found, "seconds": seconds})  # fmt: skip

    def close(self) -> None:
        """Turn everything off, for good. May be called twice."""
        self._windows = MOST_WINDOWS
        self.interrupt()

    def interrupt(self) -> None:
        """Turn everything off, until a window is opened again."""
        window, self._window = self._window, None
        if self._progress is not None:
            self._progress.forget()
        if window is not None:
            window.end()
            window.why = window.why or CUT
            self._tell(window, 0)

"""A window of traced steps: which lines of the program made what still lives at its end.

    TraceWindow: what lives of what the traced steps have made, by line, at three boundaries
       ├─ Python's and NumPy's blocks: tracemalloc, on for these steps
       ├─ torch's blocks: its own reports (memtools._core.Blocks)
       └─ the C heap, where these explain nothing: heaplines.py

A line is named if what lives of it grows from the first boundary to the last. What every step makes
and frees again is there at both boundaries, and cancels; so does a buffer that is reallocated, but
for what it has become longer.

The program's own tracemalloc is left alone. Ours is off after the last boundary, when the monitor
stops, in a forked child, and where a traced step does not end in time.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from memtools import _core
from memtools._base import process
from memtools._base.libraries import USER, owner_of
from memtools._monitor.heaplines import HEAP_LINES, SLOWEST, HeapLines
from memtools._monitor.places import Living, Place, Site, place_of
from memtools._monitor.untracked_storages import untracked_storages

PROBE = 1  # The first step is traced by one frame, to see how many frames the program can bear.
#: (frames that tracemalloc keeps, at most how many times what one frame costs they cost). More
#: frames take longer, but four do not reach the user's line in a deep library. As steps differ, one
#: frame gets some room, too.
FRAMES = ((16, 8.0), (4, 6.0), (1, 1.5))
#: If one frame makes a step more than this many times as slow, it is not traced on.
SLOWEST_PROBE = 1 + (SLOWEST - 1) / FRAMES[-1][1]
PARTS, PARTS_BY_TIME = 2, 6  # A window has so many parts: at any moment short-lived blocks live.
FALLS = 0.1  # What lives of a line that is kept falls by at most this share of its growth.
#: What lives is noted first after this step: reused buffers have been reallocated by then.
FIRST = 1
EVEN = 0.25  # Growth is even if one half of a window shows this share of the other at least.
APPEARED = 0.1  # If less of a line than this share of its half-way bytes lived first, it is new.
OF_A_BLOCK = 512  # A tensor's own objects take so many bytes beside its storage.
MOST_SITES = 256  # Of torch's sites at most so many are read, the largest first.
LONGEST_S = 60.0  # A window ends if a traced step takes longer, whatever the program does.

PROGRAMS_OWN = "the program runs tracemalloc itself"
TOO_SLOW = f"tracemalloc would make a step take more than {SLOWEST:.0f} times as long"
STOPPED = "the program has stopped tracemalloc, or started its own"
TRACEMALLOC, TORCH, DISPATCH = "tracemalloc", "torch's reports", "a dispatch mode of torch"


class BlocksLike(Protocol):
    """The methods of memtools._core.Blocks, the table of torch's host blocks, used by a window."""

    @property
    def is_on(self) -> bool: ...
    def trace(self, on: bool) -> None: ...
    def turn(self) -> int: ...
    def sites(self, first: int, last: int) -> list[tuple[int, int, int]]: ...
    def frames(self, site: int) -> tuple[tuple[str, int, str], ...]: ...
    def site_of(self, address: int, /) -> int | None: ...


class _PythonBlocks:
    """Python's and NumPy's blocks, by tracemalloc.

    Args:
        blocks: torch's blocks: storages that are not among them count as well. None, the default:
            storages do not count.
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
        """Start to trace one frame of each block. Returns "", or why not."""
        if self._module.is_tracing():
            return PROGRAMS_OWN
        self._start = self._module.start
        return "" if self._begin(1) else PROGRAMS_OWN

    def _begin(self, frames: int) -> bool:
        """Returns False if the program, on another thread, has started its own meanwhile."""
        self._module.start = self._hand_over
        if self._module.is_tracing():
            self._module.start = self._start
            return False
        self._frames, self._is_on = frames, True  # first: a child forked right now turns it off
        self._start(frames)
        return True

    def go_on(self, slower: float) -> str:
        """Start again with as many frames as the program can bear, if a step took so many times as
        long with one. Returns "", or why not."""
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
        """tracemalloc.start() while ours is on: the tracing is the program's from here on."""
        self.end()
        self._start(*args, **kwargs)

    @property
    def is_ours(self) -> bool:
        """Whether tracemalloc is on, and was started here."""
        module = self._module
        is_on = self._is_on and module.is_tracing()
        return is_on and bool(module.get_traceback_limit() == self._frames)

    def living(self, is_last: bool) -> Living | None:
        """Bytes by place of what lives; None if the program has stopped tracemalloc, or started its
        own. Storages that torch does not report are looked for only at the last boundary, because
        that takes long."""
        if not self.is_ours:
            return None
        found: Living = {}
        # Snapshot.statistics() makes an object for each block: 20 times as long, while it is on.
        for stack, size in _core._traced():
            self._add(found, [Place(*frame) for frame in stack], size)
        if not self.is_ours:  # stopped on another thread, meanwhile
            return None
        blocks = self._blocks
        if is_last and blocks is not None and blocks.is_on:
            for frames, size in untracked_storages(lambda at: blocks.site_of(at) is not None):
                self._add(found, [Place(*frame) for frame in frames], size)
        return found

    def _add(self, found: Living, frames: Sequence[Place], size: int) -> None:
        """Count a block for its place. Of a stack that was cut short a library's line is not named:
        its caller is not seen, and may be memtools itself."""
        place = place_of(frames)
        is_cut = len(frames) == self._frames < FRAMES[0][0]
        if place is not None and not (is_cut and owner_of(place.file) != USER):
            found[place] = found.get(place, 0.0) + size

    def turn(self) -> None:
        """Do nothing at the end of a traced step."""

    def give_up(self) -> None:
        """Stop, called on another thread, within the first step: it takes too long."""
        self._is_too_slow = self.is_ours
        self.end()

    def end(self) -> None:
        """Stop tracemalloc, if it is ours. May be called twice, and on another thread."""
        is_ours, self._is_on = self.is_ours, False
        if is_ours:
            self._module.stop()
        if self._module.start == self._hand_over:
            self._module.start = self._start


class _TorchBlocks:
    """torch's blocks on the host, by its allocator's own reports, or by what operators return."""

    def __init__(self, blocks: BlocksLike, name: str = TORCH) -> None:
        self.name, self.stopped = name, ""
        self._blocks = blocks
        self._is_on = False
        self._first = self._now = 0

    def begin(self) -> str:
        """Record each block's line from now on. Returns "", or why not."""
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
        """Forget what has been made so far. Returns "", or why it does not go on."""
        if not self._blocks.is_on:
            return "torch's reports have ended"
        if self.name == DISPATCH and slower > SLOWEST:
            return f"{DISPATCH} makes a step take more than {SLOWEST:.0f} times as long"
        self._first = self._now
        return ""

    def give_up(self) -> None:
        """Do nothing: it is not slow."""

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
          └ on      └ again     └ what lives       └ what lives        └ what lives; off

    The first step shows how much slower the program gets, and so how many frames it can bear. If it
    takes too long with one frame already, tracemalloc is turned off within it.

    Args:
        steps: traced steps from the first boundary to the last, at least 1.
        blocks: torch's blocks; None if they are not traced in this window.
        why_no_blocks: why there are no reports of torch's allocator, for the record; then `blocks`
            are those that a dispatch mode sees, and tracemalloc, with which it would take 24 times
            as long as a plain step, is not used beside it. "", the default: there are reports, or
            torch is not used.
        untracked: whether storages that are not among the blocks count, too: for windows that
            follow one which explained nothing, as it takes a pass over all objects. Default: no.
        probe_s: seconds that the first step may take with tracemalloc. Default: LONGEST_S.
        heap: lines of the C heap, which are then all that is traced, because what other sources
            allocate at a line is part of the heap. None, the default: the other sources.
        probe: steps that measure how slow the program gets, at least 1; 1 by default.
        parts: what lives is read after each of so many parts of the window, at least 2; 2 by
            default. With more than two, a place whose blocks become less in between does not grow.
    """

    def __init__(
        self,
        steps: int,
        blocks: BlocksLike | None,
        why_no_blocks: str = "",
        *,
        untracked: bool = False,
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
        sources = [_PythonBlocks(blocks if untracked else None)]
        if heap is not None:
            sources = [heap]
        elif blocks is not None and why_no_blocks:
            sources = [_TorchBlocks(blocks, DISPATCH)]
        elif blocks is not None:
            sources.append(_TorchBlocks(blocks))
        self._sources, self._why_no_blocks, self._heap = sources, why_no_blocks, heap
        self._marks: list[tuple[int, dict[str, Living]]] = []
        #: the step at which it began, or began again once it was known how slow tracing is
        self.begun = 0
        #: whether it is known how slow tracing is
        self.is_probed = False
        self._probe_s = probe_s
        self._probing = _thread.allocate_lock()  # around the end of the probe
        #: when the newest step began, on the monotonic clock
        self.turned = 0.0
        self._over = _thread.allocate_lock()

    def begin(self, step: int) -> bool:
        """Start what can be started. Returns False, with `why`, if nothing can."""
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
        """Whether something traces that changes how much memory is in use."""
        return self.is_open and bool({TRACEMALLOC, DISPATCH, HEAP_LINES} & set(self.sources))

    def turn(
        self, step: int, collect: Callable[[], None] | None = None, slower: float = 1.0
    ) -> bool:
        """Note that a step has ended. Returns whether it was the last one: then everything is off.

        Args:
            step: its number.
            collect: collects garbage, before what lives is read for the last time; None, the
                default: garbage counts as what lives.
            slower: how many times as long as a plain one it has taken; 1 by default.
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
        """End the probe: it is known now how slow tracing is. Returns whether nothing traces
        on."""
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
        """Trace on without this source, for this reason. Without any source the window is over."""
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
        """Whether what lives was read in more than two parts: a tick may come late, and there are
        no more parts than steps."""
        return len(self._marks) > PARTS + 1

    def wait(self, over: _thread.LockType) -> None:
        """End what takes too long, on a thread of its own, until the window is over."""
        if self._probe_s < LONGEST_S:
            if over.acquire(timeout=self._probe_s):
                return
            with self._probing:
                for source in () if self.is_probed else self._sources:
                    source.give_up()
        left = LONGEST_S
        while not over.acquire(timeout=left):
            left = self.turned + LONGEST_S - time.monotonic()
            if left <= 0:
                self.why = f"a traced step took more than {LONGEST_S:.0f} s"
                self.end()
                return

    def look(self) -> None:
        """Read what lives once, so that what this allocates is allocated."""
        for source in self._sources:
            source.living(False)

    def _is_mark(self, step: int) -> bool:
        """Whether what lives is read at this step: after the first one, and after each part."""
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
        """Return three lists of what grew, the most certain first: the places that grew in both
        halves of the window by about the same; all places; and those that grew in the second half
        after they had appeared in the first. An older block that is enlarged appears so."""
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
        """Whether what lives of a place has fallen by more than a share of its growth."""
        return max(a - b for a, b in pairwise(sizes)) > FALLS * (sizes[-1] - sizes[0])


def _in_order(sites: Sequence[Site]) -> list[Site]:
    """The sites that grow, the most first. A line that two sources report is one site."""
    found: dict[tuple[str, int], Site] = {}
    for site in sites:
        line = site.place.file, site.place.line
        other = found.get(line, Site(site.place, 0.0))
        place = site.place if other.place.function is None else other.place
        found[line] = Site(place, other.rate + site.rate)
    return sorted((site for site in found.values() if site.rate > 0), key=lambda site: -site.rate)


_open: set[TraceWindow] = set()  # of all monitors of this process


def is_any_open() -> bool:
    """Whether a window of any monitor is open in this process."""
    return bool(_open)


def _in_child() -> None:
    """Trace nothing in a forked child."""
    for window in list(_open):
        for source in window._sources:
            source.end()
    _open.clear()

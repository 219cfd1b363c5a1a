"""The signals of a leak test: what is read at the end of a step, and where each of them ends.

    Signal.read() ──► bytes now, less what the looks of memtools itself have added
          │
          ├─ at a look ─────────────► Points: one row for each look, at the same point of a step
          └─ between, where cheap ──► LeakDetector, at even units of steps

What a reading costs changes by a factor of ten thousand from program to program (mallinfo2 counts
every free chunk), and so does the time of a step. A look reads each signal whatever that costs, as
there are few of them. Between the looks a signal is read as often as it is cheap. The leak test
wants readings that are even in steps: so each signal gets a unit of steps, set once, and the units
in between lie on the line from one reading to the next. Lows are kept by that, and no stairs are
made.

    steps     | | | | | | | | | | | | |
    read      0       4           10
    unit 2    0   2   4   6   8   10          what the test sees
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools._base.limits import COUNTED_AGAINST, limits_of_process
from memtools._base.pages import mappings
from memtools._blocks.reports import HostBlocks
from memtools._leak.judge import THRESHOLDS, Block

EACH_READING = 16  # A reading is so many units after the last, as long as its cost stays equal.
FEED_NS = 2_500  # The leak test takes so long for a value.

#: signals that torch counts anyhow, to the byte: a reading of them takes less than 1 us
COUNTED = ("device", "tensors")
#: what is read at looks alone, and is not judged by itself: resident bytes, the freed memory that
#: malloc keeps, and what RLIMIT_DATA and RLIMIT_AS count
BESIDE = ("resident", "idle", "VmData", "VmSize")


#: a mapping of no file that may be written: its address, its size and its resident bytes, in KiB
class Signal:
    """One series of readings."""

    __slots__ = (
        *("_fed", "_newest", "_origin", "_own", "_read"),
        *("cost_ns", "due", "name", "recent_ns", "unit"),
    )

    #: after a reading between looks it rests for so many times what the reading took
    PAUSE = 800

    def __init__(self, name: str, read: Callable[[], int | None]) -> None:
        self.name, self._read = name, read
        #: the least that a reading has taken
        self.cost_ns = 1 << 62
        #: what one takes now, between looks; 0: none was taken yet
        self.recent_ns = 0
        #: when to read next, on the monotonic clock; 0 while it is fed as it is read
        self.due = 0
        #: steps from one value that the test sees to the next; 0 while it is fed as it is read
        self.unit = 0
        self._origin = self._fed = 0
        self._newest: tuple[int, int | None] = 0, None
        self._own = 0  # bytes that looks have added

    def read(self) -> int | None:
        """Bytes now, less what looks have added; None where it is not known."""
        size = self._read()
        return None if size is None else max(0, size - self._own)

    @property
    def newest(self) -> tuple[int, int | None]:
        """The step of the newest reading that the test was given, and its bytes."""
        return self._newest

    def rest(self, now: int, took_ns: int, pause: int) -> None:
        """Wait after a reading that took `took_ns` for `pause` times that. A reading that takes
        more than twice as long as the one before was most likely interrupted by another program, so
        it counts as twice as long. If readings stay so slow, the next ones count in full."""
        most = 2 * self.recent_ns or took_ns
        self.recent_ns = max(1, min(took_ns, most))
        self.due = now + pause * self.recent_ns

    def leave_out(self, before: int | None, after: int | None) -> None:
        """Do not count what memtools has added, or given back, between these two readings."""
        if before is not None and after is not None:
            self._own += after - before

    def begin(self, step: int, step_ns: float) -> None:
        """From this step on values are given for each unit of steps: a sixteenth of the steps that
        will lie between two readings, where a step takes so many nanoseconds. In fast steps more,
        so that a value for each unit takes less time than readings may."""
        apart = max(self.cost_ns / EACH_READING, 2 * FEED_NS)
        self.unit = 1
        while self.unit * max(1.0, step_ns) < self.PAUSE * apart:
            self.unit *= 2
        self._origin, self._fed = step, 0

    def feed(self, step: int, size: int | None) -> Iterator[tuple[int, int | None]]:
        """(step, bytes) of each unit since the reading before, of which `size` is the newest."""
        last_step, last_size = self._newest
        self._newest = step, size
        if self.unit == 0:
            yield step, size
            return
        last = (step - self._origin) // self.unit
        for n in range(self._fed + 1, last + 1):
            at = self._origin + n * self.unit
            if size is None or last_size is None:
                yield at, size
            else:
                yield at, last_size + (size - last_size) * (at - last_step) // (step - last_step)
        self._fed = max(self._fed, last)


def python_bytes() -> int:
    """Bytes of the interpreter's own blocks; an estimate if it reports only their number."""
    size = _core._python_bytes()
    return 64 * sys.getallocatedblocks() if size is None else size


class _Heap:
    """malloc's figures: one reading, which may take milliseconds, has both."""

    def __init__(self, probe: _core.Probe) -> None:
        self._probe = probe
        self.idle: int | None = None

    def used(self) -> int | None:
        sample = self._probe.read(_core.READ_HEAP)
        self.idle = sample.heap_free
        return sample.heap_used


class _Resident:
    """Resident bytes that are of no file and not shared, such as forks of a cache."""

    def __init__(self, probe: _core.Probe) -> None:
        self._probe = probe
        self.newest: int | None = None

    def read(self) -> int | None:
        self.newest = self._probe.read(_core.READ_RSS).private
        return self.newest


class _Mapped:
    """What is mapped, by one reading of /proc/self/statm."""

    def __init__(self) -> None:
        self.size: int | None = None

    def data(self) -> int | None:
        """What RLIMIT_DATA counts, with the stack. `size` is what RLIMIT_AS counts."""
        try:
            with open("/proc/self/statm", "rb") as file:
                pages = [int(number) for number in file.read().split()]
        except OSError:
            return None
        self.size = pages[0] * mmap.PAGESIZE
        return pages[5] * mmap.PAGESIZE


def signals_of(
    probe: _core.Probe, devices: Sequence[int], blocks: HostBlocks | None = None
) -> list[Signal]:
    """The signals of a run, the resident bytes first.

    Args:
        probe: what reads the memory of the process.
        devices: CUDA devices, by number.
        blocks: the reports of torch's host allocator; None, the default: no signal `tensors`.
    """

    def figure(fields: int, name: str) -> Callable[[], int | None]:
        return lambda: getattr(probe.read(fields), name)

    def shared() -> int | None:
        size = probe.read(_core.READ_SHM).shm
        _core._watch_files()
        return size

    def of_children() -> int | None:
        probe.read(_core.READ_CHILDREN)
        return probe.children_made()

    heap, mapped, resident = _Heap(probe), _Mapped(), _Resident(probe)
    signals = [
        Signal("rss", resident.read),
        Signal("heap", heap.used),
        Signal("python", python_bytes),
        # Without pages that forks copy: these are at most what they share with their parent.
        Signal("children", of_children),
        Signal("shm", shared),
    ]
    if blocks is not None:
        signals.append(Signal("tensors", blocks.in_use))
    if devices:
        signals.append(Signal("device", lambda: cuda_devices.allocated(devices)))
    return [
        *signals,
        Signal("resident", lambda: resident.newest),
        Signal("idle", lambda: heap.idle),
        Signal("VmData", mapped.data),
        Signal("VmSize", lambda: mapped.size),
    ]


def block_that_fills(written: int, smaps: str = "/proc/self/smaps") -> Block | None:
    """Return the mapping of no file that has most left to be written, of those in which at least
    half of `written` bytes are resident. None if there is none.

    Takes some milliseconds.
    """
    least = THRESHOLDS.explained * written
    filling = [
        Block(one.size, one.resident, one.begin)
        for one in mappings(smaps)
        if one.size > one.resident >= least and not one.is_shared
    ]
    return max(filling, key=lambda one: one.unwritten, default=None)


class _Crest:
    """How far the peaks of steps lie above what is used at their ends."""

    def __init__(self) -> None:
        self._peak: int | None = None
        #: what is used and how far the peaks lie above it, in bytes, as of the newest call
        self.used = self.newest = 0
        #: the most bytes by which looks of memtools itself have gone above what was used
        self.of_looks = 0

    def above(self, used: int, peak: int | None) -> int:
        """Bytes from what is used now to the highest point of the newest steps.

        Args:
            used: now.
            peak: the most that the run has used. Where it has risen since the call before, that was
                in these steps. The first call knows only the peak of the program's start.
        """
        if peak is None:
            return 0
        is_new = self._peak is not None and peak > self._peak
        self._peak, self.used, most = peak, used, max(0, peak - used)
        self.newest = most if is_new else min(self.newest, most)
        return self.newest

    def leave_out(self, peak: int | None) -> None:
        """If this peak is a new one, it was that of a look."""
        if self._peak is not None and peak is not None and peak > self._peak:
            self._peak = peak
            self.of_looks = max(self.of_looks, peak - self.used)


class Limits:
    """Where the signals end: how much memory there is to grow into."""

    def __init__(self, sampler: _core.Sampler, probe: _core.Probe, devices: Sequence[int]) -> None:
        self._sampler, self._probe, self._devices = sampler, probe, devices
        self._crest = _Crest()

    def rooms(self) -> dict[str, int]:
        """Bytes that are left until each limit, by the name of the series of a run's points that
        counts against it: "counted" for the host's, and "VmData" and "VmSize" for those of this
        process (`ulimit -d`, `ulimit -v`).

        They are left of the host's limit from the highest point of a step on, because that is where
        the limit is met, and as of the newest call of `above`.
        """
        rooms = {
            COUNTED_AGAINST[name]: most - counted
            for name, (counted, most) in limits_of_process().items()
        }
        limit = self._sampler.limit()
        if self._sampler.used() is not None and limit is not None:
            rooms["counted"] = limit[0] - self._crest.used - self._crest.newest
        return rooms

    def room_at_peak(self, step_bytes: int) -> int | None:
        """Bytes that are left until the nearest limit at the highest point of a step; None without
        a limit.

        Args:
            step_bytes: by how much a step is higher than its end. It counts for the limits of this
                process, for which the kernel has no highest point.
        """
        self.above()
        rooms = self.rooms().items()
        lefts = (left if name == "counted" else left - step_bytes for name, left in rooms)
        return min(lefts, default=None)

    def above(self) -> int:
        """Bytes by which the peaks of the steps since the call before lie above what is used at
        their ends."""
        used = self._used_now()
        return 0 if used is None else self._crest.above(used, self._sampler.peak())

    def _used_now(self) -> int | None:
        """What counts against the host's limit at this point of the step, where the newest sample
        may be of another one: what this process has of it is read now."""
        while True:
            sample, used = self._sampler.latest(), self._sampler.used()
            if sample == self._sampler.latest():  # else there was another one in between
                break
        if used is None or sample is None or sample.private is None:
            return used
        private = self._probe.read(_core.READ_RSS).private
        return used if private is None else max(0, used + private - sample.private)

    def leave_out(self) -> None:
        """If there is a new peak, a look of memtools itself has made it."""
        self._crest.leave_out(self._sampler.peak())

    def admit_look(self) -> bool:
        """Whether the host's limit leaves room for what looks have taken: they must not be what
        ends the program."""
        used, limit = self._sampler.used(), self._sampler.limit()
        return used is None or limit is None or limit[0] - used > self._crest.of_looks

    def share(self, part: float) -> int | None:
        """So much of the host's limit, in bytes; None when unknown."""
        limit = self._sampler.limit()
        return None if limit is None else int(part * limit[0])

    def used(self) -> int | None:
        """What counts against the host's limit, by the newest sample."""
        return self._sampler.used()

    def device(self) -> int | None:
        """Bytes at which all watched devices are full; None when unknown."""
        total = 0
        for tiers in map(cuda_devices.tiers, self._devices):
            if tiers.reserved is None or tiers.free is None:
                return None
            total += tiers.reserved + tiers.free
        return total if self._devices else None

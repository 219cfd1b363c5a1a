"""The floor of a series of readings: what is never given back, how fast it rises, in what shape.

    samples   . . . . | . . . . | . . . . |   4 to a block, at first
    blocks      lo hi     lo hi     lo hi     when 128 are full, pairs become one: 64 blocks of
                                              twice as many samples

The lows of the blocks are the floor. Spikes and sawteeth that are shorter than a block do not show
in them. The blocks cover a series of any length in 2 KiB.

        |            . x         A leak rises as much late as early. The shape of a window says so:
        |        . x                     straight line   1      what a leak is
        |    . x      late / early       square root    .72     on the last 3/4 of the run
        |. x                             logarithm      .5
        +---early--|--late--             a finished warm-up, a full buffer   0

Three windows end at the newest block. They cover 3/4, 1/2 and 1/4 of the blocks: the long one
distinguishes leaks from what slows down, and the short ones see a late onset. The rules compare the
figures of the windows with fixed thresholds; the detector counts how often in a row they hold.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mul, sub
from statistics import median
from typing import NamedTuple

from memtools._leak.growth import line_through

MOST_BLOCKS, FIRST_LENGTH = 128, 4
#: A series is judged when it has 64 blocks, and again after every 8 more.
LEAST_BLOCKS, EVERY_BLOCKS = 64, 8
GROUPS = 8
QUIETEST = 100.0  # The noise of a series is taken to be at least 100 bytes.

# The thresholds of the rules. They were chosen on made-up series of two seeds, 101 and 202
# (benchmarks/leak/leaks.py), so that hardly any series without a leak passes a whole rule.
# docs/guides/leaks.md has their rates on series of another seed; tests/leak/reference.py
# repeats the values.

# A series grows now if its slope is 5 standard errors above 0, its rise is twice the noise, and it
# rises in at least 5 jumps.
GROWS_Z, GROWS_SNR, GROWS_JUMPS = 5, 2, 5
# A rise slows down if it is 4 times the noise, its shape is below 0.8, and that of the next longer
# window is below 0.5. For the longest window a shape below 0.4 is enough.
SLOWS_SNR, SLOWS, SLOWED, SLOWED_ALONE = 4, 0.8, 0.5, 0.4
# A leak shows in the long window if it rises as much late as early, in at least 5 jumps, and no
# group of blocks is much below the one before;
LONG_Z, LONG_SHAPE, LONG_JUMPS, LONG_EVEN = 4, 0.88, 5, -0.2
# or in the middle window, if the rise is 8 times the noise, its last half is not flat, and the long
# window slows down little;
MIDDLE_SNR, MIDDLE_SHAPE, MIDDLE_FRONT, MIDDLE_LONG_SHAPE = 8, 0.90, 0.6, 0.76
# or in the short window, which shows a late onset, if the long window does not slow down.
SHORT_Z, SHORT_SNR, SHORT_EVEN, SHORT_SHAPE, SHORT_LONG_SHAPE = 4, 6.5, -0.8, 0.60, 0.80
GOES_ON = 0.5  # The first two also need a short window with at least half of the long slope.
STRAIGHT = 0.8, 1.25  # A shape between these is nearly a line.

# Whether a rise is a new one, and whether it is over:
LONGER = 1.5  # A rise that takes more than 1.5 times as long as the former one is a new one.
NEAR = 0.25  # A block within a quarter of the rise below its end counts as its end.
FALL = 0.9  # Between two rises the series falls by at least 0.9 of the rise.
FOOT = 0.1  # The foot of a rise is its lowest tenth.
UNSEEN = 32.0  # A rise that began before the series took at most 32 times as long as is seen.
LEVELS, LAST_SHARE = 20, 12


class Window(NamedTuple):
    """The figures of the newest blocks of a floor."""

    blocks: int
    #: of a line: bytes a block, and its standard error with the lag-1 autocorrelation of the
    #: residuals, so that a wandering series does not look certain
    slope: float
    error: float
    #: the line at the newest block, in bytes
    end: float
    #: slope over error
    z: float
    #: bytes from the first to the last of eight groups of blocks: the minimum of two ways, by the
    #: groups' minima and by their medians. `even` and `shape` are minima of both ways too
    rise: float
    #: the smallest step from one group to the next, over the average step
    even: float
    #: late over early; -9 where the series does not rise
    shape: float
    #: rise over the noise about the line
    snr: float
    #: into how many equal steps the growth that is never given back could be cut
    jumps: float
    #: slope of the last half over the slope
    front: float

    def grows(self, bar: float) -> bool:
        """Whether it certainly rises by more than `bar` bytes, and in more than a few jumps.
        Whether it will go on is not asked."""
        return (
            self.rise > bar
            and self.z > GROWS_Z
            and self.snr > GROWS_SNR
            and self.jumps >= GROWS_JUMPS
        )


#: the long window, the middle one and the short one
Windows = tuple[Window, Window, Window]


class Floor:
    """The minimum and the maximum of 64 to 127 blocks of a series."""

    __slots__ = ("_high", "_low", "count", "highs", "length", "lows")

    def __init__(self) -> None:
        self.lows, self.highs = array("d"), array("d")
        self.length = FIRST_LENGTH  # samples of a whole block
        self._begin_block()

    def _begin_block(self) -> None:
        self._low, self._high = math.inf, -math.inf
        self.count = 0  # samples of the block that is being filled

    def add(self, y: float) -> bool:
        """Add a sample; True if it ends a block."""
        if y < self._low:
            self._low = y
        if y > self._high:
            self._high = y
        self.count += 1
        if self.count < self.length:
            return False
        self.lows.append(self._low)
        self.highs.append(self._high)
        self._begin_block()
        if len(self.lows) == MOST_BLOCKS:
            self.lows = array("d", map(min, self.lows[::2], self.lows[1::2]))
            self.highs = array("d", map(max, self.highs[::2], self.highs[1::2]))
            self.length *= 2
        return True

    @property
    def is_due(self) -> bool:
        """Whether the floor is to be judged, where a block has just ended: after each 6 to 12 % of
        the series, 40 times in 8,000 samples."""
        blocks = len(self.lows)
        return blocks >= LEAST_BLOCKS and blocks % EVERY_BLOCKS == 0

    def _windows(self) -> tuple[int, int, int]:
        """How many blocks each of them has."""
        blocks = len(self.lows)
        return blocks * 3 // 4, blocks // 2, blocks // 4

    def windows(self) -> Windows:
        """There must be 64 blocks or more."""
        long, middle, short = (_window(self.lows[-blocks:].tolist()) for blocks in self._windows())
        return long, middle, short

    def may_rise(self, bar: float) -> bool:
        """False where no window rises by more than `bar` bytes, by its groups' minima: then lines
        need not be fitted."""
        lows = self.lows
        for blocks in self._windows():
            size = blocks // GROUPS
            begin = len(lows) - GROUPS * size
            if min(lows[-size:]) - min(lows[begin : begin + size]) > bar:
                return True
        return False

    def excursions(self) -> list[float]:
        """How far the series went above its floor, of each block of the newer half, in order of
        size."""
        half = len(self.lows) // 2
        return sorted(map(sub, self.highs[-half:], self.lows[-half:]))

    def largest_jump(self, slope: float) -> float:
        """Bytes by which the floor of the long window rose at once, beyond a slope; 0 or more."""
        lows = self.lows[-self._windows()[0] :]
        jump: float = max(map(sub, lows[1:], lows))
        return max(0.0, jump - slope)

    # --- about a rise that was found ---

    def regains(self, level: float, rise: float, *, highs: bool = False) -> bool:
        """Whether a rise regains what was given back before.

              /|  /|  /.   The series was at this level before, fell, and has not risen for longer
             / | / | /     since then than from the foot before to this one.
            /  |/  |/

        Args:
            level: where the rise has come to, in bytes.
            rise: by how many bytes at least.
            highs: look for the level among the maxima of the blocks; False, the default: among the
                minima.
        """
        lows, of = self.lows, self.highs if highs else self.lows
        blocks, near = len(lows), level - NEAR * rise
        # The newest block that came up to the level and was followed by a fall, and the minimum of
        # what followed.
        after, foot = blocks, self._low
        for top in reversed([i for i, y in enumerate(of) if y >= near]):
            foot = min(foot, *lows[top + 1 : after], math.inf)
            after = top + 1
            if of[top] - foot >= FALL * rise:
                break
        else:
            return False
        start = _newest_below(lows, blocks, foot + FOOT * (level - foot))
        start = max(top, blocks - 1 if start is None else start)
        filling = self.count / self.length
        former = self._former_rise(of, top, start, foot)
        return blocks - 1 - start + filling <= LONGER * former + 1

    def _former_rise(self, of: Sequence[float], peak: int, start: int, foot: float) -> float:
        """Blocks from the foot of the former rise, whose top is in block `peak` or near, to the
        foot of this one in block `start`. If the series began above the foot, as many as the rise
        would have taken from there at the same rate."""
        top = max(of[peak : start + 1])
        before = _newest_below(self.lows, peak, foot + FOOT * (top - foot))
        if before is not None:
            return start - before
        longer = (top - foot) / max(top - self.lows[0], 1)
        return (start + 1) * min(max(longer, 1), UNSEEN)

    def has_ended(self, blocks: int, longer: float) -> bool:
        """Whether the rise of the newest blocks is over.

            ._____   It has come to no new level for `longer` times as long as it ever took to
          .'         the next of twenty levels while it rose, and for a twelfth of the run.
        .'
        """
        lows = self.lows[-blocks:]
        first = min(lows)
        step = (max(lows) - first) / LEVELS
        longest = last = level = 0
        above = first + step
        for i, low in enumerate(lows):
            if low < above or level + 1 == LEVELS:
                continue
            if level > 0:
                longest = max(longest, i - last)
            last = i
            while level + 1 < LEVELS and low >= first + step * (level + 1):
                level += 1
            above = first + step * (level + 1)
        pause = blocks - last
        return pause > len(self.lows) // LAST_SHARE and pause > longer * longest

    def onset(self, windows: Windows) -> int:
        """The first block from which on the floor rises as it does at its end: where the growth
        began, as far as the blocks show it.

        By the shortest window: in a longer one the growth may have begun. Before it a block belongs
        to the growth as long as it lies no further from the line than those in the window do, and
        one block's growth, and what the error of the slope makes of the distance.
        """
        lows, line, newest = self.lows, windows[2], len(self.lows) - 1
        if line.slope <= 0:
            return len(lows) - straight(windows).blocks
        start = onset = len(lows) - line.blocks

        def beside(i: int) -> float:
            return abs(lows[i] - line.end + line.slope * (newest - i))

        furthest = line.slope + max(map(beside, range(start, len(lows))))
        while onset > 0:
            if beside(onset - 1) > furthest + 2.5 * line.error * (start - onset + 1):
                break
            onset -= 1
        return onset


def _newest_below(lows: Sequence[float], end: int, level: float) -> int | None:
    """The newest of the first `end` lows that is at most `level`; None where there is none."""
    return next((i for i in range(end - 1, -1, -1) if lows[i] <= level), None)


# --- the figures of a window ----------------------------------------------------------------------


def _window(lows: list[float]) -> Window:
    blocks = len(lows)
    line = line_through(range(blocks), lows)
    slope = line.slope
    beside = line.beside(range(blocks), lows)
    squares = sum(map(mul, beside, beside))
    rho = sum(map(mul, beside, beside[1:])) / squares + 1.5 / blocks if squares > 0 else 0.0
    rho = min(max(rho, 0.0), 0.95)
    error = math.sqrt(squares / (blocks - 2) * (1 + rho) / (1 - rho) / line.xx)
    noise = max(QUIETEST, 1.4826 * median(map(abs, beside)))
    # Eight groups of equal size; what is left over are the oldest blocks.
    size = blocks // GROUPS
    first = blocks - size * GROUPS
    groups = [sorted(lows[begin : begin + size]) for begin in range(first, blocks, size)]
    by_minima = _shape([group[0] for group in groups])
    by_medians = _shape([median(group) for group in groups])
    rise, even, shape = map(min, by_minima, by_medians)
    half = blocks // 2
    front = line_through(range(half), lows[-half:]).slope / slope if slope else 0.0
    return Window(
        blocks,
        slope,
        error,
        line.at(blocks - 1),
        slope / max(error, 1e-300) if slope else 0.0,
        rise,
        even,
        shape,
        rise / noise,
        _jumps(lows),
        front,
    )


def _shape(groups: Sequence[float]) -> tuple[float, float, float]:
    """(rise, even, shape) of a window."""
    first, last = groups[0], groups[-1]
    rise, middle = last - first, (groups[3] + groups[4]) / 2
    if rise <= 0:
        return rise, -9.0, -9.0
    least = min(map(sub, groups[1:], groups))
    early = max(middle - first, 0.02 * rise + 1)
    return rise, (GROUPS - 1) * least / rise, (last - middle) / early


def _jumps(lows: Sequence[float]) -> float:
    """What is never given back after a block is the minimum of the blocks from there on. It rises
    by jumps, of which n equal ones make (sum of jumps)^2 / (sum of squares) = n: so many jumps
    there are."""
    kept = list(accumulate(reversed(lows), min))
    jumps = list(map(sub, kept, kept[1:]))
    squares = sum(map(mul, jumps, jumps))
    return (kept[0] - kept[-1]) ** 2 / squares if squares > 0 else 0.0


# --- the rules ------------------------------------------------------------------------------------


def slows_down(windows: Windows, which: int) -> bool:
    """Whether the rise of a window slows down clearly, and so does that of the next longer one."""
    window = windows[which]
    if which < len(windows) - 1:
        return window.shape < SLOWED_ALONE
    return window.snr >= SLOWS_SNR and window.shape < SLOWS and windows[which - 1].shape < SLOWED


def lasts(windows: Windows, bar: float, span: float, length: float, slack: float = 0.0) -> bool:
    """Whether the floor rises spread out and does not slow down.

    Args:
        windows: of the floor.
        bar: what counts as a rise, in bytes.
        span: how many steps a window must cover before its shape says anything.
        length: of a block, in steps.
        slack: by how much it may slow down; 0, the default: a straight line or steeper, as exactly
            as the error allows.
    """
    long, middle, short = windows

    def counts(window: Window) -> bool:
        return window.rise > bar and window.blocks * length >= span

    # The last quarter rises too: what does not is a warm-up or a run of jumps that is over.
    goes_on = short.slope >= (GOES_ON - slack) * long.slope
    if (
        counts(long)
        and long.z >= LONG_Z
        and long.shape >= LONG_SHAPE - slack
        and long.jumps >= LONG_JUMPS
        and long.even >= LONG_EVEN
        and goes_on
    ):
        return True
    if (
        counts(middle)
        and middle.snr >= MIDDLE_SNR
        and middle.shape >= MIDDLE_SHAPE - slack
        and middle.front >= MIDDLE_FRONT
        and long.shape >= MIDDLE_LONG_SHAPE - slack
        and goes_on
    ):
        return True
    return (
        counts(short)
        and short.z >= SHORT_Z
        and short.snr >= SHORT_SNR
        and short.even >= SHORT_EVEN
        and short.shape >= SHORT_SHAPE - slack
        and long.shape >= SHORT_LONG_SHAPE - slack
    )


def straight(windows: Windows) -> Window:
    """The window whose line stands for the series now: the longest that is nearly straight, else
    the short one."""
    least, most = STRAIGHT
    return next((one for one in windows[:2] if least <= one.shape <= most), windows[2])

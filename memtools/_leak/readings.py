"""The readings of one signal, and how certain it is that it grows.

Two tests judge them: one of the floor of the whole series, each time that it has eight more blocks,
and one of the newest readings of an exact signal, each 8 steps and later each 16. The higher grade
counts. For a leak, three evaluations of the floor in a row must find growth.
"""

from __future__ import annotations

from memtools._base.sentences import STEPS_NEEDED, STEPS_TO_SUSPECT
from memtools._leak.drift import Drift, Recent
from memtools._leak.finding import GRADES
from memtools._leak.floor import Floor, Windows, lasts, slows_down, straight
from memtools._leak.forecast import Trend, trend_of_drift, trend_of_floor

#: The grades as numbers, the least certain first.
EARLY, QUIET, FILLS, FRAGMENTATION, SUSPECT, GROWING, LIKELY, LEAK = range(len(GRADES))
PAUSES, LEAK_PAUSES = 1.5, 3.0  # Growth has ended after a pause so many times the longest before.
LEAST_DRIFT = 1 / 64  # A drift of few readings must rise by this share of the bar.
FASTER = 2.0  # A drift so many times as fast as a rise that slows down is another one.
GOES_ON = 64  # A drift over so many steps is growing.
LOOK_EVERY, FIRST_LOOKS, LOOK_LATER = (
    8,
    16,
    16,
)  # Steps between the first looks, and the later ones.


class Readings:
    """The readings of one signal.

    Args:
        bar: bytes from which on a rise counts.
        span: steps that a window of the floor must cover before its shape counts.
        step: of the first reading.
        exact: whether readings are the same where nothing changes; rss is not.
    """

    __slots__ = (
        *("_bar", "_drift", "_drifting", "_ended", "_floor", "_floor_grade", "_is_known"),
        *("_is_straight", "_lasting", "_looked", "_looks", "_nearly", "_recent", "_rising"),
        *("_slope", "_slows", "_span", "_windows", "count", "first", "last", "newest"),
    )

    def __init__(self, bar: float, span: int, step: int, *, exact: bool) -> None:
        self._bar, self._span = bar, span
        #: how many readings, the steps of the first and the newest, and the newest as it was given
        self.count, self.first, self.last, self.newest = 0, step, step, 0
        self._floor, self._recent = Floor(), Recent() if exact else None
        self._windows: Windows | None = None  # of the floor as it is, once they are needed
        self._is_known = False  # the floor was judged
        self._is_straight = False  # on a line that stands for more than the last quarter
        self._floor_grade = QUIET
        self._rising = 0  # the newest blocks of the floor that have this grade,
        self._ended = False  # which rise no longer,
        self._slows = False  # or whose rise slows down clearly,
        self._slope = 0.0  # to so many bytes a step
        self._lasting = self._nearly = 0  # how often in a row growth lasted
        self._drift: Drift | None = None
        self._looks, self._looked = 0, step  # at the newest readings; the step of the last look
        self._drifting = 0  # the step since which each look has found a drift

    @property
    def steps(self) -> int:
        """From the first reading to the newest."""
        return self.last - self.first

    @property
    def _stride(self) -> float:
        """Steps from one reading to the next, on average."""
        return self.steps / (self.count - 1) if self.count > 1 else 1.0

    def add(self, step: int, size: int, judged: float) -> bool:
        """Add a reading; True if the grade may be another.

        Args:
            step: above that of the reading before.
            size: the reading in bytes.
            judged: the same without declared growth.
        """
        before, now = self.last - self.first, step - self.first
        self.count += 1
        self.last, self.newest = step, size
        changed = before < STEPS_NEEDED <= now or before < STEPS_TO_SUSPECT <= now
        if self._floor.add(judged):
            changed = self._judge_floor() or changed
        if self._recent is None:
            return changed
        self._recent.add(step, judged)
        if step - self._looked < (LOOK_EVERY if self._looks < FIRST_LOOKS else LOOK_LATER):
            return changed
        self._look(step, self._recent)
        return True

    def windows(self) -> Windows:
        """The windows of the floor, which must have been judged."""
        if self._windows is None:
            self._windows = self._floor.windows()
        return self._windows

    # --- the floor ---

    def _judge_floor(self) -> bool:
        """A block has ended; True if the grade may be another."""
        self._windows = None
        changed = self._floor.is_due
        if changed:
            self._is_known = True
            self._floor_grade = self._graded()
        if self._floor_grade == QUIET:
            return changed
        longer = LEAK_PAUSES if self._floor_grade == LEAK else PAUSES
        self._ended = self._floor.has_ended(self._rising, longer)
        return True

    def _graded(self) -> int:
        """Growth that three evaluations in a row find is a leak; two in a row make it likely. One
        evaluation says little: of many, one finds growth in any series."""
        if not self._floor.may_rise(self._bar):
            self._slows = False
            self._lasting = self._nearly = 0
            return QUIET
        windows, length = self.windows(), self._floor.length * self._stride
        lasting = lasts(windows, self._bar, self._span, length)
        nearly = lasts(windows, self._bar, self._span * 2 / 3, length, 0.25)
        self._lasting = self._lasting + 1 if lasting else 0
        self._nearly = self._nearly + 1 if nearly else 0
        growing = next((i for i in (2, 1, 0) if self._is_new_growth(windows, i)), None)
        self._rising = windows[growing or 0].blocks
        self._slows = growing is not None and slows_down(windows, growing)
        self._slope = windows[2].slope / length
        self._is_straight = straight(windows) is not windows[2]
        if self._lasting >= 3:
            return LEAK
        if growing is None or self._slows:
            return QUIET
        return LIKELY if self._nearly >= 2 else GROWING

    def _is_new_growth(self, windows: Windows, which: int) -> bool:
        """Whether a window grows into what was not in use before."""
        window = windows[which]
        if not window.grows(self._bar):
            return False
        noise = window.rise / window.snr
        return not self._floor.regains(window.end - noise, window.rise + noise)

    # --- the newest readings ---

    def _look(self, step: int, recent: Recent) -> None:
        drifted, self._looked = self._drift is not None, step
        self._drift = drift = recent.drift(self._bar * LEAST_DRIFT, self._looks)
        self._looks += 1
        if not drifted and drift is not None:
            self._drifting = drift.since
        if drift is not None and (
            self._floor.regains(drift.end, drift.rise, highs=True)
            or self._floor.regains(drift.end, drift.rise)
        ):
            self._drift = None

    def _drift_grade(self) -> int:
        """The grade of the drift. A warm-up that slows down also drifts; its floor shows that."""
        drift = self._drift
        if drift is None or (self._slows and drift.slope < FASTER * self._slope):
            return QUIET
        return GROWING if drift.until - self._drifting >= GOES_ON else SUSPECT

    # --- both ---

    @property
    def grade(self) -> int:
        return max(self._drift_grade(), QUIET if self._ended else self._floor_grade)

    @property
    def _deciding(self) -> Drift | None:
        """The drift, if it represents the series: if the floor has no straight line that grows."""
        floor_decides = (
            self._is_known
            and not self._ended
            and self._floor_grade >= GROWING
            and self._is_straight
        )
        return None if floor_decides else self._drift

    def trend(self) -> Trend | None:
        """The line that represents the series; None if there is none."""
        if (drift := self._deciding) is not None:
            return trend_of_drift(drift)
        return trend_of_floor(self._floor, self.windows(), self._stride) if self._is_known else None

    def begun(self) -> tuple[int, float]:
        """The step at which the growth of a series that grows began, and how much faster it is late
        than early."""
        if (drift := self._deciding) is not None:
            return min(self._drifting, drift.since), drift.shape
        blocks = self._floor.onset(self.windows())
        return self.first + int(blocks * self._floor.length * self._stride), self.windows()[0].shape

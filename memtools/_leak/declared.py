"""Declared growth, such as a buffer that fills: it is subtracted from the readings, and counted in
forecasts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memtools._leak.forecast import Outlook

MOST = 8  # Each reading goes through all declared growths.


@dataclass
class _Share:
    """How much of a declared growth has come in one signal: since which step, above which minimum
    of the readings, and the most that was subtracted."""

    since: int
    least: float
    used: float = 0.0


@dataclass
class _Growth:
    """Bytes and bytes a step, each infinite without a bound, the last step at which it grows, and
    the only signal."""

    size: float
    rate: float
    until: int | None
    signal: str | None
    #: how much has come, by signal
    come: dict[str, _Share] = field(default_factory=dict)

    def concerns(self, signal: str) -> bool:
        return self.signal is None or self.signal == signal

    def is_over(self, step: int) -> bool:
        return self.until is not None and step > self.until

    def allowed(self, share: _Share, step: int) -> float:
        """The bytes that may have come. Growth without a rate stops at its last step."""
        if self.rate == math.inf:
            return share.used if self.is_over(step) else self.size
        last = step if self.until is None else min(step, self.until)
        return max(0.0, min(self.size, self.rate * (last - share.since)))


class Declared:
    """All growth that is declared, by name."""

    __slots__ = ("_growths",)

    def __init__(self) -> None:
        self._growths: dict[str, _Growth] = {}

    def declare(
        self, name: str, size: float, rate: float, until: int | None, signal: str | None
    ) -> None:
        """Raises ValueError if eight other names are declared."""
        before = self._growths.get(name)
        if before is None and len(self._growths) == MOST:
            raise ValueError(
                f"expect_growth(): {MOST} growths are declared, which is the maximum; declare "
                "several buffers as one"
            )
        come = {} if before is None else before.come
        self._growths[name] = _Growth(size, rate, until, signal, come)

    def without_declared(self, signal: str, step: int, size: float) -> float:
        """A reading without declared growth: of each growth at most what may have come by this
        step, and at most what the series has grown. A series that grows less than declared must not
        seem to fall, which would hide a leak."""
        for growth in self._growths.values():
            if not growth.concerns(signal):
                continue
            share = growth.come.setdefault(signal, _Share(step, size))
            share.least = min(share.least, size)
            taken = min(size - share.least, growth.allowed(share, step))
            share.used = max(share.used, taken)
            size -= taken
        return size

    def outlook(self, signal: str, step: int, limit: float) -> Outlook:
        """What a signal will reach: what was subtracted from its readings is in use all the same,
        and what is still to come after `step` fills memory beside it."""
        coming = rate = rated = 0.0
        for growth in self._growths.values():
            share = growth.come.get(signal)
            if share is None or not growth.concerns(signal):
                continue
            limit -= share.used
            left = growth.size - share.used
            if growth.is_over(step) or left <= 0:
                continue
            if growth.rate == math.inf:
                coming += left
                continue
            if growth.until is not None:
                left = min(left, growth.rate * (growth.until - step))
            rate += growth.rate
            rated += left
        return Outlook(limit, coming, rate, rated)

"""What the demo says about each run: what happened to it, in one or two sentences.

A run that ended by memory says so. One that passed the stated limit, or grows towards it, says when
it would have ended: the limit of the demo is stated and not enforced, so that both runs can be
compared to their end. What is extrapolated says that it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtools._base.size import format_bytes
from memtools._base.text import count, duration

#: growth that reaches the limit later than this many times the updates of the run is no growth
HORIZON = 20


@dataclass(frozen=True)
class Outcome:
    """One way through an example, as facts. Sizes are bytes, times seconds.

    `ended` is "finished", or how it ended instead, such as "out of memory in update 16". `same` is
    whether losses and samples are those of the first way: "yes", "" where that is not asked, or
    where they differ. `seconds` is the whole run, `pace` the seconds of an update. `enforced` names
    the limit that is really in force, where there is one; a run that is `free` is not under it.
    With `workers`, sizes are those of all processes of the run. `failed` says how and why the
    example failed, where that was not for want of memory; it then has no other facts.
    """

    way: str
    label: str
    ended: str
    updates: int
    seconds: float
    pace: float
    peak_bytes: int
    limit_bytes: int
    same: str = ""
    growth_bytes: float | None = None  # per 1,000 updates
    passed_after: float | None = None
    generation_peak: int | None = None
    generation_cpu: float | None = None
    enforced: str = ""
    free: bool = False
    workers: bool = False
    remark: str = ""
    failed: str = ""

    @property
    def survived(self) -> bool:
        """Whether it got to its end, within the limit, and is not on its way to it."""
        return self.ended == "finished" and self.passed_after is None and not self.reaches_at

    @property
    def reaches_at(self) -> int | None:
        """The update in which growth reaches the limit; None if it does not grow that fast."""
        if self.growth_bytes is None or self.growth_bytes <= 0 or self.updates < 1:
            return None
        room = max(0, self.limit_bytes - self.peak_bytes)
        update = self.updates + round(1000 * room / self.growth_bytes)
        return update if update <= HORIZON * self.updates else None

    @property
    def reaches_after(self) -> float | None:
        """Seconds until then, at the pace of the run; None if it does not get there."""
        at = self.reaches_at
        return None if at is None else self.seconds + (at - self.updates) * self.pace


def sentences(outcome: Outcome) -> str:
    """What happened to one run."""
    return " ".join(filter(None, [_fate(outcome), _generation(outcome), _rest(outcome)]))


def _fate(outcome: Outcome) -> str:
    if outcome.failed:
        return outcome.failed
    limit, peak = format_bytes(outcome.limit_bytes), format_bytes(outcome.peak_bytes)
    done = count(outcome.updates, "update")
    if outcome.ended != "finished":
        under = f", under {outcome.enforced}" if outcome.enforced else ""
        after = duration(outcome.seconds)
        return f"{outcome.ended[:1].upper()}{outcome.ended[1:]}{under}, after {after}."
    if outcome.passed_after is not None:
        peaked = "" if outcome.generation_peak else f" and peaked at {peak}"
        return (
            f"Passed the limit of {limit} after {duration(outcome.passed_after)}{peaked}: where "
            "that limit is enforced, the run is killed there."
        )
    if outcome.reaches_at is not None:
        assert outcome.growth_bytes is not None
        return (
            f"Grows by {format_bytes(outcome.growth_bytes)} per 1,000 updates and held {peak} "
            f"after {done}. At that rate it reaches the limit of {limit} in update "
            f"{outcome.reaches_at:,}, {duration(outcome.reaches_after or 0)} after its start "
            "(extrapolated)."
        )
    of = "" if outcome.enforced else f" of the {limit}"
    under = f" under {outcome.enforced}" if outcome.enforced else ""
    under = " without the limit" if outcome.free else under
    peak += " in all processes" if outcome.workers else ""
    steady = "" if outcome.growth_bytes is None else ", and does not grow towards it"
    return f"Finished all {done}{under} with at most {peak}{of}{steady}."


def _generation(outcome: Outcome) -> str:
    if outcome.generation_peak is None or outcome.generation_cpu is None:
        return ""
    peak, cpu = format_bytes(outcome.generation_peak), duration(outcome.generation_cpu)
    return f"Generation peaked at {peak} and took {cpu} of processor time."


def _rest(outcome: Outcome) -> str:
    same = ""
    if outcome.same == "yes":
        same = "The losses are the same to the last bit."
    elif outcome.same:
        same = f"The losses are NOT the same: {outcome.same}."
    return " ".join(filter(None, [outcome.remark, same]))

"""The sentences about growth and about who holds it. Holders of a running program and those of a
record have the same fields, and so the same sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from memtools._base.size import format_bytes
from memtools._base.text import duration

if TYPE_CHECKING:
    from memtools._census.holders import Holder
    from memtools._leak.detector import LeakVerdict
    from memtools._monitor.guards import Pressure
    from memtools._record import kinds


#: Steps that have to be made before a leak test may say that something grows, and before it may say
#: that nothing does: to find growth may take as many.
STEPS_TO_SUSPECT, STEPS_NEEDED = 16, 32


def of_early(steps: int) -> str:
    """Why nothing is said of a run of so many steps in which no growth was found."""
    needed = STEPS_TO_SUSPECT if steps < STEPS_TO_SUSPECT else STEPS_NEEDED
    return f"too early to say: {steps:,} of {needed} steps"


def of_walk_that_waits(seconds: float, step: int | None) -> str:
    """Why the holder of what grows is not known yet.

    Args:
        seconds: of processor time that a walk of the heap takes.
        step: at which there is time for it; None where the program makes no steps.
    """
    cost = f"a walk of this heap takes {seconds:.1f} s"
    if step is None:
        return f"the search for its holder comes later: {cost}"
    digits = 10 ** max(0, len(str(step)) - 2)
    due = math.ceil(step / digits) * digits
    return f"the search for its holder comes at about step {due:,}: {cost}"


def of_time_left(low: float, high: float) -> str:
    """The same in seconds, for programs that make no steps."""
    if math.isinf(low):
        return "no limit in sight"
    if high <= 0:
        return "limit reached"
    if math.isinf(high):
        return f"limit in {duration(low)} at the earliest"
    return f"limit in {duration(low)} to {duration(high)}"


def of_steps_left(low: float, high: float, limit: str = "limit") -> str:
    """When a limit is reached, in steps from now: hardly before `low`, and hardly after `high`.
    `limit` says which."""
    if math.isinf(low):
        return f"no {limit} in sight"
    if high < 1:
        return f"{limit} reached"
    if math.isinf(high):
        return f"{limit} in {_rounded(low)} steps at the earliest"
    return f"{limit} in {_rounded(low)} to {_rounded(high)} steps"


def _rounded(steps: float) -> str:
    """A number of steps with two digits: a forecast does not know more."""
    digits = len(str(int(steps)))
    return f"{round(steps, min(0, 2 - digits)):,.0f}"


def of_verdict(verdict: LeakVerdict) -> str:
    """`likely: +4.0 MiB/step in heap since step 512, limit in 900 to 1,000 steps`."""
    if verdict.kind == "early":
        return of_early(verdict.steps_known)
    if verdict.signal is None:
        return "quiet: no signal grows"
    rate = f"+{format_bytes(verdict.rate_bytes_per_step)}/step"
    since = f"in {verdict.signal} since step {verdict.since_step:,}"
    left = ""
    if verdict.steps_left is not None:
        left = of_steps_left(verdict.steps_left[0], verdict.steps_left[2])
    if verdict.kind == "growing":
        return _of_growing(verdict, rate, since, left)
    if verdict.kind == "fragmentation":
        line = f"fragmentation: {rate} in rss since step {verdict.since_step:,}, while memory in"
        line = f"{line} use does not grow"
    else:
        line = f"{verdict.kind}: {rate} {since}"
        cost = verdict.rss_bytes_per_step or 0
        if verdict.signal != "rss" and cost > 1.5 * verdict.rate_bytes_per_step:
            line = f"{line}, takes {format_bytes(cost)}/step of rss"
    return f"{line}, {left}" if left else line


def _of_growing(verdict: LeakVerdict, rate: str, since: str, left: str) -> str:
    if verdict.rate_bytes_per_step < 0.5:
        return f"growing: {since}, but no longer at the end"
    shape = "straight line" if 0.8 <= verdict.shape <= 1.25 else "not a straight line"
    line = f"growing: {rate} {since}, {shape}"
    if left:
        line = f"{line}; {left} if it continues"
    if verdict.declarable:
        line = f'{line}; if a buffer fills, declare it: expect_growth("its name", bytes=...)'
    return line


def of_pressure(pressure: Pressure | kinds.GuardAct) -> str:
    """`450.0 MiB of 500.0 MiB used (90.0%; limit given, 500.0 MiB), watermark 90%`."""
    used, limit = pressure.used_bytes, pressure.limit_bytes
    share = 100.0 * used / limit if limit else 100.0
    line = (
        f"{format_bytes(used)} of {format_bytes(limit)} used ({share:.1f}%; "
        f"{pressure.limit_source}), watermark {100 * pressure.fraction:g}%"
    )
    if pressure.stalled_percent and round(pressure.stalled_percent) > 0:
        line += f", stalled {pressure.stalled_percent:.0f}% of the last 10 s"
    return line


def of_holder(holder: Holder | kinds.Holder) -> str:
    """`+4.0 MiB/step: 2 new float32 tensors a step, held by list MoEBlock.gate_history`."""
    if holder.kind == "tensors":
        held = f", most held by {holder.path}" if holder.path else ""
        return f"{holder.new_objects:,} {holder.what}, {format_bytes(holder.new_bytes)}{held}"
    is_graph = holder.kind == "autograd graph"
    if holder.new_objects == 0:
        nodes = f" ({holder.length:,} nodes)" if is_graph and holder.length else ""
        return holder.path + nodes
    size = holder.new_bytes / holder.steps
    verb = "of the" if is_graph else "held by"
    rate = "/step" if holder.steps > 1 else ""
    parts = [f"+{format_bytes(size)}{rate}: " if holder.new_bytes else ""]
    parts.append(f"{of_new_objects(holder)}, {verb} {holder.path}")
    if holder.containers > 1:
        parts.append(f" ({holder.containers} of them)")
    if holder.capacity is not None:
        now = "" if holder.length is None else f"{holder.length:,} of "
        parts.append(f", which holds {now}at most {holder.capacity:,}")
        final = final_bytes(holder)
        if final:
            parts.append(f" and then {format_bytes(final)}")
    return "".join(parts)


def of_held(holder: Holder) -> str:
    """`2 [2048, 64] float32 tensors, 1.0 MiB`: what it holds; "" where no objects are known."""
    if holder.new_objects == 0:
        return ""
    what = holder.what.removesuffix("s") if holder.new_objects == 1 else holder.what
    size = f", {format_bytes(holder.new_bytes)}" if holder.new_bytes else ""
    return f"{holder.new_objects:,} {what}{size}"


def of_new_objects(holder: Holder | kinds.Holder, seconds: float | None = None) -> str:
    """`2 new [2048, 64] float32 tensors a step`, `1 new object every 25 steps`; "" where nothing is
    known to be new. Where a step is nothing but so many seconds, `40 new dict objects a second`."""
    if holder.new_objects == 0:
        return ""
    unit = "step" if seconds is None else "second"
    each = holder.new_objects / holder.steps / (seconds or 1.0)
    return of_new(each, holder.what, unit if holder.steps > 1 or each < RARE else "")


#: Fewer objects a step than this are reported as one every several steps.
RARE = 0.6
#: A number of objects a step this close to a whole number is reported as that.
WHOLE = 0.04


def of_new(each: float, what: str, unit: str) -> str:
    """`2 new [64] float32 tensors a step`, `1 new [64] float32 tensor every 2 steps`.

    Args:
        each: objects that come in a unit, above 0.
        what: they are, as a plural.
        unit: "step" or "second"; "" where there was but one.
    """
    if each < RARE:
        return f"1 new {what.removesuffix('s')} every {1 / each:,.0f} {unit}s"
    whole = each >= 100 or (round(each) > 0 and abs(each - round(each)) <= WHOLE * each)
    number = f"{each:,.0f}" if whole else f"{each:.2g}"
    what = what.removesuffix("s") if number == "1" else what
    return f"{number} new {what}" + (f" a {unit}" if unit else "")


def final_bytes(holder: Holder | kinds.Holder) -> int | None:
    """How many bytes a bounded container will hold when it is full; None without a bound."""
    if holder.capacity is None or holder.new_objects == 0:
        return None
    return holder.capacity * holder.containers * holder.new_bytes // holder.new_objects

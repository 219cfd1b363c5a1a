"""LeakFinding: one thing that grows: how fast, what holds it, how long until the limit, and what to
do.

    census and leak test ──► LeakFinding ──► logger, terminal, on_leak(callback)
                                  │
                                  └──► an event of the record ──► explain, report, compare

The running monitor makes it once. Everything that shows it has this order: grade, holder, rate,
what is left; then the line of the program and its source text, and the fix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memtools._base import sentences
from memtools._base.redact import harmless
from memtools._base.size import format_bytes

#: The grades of growth, the least certain first.
#:
#: - early: too few steps to say that nothing grows, and no growth was found;
#: - quiet: nothing grows, after 32 steps or more;
#: - fills: a container with a bound or a warm-up takes what grows;
#: - fragmentation: resident memory grows, memory in use does not;
#: - suspect: memory in use at the end of a step rose for 16 to 32 steps;
#: - growing: and goes on growing;
#: - likely: and has not slowed down, or a container that only ever gained explains it;
#: - leak: and does not slow down, for long enough to tell it from what fills.
GRADES = ("early", "quiet", "fills", "fragmentation", "suspect", "growing", "likely", "leak")
RANK = {grade: rank for rank, grade in enumerate(GRADES)}
#: The signals of what the process itself has in use.
OF_USE = ("heap", "python", "tensors", "rss", "")
#: The parts of a name that change from look to look: the number of containers that grow in a
#: container, the entry of a container on the way to what grows.
_PASSING = re.compile(r"(\[[^]]*\])*( \([^)]*\))?$")

#: The key of a finding: (process, what grows there).
Key = tuple[str, str]
#: The process in the key of what workers have found: the same in several of them is one thing.
WORKERS = "workers"
_OF_WORKERS = re.compile(r"worker .*|[\d,]+ workers", re.DOTALL)


#: The fields that are names and sentences, "" where they are not known.
_TEXTS = (
    "holder",
    "kind",
    "what",
    "made_at",
    "kept_at",
    "source",
    "library",
    "process",
    "phase",
    "advice",
)
#: The kind of memory that was allocated before and is written for the first time.
FIRST_WRITES = "first writes"
#: The causes of what fills, where it is known whether all of it fits under the limit.
FITS, TOO_LARGE = "fits", "too large"
#: The cause of a suspect that would not reach the limit in any likely run.
LITTLE = "little"
#: A finding that is at least this share of all growth towards a limit has the forecast of it.
MUCH_OF_JOINT = 0.5


def is_call(grade: str) -> bool:
    """Whether the grade says that memory leaks: growing or above."""
    return RANK[grade] >= RANK["growing"]


def is_little(finding: LeakFinding) -> bool:
    """Whether it is a suspect that would not reach the limit in any likely run."""
    return finding.grade == "suspect" and finding.cause == LITTLE


def is_reported(finding: LeakFinding) -> bool:
    """Whether a finding is reported while the program runs: from suspect on, without what is too
    little to matter, and below that if memory runs into its limit by it, or what fills will not
    fit."""
    if is_little(finding):
        return False
    is_forecast = finding.steps_left is not None or finding.seconds_left is not None
    return RANK[finding.grade] >= RANK["suspect"] or is_forecast or finding.cause == TOO_LARGE


@dataclass(frozen=True)
class LeakFinding:
    """One thing that grows. Texts are "" if unknown or without meaning.

    Attributes:
        grade: how certain it is that memory leaks: "early", "quiet", "fills", "fragmentation",
            "suspect", "growing", "likely" or "leak".
        signal: where the growth was seen: "heap", "python", "tensors", "children", "device", "shm",
            "rss", or "resident" for resident memory that is not in use.
        per: the unit of the rate: "step", or "s" if the program makes no steps.
        phase: the phase whose steps these are, such as "evaluate".
        rate_bytes: bytes a step or a second; 0 if unknown.
        first_step: the step of the first report; None without steps.
        since_step: the step at which the growth began, as far as known.
        holder: what holds the memory, such as `list Trainer.losses`; "" if no Python object does.
        kind: of the holder: a type such as "list" or "lru_cache", "autograd graph", "optimizer
            state", "hooks", "exceptions", "variable", "stream", "entries" (those of a container
            grow), "callbacks" (of atexit) or "calls" (that do not end). Without a holder: "C heap",
            "Python objects", "shared memory", "children", "processes", "cycles", "idle heap" (freed
            memory that malloc keeps), "first writes" (to memory allocated earlier) or "outside
            malloc" (memory that a library takes from the system).
        what: what is added, such as `2 new [2048, 64] float32 tensors a step`.
        made_at: the line that allocates it, as `file:line in function`.
        kept_at: the line that puts it into the holder, or that makes or calls a library's object.
        source: the source text of `kept_at`, else of `made_at`.
        library: whose container it is, such as `tarfile.TarFile`.
        release: a method of that object that releases the memory, such as `close()`.
        process: "" for this process, else `worker 2`, `4 workers` or `child process 4711`.
        steps_left: the fewest and the most steps left before the limit, for all growth towards it;
            only for the fastest finding and those with half of that growth or more.
        seconds_left: the same in seconds, at the pace of the run.
        advice: what to do, such as `clear it after use`.
        over: whether the growth has ended; the other fields are from before.
        joint_bytes: `rate_bytes` of all growth towards the limit, if `steps_left` is known; else 0.
        freed_bytes: bytes freed at once when the growth ended, as at the end of an epoch.
        cause: "jumps" (a C buffer that is enlarged when full), "profiler", "collector" (Python's
            garbage collector is off), "views" (small views keep whole tensors), "extension" (a
            growing object of an extension, such as a table), "fits" or "too large" (for the limit),
            "little" (a suspect that would not reach the limit within a million steps).
        left_bytes: bytes still to come until what fills is full; 0 if unknown.
    """

    grade: str
    signal: str = ""
    per: str = "step"
    rate_bytes: float = 0.0
    first_step: int | None = None
    since_step: int | None = None
    holder: str = ""
    kind: str = ""
    what: str = ""
    made_at: str = ""
    kept_at: str = ""
    library: str = ""
    release: str = ""
    process: str = ""
    steps_left: tuple[float, float] | None = None
    seconds_left: tuple[float, float] | None = None
    advice: str = ""
    over: bool = False
    joint_bytes: float = 0.0
    freed_bytes: int = 0
    cause: str = ""
    phase: str = ""
    left_bytes: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        """Remove terminal escapes and secrets from names of the program."""
        for name in _TEXTS:
            object.__setattr__(self, name, harmless(getattr(self, name)))

    @property
    def part(self) -> str:
        """The part of memory that grows. It is "use" for what the process itself has in use, by
        whichever signal that was seen, and otherwise the name of the signal."""
        return "use" if self.signal in OF_USE else self.signal

    @property
    def key(self) -> Key:
        """The process and the name by which two findings are known to be about the same thing. It
        stays the same from look to look, although another entry of a dict, for example, may grow
        each time. Growth without a holder is one thing, whichever signal shows it, and so are all
        blocks of one part of memory that fill, whether their arrays are known yet or not."""
        process = WORKERS if _OF_WORKERS.fullmatch(self.process) else self.process
        if self.kind == FIRST_WRITES:
            return process, f"{self.kind} of {self.part}"
        return process, _PASSING.sub("", self.holder) or self.kind or self.part

    @property
    def subject(self) -> str:
        """The name of the holder, or words if there is none, and in which process it grows."""
        subject = self.holder or _NOBODY.get(self.kind) or _NOBODY.get(self.signal, "memory in use")
        if self.process and not self.holder and self.kind == "children":
            return self.process
        return f"{self.process}: {subject}" if self.process else subject

    def line(self) -> str:
        """Everything but the grade and the fix: `list Trainer.losses +3.1 MiB/step (2 new [2048,
        64] float32 tensors a step), limit in 300 to 420 steps; kept at train.py:17 in fit`."""
        head = " ".join(filter(None, (self.subject, self.rate())))
        if self.what:
            head += f" ({self.what})"
        head = ", ".join(filter(None, (head, self.forecast())))
        return "; ".join(filter(None, (head, self.lines())))

    def rate(self) -> str:
        """How fast it grows: `+3.1 MiB/step`; "" where that is not known."""
        if self.rate_bytes <= 0:
            return ""
        return f"+{format_bytes(self.rate_bytes)}/{self.per}{self._of_phase()}"

    def forecast(self) -> str:
        """How long is left: `limit in 300 to 420 steps`; "" where that is not known."""
        if self.per == "s" and self.seconds_left is not None:
            return sentences.of_time_left(*self.seconds_left) + self._joint()
        if self.steps_left is not None:
            limit = "limit of the device" if self.signal == "device" else "limit"
            left = sentences.of_steps_left(*self.steps_left, limit)
            return left + self._of_phase() + self._joint()
        return ""

    def _of_phase(self) -> str:
        return f" of {self.phase}" if self.phase and self.per == "step" else ""

    def _joint(self) -> str:
        """The growth that the forecast is of, if it is more than twice that of the finding."""
        if self.joint_bytes * MUCH_OF_JOINT <= self.rate_bytes:
            return ""
        return f", as memory as a whole grows by {format_bytes(self.joint_bytes)}/{self.per}"

    def freed(self) -> str:
        """How the growth ended, where what had grown was freed at once."""
        size = format_bytes(self.freed_bytes)
        end = self.phase or "an epoch"
        return f"{size} were freed at once, as at the end of {end}"

    def without_forecast(self) -> LeakFinding:
        """The finding without its forecast, for a page that has it already."""
        return replace(self, steps_left=None, seconds_left=None, joint_bytes=0.0)

    def lines(self) -> str:
        """The lines that make it and that keep it: `made at net.py:9, kept at train.py:17 in fit`;
        "" where none is known."""
        if self.made_at and self.made_at == self.kept_at:
            return f"made and kept at {self.made_at}"
        lines = ("made", self.made_at), ("kept", self.kept_at)
        return ", ".join(f"{verb} at {line}" for verb, line in lines if line)

    def __str__(self) -> str:
        if self.over:
            freed = f"; {self.freed()}" if self.freed_bytes else ""
            return f"no longer: {self.grade}: {self.without_forecast().line()}{freed}"
        return f"{self.grade}: {self.line()}"

    def as_json(self) -> dict[str, Any]:
        """The fields that programs read, None for unknown ones, and the sentence."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("grade", "first_step", "since_step", "rate_bytes", "per", "signal")
        }
        for name in _TEXTS:
            found[name] = getattr(self, name) or None
        for name in ("steps_left", "seconds_left"):
            interval = getattr(self, name)
            found[name] = None if interval is None else [_finite(end) for end in interval]
        found["text"] = str(self)
        return found


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def with_forecast(
    findings: Sequence[LeakFinding],
    steps: tuple[float, float] | None,
    seconds: tuple[float, float] | None,
    joint: float,
) -> list[LeakFinding]:
    """The findings, of which the fastest has the forecast of all that grows together, and each
    other that is at least half of that growth.

    Args:
        findings: what grows towards one limit, and does not end by itself before.
        steps: until the limit, the fewest and the most; None if that is not known.
        seconds: the same in seconds.
        joint: bytes a step or a second by which all grows together.
    """
    fastest = max((one.rate_bytes for one in findings), default=0.0)
    least = min(fastest, MUCH_OF_JOINT * joint)
    is_known = steps is not None or seconds is not None
    return [
        replace(one, steps_left=steps, seconds_left=seconds, joint_bytes=joint)
        if is_known and one.rate_bytes >= least > 0
        else one.without_forecast()
        for one in findings
    ]


#: The `what` of cycles that are not collected.
COLLECTOR_IS_OFF = "the garbage collector is off"

#: What grows if its holder is not known, by kind, or by signal.
_NOBODY = {
    "C heap": "the C heap, whose holder is not known",
    "Python objects": "Python objects whose holder is not known",
    "shared memory": "shared memory of this job",
    "children": "the memory of child processes",
    "processes": "child processes",
    "cycles": "cycles that wait for the garbage collector",
    "idle heap": "freed memory that malloc keeps",
    "first writes": "memory that is written for the first time",
    "outside malloc": "memory outside malloc",
    "mapped files": "pages of mapped files",
    "python": "Python objects",
    "tensors": "tensors",
    "device": "memory of the device",
    "shm": "shared memory",
    "rss": "resident memory",
    "resident": "resident memory",
}

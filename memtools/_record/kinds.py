"""The typed events of a record: for each kind a class with the fields that one part of memtools
writes and another one reads, and with the sentence in which they are shown.

    monitor ──► payload() ──► run.mem ──► read() ──► RecordEvent.data: Finding, Limit, ...
                JSON of the fields             └───► RecordEvent.text: data.sentence()

A text of the program (a mark, the name of a phase) has no fields.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Union

from memtools._base import sentences
from memtools._base.peak import BACKWARD, BACKWARDS, OPTIMIZER, OPTIMIZERS, PeakContents, in_phase
from memtools._base.place import line_of
from memtools._base.size import format_bytes
from memtools._leak.finding import LeakFinding

#: A field is cut to so many characters: some fields of any characters fit into a payload of 64 KiB.
LONGEST = 2048
_NUMBER = 2**63  # Numbers of a payload must be smaller.


@dataclass(frozen=True)
class Event:
    """The base class of typed events."""

    KIND: ClassVar[str]

    def sentence(self) -> str:
        """The event in words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Start(Event):
    """What is recorded, and how often. It is written again if `untested` changes, or if the leak
    test begins again.

    Attributes:
        name: the name of the monitor.
        command: the command that is watched from outside; "" if a process watches itself.
        devices: the numbers of the devices that are watched.
        interval_ms: milliseconds between samples.
        limit: the limit and where it comes from, in words.
        given_bytes: the limit that was given; it has no column.
        machine_bytes: the machine's memory, if that is the limit.
        tests_leaks: whether the run tests itself and writes what grows as findings: without a
            finding, nothing grows.
        untested: why the run does not test itself although it was meant to; "" otherwise.
        notebook: the notebook's file name, if it is known.
        origin: the leak test counts steps from this one on; before it, steps were something else.
    """

    KIND = "start"

    name: str = ""
    command: str = ""
    devices: tuple[int, ...] = ()
    interval_ms: float = 0.0
    limit: str = ""
    given_bytes: int | None = None
    machine_bytes: int | None = None
    tests_leaks: bool = False
    untested: str = ""
    notebook: str = ""
    origin: int = 0

    def sentence(self) -> str:
        name = f"{self.name}: " if self.name else ""
        host = ", ".join(["host", *(f"cuda{i}" for i in self.devices)])
        watched = f"process tree of {self.command}" if self.command else host
        return f"{name}{watched} every {self.interval_ms:g} ms; {self.limit}"


@dataclass(frozen=True)
class End(Event):
    """How the process ended: by an exit `code`, a `signal` ("" if it is not known which one), an
    `exception` (the name of its type), or in another way, such as "stop()" (`how`). `text` is that
    of the code or the exception."""

    KIND = "end"

    how: str = ""
    text: str = ""
    code: int | None = None
    signal: str | None = None
    exception: str = ""

    def clause(self) -> str:
        """`code 1: bad learning rate`, `killed by SIGTERM`, `exception ValueError: no column`."""
        what, mark = self.how, ", "
        if self.code is not None:
            what, mark = f"code {self.code}", ": "
        elif self.signal:
            what = f"killed by {self.signal}"
        elif self.exception:
            what, mark = f"exception {self.exception}", ": "
        return mark.join(part for part in (what, self.text) if part)

    def sentence(self) -> str:
        return f"exit: {self.clause()}"


@dataclass(frozen=True)
class Fork(Event):
    """How many child processes were forked since the last such event."""

    KIND = "fork"

    count: int

    def sentence(self) -> str:
        many = "a child process" if self.count == 1 else f"{self.count:,} child processes"
        return f"{many} forked"


@dataclass(frozen=True)
class Finding(LeakFinding, Event):
    """Something that grows, as the running monitor has found it: the fields of a LeakFinding."""

    KIND = "finding"

    def sentence(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Holder(Event):
    """Who holds the memory of a device that ran out: the fields of a Holder of the census. The kind
    "tensors" is what it is full of, with the container that holds most of that, if there is one."""

    KIND = "holder"

    path: str
    kind: str
    length: int | None
    capacity: int | None
    new_objects: int
    new_bytes: int
    containers: int = 1
    what: str = "objects"
    steps: int = 1

    def sentence(self) -> str:
        return sentences.of_holder(self)


@dataclass(frozen=True)
class Trace(Event):
    """Steps were traced to find the lines that make what grows.

    Attributes:
        steps: how many steps; 0 if nothing was traced.
        ms: how long the tracing took at the ends of these steps, in milliseconds.
        sources: what traced them.
        why: why a source was not used, or why nothing was traced.
        found: how many findings got a line.
        seconds: how long was traced, if the program makes no steps; else None.
    """

    KIND = "trace"

    steps: int = 0
    ms: float = 0.0
    sources: tuple[str, ...] = ()
    why: str = ""
    found: int = 0
    seconds: float | None = None

    def sentence(self) -> str:
        if not self.steps:
            return f"its line is unknown: nothing was traced, because {self.why}"
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        if self.seconds is not None:
            steps = f"{self.seconds:.1f} s"
        by = f" by {' and '.join(self.sources)}" if self.sources else ""
        known = "no line explains the growth"
        if self.found:
            known = f"the line of {self.found} finding{'s' * (self.found > 1)}"
        why = f" ({self.why})" if self.why else ""
        return f"{steps} traced{by} in {self.ms:.1f} ms{why}: {known}"


@dataclass(frozen=True)
class Peak(PeakContents, Event):
    """What lived at the peak of a step that was recorded: the fields of a PeakContents. `why` says
    why no step is recorded in this run; "" otherwise."""

    KIND = "peak"

    step: int = 0
    peak_bytes: int = 0
    why: str = ""

    def name(self) -> str:
        """`step 19`, or `step 19 of evaluate` where the phase has steps of its own."""
        return f"step {self.step:,}" + (f" of {self.of}" if self.of else "")

    def moment(self) -> str:
        """`in the optimizer's step (aten::_foreach_sqrt, train.py:31)`."""
        where = in_phase(self.phase) if self.phase else "in the step"
        at = ", ".join(part for part in (self.operator, line_of(self.line)) if part)
        return f"{where} ({at})" if at else where

    def filled(self) -> str:
        """`optimizer state 41.6 MiB, its temporaries 32.0 MiB, parameters 20.8 MiB`: the parts of 1
        % of the peak or more."""
        own = {OPTIMIZER: OPTIMIZERS, BACKWARD: BACKWARDS}.get(self.phase)
        names = {own: "its temporaries"}
        return ", ".join(
            f"{names.get(part.what, part.what)} {format_bytes(part.bytes)}"
            for part in self.parts
            if 100 * part.bytes >= self.peak_bytes
        )

    def sentence(self) -> str:
        if self.why:
            return f"the tensors at the peak are unknown: nothing was recorded, because {self.why}"
        if self.traced is not None:  # The same peak once more, with what was found of it.
            return f"peak of {self.name()}: {self.traced.found()}"
        return f"peak of {self.name()}: {self.contents()}"

    def contents(self) -> str:
        """`66.6 MiB of tensors, in the forward pass (aten::mse_loss, train.py:24): inputs ...`."""
        filled = self.filled()
        text = f"{format_bytes(self.peak_bytes)} of tensors, {self.moment()}"
        text += f": {filled}" if filled else ""
        lost = f"; {self.lost:,} blocks are missing: the recording was full" if self.lost else ""
        return text + lost


@dataclass(frozen=True)
class Limit(Event):
    """A limit of the process itself. `limit_bytes` is None if it was lifted. `used_bytes` is how
    much was in use when it acted, None if it did not (for RLIMIT_NPROC both are threads)."""

    KIND = "limit"

    name: str
    limit_bytes: int | None
    used_bytes: int | None = None

    def sentence(self) -> str:
        if self.used_bytes is not None:
            return f"{self.name} {self.limit_bytes} acted: {self.used_bytes} in use"
        size = "unlimited" if self.limit_bytes is None else f"{self.limit_bytes} B"
        return f"{self.name} {size}"


@dataclass(frozen=True)
class Counters(Event):
    """What the kernel has counted in a control group, that of the process or one above it: at the
    start of the run, when it was moved to another group, and at the end. What the version of
    control groups does not have is None. Counters can be compared if they have the same `folder`
    and `inode` of the group and the same `boot` of the kernel."""

    KIND = "counters"

    group: str
    folder: str
    version: int
    inode: int
    boot: str
    limit_bytes: int | None = None
    #: whether it is the process's own group
    own: bool = False
    #: how many of its processes the kernel has killed because memory ran out, at any limit
    oom_kill: int | None = None
    #: how often its limit, or one of a group below it, made the kernel kill
    oom: int | None = None
    #: how often all of its processes were killed together
    oom_group_kill: int | None = None
    #: how often its limit was met: `max` of version 2, `failcnt` of version 1
    met: int | None = None
    #: how often `memory.high` slowed it down
    high: int | None = None

    def sentence(self) -> str:
        limit = "no limit"
        if self.limit_bytes is not None:
            limit = f"limit {format_bytes(self.limit_bytes)}"
        killed = "not known" if self.oom_kill is None else f"{self.oom_kill:,}"
        met = "" if self.met is None else f", limit met {self.met:,} times"
        return f"control group {self.group} ({limit}): processes killed for memory: {killed}{met}"


@dataclass(frozen=True)
class SharedRoom(Event):
    """The size of /dev/shm and how much of it all processes used: at the start, and if the run did
    not end well, the highest use that was seen."""

    KIND = "shm_room"

    size_bytes: int
    used_bytes: int

    def sentence(self) -> str:
        return f"/dev/shm: {format_bytes(self.used_bytes)} of {format_bytes(self.size_bytes)} used"


@dataclass(frozen=True)
class Heap(Event):
    """Freed memory that malloc kept when the host's memory had run out."""

    KIND = "heap"

    kept_bytes: int

    def sentence(self) -> str:
        return f"malloc keeps {self.kept_bytes} B of freed memory"


@dataclass(frozen=True)
class Cleanup(Event):
    """What was done to free memory: the names of the actions, how long each took in milliseconds,
    and the bytes that were freed, None if they are not known. `notes` say why, and how many
    objects."""

    KIND = "cleanup"

    actions: tuple[str, ...]
    ms: tuple[float, ...]
    notes: tuple[str, ...] = ()
    host_freed_bytes: int | None = None
    device_freed_bytes: int = 0

    @property
    def freed_bytes(self) -> int | None:
        if self.host_freed_bytes is None:
            return None
        return self.host_freed_bytes + self.device_freed_bytes

    def sentence(self) -> str:
        notes = f" ({', '.join(self.notes)})" if self.notes else ""
        named = [self.actions[0] + notes, *self.actions[1:]] if self.actions else [notes]
        done = ", ".join(f"{n} {ms:.1f} ms" for n, ms in zip(named, self.ms, strict=False))
        freed = f"freed {format_bytes(self.host_freed_bytes or 0)} on the host"
        if self.device_freed_bytes:
            freed += f", {format_bytes(self.device_freed_bytes)} on the devices"
        return f"{done}: {freed}"


@dataclass(frozen=True)
class OutOfMemory(Event):
    """A device ran out of memory: torch could not allocate `asked_bytes`. The other sizes are those
    of that moment. `more_before`: how many such errors before have no event of their own."""

    KIND = "oom"

    device: int
    asked_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int
    largest_free_block_bytes: int
    more_before: int = 0
    phase: str | None = None

    def sentence(self) -> str:
        asked, allocated, reserved, free, total, block = map(
            format_bytes,
            (self.asked_bytes, self.allocated_bytes, self.reserved_bytes, self.free_bytes,
             self.total_bytes, self.largest_free_block_bytes),
        )  # fmt: skip
        text = f"cuda:{self.device}: no {asked}: allocated {allocated}, reserved {reserved}, "
        text += f"free {free} of {total}; largest free block {block}"
        text += f"; {self.more_before} more before" if self.more_before else ""
        return text if self.phase is None else f"{text}; in phase {self.phase}"


@dataclass(frozen=True)
class Pressure(Event):
    """Memory comes near its limit. Which fields are set depends on `what`:

    - "passed": `fraction` of the limit was passed; `used_bytes`, `limit_bytes` and its `source`.
    - "not heard": no step(), in which a callback could act, was called for `seconds` since then.
    - "cannot act": the guard or callback `handle` cannot act, and `why`.
    - "forecast": the steps that are left (fewest, most likely, most) while `signal` grows.
    """

    KIND = "pressure"

    what: str
    fraction: float = 0.0
    used_bytes: int = 0
    limit_bytes: int = 0
    source: str = ""
    seconds: int = 0
    handle: str = ""
    why: str = ""
    signal: str = ""
    steps_left: tuple[float, float, float] | None = None

    def sentence(self) -> str:
        if self.what == "not heard":
            return (
                f"no step() for {self.seconds} s since then: callbacks and guards act only in "
                "step(), so none has acted"
            )
        if self.what == "cannot act":
            return f"{self.handle} cannot act: {self.why}"
        if self.what == "forecast" and self.steps_left is not None:
            left = sentences.of_steps_left(self.steps_left[0], self.steps_left[2])
            return f"forecast: {left} ({self.signal} grows)"
        return (
            f"{100 * self.fraction:.1f} % of the limit passed: {self.used_bytes >> 20} of "
            f"{self.limit_bytes >> 20} MiB ({self.source})"
        )


@dataclass(frozen=True)
class GuardAct(Event):
    """A guard acted at this fraction of the limit. `action` is "raise", "SIGTERM", or the name of
    the function that it called. `device` is the number of the device that it guards, None for the
    host."""

    KIND = "guard"

    action: str
    fraction: float = 0.0
    used_bytes: int = 0
    limit_bytes: int = 0
    limit_source: str = ""
    stalled_percent: float | None = None
    device: int | None = None

    def pressure(self) -> str:
        """How much of the limit was used when it acted."""
        if self.action != "SIGTERM":
            return sentences.of_pressure(self)
        share = 100 * self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0
        return (
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.limit_bytes)} "
            f"({self.limit_source}) used, {share:.0f} % (guard: {100 * self.fraction:.0f} %): "
            "sent SIGTERM"
        )

    def clause(self) -> str:
        """What it did, and when: `it raised at 450.0 MiB of 500.0 MiB used`."""
        if self.action == "SIGTERM":
            return self.pressure()
        did = "raised" if self.action == "raise" else f"called {self.action}"
        return f"it {did} at {self.pressure()}"

    def sentence(self) -> str:
        if self.action == "SIGTERM":
            return self.pressure()
        return f"{self.action}: {self.pressure()}"


@dataclass(frozen=True)
class GuardSet(Event):
    """A guard was set. It acts at this fraction of the limit, at the end of a step."""

    KIND = "guard_set"

    fraction: float

    def sentence(self) -> str:
        return f"{self.fraction:g} of the limit, at the end of a step"


KINDS: dict[str, type[Event]] = {kind.KIND: kind for kind in Event.__subclasses__()}

# --- payloads -------------------------------------------------------------------------------------


def payload(kind: str, body: object, **more: object) -> bytes:
    """Return the payload of an event: the fields of `body`, an object or a mapping that has them,
    and `more`. Fields with their default are left out, and long texts are cut."""
    given = body if isinstance(body, Mapping) else None
    found: dict[str, object] = {}
    for one in fields(KINDS[kind]):
        usual = None if one.default is MISSING else one.default
        value = given.get(one.name, usual) if given else getattr(body, one.name, usual)
        value = more.get(one.name, value)
        if value != one.default:
            found[one.name] = _plain(value)
    return _ENCODER.encode(found).encode()


def _plain(value: object) -> object:
    """JSON has no infinity: null stands for it in a tuple of steps or seconds that are left. Half a
    character and a zero are escaped."""
    if isinstance(value, str):
        plain = value[:LONGEST].replace("\0", "\\0")
        return plain.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(kind: str, data: bytes) -> tuple[Event | None, str]:
    """Return the event of a payload, and its sentence. Nothing in the payload is trusted: for a
    kind that this version does not know, and for impossible fields, the event is None and the
    sentence is the payload itself."""
    try:
        found, checks = _DECODER.decode(data.decode()), _CHECKS[kind]
        given = {name: check(found[name]) for name, check in checks.items() if name in found}
        event = KINDS[kind](**given)
        return event, event.sentence()
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None, data.decode("utf-8", "backslashreplace").replace("\0", "\\0")


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse)
_Check = Callable[[Any], Any]


def _check_of(hint: Any) -> _Check:
    """Return a function that returns a value of that type, and raises ValueError for another
    value."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (types.UnionType, Union):
        inner = _check_of(parts[0])
        return lambda value: None if value is None else inner(value)
    if kind is tuple:
        return functools.partial(_several, _check_of(parts[0]), parts)
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple: a list of its fields
        checks = [_check_of(one) for one in typing.get_type_hints(hint).values()]
        return functools.partial(_named, hint, checks)
    return functools.partial(_single, hint)


def _several(check: _Check, parts: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if type(value) is not list or (Ellipsis not in parts and len(parts) != len(value)):
        raise ValueError(value)
    is_endless = parts[0] is float and Ellipsis not in parts  # In steps left, null is infinity.
    return tuple(math.inf if is_endless and part is None else check(part) for part in value)


def _named(hint: Any, checks: list[_Check], value: Any) -> Any:
    if type(value) is not list or len(checks) != len(value):
        raise ValueError(value)
    return hint(*(check(part) for check, part in zip(checks, value, strict=True)))


def _single(hint: Any, value: Any) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint or (hint in (int, float) and not abs(value) < _NUMBER):
        raise ValueError(value)
    if hint is str:
        value.encode()  # no half characters
    return value


def _checks_of(cls: type[Event]) -> dict[str, _Check]:
    hints = typing.get_type_hints(cls)
    return {one.name: _check_of(hints[one.name]) for one in fields(cls)}


_CHECKS = {kind: _checks_of(cls) for kind, cls in KINDS.items()}

"""LeakFinding: one thing that grows. What, how fast, who holds it, how long until the limit, and
what to do.

    census and leak test ──► LeakFinding ──► logger, terminal, on_leak(callback)
                                  │
                                  └──► an event of the record ──► explain, report, compare

It is made once, by the running monitor. Whoever shows it later reads the same fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memtools._base import sentences
from memtools._base.redact import harmless
from memtools._base.size import format_bytes

#: What a leak test may say of growth, from the least certain on.
#:
#: - early: too few steps to say that nothing grows, and no growth was found;
#: - quiet: nothing grows, after 32 steps or more;
#: - fills: a container with a bound or a warm-up takes what grows;
#: - fragmentation: resident memory grows, what is in use does not;
#: - suspect: what is in use grew at the same point of 16 to 32 steps;
#: - growing: and goes on growing;
#: - likely: and has not slowed down, or a container that only ever gained explains it;
#: - leak: and does not slow down, for long enough to tell it from what fills.
GRADES = ("early", "quiet", "fills", "fragmentation", "suspect", "growing", "likely", "leak")
RANK = {grade: rank for rank, grade in enumerate(GRADES)}
#: signals of what the process itself has in use
OF_USE = ("heap", "python", "tensors", "rss", "")
#: what a name has at one look and not at another: how many nodes a graph has, how many of the
#: containers in a container grow, the entry of a container by which one gets at what grows
_PASSING = re.compile(r" of (?:some )?[\d,]+ nodes|(\[[^]]*\])*( \([^)]*\))?$")

#: of a finding: (process, who or what grows there)
Key = tuple[str, str]


def is_call(grade: str) -> bool:
    """Whether the grade says that memory leaks: growing or above."""
    return RANK[grade] >= RANK["growing"]


@dataclass(frozen=True)
class LeakFinding:
    """One thing that grows, as memtools says it everywhere.

    Attributes:
        grade: how certain it is that memory leaks: one of "early", "quiet", "fills",
            "fragmentation", "suspect", "growing", "likely" and "leak".
        signal: the signal in which the growth was seen: "heap", "python", "tensors", "children",
            "device", "shm" or "rss"; "" if only a census knows of it.
        per: what the rate refers to: "step", or "s" if the program makes no steps.
        rate_bytes: how fast it grows, in bytes a step or a second; 0 if that is not known.
        first_step: the step at which the finding was first said; None without steps.
        since_step: the step at which the growth began, as far as the readings show it.
        holder: who holds what grows, such as `list Trainer.losses`; "" if no Python object does.
        kind: the kind of the holder: the type of a container, such as "list", "dict" or
            "lru_cache", else "autograd graph", "optimizer state", "hooks", "exceptions",
            "variable", or "calls" for calls that do not end; without a holder "C heap",
            "shared memory", "children", "processes", "cycles" or "".
        what: what is added, in words, such as `2 new [2048, 64] float32 tensors a step`; may be "".
        made_at: the line that makes it, as `file:line in function`; "" if that is not known.
        process: "" for this process, else `worker 2` or `child process 4711`.
        steps_left: the fewest and the most steps until the limit that are likely; None if that is
            not known.
        seconds_left: the same in seconds, at the pace of the run.
        advice: what to do, as one sentence that names the holder.
        over: whether the growth has ended; the other fields are then those of the time before.
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
    process: str = ""
    steps_left: tuple[float, float] | None = None
    seconds_left: tuple[float, float] | None = None
    advice: str = ""
    over: bool = False

    def __post_init__(self) -> None:
        """Names of the program enter here: they control no terminal and tell no secret."""
        for name in ("holder", "kind", "what", "made_at", "process", "advice"):
            object.__setattr__(self, name, harmless(getattr(self, name)))

    @property
    def part(self) -> str:
        """The part of memory that grows. It is "use" for what the process itself has in use, by
        whichever signal that was seen, and otherwise the name of the signal."""
        return "use" if self.signal in OF_USE else self.signal

    @property
    def key(self) -> Key:
        """The process and the name by which two findings are known to be about the same thing. It
        stays the same from look to look, although an autograd graph, for example, has more nodes
        each time. Growth that nobody holds is one thing, by whichever signal it was seen."""
        return self.process, _PASSING.sub("", self.holder) or self.kind or self.part

    @property
    def subject(self) -> str:
        """What grows, and in which process. It is the name of the holder, or words if nobody holds
        it."""
        subject = self.holder or _NOBODY.get(self.kind, f"memory ({self.signal})")
        if self.process and not self.holder and self.kind == "children":
            return self.process
        return f"{self.process}: {subject}" if self.process else subject

    def line(self) -> str:
        """What, how fast, who and how long, without the grade: `list Trainer.losses: +3.1 MiB/step
        (2 new [2048, 64] float32 a step); limit in 300 to 420 steps`."""
        line = self.subject
        if self.rate_bytes > 0:
            line += f": +{format_bytes(self.rate_bytes)}/{self.per}"
        details = ", ".join(part for part in (self.what, self._made()) if part)
        if details:
            line += f" ({details})"
        if self.per == "s" and self.seconds_left is not None:
            return f"{line}; {sentences.of_time_left(*self.seconds_left)}"
        if self.steps_left is not None:
            limit = "limit of the device" if self.signal == "device" else "limit"
            return f"{line}; {sentences.of_steps_left(*self.steps_left, limit)}"
        return line

    def without_forecast(self) -> LeakFinding:
        """The same where a page has said already when the limit comes."""
        return replace(self, steps_left=None, seconds_left=None)

    def _made(self) -> str:
        return f"made at {self.made_at}" if self.made_at else ""

    def __str__(self) -> str:
        if self.over:
            return f"no longer: {self.grade}: {self.without_forecast().line()}"
        return f"{self.grade}: {self.line()}"

    def as_json(self) -> dict[str, Any]:
        """The fields that programs read, None for what is not known, and the sentence."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("grade", "first_step", "since_step", "rate_bytes", "per", "signal")
        }
        for name in ("holder", "kind", "what", "made_at", "process", "advice"):
            found[name] = getattr(self, name) or None
        for name in ("steps_left", "seconds_left"):
            interval = getattr(self, name)
            found[name] = None if interval is None else [_finite(end) for end in interval]
        found["text"] = str(self)
        return found


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


#: the ends of an interval of steps, the highest by what is likeliest, after so many steps of growth
_WIDTHS = ((192, 1.35), (64, 1.6), (0, 1.9))


def steps_left(rate: float, room_bytes: int | None, steps: float) -> tuple[float, float] | None:
    """The steps until `room_bytes` are gone at `rate` bytes a step: not before and hardly after,
    closer together where growth has gone on for more `steps`. None where the rate or the room is
    not known."""
    if room_bytes is None or rate <= 0:
        return None
    left, width = max(0, room_bytes) / rate, width_of(steps)
    return left / width, left * width


def width_of(steps: float) -> float:
    """How wide the interval about a rate is that has been seen for so many steps: the truth lies
    between the rate divided by it and the rate times it."""
    return next((width for least, width in _WIDTHS if steps >= least), _WIDTHS[-1][1])


#: `what` of cycles that nobody collects
COLLECTOR_IS_OFF = "the garbage collector is off"

#: what grows where no Python object holds it
_NOBODY = {
    "C heap": "the C heap, which no Python object holds",
    "shared memory": "shared memory of this job",
    "children": "the memory of child processes",
    "processes": "child processes",
    "cycles": "cycles that wait for the garbage collector",
    "mapped files": "pages of mapped files",
}


# --- what to do -----------------------------------------------------------------------------------


def advice_for(finding: LeakFinding) -> str:
    """What to do about it: one sentence, by the kind of its holder and with the holder's name. ""
    where there is nothing to do. Reads all fields but `advice`."""
    name = _ENTRY.sub("", finding.holder) or _NOBODY.get(finding.kind, "what grows")
    if finding.grade in ("early", "quiet"):
        return ""
    if finding.kind == "mapped files":
        return (
            "pages of mapped files are taken back under memory pressure; those of /dev/shm are "
            "not: look what is left there (ls -l /dev/shm)"
        )
    if finding.grade == "fills" and finding.kind != "cycles":
        return f"{name} fills up and stops there: give it a lower bound if that is too much"
    if finding.grade == "fragmentation":
        return (
            "what is in use does not grow, what is resident does: give it back with "
            "monitor.cleanup_memory(), or start with MALLOC_ARENA_MAX=2"
        )
    rule = next((rule for fits, rule in _RULES if fits(finding)), None)
    advice = rule(finding, name) if rule else f"{name} keeps what grows: let go of it"
    if finding.process.startswith("worker") and finding.holder:
        advice += "; each worker has one of its own"
    return advice


#: the end of a path to the part of each entry that weighs
_ENTRY = re.compile(r"(, as \S+ of each entry| \([\d,]+ [^()]*(?:of them|in it)\))+$")
#: containers whose entries stay until somebody takes them out
_SEQUENCES = ("list", "deque", "tuple", "array")
_MAPPINGS = ("dict", "set", "frozenset", "OrderedDict", "defaultdict", "Counter", "mappingproxy")
#: single objects that are made anew, and each time larger
_BUFFERS = ("variable", "tensor", "ndarray", "bytes", "bytearray", "str")

_Fits = Callable[[LeakFinding], object]
_Rule = Callable[[LeakFinding, str], str]


def _is(*kinds: str) -> _Fits:
    return lambda finding: finding.kind in kinds


def _named(pattern: str) -> _Fits:
    """Holders whose kind or path tells what they are for."""
    search = re.compile(pattern).search
    return lambda finding: search(finding.kind) or search(finding.holder)


def _of_graph(finding: LeakFinding, name: str) -> str:
    """`autograd graph kept by module attribute hidden`: the variable's own name is the last one."""
    kept = name.rpartition(" kept by ")[2]
    if finding.holder.startswith("autograd graphs"):  # of the entries of a container
        return (
            f"each tensor in {kept} keeps the autograd graph that made it: keep x.detach() there, "
            "or x.item() where a number will do; in evaluation, compute under torch.no_grad()"
        )
    quoted = re.search(r"'(\w+)'|(\w+)$", kept)
    variable = (quoted[1] or quoted[2]) if quoted else "x"
    return (
        f"{kept} keeps an autograd graph alive: keep {variable}.detach() where it is kept, or "
        ".item() where a number will do"
    )


def _of_c_heap(finding: LeakFinding, name: str) -> str:
    if "profiler" in finding.what:
        return (
            "a profiler keeps all its events until it stops: give it a schedule "
            "(torch.profiler.schedule(wait=..., warmup=..., active=...)) and call its step()"
        )
    return (
        "no Python object holds it, so C or C++ code does: look at what each step calls there (a "
        "decoder, a tokenizer, an extension, convolutions of ever new shapes)"
    )


def _of_list(finding: LeakFinding, name: str) -> str:
    # A list of gates has a store made for it.
    gates = ", or keep the gates in a memtools.GateHistory" if "gate" in name.lower() else ""
    return (
        f"{name} grows: clear it once it has been used, or bound it with "
        f"collections.deque(maxlen=...){gates}"
    )


def _of_children(finding: LeakFinding, name: str) -> str:
    who = finding.process or "the child processes"
    return (
        "which container holds it is not known yet: a process that was given a queue or a "
        f"connection is asked, and answers within some 500 steps. In {who}, look for a list or a "
        "cache that grows, and for a queue that is filled faster than it is emptied; in a worker "
        "of a DataLoader, for what the dataset keeps from one item to the next"
    )


def _of_nobody(finding: LeakFinding, name: str) -> str:
    if finding.per == "s":
        return (
            "who holds what grows is found most surely at the ends of steps, and this program "
            "makes none: call monitor.step() of a memtools.MemoryMonitor once in each round of its "
            "loop"
        )
    return (
        "to learn who holds what grows: before = memtools.census(), some hundred steps later "
        "print(*memtools.census().diff(before).holders(), sep='\\n')"
    )


def _of_device(finding: LeakFinding, name: str) -> str:
    return (
        "to learn which line allocates what grows on the device, take a snapshot: "
        "torch.cuda.memory._record_memory_history(), some hundred steps later _dump_snapshot(path)"
    )


#: (whether it is for a finding, what it says), the most special first
_RULES: tuple[tuple[_Fits, _Rule], ...] = (
    (_is("C heap", "C code", "nobody"), _of_c_heap),
    (
        _is("shared memory"),
        lambda finding, name: (
            "shared memory stays until it is unlinked: call unlink() after close(), and look what "
            "is left there (ls -l /dev/shm); a mapping without a name stays until it is closed"
        ),
    ),
    (
        lambda finding: finding.kind == "processes" or "one more every" in finding.what,
        lambda finding, name: (
            "processes are started and never ended: join() or terminate() each one, or start one "
            "pool for the whole run (persistent_workers=True for a DataLoader)"
        ),
    ),
    (
        _is("calls"),
        lambda finding, name: (
            f"calls of {name.rpartition(' of ')[2]} begin and do not end, as threads do that wait "
            "for ever: join() them, give what they wait for a timeout, or take one pool of threads"
        ),
    ),
    (_is("children"), _of_children),
    (
        lambda finding: finding.kind == "cycles" and finding.what == COLLECTOR_IS_OFF,
        lambda finding, name: (
            "the program has turned Python's garbage collector off (gc.disable()), and objects in "
            "reference cycles stay for ever: call gc.collect() each so many steps, or turn it on"
        ),
    ),
    (
        _is("cycles"),
        lambda finding, name: (
            "objects in reference cycles wait for the collector: call gc.collect() now and then "
            "(memtools.CleanupPolicy does so on a schedule), or take torch.autograd.grad() in "
            "place of backward(create_graph=True)"
        ),
    ),
    (
        _named(r"create_graph=True"),
        lambda finding, name: (
            f"{name} outlive the model: take torch.autograd.grad(), or set .grad to None "
            "(zero_grad(set_to_none=True)) once it has been used"
        ),
    ),
    (_is("autograd graph"), _of_graph),
    (
        _is("lru_cache"),
        lambda finding, name: (
            f"{name} has no bound and keeps every result: give it one (maxsize=..., which counts "
            "entries), or keep a number of bytes in a cache of your own"
        ),
    ),
    (
        _named(r"\bhooks\b|_hooks\b"),
        lambda finding, name: (
            f"{name} gains a hook at each step: call remove() of the handle that its registration "
            "returned, or register it once"
        ),
    ),
    (
        _named(r"optimizer state|\boptim\w*\.(?:\w+\.)*state\b|\b(?:Adam|AdamW|SGD)\.state\b"),
        lambda finding, name: (
            f"{name} keeps the state of parameters that are no longer trained: drop it with the "
            "parameter (optimizer.state.pop(parameter, None)), or make a new optimizer"
        ),
    ),
    (
        _named(r"(?i)\b\w*(?:exception|traceback)s?\b|Error\b"),
        lambda finding, name: (
            f"{name} keeps exceptions, and each keeps the variables of all its frames: keep "
            "str(error), or error.with_traceback(None)"
        ),
    ),
    (
        _is("chain"),
        lambda finding, name: (
            f"{name.rpartition(' kept by ')[2]} leads to every object before it: cut the link to "
            "the one before once that has been used, or keep the newest in "
            "collections.deque(maxlen=...)"
        ),
    ),
    (
        _named(r"(?i)queue"),
        lambda finding, name: (
            f"{name} is filled faster than it is emptied: bound it (maxsize=...), so that whoever "
            "fills it waits"
        ),
    ),
    (_is(*_SEQUENCES), _of_list),
    (
        _is(*_MAPPINGS),
        lambda finding, name: f"{name} grows: delete what is no longer used, or bound it",
    ),
    (
        lambda finding: finding.kind in _BUFFERS and finding.holder,
        lambda finding, name: (
            f"{name} becomes larger and larger: write into one buffer of the final size, or keep "
            "a detached copy of a part, or a number"
        ),
    ),
    (lambda finding: finding.signal == "device" and not finding.holder, _of_device),
    (lambda finding: not finding.holder, _of_nobody),
)

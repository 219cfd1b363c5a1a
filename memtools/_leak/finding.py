"""LeakFinding: one thing that grows. What, how fast, who holds it, how long until the limit, and
what to do.

    census and leak test ──► LeakFinding ──► logger, terminal, on_leak(callback)
                                  │
                                  └──► an event of the record ──► explain, report, compare

The running monitor makes it once. Pages and commands show its fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
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
#: - fragmentation: resident memory grows, what is in use does not;
#: - suspect: what is in use grew at the same point of 16 to 32 steps;
#: - growing: and goes on growing;
#: - likely: and has not slowed down, or a container that only ever gained explains it;
#: - leak: and does not slow down, for long enough to tell it from what fills.
GRADES = ("early", "quiet", "fills", "fragmentation", "suspect", "growing", "likely", "leak")
RANK = {grade: rank for rank, grade in enumerate(GRADES)}
#: The signals of what the process itself has in use.
OF_USE = ("heap", "python", "tensors", "rss", "")
#: The parts of a name that change from look to look: the number of nodes of a graph, the number of
#: containers that grow in a container, the entry of a container on the way to what grows.
_PASSING = re.compile(r" of (?:some )?[\d,]+ nodes|(\[[^]]*\])*( \([^)]*\))?$")

#: The key of a finding: (process, what grows there).
Key = tuple[str, str]


#: The fields that are names and sentences, "" where they are not known.
_TEXTS = ("holder", "kind", "what", "made_at", "kept_at", "library", "process", "phase", "advice")
#: The kind of memory that was allocated before and is written for the first time.
FIRST_WRITES = "first writes"
#: The causes of what fills, where it is known whether all of it fits under the limit.
FITS, TOO_LARGE = "fits", "too large"
#: A finding that is at least this share of all growth towards a limit has the forecast of it.
MUCH_OF_JOINT = 0.5


def is_call(grade: str) -> bool:
    """Whether the grade says that memory leaks: growing or above."""
    return RANK[grade] >= RANK["growing"]


def is_reported(finding: LeakFinding) -> bool:
    """Whether a finding is reported while the program runs: from suspect on, and below that if
    memory runs into its limit by it, or what fills will not fit."""
    is_forecast = finding.steps_left is not None or finding.seconds_left is not None
    return RANK[finding.grade] >= RANK["suspect"] or is_forecast or finding.cause == TOO_LARGE


@dataclass(frozen=True)
class LeakFinding:
    """One thing that grows. All parts of memtools report it in the same words.

    Attributes:
        grade: how certain it is that memory leaks: one of "early", "quiet", "fills",
            "fragmentation", "suspect", "growing", "likely" and "leak".
        signal: the signal in which the growth was seen: "heap", "python", "tensors", "children",
            "device", "shm" or "rss", or "resident" for growth of resident memory that is not growth
            in use; "" if only a census knows of it.
        per: what the rate refers to: "step", or "s" if the program makes no steps.
        phase: the phase whose own steps these are, such as "evaluate"; "" for the steps of the run.
        rate_bytes: how fast it grows, in bytes a step or a second; 0 if that is not known.
        first_step: the step at which it was first reported; None without steps.
        since_step: the step at which the growth began, as far as the readings show it.
        holder: who holds what grows, such as `list Trainer.losses`; "" if no Python object does.
        kind: the kind of the holder: the type of a container, such as "list", "dict" or
            "lru_cache", else "autograd graph", "optimizer state", "hooks", "exceptions",
            "variable", "stream", "entries" where those of a container grow, "callbacks" of atexit,
            or "calls" for calls that do not end; without a holder "C heap", "Python objects",
            "shared memory", "children", "processes", "cycles", "idle heap" (freed memory that
            malloc keeps), "first writes" (memory that was allocated before and is written for the
            first time), "outside malloc" (memory that a library has from the system by itself) or
            "".
        what: what is added, in words, such as `2 new [2048, 64] float32 tensors a step`; may be "".
        made_at: the line that makes it, as `file:line in function`; "" if that is not known.
        kept_at: the line of the program that keeps it, as of `made_at`: where it is put into the
            holder, or, if a library's object holds it, where that object is made or called.
        library: the class, function or module of a library that has the container, such as
            `tarfile.TarFile`; "" if the program itself has it, or that is not known.
        release: a method by which that lets go of what it holds, such as `close()`; "" for none.
        process: "" for this process, else `worker 2` or `child process 4711`.
        steps_left: the fewest and the most steps until the limit that are likely, for all that
            grows there together. The fastest finding has it, and others that are at least half of
            that growth; None for the rest, and if it is not known.
        seconds_left: the same in seconds, at the pace of the run.
        advice: what to do, as one sentence that names the holder.
        over: whether the growth has ended; the other fields are then those of the time before.
        joint_bytes: bytes a step, or a second, by which all that the limit counts grows together,
            where `steps_left` is known; else 0.
        freed_bytes: if it ended because what had grown was freed at once, as at the end of an
            epoch, so many bytes; otherwise 0.
        cause: what is known of the reason beside the kind: "jumps" of a buffer of C code that is
            made larger each time it is full, "profiler", "collector" if Python's garbage collector
            is off, "views" where small parts of tensors keep the whole tensors, "extension" for an
            object of an extension that becomes longer, such as a table, "fits" or "too large" for
            what fills, where it is known whether all of it fits under the limit; "" for others.
        left_bytes: bytes that are still to come until what fills is full; 0 where that is not known
            and for all that does not fill.
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
        stays the same from look to look, although an autograd graph, for example, has more nodes
        each time. Growth without a holder is one thing, whichever signal shows it, and so are all
        blocks of one part of memory that fill, whether their arrays are known yet or not."""
        if self.kind == FIRST_WRITES:
            return self.process, f"{self.kind} of {self.part}"
        return self.process, _PASSING.sub("", self.holder) or self.kind or self.part

    @property
    def subject(self) -> str:
        """The name of the holder, or words if there is none, and in which process it grows."""
        subject = self.holder or _NOBODY.get(self.kind, f"memory ({self.signal})")
        if self.process and not self.holder and self.kind == "children":
            return self.process
        return f"{self.process}: {subject}" if self.process else subject

    def line(self) -> str:
        """What, how fast, who and how long, without the grade: `list Trainer.losses: +3.1 MiB/step
        (2 new [2048, 64] float32 a step); limit in 300 to 420 steps`."""
        line = self.subject
        if self.rate_bytes > 0:
            line += f": +{format_bytes(self.rate_bytes)}/{self.per}{self._of_phase()}"
        details = ", ".join(part for part in (self.what, self._made()) if part)
        if details:
            line += f" ({details})"
        return "; ".join(filter(None, (line, self.forecast())))

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

    def _made(self) -> str:
        """The lines that make it and that keep it."""
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

#: What grows if its holder is not known, by kind.
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
}


# --- what to do -----------------------------------------------------------------------------------


def advice_for(finding: LeakFinding) -> str:
    """Return what to do in one sentence, by the kind and the name of the holder; "" if there is
    nothing to do. Reads all fields but `advice`."""
    if finding.grade in ("early", "quiet") or finding.cause == FITS:
        return ""
    name = _ENTRY.sub("", finding.holder) or _NOBODY.get(finding.kind, "what grows")
    keeper = name.rpartition(" kept by ")[2]
    variable = re.search(r"'(\w+)'|(\w+)$", keeper)
    advice = next(text for fits, text in _ADVICE if fits(finding)).format(
        name=name,
        keeper=keeper,
        function=name.rpartition(" of ")[2],
        variable=(variable[1] or variable[2]) if variable else "x",
        process=finding.process or "the child processes",
        library=finding.library,
        release=finding.release,
    )
    if finding.process.startswith("worker") and finding.holder and _grows(finding):
        advice += "; each worker has one of its own"
    return advice


#: The end of a path that leads to a part of each entry.
_ENTRY = re.compile(
    r"(, as \S+ of each entry|, whose entries grow| \([\d,]+ [^()]*(?:of them|in it)\)"
    r"| \(such as [^()]*\)| \(its values keep its keys\))+$"
)
#: Containers whose entries stay until the program removes them.
_SEQUENCES = ("list", "deque", "tuple", "array")
_MAPPINGS = ("dict", "set", "frozenset", "OrderedDict", "defaultdict", "Counter", "mappingproxy")
#: Single objects that are reallocated, larger each time (such as a growing torch.cat).
_BUFFERS = ("variable", "tensor", "ndarray", "bytes", "bytearray", "str")

#: Libraries whose tables are not changed but made anew, with each row that is added.
_TABLES = ("pandas.", "polars.", "pyarrow.")

_Fits = Callable[[LeakFinding], object]


def _grows(finding: LeakFinding) -> bool:
    return RANK[finding.grade] >= RANK["suspect"]


def _is(*kinds: str) -> _Fits:
    return lambda finding: finding.kind in kinds


def _caused_by(cause: str) -> _Fits:
    return lambda finding: finding.cause == cause


def _is_of(*libraries: str) -> _Fits:
    return lambda finding: finding.library in libraries


def _named(pattern: str) -> _Fits:
    """Matches holders whose kind or path shows their purpose."""
    search = re.compile(pattern).search
    return lambda finding: search(finding.kind) or search(finding.holder)


#: (whether it fits a finding, what to do), the most special first.
_ADVICE: tuple[tuple[_Fits, str], ...] = (
    (
        _is("mapped files"),
        "pages of mapped files are taken back under memory pressure; those of /dev/shm are not: "
        "look what is left there (ls -l /dev/shm)",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.startswith("stable_baselines3."),
        "{name} will not fit: give the model a smaller buffer_size, let it keep each observation "
        "once (optimize_memory_usage=True, replay_buffer_kwargs=dict("
        "handle_timeout_termination=False)), or let the environment return frames as uint8",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.endswith(".LazyMemmapStorage"),
        "a LazyMemmapStorage without scratch_dir= lies in /dev/shm, which is memory: give it a "
        "directory on a disk (scratch_dir=...), or a smaller max_size",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.library.startswith("torchrl."),
        "{name} will not fit: give the storage a smaller max_size, keep it in a file "
        "(LazyMemmapStorage(max_size, scratch_dir=...) with a directory on a disk), or store "
        "frames as uint8",
    ),
    (
        lambda one: one.cause == TOO_LARGE and one.kind == FIRST_WRITES and one.holder,
        "{name} will not fit: allocate fewer rows, store frames as uint8 and not as float32, or "
        "write to a file (numpy.memmap), whose pages the system takes back",
    ),
    (
        _is(FIRST_WRITES),  # of which the array is not known, or whether it fits
        "it was allocated before and becomes resident as the program writes to it, such as a "
        "buffer that is filled row by row: allocate less if it does not fit",
    ),
    (
        _is("outside malloc"),
        "a library takes it from the system by itself, by mmap() or an allocator of its own as "
        "that of pyarrow or Polars: look at what the program gives such a library and "
        "does not release (pyarrow.total_allocated_bytes() has its figure)",
    ),
    (
        _is("idle heap"),
        "blocks that stay keep what is freed around them from being used again: start with "
        "MALLOC_MMAP_THRESHOLD_=65536 in the environment, and with MALLOC_ARENA_MAX=2 if many "
        "threads allocate, give it back by a memtools.CleanupPolicy, or load jemalloc in malloc's "
        "place",
    ),
    (
        _caused_by(TOO_LARGE),
        "{name} will not fit: give it a lower bound, or keep less in each entry (frames as uint8, "
        "not as float32)",
    ),
    (
        lambda one: one.grade == "fills" and one.kind != "cycles",
        "{name} fills up and stops there: give it a lower bound if that is too much",
    ),
    (
        lambda one: one.grade == "fragmentation",
        "what is in use does not grow, what is resident does: give it back with "
        "monitor.cleanup_memory(), or start with MALLOC_ARENA_MAX=2",
    ),
    (
        _caused_by("profiler"),
        "a profiler keeps all its events until it stops: give it a schedule "
        "(torch.profiler.schedule(wait=..., warmup=..., active=...)) and call its step()",
    ),
    (
        lambda one: one.kind == "C heap" and one.cause == "jumps",
        "C or C++ code has a buffer that it makes larger each time it is full (a vector, an "
        "index): look at what each step adds there, and remove what is no longer used",
    ),
    (
        _is("C heap"),
        "no container becomes longer for it: look at what each step calls in C or C++ (a decoder, "
        "a tokenizer, convolutions of ever new shapes), and for an object of an extension that is "
        "replaced by a larger one (table = table.vstack(rows))",
    ),
    (
        _is("Python objects"),
        "no path leads from the program's modules and variables to these objects: look at what is "
        "given to C code at each step and never taken back (a callback, user data, a reference "
        "that an extension or ctypes has added)",
    ),
    (
        _is("shared memory"),
        "shared memory stays until it is unlinked: call unlink() after close(), and look what is "
        "left there (ls -l /dev/shm); a mapping without a name stays until it is closed",
    ),
    (
        _is("processes"),
        "processes are started and never ended: join() or terminate() each one, or start one pool "
        "for the whole run (persistent_workers=True for a DataLoader)",
    ),
    (
        _is("calls"),
        "calls of {function} begin and do not end, as threads do that wait for ever: join() them, "
        "give what they wait for a timeout, or take one pool of threads",
    ),
    (
        _is("entries"),
        "{name} does not get longer, but its entries come to hold more: delete what an entry was "
        "given after it was made (a cached property, a buffer) once that has been used",
    ),
    (
        _is("stream"),
        "{name} keeps all that was written to it: once that has been used, call seek(0) and "
        "truncate(), or write to a file",
    ),
    (
        _is("callbacks"),
        "{name} stay with their arguments until the process ends: register one function once, or "
        "call atexit.unregister() when it is no longer needed",
    ),
    (
        _is("children"),
        "which container holds it is not known yet: a process that was given a queue or a "
        "connection, or that trains, is asked, and answers within some 500 steps. In {process}, "
        "look for a list or a cache that grows, and for a queue that is filled faster than it is "
        "emptied; in a worker of a DataLoader, for what the dataset keeps from one item to the "
        "next",
    ),
    (
        _caused_by("collector"),
        "the program has turned Python's garbage collector off (gc.disable()), and objects in "
        "reference cycles stay for ever: call gc.collect() each so many steps, or turn it on",
    ),
    (
        _is("cycles"),
        "objects in reference cycles wait for the collector: call gc.collect() now and then "
        "(memtools.CleanupPolicy does so on a schedule), or take torch.autograd.grad() in place of "
        "backward(create_graph=True)",
    ),
    (
        _named(r"create_graph=True"),
        "{name} outlive the model: take torch.autograd.grad(), or set .grad to None "
        "(zero_grad(set_to_none=True)) once it has been used",
    ),
    (
        lambda one: one.kind == "autograd graph" and one.holder.startswith("autograd graphs"),
        "each tensor in {keeper} keeps the autograd graph that made it: keep x.detach() there, or "
        "x.item() where a number will do; in evaluation, compute under torch.no_grad()",
    ),
    (
        _is("autograd graph"),
        "{keeper} keeps an autograd graph alive: keep {variable}.detach() where it is kept, or "
        ".item() where a number will do",
    ),
    (
        _caused_by("extension"),
        "{name} keeps all that is added to it: remove what is no longer used, keep its newest part "
        "alone (such as the last rows of a table), or write it to a file now and then",
    ),
    (
        lambda one: one.kind == "lru_cache" and one.library,
        "{name} is the cache of a function of a library: call its {release} now and then, "
        "or do not call it with ever new arguments",
    ),
    (
        _is("lru_cache"),
        "{name} has no bound and keeps every result: give it one (maxsize=..., which counts "
        "entries), or keep a number of bytes in a cache of your own",
    ),
    (
        _named(r"\bhooks\b|_hooks\b"),
        "{name} gains a hook at each step: call remove() of the handle that its registration "
        "returned, or register it once",
    ),
    (
        _named(r"optimizer state|\boptim\w*\.(?:\w+\.)*state\b|\b(?:Adam|AdamW|SGD)\.state\b"),
        "{name} keeps the state of parameters that are no longer trained: drop it with the "
        "parameter (optimizer.state.pop(parameter, None)), or make a new optimizer",
    ),
    (
        _named(r"(?i)\b\w*(?:exception|traceback)s?\b|Error\b"),
        "{name} keeps exceptions, and each keeps the variables of all its frames: keep str(error), "
        "or error.with_traceback(None)",
    ),
    (
        _is("chain"),
        "{keeper} leads to every object before it: cut the link to the one before once that has "
        "been used, or keep the newest in collections.deque(maxlen=...)",
    ),
    (
        _named(r"(?i)queue"),
        "{name} is filled faster than it is emptied: bound it (maxsize=...), so that its producer "
        "waits",
    ),
    (
        _is("WeakKeyDictionary"),
        "an entry of {name} goes when nothing else refers to its key: keep no reference to the key "
        "in the value (weakref.ref(key) in its place), and look who else keeps the keys",
    ),
    (
        _is("WeakValueDictionary"),
        "an entry of {name} goes when nothing else refers to its value: keep no reference to the "
        "value in the key, and look who else keeps the values",
    ),
    (
        _named(r"\(such as '_\d+'\)|\b_oh\b|\.Out\b|\bHistoryManager\b"),
        "{name} keeps what cells of IPython return (Out, _1, _2), or its text: end such a cell "
        "with a semicolon; %reset -f out frees the values",
    ),
    (
        _is_of("transformers.trainer_pt_utils.EvalLoopContainer"),
        "evaluate() keeps what the model returns of each batch, [rows, tokens, vocabulary] for "
        "logits: keep one number a token by Trainer(preprocess_logits_for_metrics=lambda logits, "
        "labels: logits.argmax(-1)), or none by batch_eval_metrics=True, which gives each batch to "
        "compute_metrics, or by prediction_loss_only=True; eval_accumulation_steps=8 moves them "
        "from a GPU to the host each 8 batches, where they stay",
    ),
    (
        _is_of("logging.handlers.MemoryHandler"),
        "{name} keeps the records until its capacity is reached, and then only if it has a target: "
        "give the handler a target and a smaller capacity, or log less",
    ),
    (
        _is_of("multiprocessing.pool.IMapIterator", "multiprocessing.pool.IMapUnorderedIterator"),
        "{name} has results that were computed and not yet taken: submit less at a time, such as "
        "the tasks of one epoch, or let a semaphore hold the tasks back",
    ),
    (
        _is_of("matplotlib._pylab_helpers.Gcf"),
        "pyplot keeps each figure until it is closed: call matplotlib.pyplot.close(figure) once it "
        "has been saved or shown",
    ),
    (
        _named(r"\bLogger\.handlers\b"),
        "a handler is added to a logger at each step, and each one writes every record: add it "
        "once, or call removeHandler() and close() of the handler",
    ),
    (
        _named(r"\bthreading\._(?:active|limbo)\b"),
        "threads are started and do not end: join() them or cancel() their timers, or take one "
        "pool of threads",
    ),
    (
        lambda one: one.library.startswith(_TABLES) and one.kind in _BUFFERS,
        "a larger {library} takes the place of the one before: collect its parts in a list and "
        "join them once, keep its newest part alone, or write it to a file now and then",
    ),
    (
        lambda one: one.library and one.release,
        "{name} belongs to {library}, and grows as that is used: call its {release} once it has "
        "been used and make a new one now and then, or give it less to keep",
    ),
    (
        lambda one: one.library,
        "{name} belongs to {library}, and grows as that is used: do not keep the object for the "
        "whole run, give it less to keep, or look for an option of it that sets a limit",
    ),
    (
        _caused_by("views"),
        "{name} keeps views, and each keeps the whole tensor that it is a part of: keep "
        "view.clone(), and delete what is no longer used",
    ),
    (
        lambda one: one.kind in _SEQUENCES and "gate" in one.holder.lower(),
        "{name} grows: clear it once it has been used, or bound it with "
        "collections.deque(maxlen=...), or keep the gates in a memtools.GateHistory",
    ),
    (
        _is("deque"),
        "{name} grows: take from it as fast as it is filled, or bound it with maxlen=, or maxsize= "
        "of a queue.Queue",
    ),
    (
        _is(*_SEQUENCES),
        "{name} grows: clear it once it has been used, or bound it with "
        "collections.deque(maxlen=...)",
    ),
    (_is(*_MAPPINGS), "{name} grows: delete what is no longer used, or bound it"),
    (
        lambda one: one.kind in _BUFFERS and one.holder,
        "{name} becomes larger and larger: write into one buffer of the final size, or keep a "
        "detached copy of a part, or a number",
    ),
    (
        lambda one: one.signal == "device" and not one.holder,
        "to learn which line allocates what grows on the device, take a snapshot: "
        "torch.cuda.memory._record_memory_history(), some hundred steps later _dump_snapshot(path)",
    ),
    (
        lambda one: one.per == "s" and not one.holder,
        "who holds what grows is found most surely at the ends of steps, and this program makes "
        "none: call monitor.step() of a memtools.MemoryMonitor once in each round of its loop",
    ),
    (
        lambda one: not one.holder,
        "to learn who holds what grows: before = memtools.census(), some hundred steps later "
        "print(*memtools.census().diff(before).holders(), sep='\\n')",
    ),
    (lambda one: True, "{name} keeps what grows: let go of it"),
)

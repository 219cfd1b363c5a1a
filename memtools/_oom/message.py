"""The forms in which programs, libraries, schedulers and the kernel say that memory ran out.

    a place in a text ──► which FORM is it?   its words, in bounded expressions
                      ──► its lines joined    those of one rank, without their prefixes
                      ──► the FIGURES         each by the words next to it, in any order
                      ──► OomMessage          bytes; None where the text does not have the figure

Texts come from anywhere: cut in the middle, of several ranks in one file, with control characters.
So each expression has a largest length, none has a repetition inside of another one, and all that
is repeated from a text passes `shown`. A figure that is not there is None, and never 0.

PyTorch writes `17179869184.00 GiB`, which is 2**64 bytes, where the driver gave no figure (Windows,
WSL, MIG), and where a limit is not set. Such figures count as not there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from re import Match, Pattern
from typing import Any, Final

from memtools._base.number import LARGEST
from memtools._base.oom import CODES
from memtools._base.text import shown
from memtools._oom.codes import LIKELY, NO, exit_code

#: characters of a message that are read, from its first line on; of its quotation
MOST, QUOTE = 4000, 240
#: lines above a message in which its traceback is
TRACEBACK: Final = 120
#: messages of one form in one line that are read
FEW: Final = 8
#: other processes of a device that are read from one message
PROCESSES = 64

DEVICE, HOST, SHM, UNCLEAR = "device", "host", "shm", "unclear"


@dataclass(frozen=True)
class OomMessage:
    """What one message says. Sizes are bytes, as exact as the text: None if it does not say.

    Attributes:
        kind: the form, a key of FORMS.
        where: whose memory ran out: "device", "host", "shm" (/dev/shm) or "unclear".
        certain: whether the text says that memory ran out. False: it may have another cause.
        line: the number of its line in the text, from 1.
        quote: its beginning, in characters that a terminal can show.
        rank: the process that wrote it, as the prefix of its line names it.
        place: the program's own line that was running, by the traceback before it.
        backend: "CUDA", "HIP", "XPU", "MPS" and so on.
        device: the number of the device.
        requested: the size that was asked for.
        capacity: the size of the device.
        free: what the driver could still give, to any process.
        allocated: what tensors had, those in private pools included.
        unallocated: what PyTorch had reserved and no tensor had.
        reserved: both, where the text has their sum (torch before 2.1).
        private: of `allocated`, what was in private pools (CUDA graphs).
        process: all that this process had on the device, with what is not PyTorch's.
        others: process number and size of each other process on the device.
        other: memory in use by others, where no process is named (MPS).
        variable: the variable for settings of the allocator that the text names.
        allowed: a limit below the capacity (a memory fraction, MPS's watermark).
        used: what was in use when a limit acted.
        limit: the limit of a control group, a job or a container.
        pid: the process that was killed or that failed.
        name: its name.
        anonymous: resident anonymous memory of that process: heap and tensors.
        file: its resident pages of files.
        shared: its resident shared memory.
        virtual: its address space.
        group: the control group whose limit acted.
        constraint: the kernel's word for whose memory ran out: CONSTRAINT_MEMCG for a control
            group, CONSTRAINT_NONE for the machine.
        shape: the shape of the array that was asked for.
        dtype: its type.
        signal: the signal that ended a process.
        code: the exit code.
        count: how many processes were killed.
    """

    kind: str
    where: str
    certain: bool
    line: int
    quote: str
    rank: str | None = None
    place: str | None = None
    backend: str | None = None
    device: int | None = None
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    private: int | None = None
    process: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    other: int | None = None
    variable: str | None = None
    allowed: int | None = None
    used: int | None = None
    limit: int | None = None
    pid: int | None = None
    name: str | None = None
    anonymous: int | None = None
    file: int | None = None
    shared: int | None = None
    virtual: int | None = None
    group: str | None = None
    constraint: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    signal: str | None = None
    code: int | None = None
    count: int | None = None

    @property
    def weight(self) -> int:
        """How much it says, of several messages about one end."""
        weight = BY_KIND[self.kind].weight
        return min(weight, _BARE) if not self.figures else weight

    @property
    def figures(self) -> dict[str, int]:
        """The sizes that it has, by their names."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}


#: The weight of a message without figures is not above this one's.
_BARE: Final = 72
#: the fields that are sizes
SIZES: Final = (
    "requested", "capacity", "free", "allocated", "unallocated", "reserved", "private", "process",
    "other", "allowed", "used", "limit", "anonymous", "file", "shared", "virtual",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One form of a message.

    Attributes:
        kind: its name.
        anchors: texts in lower case, one of which each message of the form has.
        words: the expression that decides; its groups may be fields.
        where: whose memory; None if `judge` says it.
        figures: the fields and their expressions, or the names of TORCH's.
        weight: of several messages about one end, the heaviest says most.
        lines: over how many lines it may reach.
        judge: by the match, whose memory and whether that is certain; None: this is no message.
    """

    kind: str
    anchors: tuple[str, ...]
    words: Pattern[str]
    where: str | None
    weight: int
    figures: dict[str, Pattern[str]] | None = None
    lines: int = 1
    certain: bool = True
    judge: Callable[[Match[str]], tuple[str, bool] | None] | None = None


# --- sizes ----------------------------------------------------------------------------------------

_SIZE: Final = r"(\d{1,24}(?:\.\d{0,6})?) {0,2}(bytes|[kKMGTPE]i?B?|B)\b"
#: torch and numpy mean powers of 1024 with every unit; so do Kubernetes' Mi and the kernel's kB
_POWERS: Final = {letter: power for power, letter in enumerate("kmgtpe", 1)}
_DECIMAL: Final = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
#: from here on a limit is none
NO_LIMIT: Final = 1 << 50


def size_of(number: str, unit: str) -> int | None:
    """Bytes; None for what no device has, by which torch says that a figure is not known."""
    power = _POWERS.get(unit[:1].lower(), 0) if unit.lower() != "bytes" else 0
    size = int(number) << (10 * power) if number.isdecimal() else round(float(number) * 1024**power)
    return size if size <= LARGEST else None


def _figure(text: str) -> Pattern[str]:
    """An expression in which SIZE stands for a size; alternatives have one each."""
    return re.compile(text.replace("SIZE", _SIZE))


#: the words next to each figure, in all versions of torch's messages
TORCH: Final = {
    "requested": _figure(r"Tried to allocate (?:more than )?SIZE"),
    "device": re.compile(r"GPU {0,2}(\d{1,4})"),
    "capacity": _figure(r"total capac\w{2,4} of SIZE|SIZE total capac\w{2,4}"),
    "free": _figure(r"of which SIZE is free|SIZE free"),
    "allocated": _figure(r"SIZE (?:is|already) allocated"),
    "private": _figure(r"with SIZE allocated in private pools"),
    "unallocated": _figure(r"SIZE is reserved by PyTorch but unallocated|SIZE cached"),
    "reserved": _figure(r"SIZE reserved in total by PyTorch"),
    "allowed": _figure(r"SIZE allowed"),
    "process": _figure(r"this process has SIZE memory in use"),
    "variable": re.compile(r"try setting (PYTORCH_\w{0,12}ALLOC_CONF)=expandable_segments"),
}
_PROCESS: Final = _figure(r"Process (\d{1,10}) has SIZE memory in use")
_MPS: Final = {
    "requested": TORCH["requested"],
    "allocated": _figure(r"MPS allocated: SIZE"),
    "other": _figure(r"other allocations: SIZE"),
    "allowed": _figure(r"max allowed: SIZE"),
}
_ASYNC: Final = {
    "device": re.compile(r"on device (\d{1,4})"),
    "allocated": _figure(r"Currently allocated {0,9}: SIZE"),
    "requested": _figure(r"Requested {0,19}: SIZE"),
    "capacity": _figure(r"Device limit {0,15}: SIZE"),
    "free": _figure(r"Free \(according to CUDA\) {0,9}: SIZE"),
    "allowed": _figure(r"PyTorch limit [^:]{0,60}: SIZE"),
}
_KERNEL: Final = {
    "pid": re.compile(r"(?:process|pid=) ?(\d{1,10})"),
    "name": re.compile(r"process \d{1,10},? (?:UID \d{1,10},? )?\((.{1,40}?)\)|task=(.{1,40}?),"),
    "virtual": _figure(r"total-vm:SIZE"),
    "anonymous": _figure(r"anon-rss:SIZE"),
    "file": _figure(r"file-rss:SIZE"),
    "shared": _figure(r"shmem-rss:SIZE"),
    "constraint": re.compile(r"constraint=(\w{1,40})"),
    "group": re.compile(r"oom_memcg=([^,\s]{1,300})"),
    "used": _figure(r"usage SIZE"),
    "limit": _figure(r"limit SIZE"),
}
_ARRAY: Final = {
    "requested": _figure(r"[Uu]nable to allocate SIZE"),
    "shape": re.compile(r"(?:shape|form) \((\d[\d, ]{0,200})\)"),
    "dtype": re.compile(r"data type (\w{1,20})"),
}


# --- what some forms decide by their words ---


def _dataloader(match: Match[str]) -> tuple[str, bool] | None:
    how = (match["how"] or "").lower()
    if "bus error" in how or match["bus"]:
        return SHM, True
    if how.startswith("killed"):
        return HOST, False
    if match["unexpectedly"]:
        return None if match["code"] and _is_fault(int(match["code"])) else (UNCLEAR, False)
    return None


def _is_fault(code: int) -> bool:
    found = exit_code(code)
    return found.signal is not None and found.out_of_memory == NO


def _code(match: Match[str]) -> tuple[str, bool] | None:
    found = exit_code(int(match["code"]))
    # 134 and 139 have other causes as a rule, and words of their own in the same text.
    return (found.where, False) if found.out_of_memory == LIKELY else None


def _other_cause(match: Match[str]) -> tuple[str, bool]:
    """A status of a library: some have other causes as well."""
    return DEVICE, not any(word in match[0] for word in ("NOT_", "RESOURCES", "engine"))


_EXCEPTION: Final = r"(?:Error|Exception|ERROR|FATAL|error|what\(\)|terminate)"
_SHELL: Final = (
    r"^Killed\.?$|^\S{1,200}: line \d{1,7}: {0,4}\d{1,10} {1,20}[Kk]illed\b|"
    r"^\[\d{1,4}\] {0,2}[+-]? {1,40}(?:\d{1,10} {1,20})?[Kk]illed\b|^zsh: killed\b"
    r"|^srun: error: .{1,200}: Killed$"
    r"|\b(?:Getötet|Processus arrêté|Tué|Terminado \(killed\)|Ucciso|Morto|Убито|已杀死|已殺死"
    r"|強制終了|죽었음)$"
)

FORMS: Final = (
    Form(
        "mps", ("mps backend out of memory",),
        re.compile(r"\b(?P<backend>MPS) backend out of memory\b"), DEVICE, 100, _MPS, 6,
    ),
    Form(
        "torch", ("out of memory", "tried to allocate"),
        re.compile(
            r"(?<!encounter )\b(?P<backend>CUDA|HIP|XPU|NPU|HPU|MUSA|PrivateUse1) out of memory"
            r"\b(?:\. {0,4}Tried to allocate)?|(?<!you )\bTried to allocate (?=[\d.]{1,30} {0,2}\w)"
        ),
        DEVICE, 100, TORCH, 10,
    ),
    Form(
        "mps buffer", ("invalid buffer size",),
        _figure(r"Invalid buffer size: (?=SIZE)"), DEVICE, 90,
        {"requested": _figure(r"Invalid buffer size: SIZE")},
    ),
    Form(
        "cudaMallocAsync", ("would exceed allowed memory",),
        re.compile(r"Allocation on device .{0,12}would exceed allowed memory"
                   r"(?:\. \(out of memory\))?"),
        DEVICE, 95, _ASYNC, 8,
    ),
    Form(
        "host allocator", ("cpuallocator", "not enough memory: you tried"),
        re.compile(r"(?:DefaultCPUAllocator: |Torch: |CPUAllocator: )(?:can't allocate|not enough) "
                   r"memory"),
        HOST, 90, {"requested": _figure(r"tried to allocate SIZE")}, 4,
    ),
    Form(
        "array", ("unable to allocate",),
        re.compile(r"[Uu]nable to allocate (?:[\d.]{1,30} ?\w{1,5} )?(?:for )?(?:an )?array"),
        HOST, 90, _ARRAY, 3,
    ),
    Form(
        "shared memory", ("no space left on device",),
        re.compile(r"unable to (?:write to|open|resize|allocate shared memory).{0,40}</?torch_"
                   r".{0,80}No space left on device"),
        SHM, 85, None, 2,
    ),
    Form(
        "mapped file", ("unable to mmap",),
        re.compile(r"unable to mmap (?=\d{1,20} bytes .{0,300}Cannot allocate memory)"), HOST, 85,
        {"requested": _figure(r"unable to mmap SIZE")}, 2,
    ),
    Form(
        "bitsandbytes", ("error out of memory at line",),
        re.compile(r"Error out of memory at line \d{1,6} in file"), DEVICE, 75,
    ),
    Form(
        "nccl", ("cuda failure", "nccl warn failed to cuda"),
        re.compile(r"Cuda failure (?:\d{1,4} )?'out of memory'|NCCL WARN Failed to CUDA \w{1,9}"
                   r"(?= \d)"),
        DEVICE, 72, {"requested": _figure(r"Failed to CUDA \w{1,9} SIZE")}, 3,
    ),
    Form(
        "library", tuple(code.lower() for code in CODES),
        re.compile("|".join(map(re.escape, CODES))), None, 70, None, judge=_other_cause,
    ),
    Form(
        "driver", ("out of memory", "outofmemoryerror"),
        re.compile(r"(?P<backend>CUDA|HIP)(?: driver| runtime)? [Ee]rror:? out of memory\b|"
                   r"\btorch\.(?:cuda\.)?OutOfMemoryError\b"),
        DEVICE, 70,
    ),
    Form(
        "xla", ("resource_exhausted",),
        re.compile(r"RESOURCE_EXHAUSTED: .{0,80}?[Oo]ut of memory"), DEVICE, 70,
        {"requested": _figure(r"(?:allocate|allocating) SIZE")},
    ),
    Form(
        "tensorflow", ("oom when allocating tensor",),
        re.compile(r"OOM when allocating tensor with shape ?\["), None, 70,
        {"device": re.compile(r"device:GPU:(\d{1,4})")},
        judge=lambda match: (DEVICE if "GPU" in match.string else HOST, True),
    ),
    Form(
        "hpu", ("pt_devmem",),
        re.compile(r"PT_DEVMEM.{0,20}Allocation failed"), DEVICE, 70,
        {"requested": re.compile(r"size::?(\d{1,20})()")},
    ),
    Form(
        "kernel",
        ("oom-kill:constraint", "memory: killed process", "memory: kill process",
         "killed process", "memory: usage"),
        re.compile(r"oom-kill:constraint=|(?:Memory cgroup out of memory: |Out of memory[^:]{0,40}"
                   r": )?Kill(?:ed)? process \d{1,10},? (?:UID \d{1,10},? )?\(|\bmemory: usage "
                   r"\d{1,20}kB, limit \d"),
        HOST, 60, _KERNEL,
    ),
    Form(
        "slurm",
        ("oom-kill event", "oom_kill event", "exceeded memory limit", "job memory limit",
         "step memory limit", ": out of memory", "out_of_memory", "out_of_me+"),
        re.compile(r"Detected (?P<count>\d{1,6}) oom[-_]kill event|exceeded memory limit \("
                   r"\d{1,20} > \d{1,20}\)|Exceeded (?:job|step) memory limit|"
                   r"srun: error: .{1,200}: Out Of Memory|\bOUT_OF_ME(?:MORY|\+)"),
        HOST, 50,
        {"used": re.compile(r"memory limit \((\d{1,20})() >"),
         "limit": re.compile(r"memory limit \(\d{1,20} > (\d{1,20})()\)")},
    ),
    Form(
        "kubernetes", ("oomkilled", "oom killed", "low on resource: memory"),
        re.compile(r"\bOOM ?Killed\b(?![\"']?\s{0,4}[:=]\s{0,4}false)|"
                   r"\blow on resource: memory\b"),
        HOST, 49,
        {"limit": re.compile(r"Limits: .{0,120}?memory: {0,20}(\d{1,15}(?:\.\d{1,4})?)([KMGT]i?)"),
         "code": re.compile(r"Exit Code: {0,20}(\d{1,3})\b")}, 14,
    ),
    Form(
        "ray", ("due to the node running low on memory", "due to memory pressure"),
        re.compile(r"killed due to (?:the node running low on memory|memory pressure)"), HOST, 49,
    ),
    Form(
        "early oom", ("due to memory pressure for", "low memory! at or below"),
        re.compile(r"systemd-oomd.{0,20}: Killed (?P<group>\S{1,300}) due to memory pressure|"
                   r"low memory! at or below SIG(?:TERM|KILL) limits"), HOST, 50,
    ),
    Form(
        "dataloader", ("dataloader worker", "unexpected bus error"),
        re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d{1,10})[\d, ]{0,200}\) (?:is "
                   r"killed by signal: (?P<how>\w{1,20}(?: \w{1,20})?)|(?P<unexpectedly>exited "
                   r"unexpectedly)(?: with exit code (?P<code>-?\d{1,10}))?)|"
                   r"(?P<bus>Unexpected bus error encountered in worker)"),
        None, 40, judge=_dataloader,
    ),
    Form(
        "host",
        ("memoryerror", "cannot allocate memory", "bad_alloc", "can't allocate memory",
         "memory allocation failed", "java.lang.outofmemoryerror"),
        re.compile(r"(?:^|[\s:(])(?:[\w.]{1,60}\.)?_?(?:Array|Arrow)?MemoryError(?=:|\s|$)|"
                   r"\b(?:OSError|fork|spawn)\b.{0,80}Cannot allocate memory|std::bad_alloc|"
                   r"[Cc]an(?:not|'t) allocate memory|memory allocation failed|"
                   r"java\.lang\.OutOfMemoryError"),
        HOST, 65, {"requested": re.compile(r"malloc of size (\d{1,20})()")},
    ),
    Form(
        "onednn", ("could not create a primitive", "could not execute a primitive"),
        re.compile(r"could not (?:create a primitive(?! desc)|execute a primitive)"), HOST, 45,
        certain=False,
    ),
    Form(
        "pool", ("terminated abruptly", "was unexpectedly terminated"),
        re.compile(r"process pool was terminated abruptly|worker process .{0,80}was unexpectedly "
                   r"terminated"),
        UNCLEAR, 40, certain=False,
    ),
    Form("shell", ("killed", "getötet", "arrêté", "tué", "ucciso", "morto", "Убито", "已杀死",
                   "已殺死", "強制終了", "죽었음"),
         re.compile(_SHELL), HOST, 30, certain=False),
    Form(
        "exit code",
        ("exitcode", "exit code", "exited with code", "exit status", "received by pid",
         "terminated with signal", "died with <signals.", "return code", "error 137", "code 137"),
        re.compile(r"(?:exitcode|exit code|exited with code|exit status|return code|\berror|\bcode)"
                   r"[\"']? {0,4}[:=]? {0,4}(?P<code>-?\d{1,10})\b|(?P<kill>Signal 9 \(SIGKILL\)|"
                   r"terminated with signal (?:SIGKILL|9)\b|died with <Signals.SIGKILL)",
                   re.IGNORECASE),
        None, 20, judge=lambda match: (HOST, False) if match["kill"] else _code(match),
    ),
    Form(
        "other", ("out of memory",),
        re.compile(rf"{_EXCEPTION}.{{0,120}}?[Oo]ut [Oo]f [Mm]emory"), UNCLEAR, 10, certain=False,
    ),
)  # fmt: skip
BY_KIND: Final = {form.kind: form for form in FORMS}
#: each anchor in the bytes of a text in lower case, and its forms in the order of FORMS
ANCHORS: Final = {
    anchor.encode(): tuple(form for form in FORMS if anchor in form.anchors)
    for anchor in dict.fromkeys(anchor for form in FORMS for anchor in form.anchors)
}


# --- one message ----------------------------------------------------------------------------------

#: Who wrote a line: [rank3]:, [default3]:, (name pid=12), "3: " of srun -l, [1,3]<stderr> of mpi.
_PREFIX: Final = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[T ][\d:.,Z+]{5,24}\]?\s{0,4})?"
    r"(?:\[(?:rank|default|local_rank)[ :]?(?P<rank>\d{1,6})\]:?|"
    r"\((?P<name>[\w.:-]{0,40} ?(?:pid|rank)=\d{1,9})[^)\n]{0,60}\)|"
    r"\[\d{1,5},(?P<mpi>\d{1,6})\]<std(?:err|out)>:?|"
    r"[Rr]ank ?(?P<word>\d{1,6})[:\]]|"
    r" {0,5}(?P<task>\d{1,5}): )\s?"
)
_ESCAPE: Final = re.compile(r"\x1b\[[\d;]{0,20}[A-Za-z]")
_FRAME: Final = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7}), in ([^\n]{1,80})')
#: files in which no user's line is
_LIBRARIES: Final = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "\\lib\\",
    "<frozen",
    "<string>",
)
#: a message ends where another one begins
_NEXT: Final = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend|NPU) out of memory|Traceback \(most recent|During handling of"
)


def without_prefix(line: str) -> tuple[str | None, str]:
    """The rank that wrote a line, and the rest of it."""
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    number = match["rank"] or match["mpi"] or match["word"]
    name = f"rank {number}" if number else match["name"] or f"task {match['task']}"
    return shown(name), line[match.end() :]


def plain(text: str) -> str:
    """The text without colours."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def messages_in(
    before: Sequence[str],
    line: str,
    after: Sequence[str],
    number: int,
    forms: Sequence[Form],
    column: int | None = None,
) -> Iterator[OomMessage]:
    """The messages of some forms that begin in a line, FEW of each form.

    Args:
        before: the lines above it, the nearest last.
        line: the line.
        after: the lines below it.
        number: its number in the text.
        forms: what is looked for.
        column: in a part of a very long line, the place that a message has to cover.
    """
    rank, own = (None, line) if column is not None else without_prefix(plain(line))
    for form in forms:
        for match in itertools.islice(form.words.finditer(own), FEW):
            if column is not None and not match.start() <= column < match.end():
                continue
            found = (form.where, form.certain) if form.judge is None else form.judge(match)
            if found is None or found[0] is None:
                continue
            text = _joined(
                own[match.start() :], after, rank, form.lines, match.end() - match.start()
            )
            values = _values(form, match, text)
            yield OomMessage(
                kind=form.kind, where=found[0], certain=found[1], line=number, rank=rank,
                quote=shown(" ".join(text[:QUOTE].split())), place=_place(before, rank), **values,
            )  # fmt: skip


def _joined(own: str, after: Sequence[str], rank: str | None, lines: int, words: int) -> str:
    """The message from its first word on, with the following lines of its rank, up to the next
    message."""
    parts, size = [own], len(own)
    for line in after:
        if len(parts) >= lines or size > MOST:
            break
        who, rest = without_prefix(plain(line))
        if who == rank:
            parts.append(rest)
            size += len(rest)
    text = " ".join(" ".join(parts)[:MOST].split())
    stop = _NEXT.search(text, min(words, len(text)))
    return text[: stop.start()] if stop else text


def _values(form: Form, match: Match[str], text: str) -> dict[str, Any]:
    """The fields of a message, by its words and its figures."""
    values: dict[str, Any] = {}
    groups = match.groupdict()
    for name in ("backend", "group"):
        if groups.get(name):
            values[name] = shown(groups[name])
    for name in ("pid", "code", "count"):
        if groups.get(name):
            values[name] = int(groups[name])
    if form.kind == "dataloader" and groups.get("how"):
        values["signal"] = groups["how"]
    for name, words in (form.figures or {}).items():
        found = words.search(text)
        if found is not None:
            values[name] = _value(name, [part for part in found.groups() if part is not None])
    if form.kind == "slurm":  # in KiB
        values |= {name: values[name] << 10 for name in ("used", "limit") if values.get(name)}
    if form.kind == "kernel" and "out of memory" in match[0].lower():
        of_group = "cgroup" in match[0]
        values.setdefault("constraint", "CONSTRAINT_MEMCG" if of_group else "CONSTRAINT_NONE")
    if form.kind == "torch":
        values |= _of_torch(values, text)
    return values


def _value(name: str, parts: list[str]) -> Any:
    if name in ("device", "pid", "code"):
        return int(parts[0])
    if name == "shape":
        dimensions = (part.strip() for part in parts[0].split(","))
        return tuple(int(part[:18]) for part in dimensions if part)[:16]
    if len(parts) == 1:
        return shown(parts[0])
    if name == "limit" and parts[1] in _DECIMAL:  # Kubernetes means 10**9 with G, 2**30 with Gi
        return round(float(parts[0]) * _DECIMAL[parts[1]])
    size = size_of(parts[0], parts[1])
    return None if name in ("limit", "allowed") and size is not None and size >= NO_LIMIT else size


def _of_torch(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Reserved in total is one figure of old versions, of which new ones give the parts."""
    reserved, allocated = values.get("reserved"), values.get("allocated")
    more: dict[str, Any] = {}
    if reserved is not None and allocated is not None and "unallocated" not in values:
        more["unallocated"] = max(0, reserved - allocated)
    others: list[tuple[int, int]] = []
    for match in _PROCESS.finditer(text):
        size = size_of(match[2], match[3])
        if size is not None and len(others) < PROCESSES:
            others.append((int(match[1]), size))
    if others:
        more["others"] = tuple(others)
    return more


def _place(before: Sequence[str], rank: str | None) -> str | None:
    """The innermost frame of the traceback above a message that is not a library's."""
    for line in itertools.islice(reversed(before), TRACEBACK):
        who, rest = without_prefix(plain(line))
        if who != rank:
            continue
        if rest.startswith("Traceback"):
            return None
        match = _FRAME.search(rest)
        if match is not None and not any(part in match[1] for part in _LIBRARIES):
            file = re.split(r"[/\\]", match[1])[-1]
            return shown(f"{file}:{match[2]} in {match[3].strip()}")
    return None


def merged(first: OomMessage, second: OomMessage) -> OomMessage:
    """Two lines of the kernel about one kill: what either says."""
    missing = {
        one.name: getattr(first, one.name)
        for one in fields(second)
        if getattr(second, one.name) is None
    }
    return replace(second, **missing)

"""Who ended a run that was killed: by the record alone, and by the kernel's log. The control group
is not read again: it is gone with the job, and what is said must be the same before and after.

    at the start   Counters of the own group and of those above it ─┐
    now and then   Counters again, where they have changed          │
    at the end     Counters again, by the run or by who watched it ─┴─► what was counted meanwhile
                   or, where nobody could read them, memory and limit at the last sample
                                                                        │
                                                                        ▼
    kernel's log   "Killed process 1234 (python)" ──────────────────► Cause, or None: not known

The kernel adds one to `oom_kill` of a process's group, and of those above it, when it kills the
process because memory ran out, and to `oom` of the group whose limit that was. So no rise of
`oom_kill` says that the kernel did not do it, and a rise without one of `oom` that it was not a
limit which is visible here. Version 1 has no `oom`: there the limits that were met tell, and only
the own group counts.

A process that is killed counts no more. So of one that nobody watched (`memtools run train.py`, a
MemoryMonitor) the last sample is what is known: near a limit, its out-of-memory killer is likely,
and that word is used. `memtools run -- command` reads the counters after the end, and is sure.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memtools._base.size import format_bytes
from memtools._base.text import shown
from memtools._record.counters import boot_id
from memtools._record.events import Ending, events_of, signal_name, start_of
from memtools._record.kinds import Counters, SharedRoom, Start

if TYPE_CHECKING:
    from memtools._record.figures import Used
    from memtools._record.record import Record

ROOT = "/"  # under which the kernel's files are read now; tests have their own
FULL = 0.75  # of /dev/shm: a file that does not fit leaves some room
LOG_SLACK_NS = 10**9  # by which the log's clock and the run's may differ
MOST_LOG = 1 << 24  # bytes of the kernel's log that are read
OF_A_GROUP, OF_THE_MACHINE, NOT_NAMED = "group", "machine", "not named"  # what the log says
_INIT_PIDS = "pid:[4026531836]"  # the namespace in whose numbers the kernel's log speaks
_KILLED = re.compile(
    r"^\d+,\d+,(\d+),[^;]*;(Memory cgroup out of memory|Out of memory)[^:]*: "
    r"Kill(?:ed)? process (\d+) ",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Cause:
    """What is known of a kill. `by`: "group" (the kernel, because a control group had no memory
    left), "machine" (the kernel, because of the machine's memory or of a limit that is not visible
    here), "shm" (a mapped file found no room in /dev/shm), "nobody" (nobody was killed for memory),
    "unclear" (somebody in the group was, perhaps another process). `text`: a clause about it."""

    by: str
    text: str
    group: str = ""
    limit_bytes: int | None = None

    @property
    def is_memory(self) -> bool:
        return self.by in ("group", "machine", "shm")


@dataclass(frozen=True)
class Victim:
    """A child whose death an exception tells of. `signal`: None where it is not told."""

    signal: str | None
    pid: int | None = None


# --- the kernel's log -----------------------------------------------------------------------------


def _killed_by_log(pid: int, since_ns: int, root: str) -> str | None:
    """For whose memory the kernel's log says that it killed this process after `since_ns`, or
    NOT_NAMED; None where the log cannot be read, does not go back so far, or speaks of other
    numbers of processes, as in a container."""
    try:
        own = os.readlink(os.path.join(root, "proc/self/ns/pid"))
    except OSError:
        return None
    log = _log(root) if own == _INIT_PIDS else ""
    first = re.match(r"\d+,\d+,(\d+),", log)
    if first is None:
        return None
    for time_us, whose, number in _KILLED.findall(log):
        if int(number) == pid and int(time_us) * 1000 >= since_ns - LOG_SLACK_NS:
            return OF_A_GROUP if whose.startswith("Memory cgroup") else OF_THE_MACHINE
    return NOT_NAMED if int(first[1]) * 1000 <= since_ns else None


def _log(root: str) -> str:
    """All that is in it now, a record a line; never waits."""
    parts, size = [], 0
    try:
        file = os.open(os.path.join(root, "dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while size < MOST_LOG:
            try:
                part = os.read(file, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # this record was overwritten: the next one follows
                    continue
                break
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(file)
    return b"".join(parts).decode("utf-8", "replace")


# --- the cause ------------------------------------------------------------------------------------


def explained(end: Ending, record: Record, used: Used | None) -> Ending:
    """The ending with its cause, where that is known.

    Args:
        end: of the record.
        record: which may still be written: then nothing is asked.
        used: memory and its limit at the last sample.
    """
    victim = None
    if end.kind == "failed" and _NO_ROOM.search(end.text):
        cause = _by_shm(record, certain=True)
    elif end.kind == "failed" and end.out_of_memory is None:
        victim = victim_of(end.text)
        cause = _of_others(record) if victim is None else cause_of(record, used, victim=victim)
    elif end.kind == "killed" and end.code is not None and _watches_itself(record):
        cause = _of_others(record) or cause_of(record, used, signal=end.signal)
    elif end.kind in ("killed", "gone"):
        cause = cause_of(record, used, signal=end.signal)
    else:
        cause = None
    if cause is None:
        return end
    if cause.by == "nobody" and _is_near(used) and used is not None and used.source == "given":
        cause = replace(cause, by="unclear")  # whatever enforces that limit is not the kernel
    if end.kind == "gone" and cause.is_memory:
        return replace(end, text=cause.text, cause=cause)
    said = end.text if end.text.endswith("...") else end.text.rstrip(". ")
    return replace(end, text=f"{said}; {cause.text}", cause=cause)


def _watches_itself(record: Record) -> bool:
    """Whether the process has written its own end: a code such as 137 was a child's before."""
    start = next(events_of(record, Start), None)
    return start is not None and not start.command


def _is_near(used: Used | None) -> bool:
    return used is not None and used.near_since_seconds is not None


def _of_others(record: Record) -> Cause | None:
    """Of a run that failed by itself: who was killed meanwhile, which may be why."""
    groups = _groups_of(record)
    if not groups or not _rose(*groups[0]):
        return None
    own, now = groups[0]
    return _said("others", group=own.group, counted=_counted_of(own, now))


def cause_of(
    record: Record,
    used: Used | None,
    *,
    signal: str | None = None,
    victim: Victim | None = None,
) -> Cause | None:
    """Who ended a run that a signal ended ("": nobody knows which), or a child of it.

    Args:
        record: of a run that is over.
        used: memory and its limit at the last sample.
        signal: that ended it.
        victim: the child that was killed, and whose death ended the run; None: the run itself.
    """
    signal = signal if victim is None else victim.signal
    if signal == "SIGBUS":
        return _by_shm(record)
    if signal not in ("", "SIGKILL"):
        return None
    pid = record.pid if victim is None else victim.pid
    log = None
    if pid is not None and not start_of(record).command:
        # A record of memtools run -- command has no number of the command, but memtools' own.
        log = _killed_by_log(pid, record.clock_ns, ROOT) if _same_boot(record) else None
    whom = "it" if victim is None else "a child process"
    groups = _groups_of(record)
    if _were_read_at_the_end(record):
        return _by_counters(groups, log, whom)
    if log is not None:
        return _by_log(groups, log, whom)
    return _by_last_sample(groups, used) if victim is None else None


#: what is known ──► whom it speaks of (`Cause.by`), and the sentence
_SENTENCES = {
    "counted for a group": (
        "group",
        "{whom} was killed by the out-of-memory killer of the control group {group}{limit}: "
        "{counted}",
    ),
    "counted": (
        "machine",
        "{whom} was killed by the kernel's out-of-memory killer ({counted} in the control group "
        "{group}), for the machine's memory or a limit that is not visible here",
    ),
    "counted, another named": (
        "nobody",
        "a process of the control group {group} was killed for memory since the run began "
        "({counted}), and the kernel's log names another one",
    ),
    "counted above": (
        "unclear",
        "a process below the control group {above} was killed for memory ({counted}), but none of "
        "{group}, in which it began",
    ),
    "not counted": (
        "nobody",
        "the counters say that no process of the control group {group}, in which it began, was "
        "killed for memory",
    ),
    "others": (
        "unclear",
        "meanwhile the kernel killed a process of the control group {group} for memory: {counted}",
    ),
    "named for a group": (
        "group",
        "{whom} was killed by the out-of-memory killer of the control group {group}{limit}, says "
        "the kernel's log",
    ),
    "named": ("machine", "{whom} was killed for memory, says the kernel's log: for {why}"),
    "not named": ("nobody", "the kernel's log does not say that {whom} was killed for memory"),
    "near a group's limit": (
        "group",
        "it was most likely killed by the out-of-memory killer of the control group {group}{limit}"
        ": {used} were in use {at_last}",
    ),
    "near the machine's memory": (
        "machine",
        "it was most likely killed by the kernel's out-of-memory killer: the machine's memory of "
        "{size} was in use {at_last}",
    ),
    "shm was full": ("shm", "/dev/shm ran full: {in_use}"),
    "shm had room": ("unclear", "/dev/shm had room: {in_use}"),
}


def _said(known: str, *, group: str = "", limit_bytes: int | None = None, **more: str) -> Cause:
    by, sentence = _SENTENCES[known]
    limit = "" if limit_bytes is None else f" (limit {format_bytes(limit_bytes)})"
    text = sentence.format(group=shown(group), limit=limit, **more)
    return Cause(by, text, shown(group), limit_bytes)


_Groups = Sequence[tuple[Counters, Counters]]


def _by_counters(groups: _Groups, log: str | None, whom: str) -> Cause | None:
    """By what was counted between the start and the end."""
    own, now = groups[0]
    if own.oom_kill is None or now.oom_kill is None or now.oom_kill < own.oom_kill:
        return None
    counted = _counted_of(own, now)
    if now.oom_kill == own.oom_kill:
        return _by_nobody(groups)
    if log == NOT_NAMED:
        limit = own.limit_bytes
        return _said("counted, another named", group=own.group, limit_bytes=limit, counted=counted)
    full = next((before for before, after in groups if _ran_out(before, after)), None)
    if full is None:
        return _said("counted", group=own.group, whom=whom, counted=counted)
    limit = full.limit_bytes
    return _said(
        "counted for a group", group=full.group, limit_bytes=limit, whom=whom, counted=counted
    )


def _by_nobody(groups: _Groups) -> Cause:
    """Where the own group counted no kill. In version 2 those above it count its kills too: a kill
    there was of another group's process, or this one was moved meanwhile."""
    own = groups[0][0]
    for before, after in groups[1:]:
        if before.version == 2 and _rose(before, after):
            return _said(
                "counted above", group=own.group, limit_bytes=own.limit_bytes,
                above=shown(before.group), counted=_counted_of(before, after),
            )  # fmt: skip
    return _said("not counted", group=own.group, limit_bytes=own.limit_bytes)


def _by_log(groups: _Groups, log: str, whom: str) -> Cause:
    """By the kernel's log alone."""
    if log == NOT_NAMED:
        return _said("not named", group=groups[0][1].group if groups else "", whom=whom)
    full = next((last for _, last in groups if last.limit_bytes is not None), None)
    if log != OF_A_GROUP:
        return _said("named", whom=whom, why="the machine's memory")
    if full is None:
        return _said("named", whom=whom, why="a control group's limit that is not visible here")
    return _said("named for a group", group=full.group, limit_bytes=full.limit_bytes, whom=whom)


def _by_last_sample(groups: _Groups, used: Used | None) -> Cause | None:
    """By where memory stood, where nobody counted at the end: what is likely."""
    if used is None or not _is_near(used) or used.limit_bytes is None:
        return None
    limit = used.limit_bytes
    full = next((last for _, last in groups if last.limit_bytes == limit), None)
    if used.source == "cgroup" and full is not None:
        in_use = format_bytes(used.last_bytes)
        return _said(
            "near a group's limit", group=full.group, limit_bytes=limit, used=in_use,
            at_last=used.at_last,
        )  # fmt: skip
    if used.source == "machine":
        size = format_bytes(limit)
        return _said("near the machine's memory", size=size, at_last=used.at_last)
    return None


def _rose(before: Counters, after: Counters) -> bool:
    return (after.oom_kill or 0) > (before.oom_kill or 0)


def _counted_of(before: Counters, after: Counters) -> str:
    return f"oom_kill rose from {before.oom_kill or 0:,} to {after.oom_kill or 0:,}"


def _ran_out(before: Counters, after: Counters) -> bool:
    """Whether it was this group's limit: the innermost where it was counted."""
    if before.version == 1:
        return before.limit_bytes is not None and (after.met or 0) > (before.met or 0)
    return (after.oom or 0) > (before.oom or 0)


def _by_shm(record: Record, certain: bool = False) -> Cause | None:
    """Whether /dev/shm was full; `certain`: the exception says that a file of it found no room."""
    rooms = [event.data for event in record.events if isinstance(event.data, SharedRoom)]
    if len(rooms) < 2:  # at the start alone: what was in use at the end, nobody knows
        return None
    most = max(room.used_bytes for room in rooms)
    size = rooms[-1].size_bytes
    known = "shm was full" if certain or most >= FULL * size else "shm had room"
    in_use = f"{format_bytes(most)} of {format_bytes(size)} in use"
    return _said(known, limit_bytes=size, in_use=in_use)


def _groups_of(record: Record) -> list[tuple[Counters, Counters]]:
    """Of each group, the own one first: its counters at the start, and when they were read last.
    Counters never fall, and what was read first may have been written again later."""
    found: dict[str, list[Counters]] = {}
    for counters in (e.data for e in record.events if isinstance(e.data, Counters)):
        if counters.own and counters.folder not in found:
            found = {}  # the first group, or it was moved to another one
        found.setdefault(counters.folder, []).append(counters)
    return [(min(of, key=_counted), max(of, key=_counted)) for of in found.values()]


def _counted(counters: Counters) -> tuple[int, int, int]:
    return counters.oom_kill or 0, counters.oom or 0, counters.met or 0


def _were_read_at_the_end(record: Record) -> bool:
    """Whether somebody read the counters when the run was over. Who does so writes those of the
    own group last, whether or not they have changed, and then how it ended."""
    own = [e.data for e in record.events if isinstance(e.data, Counters) and e.data.own]
    return len(own) > 1 and any(event.kind == "end" for event in record.events)


def _same_boot(record: Record) -> bool:
    of = next((e.data.boot for e in record.events if isinstance(e.data, Counters)), "")
    return bool(of) and of == boot_id(ROOT)


# --- children, by what an exception says of them --------------------------------------------------

#: of torch's and Python's words for a file of /dev/shm that does not fit
_NO_ROOM = re.compile(
    r"unable to (allocate|mmap|write)[^\n]*(shared memory|/torch_)[^\n]*(No space|out of memory)"
    r"|No space left on device[^\n]*(/dev/shm|'/psm_)"
)
_SIGNALS = {  # as strsignal() names them
    "killed": "SIGKILL", "bus error": "SIGBUS", "segmentation fault": "SIGSEGV",
    "aborted": "SIGABRT", "terminated": "SIGTERM",
}  # fmt: skip
_DEATHS = (
    re.compile(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<words>[\w ]+)"),
    re.compile(r"DataLoader worker \(pid\(s\) (?P<pid>\d+)[\d, ]*\) exited unexpectedly"),
    re.compile(r"process \d+ terminated with signal (?P<name>SIG\w+)"),
    re.compile(r"died with <Signals\.(?P<name>SIG\w+): \d+>"),
    re.compile(r"returned non-zero exit status (?P<code>\d+)"),
    re.compile(r"exitcode\s*:?\s*(?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"),
    re.compile(r"A process in the process pool was terminated abruptly"),
)


def victim_of(text: str) -> Victim | None:
    """The child whose death the text of an exception tells of, by torch's, multiprocessing's and
    subprocess's words; None where it speaks of something else."""
    for form in _DEATHS:
        found = form.search(text)
        if found is None:
            continue
        said = found.groupdict()
        pid = None if said.get("pid") is None else int(said["pid"])
        if said.get("words") is not None:
            return Victim(_SIGNALS.get(said["words"].strip().lower()), pid)
        if said.get("code") is not None:
            code = int(said["code"])
            number = -code if code < 0 else code - 128
            return Victim(signal_name(number), pid) if 0 < number <= 64 else None
        return Victim(said.get("name", ""), pid)
    return None

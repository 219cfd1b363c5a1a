"""Who ended a run that was killed, by the record and by the kernel's log. The control group is not
read again: it may be gone with the job, and the answer must be the same before and after.

    at the start   Counters of the own group and of those above it ─┐
    now and then   Counters again, if they have changed             │
    at the end     Counters again, by the run or by its watcher ────┴─► what was counted meanwhile
                   or, without them, memory and limit at the last sample
                                                                        │
                                                                        ▼
    kernel's log   "Killed process 1234 (python)" ──────────────────► Cause, or None: not known

When the kernel kills a process because memory ran out, it adds one to `oom_kill` of the process's
group and of those above it, and to `oom` of the group whose limit was reached. So if `oom_kill` has
not risen, the kernel did not kill. If it has risen and `oom` has not, the limit is not visible
here. Version 1 has no `oom`: there the number of times that a limit was met decides, and only the
own group counts.

A process that is killed cannot read counters. If no other process watched it (`memtools run
train.py`, a MemoryMonitor), only the last sample is known: near a limit, the out-of-memory killer
is likely, and the text says so. `memtools run -- command` reads the counters after the end, and is
sure.
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

ROOT = "/"  # The kernel's log and its boot id are read under this folder.
FULL = 0.75  # share of /dev/shm in use: a file that does not fit leaves some room
LOG_SLACK_NS = 10**9  # The log's clock and the run's may differ by so much.
MOST_LOG = 1 << 24  # bytes of the kernel's log that are read, at most
OF_A_GROUP, OF_THE_MACHINE, NOT_NAMED = "group", "machine", "not named"  # answers of the log
_INIT_PIDS = "pid:[4026531836]"  # The log has process numbers of this namespace.
_KILLED = re.compile(
    r"^\d+,\d+,(\d+),[^;]*;(Memory cgroup out of memory|Out of memory)[^:]*: "
    r"Kill(?:ed)? process (\d+) ",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Cause:
    """What is known about a kill.

    Attributes:
        by: "group" (the kernel, because a control group had no memory left), "machine" (the kernel,
            because of the machine's memory or of a limit that is not visible here), "shm" (a mapped
            file found no room in /dev/shm), "nobody" (no process was killed for memory) or
            "unclear" (a process of the group was, perhaps another one).
        text: a clause about it.
        group: the control group whose limit was reached, or the own group; "" for "shm".
        limit_bytes: its limit, or the size of /dev/shm; None if it is not known.
    """

    by: str
    text: str
    group: str = ""
    limit_bytes: int | None = None

    @property
    def is_memory(self) -> bool:
        return self.by in ("group", "machine", "shm")


@dataclass(frozen=True)
class Victim:
    """A child whose death an exception reports. `signal` is "" if the text does not name it, and
    None if its name is not known."""

    signal: str | None
    pid: int | None = None


# --- the kernel's log -----------------------------------------------------------------------------


def _killed_by_log(pid: int, since_ns: int, root: str) -> str | None:
    """Whose memory ran out when the kernel killed this process after `since_ns`, by the kernel's
    log: OF_A_GROUP, OF_THE_MACHINE, or NOT_NAMED if the log does not name the process. None if the
    log cannot be read, does not go back so far, or has other process numbers, as in a container."""
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
    """The log as it is now, one record a line. Never waits."""
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
                if error.errno == errno.EPIPE:  # This record was overwritten; the next one follows.
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
    """Add the cause to an ending, if it is known.

    Args:
        end: how the record says that the run ended.
        record: the record of the run.
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
        cause = replace(cause, by="unclear")  # The kernel does not enforce that limit.
    if end.kind == "gone" and cause.is_memory:
        return replace(end, text=cause.text, cause=cause)
    text = end.text if end.text.endswith("...") else end.text.rstrip(". ")
    return replace(end, text=f"{text}; {cause.text}", cause=cause)


def _watches_itself(record: Record) -> bool:
    """Whether the process wrote its own end. Then a code such as 137 was first that of a child."""
    start = next(events_of(record, Start), None)
    return start is not None and not start.command


def _is_near(used: Used | None) -> bool:
    return used is not None and used.near_since_seconds is not None


def _of_others(record: Record) -> Cause | None:
    """The cause of a run that failed by itself: another process was killed meanwhile."""
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
    """Who ended a run, or a child of it, by a signal; None if that is not known.

    Args:
        record: the record of a run that is over.
        used: memory and its limit at the last sample.
        signal: the signal that ended the run; "" if it is not known which one did.
        victim: the child that was killed and whose death ended the run. None, the default: the run
            itself was killed.
    """
    signal = signal if victim is None else victim.signal
    if signal == "SIGBUS":
        return _by_shm(record)
    if signal not in ("", "SIGKILL"):
        return None
    pid = record.pid if victim is None else victim.pid
    log = None
    if pid is not None and not start_of(record).command:
        # The record of memtools run -- command has the number of memtools, not of the command.
        log = _killed_by_log(pid, record.clock_ns, ROOT) if _same_boot(record) else None
    whom = "it" if victim is None else "a child process"
    groups = _groups_of(record)
    if _were_read_at_the_end(record):
        return _by_counters(groups, log, whom)
    if log is not None:
        return _by_log(groups, log, whom)
    return _by_last_sample(groups, used) if victim is None else None


#: what is known ──► `Cause.by`, and the sentence
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
        "({counted}), but the kernel's log names another process",
    ),
    "counted above": (
        "unclear",
        "a process below the control group {above} was killed for memory ({counted}), but none of "
        "{group}, in which it began",
    ),
    "not counted": (
        "nobody",
        "not by the out-of-memory killer: the control group {group} counted no kill",
    ),
    "others": (
        "unclear",
        "meanwhile the kernel killed a process of the control group {group} for memory: {counted}",
    ),
    "named for a group": (
        "group",
        "{whom} was killed by the out-of-memory killer of the control group {group}{limit}, "
        "according to the kernel's log",
    ),
    "named": ("machine", "{whom} was killed for memory, according to the kernel's log: {why}"),
    "not named": ("nobody", "the kernel's log reports no out-of-memory kill of {whom}"),
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
    "shm was full": ("shm", "/dev/shm was full: {in_use}"),
    "shm had room": ("unclear", "/dev/shm had room: {in_use}"),
}


def _said(known: str, *, group: str = "", limit_bytes: int | None = None, **more: str) -> Cause:
    by, sentence = _SENTENCES[known]
    limit = "" if limit_bytes is None else f" (limit {format_bytes(limit_bytes)})"
    text = sentence.format(group=shown(group), limit=limit, **more)
    return Cause(by, text, shown(group), limit_bytes)


_Groups = Sequence[tuple[Counters, Counters]]


def _by_counters(groups: _Groups, log: str | None, whom: str) -> Cause | None:
    """The cause by what was counted between the start and the end."""
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
    """The cause if the own group counted no kill. In version 2 the groups above count its kills,
    too: a kill that only they have counted was in another group, or this process was moved."""
    own = groups[0][0]
    for before, after in groups[1:]:
        if before.version == 2 and _rose(before, after):
            return _said(
                "counted above", group=own.group, limit_bytes=own.limit_bytes,
                above=shown(before.group), counted=_counted_of(before, after),
            )  # fmt: skip
    return _said("not counted", group=own.group, limit_bytes=own.limit_bytes)


def _by_log(groups: _Groups, log: str, whom: str) -> Cause:
    """The cause by the kernel's log alone."""
    if log == NOT_NAMED:
        return _said("not named", group=groups[0][1].group if groups else "", whom=whom)
    full = next((last for _, last in groups if last.limit_bytes is not None), None)
    if log != OF_A_GROUP:
        return _said("named", whom=whom, why="the machine's memory")
    if full is None:
        return _said("named", whom=whom, why="a control group's limit that is not visible here")
    return _said("named for a group", group=full.group, limit_bytes=full.limit_bytes, whom=whom)


def _by_last_sample(groups: _Groups, used: Used | None) -> Cause | None:
    """The likely cause by the last sample, if the counters were not read at the end."""
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
    """Whether the limit of this group was reached."""
    if before.version == 1:
        return before.limit_bytes is not None and (after.met or 0) > (before.met or 0)
    return (after.oom or 0) > (before.oom or 0)


def _by_shm(record: Record, certain: bool = False) -> Cause | None:
    """Whether /dev/shm was full. `certain`: an exception says that a file found no room there."""
    rooms = [event.data for event in record.events if isinstance(event.data, SharedRoom)]
    if len(rooms) < 2:  # It was read only at the start: the use at the end is not known.
        return None
    most = max(room.used_bytes for room in rooms)
    size = rooms[-1].size_bytes
    known = "shm was full" if certain or most >= FULL * size else "shm had room"
    in_use = f"{format_bytes(most)} of {format_bytes(size)} in use"
    return _said(known, limit_bytes=size, in_use=in_use)


def _groups_of(record: Record) -> list[tuple[Counters, Counters]]:
    """The counters of each group at the start and when they were read last, the own group first.
    Counters never fall, and those of the start may have been written again later."""
    found: dict[str, list[Counters]] = {}
    for counters in (e.data for e in record.events if isinstance(e.data, Counters)):
        if counters.own and counters.folder not in found:
            found = {}  # The process was moved to another group.
        found.setdefault(counters.folder, []).append(counters)
    return [(min(of, key=_counted), max(of, key=_counted)) for of in found.values()]


def _counted(counters: Counters) -> tuple[int, int, int]:
    return counters.oom_kill or 0, counters.oom or 0, counters.met or 0


def _were_read_at_the_end(record: Record) -> bool:
    """Whether the counters were read when the run was over. Those of the own group are written then
    whether or not they have changed, and after them the end."""
    own = [e.data for e in record.events if isinstance(e.data, Counters) and e.data.own]
    return len(own) > 1 and any(event.kind == "end" for event in record.events)


def _same_boot(record: Record) -> bool:
    of = next((e.data.boot for e in record.events if isinstance(e.data, Counters)), "")
    return bool(of) and of == boot_id(ROOT)


# --- children whose death an exception reports ----------------------------------------------------

#: what torch and Python say if a file does not fit into /dev/shm
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
    """The child whose death the text of an exception reports, in the words of torch,
    multiprocessing or subprocess; None for another text."""
    for form in _DEATHS:
        found = form.search(text)
        if found is None:
            continue
        parts = found.groupdict()
        pid = None if parts.get("pid") is None else int(parts["pid"])
        if parts.get("words") is not None:
            return Victim(_SIGNALS.get(parts["words"].strip().lower()), pid)
        if parts.get("code") is not None:
            code = int(parts["code"])
            number = -code if code < 0 else code - 128
            return Victim(signal_name(number), pid) if 0 < number <= 64 else None
        return Victim(parts.get("name", ""), pid)
    return None

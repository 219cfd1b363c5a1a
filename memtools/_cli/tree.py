"""`memtools run -- command`: watch a command and all processes that it starts, from outside.

    terminal ── Ctrl-C ──► both, as one job          memtools  ── posix_spawn ──►  command
    kill, scheduler ─────► memtools ── passes it on ─────────────────────────►       │
                              │  ◄── SIGCHLD, wait4: how it ended, and its peak ─────┤
                              └── every interval: /proc of all descendants ──► run.mem
                              ◄── orphans come here, and still count ─────────── grandchildren

There is one thread and no signal handler: signals are blocked, and awaited until a sample is due.
The command is in memtools' process group, so that the terminal, the shell's job control and
memtools agree which process is in the foreground. The kernel sends signals of the keyboard to both.
memtools leaves those to the command, and passes on only signals that another process sent.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from memtools import _core
from memtools._base.file import folder_now, seen_from
from memtools._base.limits import lowest_limit
from memtools._base.size import format_bytes
from memtools._base.text import shown
from memtools._cli.run import NOT_EXECUTABLE, NOT_FOUND
from memtools._monitor.host import high_water
from memtools._monitor.inprocess import announce, discard, log_name, opened
from memtools._monitor.log import open_record
from memtools._monitor.run import columns
from memtools._record.counters import (
    counters_to_write,
    membership_of,
    read_counters,
    room_of_shm,
)
from memtools._record.events import signal_name
from memtools._record.kinds import End, Event, GuardAct, Start, payload
from memtools._record.summary import print_summary

SIGNALLED = 128
PASSED_ON = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT", "TSTP", "ALRM")
)
WATCHED = {signal.SIGCHLD, *PASSED_ON}
FIELDS = _core.READ_ROOM | _core.READ_PRESSURE | _core.READ_CHILDREN
FROM_KERNEL = 128  # si_code of a key of the terminal; signals of processes have 0 or less
PAGE = resource.getpagesize()
PR_SET_CHILD_SUBREAPER = 36
COLUMNS = columns(devices=0)


@dataclass
class Ended:
    """How the command ended."""

    status: int  # as wait4 returns it
    peak_bytes: int | None  # of its largest process; None if it is below that of memtools

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    def end(self) -> End:
        if self.signal is None:
            return End(code=os.WEXITSTATUS(self.status))
        return End(signal=signal_name(self.signal))


class Process:
    """One process's own memory. The descriptor means it, and no later process of its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._statm = -1
        with contextlib.suppress(OSError):  # The process has ended already.
            self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Resident bytes, and how many of them are private; zeros if it has ended."""
        try:
            _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        except (OSError, ValueError):
            return 0, 0
        return int(resident) * PAGE, (int(resident) - int(shared)) * PAGE


class Tree:
    """Samples the command and its descendants into a record."""

    def __init__(self, writer: _core.RecordWriter, limit: int | None) -> None:
        self.writer = writer
        self._probe = _core.Probe()
        self._given = limit
        self._process: Process | None = None
        self.limit, self.source = self._lowest(self._probe.read(FIELDS))
        self.used = 0
        self._counters = read_counters(self._probe)
        self._groups = membership_of("self")  # in which the command is
        self._room = room_of_shm()

    def write_counters(self) -> None:
        """Write what the kernel has counted so far in the control groups, and what is in
        /dev/shm."""
        for event in [*self._counters, *([] if self._room is None else [self._room])]:
            write(self.writer, event)

    def _follow(self, process: Process) -> None:
        """If the command was moved to other control groups, as systemd-run does, write the counters
        of those. A process that has ended is in no group."""
        groups = membership_of(process.pid)
        if not groups or groups == self._groups or process.read() == (0, 0):
            return
        self._groups = groups
        self._counters = read_counters(self._probe, membership=groups)
        for counters in self._counters:
            write(self.writer, counters)

    def write_ended(self, ended: Ended) -> None:
        """Write what the kernel has counted since. If the command did not end well, write the
        highest use of /dev/shm that was seen: the files may be gone now."""
        now = read_counters(self._probe, membership=self._groups)
        for counters in counters_to_write(self._counters, now):
            write(self.writer, counters)
        if self._room is not None and ended.end() != End(code=0):
            write(self.writer, self._room)

    def _lowest(self, now: _core.Sample) -> tuple[int | None, str]:
        limit = lowest_limit(given=self._given, cgroup=now.cgroup_limit, machine=now.total)
        return limit or (None, "unknown")

    def begin(self, pid: int) -> None:
        self._process = Process(pid)

    def sample(self) -> None:
        """Write one row, whose rss and private are the tree's: the command's resident bytes, and
        the private bytes of all others, so that what they share counts once. children_private is
        left empty, because readers add it to rss."""
        now = self._probe.read(FIELDS)
        rss, private = self._process.read() if self._process else (0, 0)
        # The command is one of the children, and its private memory part of theirs.
        others = max(0, (now.children_private or 0) - private)
        count = None if now.children is None else max(0, now.children - 1)
        total = rss + others
        limit = now.cgroup_limit if now.cgroup_limit is not None and now.cgroup_limit >= 0 else None
        row = [None, total, private + others, None, now.cgroup_used, limit, now.available]
        self.writer.append(None, [*row, now.pressure, None, count, None, total, None, None])
        self.limit, self.source = self._lowest(now)
        self.used = self._used(now, total)
        if self._process is not None:
            self._follow(self._process)
        room = room_of_shm()
        if room is not None and (self._room is None or room.used_bytes > self._room.used_bytes):
            self._room = room

    def _used(self, now: _core.Sample, tree: int) -> int:
        """What counts against the limit: the tree's memory against a limit that was given, the
        control group's against the group's limit, and all that is not available against the
        machine's."""
        if self.source == "cgroup" and now.cgroup_used is not None:
            return now.cgroup_used
        if self.source == "machine" and now.total is not None and now.available is not None:
            return now.total - now.available
        return tree

    def share(self) -> float:
        return self.used / self.limit if self.limit else 0.0


def adopt_orphans() -> None:
    """Make daemons of the command children of this process, not of init, so that they stay in the
    tree. If the kernel refuses, such processes are not seen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(command: int) -> Ended | None:
    """Wait for each child that has ended. Return how the command ended, None while it runs."""
    ended = None
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == command:
            # The peak of a spawned process includes ours, because both share their memory for a
            # moment.
            peak = usage.ru_maxrss * 1024
            ended = Ended(status, peak if peak > (high_water() or 0) else None)


def pass_on(info: signal.struct_siginfo, command: int) -> None:
    """Send the command a signal that another process sent to memtools. The kernel sends those of
    the terminal itself. A stop stops memtools, too, until both are continued."""
    if info.si_code != FROM_KERNEL:
        os.kill(command, info.si_signo)
    if info.si_signo == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)


class Guard:
    """Send the command SIGTERM once, when its tree uses this fraction of the limit."""

    def __init__(self, fraction: float | None) -> None:
        self._fraction = fraction

    def look(self, tree: Tree, command: int) -> None:
        if self._fraction is None or tree.share() < self._fraction:
            return
        act = GuardAct("SIGTERM", self._fraction, tree.used, tree.limit or 0, tree.source)
        self._fraction = None
        write(tree.writer, act)
        print(f"memtools: {act.sentence()}", file=sys.stderr, flush=True)
        os.kill(command, signal.SIGTERM)


def write(writer: _core.RecordWriter, event: Event) -> None:
    writer.event(event.KIND, payload(event.KIND, event))


def watch(command: int, tree: Tree, guard: Guard, interval: float) -> Ended:
    """Sample the tree until the command has ended. Return how it ended."""
    due = time.monotonic()
    while True:
        info = signal.sigtimedwait(WATCHED, max(0.0, due - time.monotonic()))
        if info is not None and info.si_signo == signal.SIGCHLD:
            ended = reap(command)
            if ended is not None:
                return ended
        elif info is not None:
            pass_on(info, command)
        if time.monotonic() >= due:
            tree.sample()
            guard.look(tree, command)
            due = max(due + interval, time.monotonic() + interval / 10)


def start(words: Sequence[str], mask: set[signal.Signals | int]) -> int:
    """Start the command with the signal mask that memtools was started with. Return its process
    id."""
    ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(
        words[0], list(words), os.environ, setsigmask=mask, setsigdef=ignored_by_python
    )


def end_like(ended: Ended) -> int:
    """End by the signal that ended the command, so that a shell or a scheduler sees the same."""
    number = ended.signal
    if number is None:
        return os.WEXITSTATUS(ended.status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # One core is enough.
    sys.stderr.flush()
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return SIGNALLED + number  # The signal does not end process 1 of a container.


def run_command(words: Sequence[str], args: argparse.Namespace) -> int:
    found = shutil.which(words[0])
    if found is None:
        exists = os.path.exists(words[0]) and os.sep in words[0]
        reason = "cannot be executed" if exists else "is not found"
        print(f"memtools run: the command {shown(words[0])} {reason}", file=sys.stderr)
        return NOT_EXECUTABLE if exists else NOT_FOUND
    announced = discard if args.quiet else announce
    log = log_name(args.log, announced)
    with opened(lambda: open_record(log, COLUMNS, words, announced)) as writer:
        tree = Tree(writer, args.limit)
        ended = run_recorded(words, args, tree)
    if isinstance(ended, int):
        return ended
    if not args.quiet:
        print_summary(writer.path, seen_from(folder_now(), writer.path), as_json=args.json)
    return end_like(ended)


def run_recorded(words: Sequence[str], args: argparse.Namespace, tree: Tree) -> Ended | int:
    writer = tree.writer
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored by the caller, nothing could be waited for
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    adopt_orphans()
    limit = f"limit {format_bytes(tree.limit)} ({tree.source})" if tree.limit else "limit unknown"
    given, machine = (tree.limit if tree.source == of else None for of in ("given", "machine"))
    write(writer, Start("", words[0], (), args.interval_ms, limit, given, machine))
    begun = time.monotonic_ns()
    tree.write_counters()
    try:
        pid = start(words, mask)
    except OSError as error:
        write(writer, End("not started", error.strerror or ""))
        print(f"memtools run: {words[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    tree.begin(pid)
    ended = watch(pid, tree, Guard(args.guard), args.interval_ms / 1000)
    writer.phase("command", time.monotonic_ns() - begun, ended.peak_bytes)
    tree.write_ended(ended)
    write(writer, ended.end())
    return ended

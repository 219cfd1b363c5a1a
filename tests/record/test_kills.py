"""Who ended a run that was killed: by counters of control groups, the kernel's log and /dev/shm in
a made-up root. Never a wrong cause: what cannot be told is not said."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memtools
from memtools import _core
from memtools._record import counters, kills
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import Counters, End, SharedRoom, Start, payload
from memtools.report import render
from memtools.report._advice import advise
from tests.report import reportcases

GIB, MIB = 2**30, 2**20
NEAR, FAR = 1000 * MIB, 300 * MIB  # of the limit of 1 GiB


class Machine:
    """A made-up root with one boot and nested control groups, of version 1 or 2."""

    def __init__(self, path: Path, version: int = 2) -> None:
        self.path, self.version = path, version
        self.top = path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
        for folder in (self.top, path / "proc/self", path / "dev"):
            folder.mkdir(parents=True)
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        mount = str(self.top).removeprefix(str(path))
        (path / "proc/self/mountinfo").write_text(f"30 20 0:26 / {mount} rw - {kind}\n")
        self.boot("first")

    def boot(self, name: str) -> None:
        file = self.path / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}\n")

    def group(self, name: str, limit: int | None = None, **counters: int) -> None:
        folder = self.top / name.strip("/")
        folder.mkdir(exist_ok=True, parents=True)
        if self.version == 2:
            (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
            (folder / "memory.current").write_text("0\n")
            lines = {"low": 0, "high": 0, "max": 0, "oom": 0, "oom_kill": 0} | counters
            (folder / "memory.events").write_text("".join(f"{k} {v}\n" for k, v in lines.items()))
        else:
            most = 2**63 - 4096 if limit is None else limit
            (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
            (folder / "memory.usage_in_bytes").write_text("0\n")
            (folder / "memory.failcnt").write_text(f"{counters.get('max', 0)}\n")
            text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {counters.get('oom_kill', 0)}\n"
            (folder / "memory.oom_control").write_text(text)

    def enter(self, name: str) -> None:
        line = f"0::{name}\n" if self.version == 2 else f"4:memory:{name}\n"
        (self.path / "proc/self/cgroup").write_text(line)

    def counters(self) -> list[Counters]:
        root = str(self.path)
        return counters.read_counters(_core.Probe(root), root)

    def log(self, *lines: str, at_us: int = 0, init: bool = True) -> None:
        """The kernel's log, as /dev/kmsg has it, and whose numbers of processes are ours."""
        first = f"6,1,{at_us},-;Linux version 6.0\n SUBSYSTEM=cpu\n"
        text = first + "".join(f"3,{n},{t},-;{line}\n" for n, line in enumerate(lines)
                               for t in [line.partition("@")[2] or at_us + 10**6])  # fmt: skip
        (self.path / "dev/kmsg").write_text(text)
        link = self.path / "proc/self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("pid:[4026531836]" if init else "pid:[4026532999]")


@pytest.fixture(params=[2, 1])
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """The own group /job/task, below /job, whose limit is 1 GiB."""
    made = Machine(tmp_path / "root", request.param)
    monkeypatch.setattr(kills, "ROOT", str(made.path))
    made.group("/")
    made.group("/job", GIB)
    made.group("/job/task")
    made.enter("/job/task")
    return made


def killed(machine: Machine, **counters: int) -> None:
    """The kernel kills a process of the own group because /job is full."""
    count = {"oom_kill": 1} | counters
    above = {"max": 7, "oom": 1} | (count if machine.version == 2 else {})
    machine.group("/job/task", None, **count)
    machine.group("/job", GIB, **above)
    machine.group("/", None, **(above if machine.version == 2 else {}))


Events = list[tuple[str, Any]]


def figures(tmp_path: Path, events: list[Any], base: int = FAR, close: bool = False) -> Figures:
    path, told = str(tmp_path / "run.mem"), [(e.KIND, payload(e.KIND, e)) for e in events]
    reportcases.write(path, steps=400, base=base, limit=GIB, events=told, close=close)
    return figures_of(memtools.read_record(path))


def test_the_counters_of_all_groups_that_are_visible(machine: Machine) -> None:
    killed(machine, oom_group_kill=1)
    found = machine.counters()
    assert [(c.group, c.own, c.limit_bytes) for c in found] == [
        ("/job/task", True, None), ("/job", False, GIB), ("/", False, None)]  # fmt: skip
    first, second, _ = found
    assert (first.oom_kill, first.boot, first.version) == (1, "first", machine.version)
    assert second.met == 7
    if machine.version == 2:
        assert (second.oom, second.high, first.oom_group_kill) == (1, 0, 1)
        assert "limit 1.00 GiB): processes killed for memory: 1, limit met 7" in second.sentence()


def after(machine: Machine) -> list[Counters]:
    """The counters after the kernel has killed a process of the own group."""
    killed(machine)
    return machine.counters()


def counted_alone(machine: Machine) -> list[Counters]:
    """The kill is counted, and no group's limit was met."""
    machine.group("/job/task", None, oom_kill=1)
    return machine.counters()


def moved(machine: Machine) -> list[Any]:
    """To another group, which is full later."""
    start = machine.counters()
    machine.group("/scope", 2 * GIB)
    machine.enter("/scope")
    began = machine.counters()
    machine.group("/scope", 2 * GIB, oom_kill=1, oom=1, max=1)
    return [*start, *began, *machine.counters(), End(code=137)]


def worker(words: str) -> End:
    text = f"DataLoader worker (pid 5) is killed by signal: {words}."
    return End(exception="RuntimeError", text=text)


class Case(NamedTuple):
    """What a record holds of a run that was killed, and what is said of it: the end of the text
    about its end, who is the cause, and a piece of the advice."""

    events: Callable[[Machine], list[Any]]
    base: int
    text: str
    by: str | None
    advice: str = ""
    closed: bool = True


OF_JOB = "killed by the out-of-memory killer of the control group /job (limit 1.00 GiB): "
ROSE = "oom_kill rose from 0 to 1"
NOBODY = "not by the out-of-memory killer: the control group /job/task counted no kill"
MEANWHILE = (
    "; meanwhile the kernel killed a process of the control group /job/task for memory: "
    "oom_kill rose from 0 to 1"
)
GONE = "it was ended by SIGKILL or os._exit() (no end mark)"
SIGKILL, OWN = End(signal="SIGKILL"), Start(name="memtools run")
REFUSED_SHM = "unable to allocate shared memory(shm) for file </torch_9_9_7>: No space left on ..."


def in_shm(*used: int, end: End) -> Callable[[Machine], list[Any]]:
    return lambda _: [*(SharedRoom(64 * MIB, size * MIB) for size in used), end]


CASES = {
    # Watched from outside: the counters were read at the end.
    "at its limit": Case(
        lambda m: [*m.counters(), *after(m), SIGKILL], NEAR,
        f"it was killed by SIGKILL; it was {OF_JOB}{ROSE}", "group"),
    "far from its limit": Case(
        lambda m: [*m.counters(), *after(m), End(code=137)], FAR,
        f"it ended with exit code 137; it was {OF_JOB}{ROSE}", "group"),
    "by hand, at its limit": Case(
        lambda m: [*m.counters(), *m.counters()[:1], SIGKILL], NEAR,
        f"it was killed by SIGKILL; {NOBODY}", "nobody", "did not kill it for memory"),
    "by the machine's own killer": Case(
        lambda m: [*m.counters(), *counted_alone(m), SIGKILL], NEAR,
        "it was killed by SIGKILL; it was killed by the kernel's out-of-memory killer (oom_kill "
        "rose from 0 to 1 in the control group /job/task), for the machine's memory or a limit "
        "that is not visible here", "machine", "the memory of the whole machine"),
    "in another group": Case(
        moved, FAR, "it ended with exit code 137; it was killed by the out-of-memory killer of the "
        "control group /scope (limit 2.00 GiB): oom_kill rose from 0 to 1", "group"),
    "counters that fell": Case(
        lambda m: [*(replace(c, oom_kill=None) for c in after(m)), *m.counters(), SIGKILL], NEAR,
        "it was killed by SIGKILL", None),
    "a limit that was given": Case(
        lambda m: [Start(command="x", given_bytes=NEAR + 20 * MIB), *m.counters(), *m.counters(),
                   SIGKILL], NEAR, f"it was killed by SIGKILL; {NOBODY}", "unclear"),
    "terminated": Case(
        lambda m: [*m.counters(), *after(m), End(signal="SIGTERM")], NEAR,
        "it was killed by SIGTERM", None),
    "exit code 0": Case(
        lambda m: [*m.counters(), *after(m), End(code=0)], FAR, "finished (exit code 0)", None),
    # Nobody watched: by the last sample, and never where that is far from the limit.
    "nobody watched, at its limit": Case(
        lambda m: m.counters(), NEAR, "it was most likely killed by the out-of-memory killer of "
        "the control group /job (limit 1.00 GiB): 1000.0 MiB were in use at the last sample",
        "group",
        closed=False),
    "nobody watched, far from it": Case(
        lambda m: m.counters(), FAR, GONE, None, closed=False),
    "nobody watched, counted meanwhile": Case(
        lambda m: [*m.counters(), *after(m)], FAR, GONE, None, closed=False),
    "nobody watched, no counters": Case(lambda m: [], FAR, GONE, None, closed=False),
    # A run that ends by itself after another process was killed.
    "a child's exit code": Case(
        lambda m: [OWN, *m.counters(), *after(m), End(code=137)], FAR,
        f"it ended with exit code 137{MEANWHILE}", "unclear"),
    "exit code 1": Case(
        lambda m: [*m.counters(), *after(m), End(code=1)], FAR,
        f"it ended with exit code 1{MEANWHILE}", "unclear"),
    "a worker": Case(
        lambda m: [*m.counters(), *after(m), worker("Killed")], FAR,
        f"; a child process was {OF_JOB}{ROSE}", "group"),
    "a worker that nobody killed for memory": Case(
        lambda m: [*m.counters(), *m.counters()[:1], worker("Killed")], FAR,
        f"; {NOBODY}", "nobody"),
    "a worker that aborted": Case(
        lambda m: [*m.counters(), *after(m), worker("Aborted")], FAR,
        "is killed by signal: Aborted.", None),
    # /dev/shm
    "full /dev/shm": Case(
        in_shm(0, 63, end=worker("Bus error")), FAR,
        "; /dev/shm was full: 63.0 MiB of 64.0 MiB in use", "shm", "docker run --shm-size"),
    "room in /dev/shm": Case(
        in_shm(0, 1, end=worker("Bus error")), FAR,
        "; /dev/shm had room: 1.0 MiB of 64.0 MiB in use", "unclear"),
    "/dev/shm at the start alone": Case(
        in_shm(0, end=worker("Bus error")), FAR, "is killed by signal: Bus error.", None),
    "no room in /dev/shm": Case(
        in_shm(0, 40, end=End(exception="RuntimeError", text=REFUSED_SHM)), FAR,
        "; /dev/shm was full: 40.0 MiB of 64.0 MiB in use", "shm"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_ended_a_run(machine: Machine, tmp_path: Path, name: str) -> None:
    """And it is the same when the group is gone with the job."""
    case = CASES[name]
    told = figures(tmp_path, case.events(machine), case.base, close=case.closed)
    cause, advice = told.ending.cause, advise(told)
    assert told.ending.text.endswith(case.text)
    assert (cause and cause.by) == case.by
    assert case.advice in "\n".join(advice)
    if cause is not None and cause.by != "unclear":
        assert told.ending.by_memory(near=True) == (cause.by != "nobody")
        limits = {"shm": "/dev/shm of 64.0 MiB", "group": "the cgroup limit of ", "nobody": ""}
        assert (told.limit_acted or "").startswith(limits.get(cause.by, ""))
        assert (told.limit_acted is None) == (cause.by == "nobody")
        assert not any("dmesg" in line for line in advice)
    for group in ("job/task", "job"):
        (machine.top / group).rename(machine.top / group.replace("/", "-gone-"))
    machine.enter("/")
    again = figures_of(memtools.read_record(str(tmp_path / "run.mem")))
    assert (again.ending, again.headline(), advise(again)) == (
        told.ending, told.headline(), advice)  # fmt: skip


def test_a_run_that_was_killed_for_memory_is_called_killed(
    machine: Machine, tmp_path: Path
) -> None:
    told = figures(tmp_path, machine.counters(), NEAR)
    assert told.as_json()["ending"]["cause"]["by"] == "group"
    page = render(memtools.read_record(str(tmp_path / "run.mem")))
    assert ">Killed<" in page
    assert ">No end mark<" not in page


def test_a_kill_below_a_group_above_may_be_another_process(
    machine: Machine, tmp_path: Path
) -> None:
    start = machine.counters()
    above = replace(start[-1], oom_kill=1, oom=1)
    told = figures(tmp_path, [*start, start[0], above, SIGKILL], NEAR, close=True)
    assert told.ending.cause is not None
    assert told.ending.cause.by == ("unclear" if machine.version == 2 else "nobody")


@pytest.mark.parametrize("folder", ["/fifo", "/\0", "/\udc80", "relative", "", "/" * 5000])
def test_a_record_may_name_any_folder(machine: Machine, tmp_path: Path, folder: str) -> None:
    """Who reads it neither waits nor fails."""
    os.mkfifo(tmp_path / "memory.events")
    place = str(tmp_path) if folder == "/fifo" else folder
    hostile = Counters("\x1b[2J", place, 2, os.stat(tmp_path).st_ino, "first", own=True, oom_kill=0)
    assert "\x1b" not in figures(tmp_path, [hostile], NEAR).ending.text


def test_names_of_groups_are_made_harmless(machine: Machine, tmp_path: Path) -> None:
    own = machine.counters()[0]
    hostile = replace(own, group="\x1b[2J\x07", limit_bytes=GIB)
    told = figures(tmp_path, [hostile], NEAR)
    assert told.ending.cause is not None
    assert "\x1b" not in told.ending.text + told.ending.cause.group


def test_files_that_say_nothing_sensible(machine: Machine) -> None:
    for name in ("memory.events", "memory.oom_control", "memory.failcnt", "memory.max"):
        (machine.top / "job" / name).write_bytes(b"oom_kill -1\n\xff\xfe oom x\noom_kill\n")
    second = machine.counters()[1] if len(machine.counters()) == 3 else None
    assert second is None or (second.group, second.oom_kill, second.oom) == ("/", 0, 0)
    (machine.path / "proc/self/cgroup").write_text("not a group\n")
    assert machine.counters() == []


def test_another_process_by_its_membership(machine: Machine) -> None:
    root = str(machine.path)
    probe = _core.Probe(root)
    prefix = "0::" if machine.version == 2 else "4:memory:"
    machine.group("/scope", 2 * GIB)
    for text, groups in {
        f"{prefix}/scope\n": ["/scope", "/"],
        f"7:pids:/x\n{prefix}/job/task\n": ["/job/task", "/job", "/"],
        f"{prefix}/\n": ["/"],
        f"{prefix}/../other\n": [],
        f"{prefix}/gone\n": [],
        "nonsense": [],
        "": [],
    }.items():
        found = counters.read_counters(probe, root, membership=text)
        assert [c.group for c in found] == groups, text
        assert [c.own for c in found] == [i == 0 for i in range(len(found))]


CGROUP, ANY = "Memory cgroup out of memory: Killed process", "Out of memory: Killed process"


@pytest.mark.parametrize(
    ("lines", "init", "near", "text"),
    [
        ([f"{CGROUP} {{pid}} (python) total-vm:1kB"], True, FAR,
         "it was killed by the out-of-memory killer of the control group /job (limit 1.00 GiB), "
         "according to the kernel's log"),
        ([f"{ANY} {{pid}} (python) total-vm:1kB"], True, FAR,
         "it was killed for memory, according to the kernel's log: the machine's memory"),
        ([f"{CGROUP} 1 (python) total-vm:1kB"], True, NEAR,
         "; the kernel's log reports no out-of-memory kill of it"),
        ([f"{CGROUP} {{pid}} (x) total-vm:1kB"], False, NEAR,  # numbers of another namespace
         "1000.0 MiB were in use at the last sample"),
        ([], True, FAR, "; the kernel's log reports no out-of-memory kill of it"),
    ],
)  # fmt: skip
def test_the_kernels_log_decides_who_it_was(
    machine: Machine, tmp_path: Path, lines: list[str], init: bool, near: int, text: str
) -> None:
    clock_us = memtools.read_record(reportcases.write(str(tmp_path / "x.mem"), steps=1)).clock_ns
    machine.log(
        *(f"{line.format(pid=os.getpid())} @{10**12}" for line in lines),
        at_us=max(0, clock_us // 1000 - 10**8),
        init=init,
    )
    told = figures(tmp_path, machine.counters(), near)
    assert told.ending.text.endswith(text)
    assert told.ending.by_memory(near=near == NEAR) == ("no out-of-memory kill" not in text)


def test_a_log_that_does_not_go_back_so_far_says_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.log(at_us=10**15)
    told = figures(tmp_path, machine.counters(), NEAR)
    assert "most likely" in told.ending.text


@pytest.mark.parametrize(
    ("text", "victim"),
    [
        ("DataLoader worker (pid 5) is killed by signal: Killed. ", ("SIGKILL", 5)),
        ("DataLoader worker (pid 5) is killed by signal: Bus error. It is", ("SIGBUS", 5)),
        ("DataLoader worker (pid 5) is killed by signal: Segmentation fault. ", ("SIGSEGV", 5)),
        ("DataLoader worker (pid 5) is killed by signal: Strange. ", (None, 5)),
        ("DataLoader worker (pid(s) 5, 6) exited unexpectedly", ("", 5)),
        ("process 1 terminated with signal SIGKILL", ("SIGKILL", None)),
        ("Command '['x']' died with <Signals.SIGKILL: 9>.", ("SIGKILL", None)),
        ("Command 'x' returned non-zero exit status 137.", ("SIGKILL", None)),
        ("exitcode  : -9 (pid: 77)", ("SIGKILL", 77)),
        ("A process in the process pool was terminated abruptly while", ("", None)),
        ("Command 'x' returned non-zero exit status 1.", None),
        ("Command 'x' returned non-zero exit status 255.", None),
        ("no such file", None),
    ],
)
def test_children_by_what_exceptions_say(text: str, victim: tuple[str | None, int | None]) -> None:
    found = kills.victim_of(f"it ended by exception RuntimeError: {text}")
    assert (found and (found.signal, found.pid)) == victim


def test_the_room_for_shared_memory_of_this_machine(tmp_path: Path) -> None:
    found = counters.room_of_shm()
    assert found is not None
    assert 0 <= found.used_bytes <= found.size_bytes
    assert counters.room_of_shm(str(tmp_path)) is None


KERNEL_COUNTS = st.sampled_from(["7", "07", "", "-7", "9" * 30, "7x", "\xb2", "7 7"])
KERNEL_LINES = st.tuples(st.sampled_from(["oom_kill", "max", "oom", "x"]), KERNEL_COUNTS)
KERNEL_TEXTS = st.binary(max_size=60) | st.lists(KERNEL_LINES, max_size=5).map(
    lambda lines: "\n".join(" ".join(line) for line in lines).encode()
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.tuples(*[KERNEL_TEXTS] * 4), version=st.sampled_from([1, 2]))
def test_no_text_in_a_groups_files_raises_or_makes_a_count_below_zero(
    texts: tuple[bytes, ...], version: int, tmp_path: Path
) -> None:
    names = ("memory.events", "memory.oom_control", "memory.failcnt", "memory.max")
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_bytes(text)
    found = counters._counters_in(str(tmp_path), str(tmp_path.parent), version, "first")
    if found is not None:
        for value in (found.oom_kill, found.oom, found.oom_group_kill, found.met, found.high):
            assert value is None or value >= 0

"""What is said of runs whose truth is known: 21 real programs, and the ways in which a run ends.

Each case says which words must be there and which must not, in the last lines of `memtools run` and
in `memtools explain`. The programs are in tests/traces/runs.py; the ends are made up here, in the
form in which the monitor writes them.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import memtools
from memtools import _core
from memtools._leak.advice import advice_for
from memtools._leak.finding import RANK, LeakFinding
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import End, Event, GuardAct, GuardSet, Heap, Limit, Start
from memtools._record.summary import summary_lines
from memtools.report._explain import explain
from tests.report.reportcases import COLUMNS, FINISHED, MIB, SIGKILLED, abandon, event
from tests.traces import runs

GIB = 2**30
SILENCED = r"nothing grows|nothing leaks|[Ee]nded properly|it used|expect_growth"
#: once in the last lines of a run, once in explain
FORECAST = r"limit in |limit reached"

#: bytes a step that each program leaks (a second, where it makes no steps); None: no column sees it
LEAKS = {
    "l02_lightning_val_outputs": 32128,
    "l03_lru_cache_getitem": 153600,
    "l05_hook_each_forward": 49152,
    "l09_numpy_replay_list": 28224,
    "l10_actor_queue_backlog": 66048,
    "l11_sampler_thread_queue": 66560,
    "l14_shm_not_unlinked": None,
    "l15_profiler_no_schedule": None,
    "l17_hidden_not_detached": 217702,
    "l20_eval_concat_numpy": None,
    "l22_stale_optimizer_state": 129600,
    "l23_native_buffer": 36864,
    "l27_weights_each_epoch": 48006,
}
LEAK_FREE = (
    "f02_conv_varying_sizes",
    "f04_deque_replay",
    "f06_memmap_tokens",
    "f08_lru_bounded",
    "f09_folds_in_cycles",
    "f11_longer_answers",
    "f12_lightning_cleared",
    "f15_thread_per_request",
)


def said(path: str) -> tuple[Figures, str]:
    """The figures, and all that run and explain say of them."""
    figures = figures_of(memtools.read_record(path))
    lines = "\n".join(summary_lines(figures_of(memtools.read_record(path))))
    return figures, f"{lines}\n{explain(figures)}"


def test_every_program_has_its_truth() -> None:
    assert sorted([*LEAKS, *LEAK_FREE]) == sorted(runs.events())


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_said_with_its_rate(name: str, tmp_path: Path) -> None:
    rate = LEAKS[name]
    figures, words = said(runs.write(name, str(tmp_path / "run.mem")))
    assert not re.search(SILENCED, words), words
    if name == "l14_shm_not_unlinked":
        assert "neither the process nor its workers grow" in words
        return
    found = figures.verdict.findings
    assert found
    assert RANK[found[0].grade] >= RANK["suspect"]
    assert len(re.findall(FORECAST, words)) == 2  # one, in each once
    if rate is not None:
        assert found[0].rate_bytes == pytest.approx(rate, rel=0.2)
    if name == "l10_actor_queue_backlog":
        assert "within about 500 steps" in words
    assert_forecast(figures)


def assert_forecast(figures: Figures) -> None:
    """One for all, and not later than the growth of the worst itself allows."""
    room, found = figures.room_bytes, figures.verdict.findings
    assert room is not None
    left = found[0].steps_left if found[0].per == "step" else found[0].seconds_left
    assert left is not None
    assert left[0] <= room / found[0].rate_bytes
    assert left[1] <= 1.91 * room / found[0].rate_bytes
    assert {one.steps_left for one in found} == {found[0].steps_left}


@pytest.mark.parametrize("name", LEAK_FREE)
def test_what_does_not_leak_is_not_called_a_leak(name: str, tmp_path: Path) -> None:
    _, words = said(runs.write(name, str(tmp_path / "run.mem")))
    assert not re.search(r"\b(leak|likely)  (?!memory|resident)", words), words
    assert not re.search(r"\bleak  ", words), words
    assert not re.search(r"train\.loss|autograd graph", words), words  # of the current step
    assert not re.search(r"nothing leaks|[Ee]nded properly|it used|clear it", words), words
    if name == "f06_memmap_tokens":
        assert "fills  pages of mapped files  +" in words


# --- how runs end ---------------------------------------------------------------------------------


MACHINE = Start("memtools run", machine_bytes=24 * GIB)


@dataclass(frozen=True)
class Made:
    """A made-up run. `imports`: seconds before the first step; `rate`: bytes a step in the process
    after `from_step`, `workers`: in its workers; `used_by_others`: of a machine of 24 GiB; `end`:
    the end event; `each`: so many-th step is read."""

    steps: int = 95
    imports: float = 4.0
    rate: float = 0
    from_step: int = 0
    workers: float = 0
    base: int = 300 * MIB
    limit: int | None = None
    start: Start = MACHINE
    used_by_others: int = 2 * GIB
    end: End | None = FINISHED
    closed: bool = True
    events: tuple[Event | LeakFinding, ...] = ()
    count: bool = True
    step_ns: int = 10**7
    each: int = 1

    def write(self, path: str) -> str:
        rng = random.Random(1)
        with_close = _core.RecordWriter(path, COLUMNS, command=["python", "train.py"])
        origin = memtools.read_record(path).clock_ns
        with_close.event(*event(self.start), time_ns=origin)
        before = int(self.imports * 100)
        for i in (*range(before), *range(before, before + self.steps, self.each)):
            step = max(0, i - before)
            own = self.base if i >= before else self.base * i // before
            rss = int(own + max(0, step - self.from_step) * self.rate) + rng.randrange(64) * 4096
            children = int(20 * MIB + step * self.workers) if self.workers and step > 1 else 0
            total = rss + children
            group = None if self.limit is None else min(total, self.limit)
            heap = max(0, rss - 100 * MIB) if i % 10 == 0 else None
            row = [step if self.count else None, rss, rss - 50 * MIB if rss > 50 * MIB else 0, 0]
            row += [group, self.limit, 24 * GIB - self.used_by_others - total, 0, heap]
            row += [2 if children else 0, children if i % 20 == 0 else None]
            with_close.append(origin + i * self.step_ns, row)
        for one in (*self.events, *([self.end] if self.end is not None else [])):
            with_close.event(*event(one))
        if self.closed:
            with_close.close()
        else:
            abandon(with_close, path)
        return path


GIVEN = Start("memtools run", given_bytes=600 * MIB)
CGROUP = Start("memtools run")
OWN = Start()
TREE = Start(command="python", given_bytes=600 * MIB)
CANNOT = End(
    exception="RuntimeError",
    text="[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 4194304 bytes.",
)
PRIMITIVE = End(exception="RuntimeError", text="could not create a primitive")
CUDA = End(exception="OutOfMemoryError", text="CUDA out of memory. Tried to allocate 2.00 GiB.")
HELD = LeakFinding("suspect", "heap", "step", 3.9 * MIB, 16, 1, "list Net.kept", "list")
HOLDS = replace(HELD, advice=advice_for(HELD))
IDLE = Heap(400 * MIB)
RISE = 3.9 * MIB
LIMIT = 600 * MIB
STEPS_95 = r"suspect  resident memory  \+3\.9 MiB/step  over the last 9\d steps  limit "
HELD_95 = r"suspect  list Net\.kept  \+3\.9 MiB/step  limit "

#: a run, what must be said of it, and what must not
ENDS: dict[str, tuple[Made, list[str], list[str]]] = {
    "a control group's kill of a leak in 95 steps": (
        Made(rate=RISE, base=235 * MIB, limit=LIMIT, start=CGROUP, end=None, closed=False),
        [r"It was ended by SIGKILL or os._exit\(\)", STEPS_95, r"out-of-memory killer most likely"],
        [SILENCED, "peak .* is too high", "limit in about"],
    ),
    "the same where the limit was given": (
        Made(rate=RISE, base=235 * MIB, start=GIVEN, end=None, closed=False),
        [
            STEPS_95,
            "whatever enforces the given limit most likely ended it",
            r"\(given limit, 10\d %\)",
        ],
        [SILENCED, "too high", "was killed"],
    ),
    "with a holder": (
        Made(rate=RISE, base=235 * MIB, limit=LIMIT, start=CGROUP, end=None, closed=False,
             events=(HOLDS,)),
        [HELD_95, r"fix: clear it after use"],
        [SILENCED, "stop list"],
    ),
    "a peak that is too high": (
        Made(steps=3000, base=590 * MIB, limit=LIMIT, start=CGROUP, end=None, closed=False),
        ["the process does not grow; its peak is too high: use smaller micro-batches"],
        ["nothing leaks", "rose"],
    ),
    **{
        f"a leak of the last {late} of {steps} steps": (
            Made(steps=steps, rate=RISE / 2, from_step=steps - late, limit=LIMIT, start=CGROUP,
                 base=600 * MIB - int(late * RISE / 2), end=None, closed=False),
            [r"\w+  (resident memory|memory in use)  \+(2\.[0-2]|1\.[89]\d?) MiB/step"],
            ["does not grow", "too short", "too high", SILENCED],
        )
        for steps, late in ((1999, 119), (3000, 99), (660, 60))
    },
    "a jump in the last steps": (
        Made(steps=3000, rate=RISE * 4, from_step=2995, limit=LIMIT, start=CGROUP,
             base=540 * MIB, end=None, closed=False),
        [r"memory rose \d\d\.\d MiB in the last [3-5] steps and had not been so high before; its"],
        ["does not grow", "too short", SILENCED],
    ),
    "seldom read": (
        Made(steps=1500, each=19, rate=16 * 1024, limit=LIMIT, start=CGROUP, end=None,
             closed=False),
        [r"suspect  resident memory  \+1\d\.\d KiB/step  over the last 1,\d{3} steps"],
        ["too few", SILENCED],
    ),
    "one sample at the end of a program without steps": (
        Made(steps=3000, rate=300 * MIB, from_step=2998, count=False),
        ["the process does not grow"],
        ["rose", SILENCED],
    ),
    "an uneven rise beside workers that leak": (
        Made(steps=3000, rate=100 * 1024, workers=40 * 1024),
        [r"memory in use  \+\d\d\d\.\d KiB/step"],
        ["small part", SILENCED],
    ),
    "a peak in a run that is too short": (
        Made(steps=40, base=590 * MIB, limit=LIMIT, start=CGROUP, end=None, closed=False),
        ["too early to say: 3\\d of 256 steps",
         "too short to distinguish a leak from a peak that is too high"],
        [SILENCED],
    ),
    "SIGKILL with room": (
        Made(limit=LIMIT, start=CGROUP, end=None, closed=False),
        ["It was ended by SIGKILL or os._exit()", "does not explain the end"],
        [SILENCED, "was killed", "out-of-memory killer"],
    ),
    "SIGKILL from outside": (
        Made(count=False, base=595 * MIB, start=TREE, end=SIGKILLED),
        ["It was killed by SIGKILL", "the process tree 595", "killed at the given limit"],
        ["nothing leaks"],
    ),
    "SIGTERM": (
        Made(end=End(signal="SIGTERM")),
        ["It was killed by SIGTERM", "SIGTERM is a request to exit", "memory is not the reason"],
        [SILENCED, "out-of-memory killer", "dmesg"],
    ),
    "exit code 143": (
        Made(end=End(code=143)),
        ["with exit code 143", "143 means SIGTERM in a shell", "a request to exit"],
        [SILENCED, "dmesg"],
    ),
    "exit code 137 near the limit": (
        Made(base=590 * MIB, start=GIVEN, end=End(code=137)),
        ["137 means SIGKILL in a shell", "killed at the given limit"],
        [SILENCED],
    ),
    "exit code 137 with room": (
        Made(end=End(code=137)),
        ["137 means SIGKILL", "memory does not explain the end: 21.7 GiB were free"],
        [SILENCED],
    ),
    "SIGBUS": (
        Made(end=End(signal="SIGBUS")),
        ["It was killed by SIGBUS", "check whether /dev/shm"],
        [SILENCED, "dmesg"],
    ),
    "Ctrl-C": (
        Made(end=End(exception="KeyboardInterrupt")),
        [r"It was interrupted \(KeyboardInterrupt, Ctrl-C\)"],
        [SILENCED, "memory does not explain"],
    ),
    "os._exit": (
        Made(end=None, closed=False),
        [r"ended by SIGKILL or os\._exit\(\) \(no end mark\)"],
        [SILENCED, "was killed", "who killed", "the out-of-memory killer most likely"],
    ),
    "a clean end": (
        Made(steps=3000),
        [r"Finished \(exit code 0\)", "the process does not grow"],
        ["nothing leaks", "What to do next", "ended properly"],
    ),
    "a clean end of a run of 95 steps": (
        Made(),
        [r"Finished \(exit code 0\)", "too early to say: 9\\d of 256 steps"],
        [SILENCED],
    ),
    "exit code 1 with a text": (
        Made(end=End(code=1, text="bad learning rate")),
        ["It ended with exit code 1: bad learning rate"],
        [SILENCED, " means SIG"],
    ),
    "an exception": (
        Made(end=End(exception="ValueError", text="no such column")),
        ["It ended by exception ValueError: no such column"],
        [SILENCED, "out of memory"],
    ),
    "RLIMIT_AS": (
        Made(rate=RISE, end=CANNOT, events=(Limit("RLIMIT_AS", 5120000000), HOLDS)),
        ["It ran out of memory: exception RuntimeError", "RLIMIT_AS of 4.77 GiB was in force",
         "counts address space, used or not: raise it", HELD_95, "fix: clear it"],
        [SILENCED, "limit in about"],
    ),
    "RLIMIT_DATA and oneDNN": (
        Made(end=PRIMITIVE, events=(Limit("RLIMIT_DATA", GIB),)),
        ["It ran out of memory", "RLIMIT_DATA of 1.00 GiB", r"raise it \(ulimit -d\)"],
        [SILENCED, "malloc keeps"],
    ),
    "RLIMIT_DATA, oneDNN and much freed heap": (
        Made(end=PRIMITIVE, events=(Limit("RLIMIT_DATA", GIB), IDLE)),
        ["It ran out of memory", "RLIMIT_DATA of 1.00 GiB",
         r"malloc keeps 400\.0 MiB of freed memory, which counts against the limit",
         r"- malloc keeps .* call memtools\.allocator_settings\(\)\.set\(mmap_threshold='1 MiB'\)",
         "MALLOC_MMAP_THRESHOLD_=1048576"],
        [SILENCED],
    ),
    "MemoryError without a limit": (
        Made(end=End(exception="MemoryError")),
        ["It ran out of memory: exception MemoryError", "no limit of the process is recorded"],
        [SILENCED, "was in force"],
    ),
    "CUDA out of memory": (
        Made(end=CUDA),
        ["It ran out of memory: exception OutOfMemoryError", "the device ran out of memory"],
        [SILENCED, "no limit of the process"],
    ),
    "a budget": (
        Made(end=End(exception="BudgetError", text="budget 'kv': 2.0 GiB asked, 1.0 GiB free")),
        ["It ran out of memory: exception BudgetError", r"a memtools\.Budget was full"],
        [SILENCED, "ulimit"],
    ),
    "a guard that raised": (
        Made(rate=RISE, base=180 * MIB, start=GIVEN,
             end=End(exception="HostMemoryPressure", text="host"),
             events=(GuardSet(0.9), GuardAct("raise", 0.9, 569061376, 600 * MIB, "given"))),
        ["the guard acted before the limit did: it raised at 542.7 MiB of 600.0 MiB", STEPS_95],
        [SILENCED, "could not act", "ran out of memory"],
    ),
    "a guard that could not act": (
        Made(count=False, steps=600, rate=2 * MIB, start=GIVEN,
             events=(GuardSet(0.9),)),
        [r"the guard at 90% could not act although memory passed it", "call monitor.step()"],
        [SILENCED],
    ),
    "workers that grow for 1,000 steps": (
        Made(steps=1000, workers=0.66 * MIB),
        [r"suspect  the memory of child processes  \+67\d\.\d KiB/step  over the last 9\d\d st",
         "within about 500 steps", "its workers 66\\d"],
        [SILENCED],
    ),
    "a machine that others fill": (
        Made(used_by_others=14 * GIB),
        [r"the process 300\.\d MiB; the machine 14\.3 of 24\.0 GiB \(60 %\)"],
        [SILENCED, r"14\.3 GiB of"],
    ),
    "growth that is too little to matter": (
        Made(steps=6000, rate=300),
        ["grows by \\d+ B a step, too little to matter", "Finished"],
        ["growing  ", "nothing leaks", "What to do next"],
    ),
    "growth that is little a step and much a second": (
        Made(steps=6000, rate=900, step_ns=10**6),
        [r"leak  memory in use  \+(89\d|90\d) B/step  limit in ", r"that is \d h",
         "fix: find the holder by hand"],
        ["too little to matter", "nothing leaks"],
    ),
    "a leak of a monitor of the program's own": (
        Made(steps=1200, rate=65536, limit=LIMIT, start=OWN,
             events=(replace(HOLDS, grade="growing", rate_bytes=65536.0),)),
        ["growing  list Net", "fix: clear it"],
        ["nothing leaks", "nothing grows", "expect_growth"],
    ),
    "a start that was interrupted": (
        Made(end=End("start() was interrupted")),
        [r"The monitor's start\(\) was interrupted"],
        [SILENCED, "Finished"],
    ),
    "an end that nobody understands": (
        Made(end=End("the moon")),
        ["It ended: the moon"],
        [SILENCED, "Finished"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_run_is_told_with_what_is_known(case: str, tmp_path: Path) -> None:
    made, wanted, unwanted = ENDS[case]
    _, words = said(made.write(str(tmp_path / "run.mem")))
    for pattern in wanted:
        assert re.search(pattern, words), f"{pattern}\nis not in\n{words}"
    for pattern in unwanted:
        assert not re.search(pattern, words), f"{pattern}\nis in\n{words}"

"""Workers find out what grows in them, and say so to the process that asks."""

from __future__ import annotations

import compileall
import contextlib
import functools
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools
from memtools._base import sentences
from memtools._census.holders import Holder
from memtools._census.keepers import Keepers, Ways
from memtools._leak.advice import advice_for
from memtools._leak.finding import LeakFinding
from memtools._leak.judge import of_workers
from memtools._monitor import children, worker, workers
from memtools._monitor.worker import SLOT_BYTES, SLOTS, TRIES, Page
from memtools._monitor.workers import WorkerReports
from tests.kit.children import seen_meanwhile
from tests.kit.long import LONG
from tests.kit.ownprocess import ENV, PROJECT
from tests.monitor import workerruns
from tests.monitor.workerruns import BATCH, KEPT, SIZE, loop

MIB = 1 << 20
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.new()
    yield made
    made.close()


@pytest.fixture
def reports() -> Iterator[WorkerReports]:
    made = WorkerReports()
    yield made
    made.close()


# --- whole programs -------------------------------------------------------------------------------


@functools.cache
def run(kind: str, start: str, count: int, asks: str) -> dict[str, Any]:
    """What a program of workerruns prints. Each runs once, with memtools compiled, as it is where
    it is installed: what compiling leaves in a process is not what a census adds."""
    assert compileall.compile_dir(Path(memtools.__file__).parent, quiet=1)
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.monitor.workerruns",
         kind, start, str(count), asks],
        cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


HOLDERS = {"dict": "dict Frames.seen", "lru_cache": "lru_cache of load()"}
#: the line that puts it there, and its function
KEPT_AT = {
    "dict": ("        self.seen[index] = bytes(SIZE)", "__getitem__"),
    "lru_cache": ("@functools.cache", "load"),
}


def kept_at(kind: str) -> str:
    script, (line, function) = Path(workerruns.__file__), KEPT_AT[kind]
    number = script.read_text().splitlines().index(line) + 1
    return f"{script.relative_to(PROJECT)}:{number} in {function}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "start", "count"),
    [
        (kind, start, count)
        for kind in ("dict", "lru_cache")
        for start in ("fork", "spawn")
        for count in (2, 8)
        if LONG
        or (kind == "dict" and count == 2)
        or (kind, start, count) == ("lru_cache", "fork", 8)
    ],
)
def test_what_grows_in_the_workers_of_a_loader_is_named(kind, start, count):
    found = run(kind, start, count, "ask")["found"]
    assert {one["process"] for one in found} == {f"worker {i}" for i in range(count)}
    for one in found:
        assert (one["holder"], one["kind"]) == (HOLDERS[kind], kind)
        assert (one["grade"], one["signal"], one["per"]) == ("growing", "children", "step")
        assert one["rate_bytes"] == pytest.approx(BATCH * SIZE / count, rel=0.2)
        assert one["kept_at"] == kept_at(kind)  # by the parent, which has the same code


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_looks_add_some_2_mib_of_private_memory_to_a_worker_that_leaks(start):
    """1.6 to 2.1: which pages of a fork are copied depends on where its objects lie."""
    without, asked = (max(run("dict", start, 2, a)["private"]) for a in ("no", "ask"))
    assert asked - without <= 2.5 * MIB


#: each kind of worker once, and each way to start one
SOME = (("pool", "forkserver"), ("executor", "spawn"), ("pipe", "fork"), ("loop", "fork"),
        ("class", "spawn"))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (kind, start)
        for kind in ("pool", "executor", "pipe", "loop", "class")
        for start in ("fork", "spawn", "forkserver")
        if LONG or (kind, start) in SOME
    ],
)
def test_workers_that_are_no_loaders_are_named_by_their_process(kind, start):
    result = run(kind, start, 1, "ask")
    (one,) = result["found"]
    assert one["process"].startswith("worker ")
    assert one["process"].endswith("-1")
    assert one["holder"].startswith("list ")
    assert one["holder"].endswith("KEPT")
    assert one["rate_bytes"] == pytest.approx(SIZE, rel=0.2)
    assert result["first"] <= 28  # asked at step 10


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_nothing_is_done_where_nobody_asks(start):
    result = run("loop", start, 1, "no")
    assert (result["found"], result["reported"]) == ([], [])
    assert result["loaded"] is (start == "fork")  # a fork has it by its parent


# --- in a worker ----------------------------------------------------------------------------------


class Fast:
    """A census of one list, whatever the process is."""

    cut, reached_bytes, keepers = False, 0, Ways()

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.points: list[tuple[int, int]] = []

    def look(self, step: int) -> None:
        self.points.append((step, len(KEPT)))
        self.reached_bytes = SIZE * len(KEPT)

    def holders(self) -> tuple[Holder, ...]:
        (begin, before), (now, length) = self.points[0], self.points[-1]
        more, steps = length - before, now - begin
        return tuple(
            Holder("list KEPT", "list", length, None, more, SIZE * more, steps=steps,
                   only_gained=True)
            for _ in range(1 if steps else 0)
        )  # fmt: skip


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "new_census", Fast)


class Served:
    """A worker with two queues."""

    def __init__(self, target: Callable[..., None] = loop) -> None:
        self.given, self.done = FORK.Queue(), FORK.Queue()
        self.process = FORK.Process(target=target, args=(self.given, self.done), daemon=False)
        self.process.start()

    def ask(self, times: int = 1) -> list[Any]:
        answers = []
        for _ in range(times):
            self.given.put(0)
            answers.append(self.done.get(timeout=60))
        return answers

    def end(self) -> None:
        self.given.put(None)
        self.process.join(60)
        assert self.process.exitcode == 0


def test_a_rate_is_that_of_a_step_of_the_program(reports, fast):
    served = Served()
    reports.ask()
    for step in range(1, 40):
        served.ask(3)  # three batches make a step
        found = reports.findings(step)
    served.end()
    assert [str(one) for one in found] == [
        "growing: worker Process-1: list KEPT +39.6 KiB/step (3 new objects a step)".replace(
            "Process-1", served.process.name
        )
    ]
    assert reports.findings(40) == ()  # it has ended


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (2.004, "2 new arrays a step"),
        (0.501, "1 new array every 2 steps"),
        (0.25, "1 new array every 4 steps"),
        (1.5, "1.5 new arrays a step"),
        (0.98, "1 new array a step"),
        (151.3, "151 new arrays a step"),
    ],
)
def test_what_comes_is_said_by_the_step(each, text):
    assert sentences.of_new(each, "arrays", "step") == text


def test_a_program_without_steps_has_rates_per_second(reports, fast):
    served, begin = Served(), time.monotonic()
    reports.ask()
    for _ in range(20):
        served.ask()
        found = reports.findings(0)
    seconds = time.monotonic() - begin
    served.end()
    assert (found[0].per, found[0].since_step) == ("s", None)
    assert found[0].rate_bytes >= 10 * SIZE / seconds


def test_a_worker_that_dies_while_it_is_asked_is_heard_no_more(reports, fast):
    served, other = Served(), Served()
    reports.ask()
    for step in range(1, 12):
        served.ask()
        other.ask()
        found = reports.findings(step)
    assert len(found) == 2
    assert served.process.pid is not None
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.join(60)
    assert [one.process for one in reports.findings(12)] == [f"worker {other.process.name}"]
    other.end()


def broken(*args: object, **kwargs: object) -> object:
    raise MemoryError


@pytest.mark.parametrize("what", ["new_census", "who"])
def test_a_census_that_fails_leaves_the_worker_alone(reports, monkeypatch, what):
    monkeypatch.setattr(worker, "new_census", Fast)
    monkeypatch.setattr(worker, what, broken)
    served = Served()
    reports.ask()
    assert len(served.ask(10)) == 10
    assert list(reports._page.read()) == []
    served.end()


def fork_again(given: Any, done: Any) -> None:
    """A worker with a worker of its own, and one that multiprocessing knows nothing of."""
    inner = Served()
    while given.get() is not None:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(queue.Empty):
                given.get(timeout=0)
            os._exit(0)
        os.waitpid(pid, 0)
        done.put(inner.ask()[0])
    inner.end()


def test_a_worker_that_forks_again_is_two_workers(reports, fast):
    served = Served(fork_again)
    reports.ask()
    for step in range(1, 12):
        served.ask()
        found = reports.findings(step)
    assert len(list(reports._page.read())) == 2
    assert [one.holder for one in found] == ["list KEPT"]  # of the one that keeps something
    served.end()


def alone(done: Any) -> None:
    """A process whose connection nobody has given to it."""
    KEPT.append(b"")
    os.write(done, b"x")


def test_a_process_without_queues_is_not_asked(reports, fast):
    ours, theirs = os.pipe()
    process = FORK.Process(target=alone, args=(theirs,))
    reports.ask()
    process.start()
    assert os.read(ours, 1) == b"x"
    process.join(60)
    assert (process.exitcode, list(reports._page.read())) == (0, [])
    os.close(ours)
    os.close(theirs)


def train(done: Any) -> None:
    """A process that trains, with a connection that nobody has given to it."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], lr=0.1) for _ in range(2)]
    weight.grad = torch.ones(1)
    for _ in range(16):
        KEPT.append(b"")
        for optimizer in optimizers:
            optimizer.step()
    os.write(done, b"x")
    time.sleep(60)


def test_the_steps_of_a_process_that_trains_are_its_batches(reports, fast):
    ours, theirs = os.pipe()
    process = FORK.Process(target=train, args=(theirs,), daemon=True)
    reports.ask()
    process.start()
    assert os.read(ours, 1) == b"x"
    ((pid, passed, report),) = reports._page.read()
    assert (pid, passed) == (process.pid, 16)  # both optimizers are of one step
    assert report["holders"][0]["path"] == "list KEPT"
    process.kill()
    process.join(60)
    os.close(ours)
    os.close(theirs)


def test_a_queue_that_is_counted_does_what_it_did():
    counted = FORK.Queue()
    own = vars(counted).copy()
    worker._count_calls(counted, "get")
    worker._count_calls(counted, "get")  # once
    with pytest.raises(queue.Empty):
        counted.get(timeout=0)
    counted.put(7)
    assert counted.get(timeout=60) == 7
    assert set(vars(counted)) - set(own) == {"get"}
    counted.close()


def test_the_busiest_queue_counts(page):
    """A queue of orders that is read now and then is no clock."""
    one = worker.Worker(page)
    one.passed(1)
    for _ in range(5):
        one.passed(2)
        one.passed(3)
    page.ask(True)
    one._census = Fast()
    one.before(1)
    assert one._clock == 2
    assert page.owner(os.getpid() % SLOTS) == 0  # and it is not its turn
    one.before(2)
    assert [passed for _, passed, _ in page.read()] == [5]
    one.passed(2)
    one.passed(1)
    assert [passed for _, passed, _ in page.read()] == [6]


def test_while_a_worker_looks_its_parent_knows(page, reports, monkeypatch):
    seen = []

    class Seen(Fast):
        def look(self, step: int) -> None:
            seen.append(page.looking())

    one = worker.Worker(page)
    one._census = Seen()
    monkeypatch.setattr(reports, "_page", page)
    reports.ask()
    one.before(1)
    assert (seen, page.looking()) == ([True], False)
    assert [reports.have_looked() for _ in range(2)] == [True, False]  # since the call before
    slot = page.take(os.getpid())
    page.look(slot, True)
    assert [reports.have_looked() for _ in range(2)] == [True, True]
    later = time.monotonic() + worker.LONGEST + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not page.looking()  # it was killed, and nobody has waited for it
    assert not reports.looking()


def test_looks_grow_apart(page):
    one, looked = worker.Worker(page), []
    one._census = Fast()
    page.ask(True)
    for batch in range(200):
        before = one._looks
        one.before(1)
        if one._looks > before:
            looked.append(batch)
        one._rests_until = 0.0
        one.passed(1)
    assert looked[:6] == [0, 2, 4, 7, 11, 16]
    assert len(looked) < 25


def test_a_worker_whose_parent_asks_no_more_drops_its_census(page, monkeypatch):
    made = list[weakref.ref[Fast]]()

    def new_census() -> Fast:
        census = Fast()
        made.append(weakref.ref(census))
        return census

    monkeypatch.setattr(worker, "new_census", new_census)
    one = worker.Worker(page)
    lives = []
    for asks in (True, False, True):
        page.ask(asks)
        one.before(1)
        one.passed(1)
        lives.append([census() is not None for census in made])
    assert lives == [[True], [False], [False, True]]


# --- the page -------------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_written(page):
    slot = page.take(os.getpid())
    assert slot == page.take(os.getpid()) == os.getpid() % SLOTS
    page.write(slot, 7, b'{"a": 1}')
    assert list(page.read()) == [(os.getpid(), 7, {"a": 1})]
    page.count(slot, 9)
    assert list(page.read()) == [(os.getpid(), 9, {"a": 1})]


@pytest.mark.parametrize("at", [4, 8, worker._SLOT.size, worker._SLOT.size + 6])
def test_half_a_report_is_none(page, at):
    slot = page.take(os.getpid())
    page.write(slot, 7, b'{"a": 1}')
    place = SLOT_BYTES * (1 + slot) + at
    page._memory[place] ^= 0x15
    assert list(page.read()) == []


def test_a_number_is_seen_as_it_was_written(page):
    slot = page.take(os.getpid())
    page.weigh(slot, 1)

    def write_numbers():
        for number in range(300_000):
            page.weigh(slot, 1 + number % 2)

    seen = seen_meanwhile(write_numbers, lambda: page.in_use()[os.getpid()])
    assert seen <= {1, 2}


def test_the_slot_of_a_process_that_has_ended_is_free(page):
    process = FORK.Process(target=time.sleep, args=(0,))
    process.start()
    assert process.pid is not None
    slot = page.take(process.pid)
    assert page.owner(slot) == process.pid
    process.join(60)
    assert page.take(process.pid + SLOTS) == slot


def test_of_10_000_workers_those_beyond_the_slots_are_not_heard(page, monkeypatch):
    monkeypatch.setattr(worker, "_lives", lambda pid: True)
    taken = [page.take(pid) for pid in range(100_000, 110_000)]
    assert sum(slot is not None for slot in taken) == SLOTS
    text = json.dumps(report()).encode()
    for slot in range(SLOTS):
        pid = page.owner(slot)
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        page.write(slot, 9, text)
    begin = time.thread_time()
    assert len(list(page.read())) == SLOTS
    assert time.thread_time() - begin < 0.5
    assert page.take(1) is None
    assert TRIES < SLOTS


def test_the_page_takes_memory_for_those_who_report_alone(page):
    """Each page of a memory file that is looked at exists from then on, and is the job's."""

    def taken():
        return 512 * os.fstat(page.fd).st_blocks

    assert taken() == SLOT_BYTES
    page.write(page.take(os.getpid()), 7, b'{"a": 1}')
    assert len(list(page.read())) == 1
    assert not page.looking()
    assert taken() == 2 * SLOT_BYTES


def test_a_spawned_process_without_memtools_goes_on():
    function, (text,) = worker.Invitation(1, 1).__reduce__()
    assert function is exec
    code = f"import sys; sys.modules['memtools'] = None; print(exec({text!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("None\n", "", 0)


def settings() -> dict[str, Any]:
    return multiprocessing.current_process()._config  # type: ignore[attr-defined, no-any-return]


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_what_is_closed_leaves_nothing_behind():
    before = descriptors()
    one, other = WorkerReports(), WorkerReports()
    assert one._page is other._page
    one.ask()
    assert worker.ENTRY in settings()
    one.close()
    one.close()
    assert worker.ENTRY in settings()
    assert other.findings(1) == ()
    other.close()
    assert worker.ENTRY not in settings()
    assert worker._page == []
    assert descriptors() == before
    assert one.findings(1) == other.findings(1) == ()


def test_where_there_is_no_room_for_a_page_nobody_is_asked(monkeypatch):
    def refuse(*args: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert children.worker_reports() is None


# --- what the parent makes of it ------------------------------------------------------------------


def report(**changed: Any) -> dict[str, Any]:
    holder = {
        "path": "dict Frames.seen", "kind": "dict", "what": "bytes objects", "length": 9,
        "capacity": None, "containers": 1, "new_objects": 8, "new_bytes": 80_000, "batches": 8,
        "only_gained": True, "may_fill": False, "way": None,
    }  # fmt: skip
    told = {name: changed.pop(name) for name in tuple(changed) if name in holder}
    return {
        "name": "Process-3", "worker": 2, "workers": 4, "looks": 3, "batch": 9, "cut": False,
        "holders": [{**holder, **told}], **changed,
    }  # fmt: skip


def made(passed: int, steps: int, grade: str = "suspect", **changed: Any) -> list[LeakFinding]:
    known = workers._Known(1, 100, 50, 0)
    now = 100 + passed, 50 + steps, 10**9
    return workers._findings_of(report(**changed), known, *now, grade, Keepers())


@pytest.mark.parametrize(
    ("batches", "steps", "rate"),
    [
        (4, 16, 10_000 / 4),  # each worker of four has every fourth batch
        (6, 16, 10_000 / 4),  # and runs ahead of the program
        (2, 16, 10_000 / 4),
        (0, 8, 10_000 / 4),  # or waits
        (16, 16, 10_000),  # four batches make a step
        (18, 16, 10_000),
        (64, 128, 10_000 / 2),
        (100, 800, 10_000 / 8),  # a loader for validation, which rests most of the time
    ],
)
def test_the_rate_of_a_step(batches, steps, rate):
    (finding,) = made(batches, steps)
    assert finding.rate_bytes == pytest.approx(rate, rel=1e-6)
    assert (finding.process, finding.since_step) == ("worker 2", 50)


@pytest.mark.parametrize(("ahead", "then"), [(0, 0), (3, 3), (3, 0), (0, 3), (-2, 1)])
@pytest.mark.parametrize("a_turn", [1, 2])
@pytest.mark.parametrize("count", [2, 8])
def test_a_worker_that_runs_ahead_is_never_taken_for_one_with_twice_the_batches(
    ahead, then, a_turn, count
):
    """As far as two batches that are ready and one that is made take it, whenever one looks."""
    known, told, keepers = workers._Known(1, 100 + then, 50, 0), 0, Keepers()
    for turns in range(1, 40):
        passed = max(0, a_turn * turns + ahead - then)
        now = 100 + then + passed, 50 + turns * count
        for one in workers._findings_of(report(workers=count), known, *now, 0, "suspect", keepers):
            if a_turn == 1 or turns > 6:
                assert one.rate_bytes == pytest.approx(10_000 * a_turn / count, rel=0.2), turns
            told += 1
    assert told >= 33


def test_a_loader_that_rests_does_not_grow():
    assert made(0, 100) == []


@pytest.mark.parametrize(
    ("grade", "changed", "said"),
    [
        ("quiet", {}, "growing"),  # eight batches of one of four workers are 32 steps
        ("quiet", {"batches": 3}, "suspect"),
        ("quiet", {"only_gained": False}, "suspect"),
        ("suspect", {}, "growing"),
        ("growing", {}, "likely"),
        ("leak", {}, "leak"),
        ("suspect", {"only_gained": False}, "suspect"),
        ("leak", {"capacity": 100}, "fills"),
        ("growing", {"may_fill": True}, "growing"),
        ("leak", {"may_fill": True}, "leak"),
    ],
)
def test_a_container_that_only_ever_gained_raises_the_grade(grade, changed, said):
    (finding,) = made(4, 16, grade, **changed)
    assert finding.grade == said


@pytest.mark.parametrize(
    "changed",
    [{"looks": 2}, {"holders": []}, {"new_bytes": 100}, {"looks": None}, {"holders": None},
     {"holders": ["a"]}, {"new_bytes": "a"}, {"batches": None}, {"workers": "a"}],
)  # fmt: skip
def test_what_is_no_word_worth_or_no_report_is_not_said(changed):
    assert made(4, 16, **changed) == []


class Bounded:
    rows: list[int]

    def add(self, row: int) -> None:
        self.rows.append(row)
        if len(self.rows) > 500:
            self.rows.pop(0)

    def note(self, row: int) -> None:
        self.notes.append(row)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "fills"), [("rows", True), ("notes", False), ("gone", False)])
def test_the_parent_reads_whether_the_code_of_a_worker_sets_an_end(name, fills):
    """A list of a class that only the worker has is `gone`."""
    way = [False, [[name, 0, "class", __name__, "Gone" if name == "gone" else "Bounded"]]]
    given = report()["holders"][0] | {"path": f"list Bounded.{name}", "way": way}
    found = workers._by_code(given, Keepers())
    assert found["may_fill"] is fills
    assert (":" in found["kept_at"]) is (name != "gone")


GARBAGE = {"batches": 8, "used": 84_000, "bytes": 80_000, "objects": 8, "collects": 0,
           "grown": 0}  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), [
    ({}, ["growing"]),
    ({"objects": 7}, []),  # fewer than one a batch: C code has them
    ({"bytes": 20_000}, []),  # most of what grows is reached
    ({"batches": 0}, []),
    ({"bytes": 400}, []),
])  # fmt: skip
def test_garbage_that_nothing_collects_in_a_worker_is_said(changed, said):
    found = made(4, 16, holders=[], garbage={**GARBAGE, **changed})
    assert [one.grade for one in found] == said
    for one in found:
        assert str(one) == (
            "growing: worker 2: cycles that wait for the garbage collector +2.4 KiB/step "
            "(the garbage collector is off)"
        )
        (both,) = of_workers([one, replace(one, process="worker 3")])
        assert both.process == "2 workers"
        assert advice_for(both) == advice_for(one)
        assert "gc.disable()" in advice_for(both)


@pytest.mark.parametrize(("changed", "said"), [
    ({}, "suspect: worker 2: cycles that wait for the garbage collector +12.2 KiB/step "
         "(none were collected yet)"),
    ({"batches": 3, "bytes": 150_000}, None),  # in 12 steps
    ({"bytes": 80_000, "used": 80_000}, None),  # C code takes so little
    ({"grown": 400_000, "freed": 300_000},
     "fills: worker 2: cycles that wait for the garbage collector +12.2 KiB/step"),
    ({"grown": 400_000, "freed": 100_000}, None),  # most of it was no garbage
])  # fmt: skip
def test_garbage_that_is_collected_in_a_worker_is_no_leak(changed, said):
    given = {**GARBAGE, "collects": 1, "bytes": 400_000, "used": 420_000, **changed}
    found = made(4, 16, "growing", holders=[], garbage=given)
    assert [str(one) for one in found] == ([] if said is None else [said])


def test_a_worker_counts_what_nothing_collects(page, monkeypatch):
    one = worker.Worker(page)
    one._census = Fast()
    assert one._garbage_report() == {}
    runs, counts = iter([3, 3, 4, 4]), iter([100, 180, 3, 8])
    monkeypatch.setattr("gc.get_stats", lambda: [{"collections": next(runs)}])
    monkeypatch.setattr("gc.get_count", lambda: (next(counts), 0, 0))
    seen = []
    for passed, in_use, reached in ((2, 0, 0), (10, 9000, 1000), (12, 3000, 1200), (14, 3500, 0)):
        one._census.reached_bytes = reached
        is_collected = one._note_garbage(in_use, passed)
        report = one._garbage_report()
        names = ("batches", "used", "bytes", "objects", "grown")
        seen.append((is_collected, *(report[name] for name in names), report.get("freed")))
    assert seen == [
        (False, 0, 0, 0, 0, 0, None),
        (False, 8, 9000, 8000, 80, 0, None),
        (True, 8, 9000, 8000, 80, 8000, 6200),  # of before the collection, as nothing has come yet
        (False, 8, 9000, 8000, 80, 8000, 6200),
    ]


def test_a_worker_that_is_asked_no_more_keeps_no_old_report(page, monkeypatch):
    one = worker.Worker(page)
    monkeypatch.setattr(worker, "new_census", Fast)
    reports = []
    for asks in (True, False, True):
        page.ask(asks)
        one.before(1)
        reports.append([passed for _, passed, _ in page.read()])
        for _ in range(5):
            one.passed(1)
    assert reports == [[0], [], [10]]


@pytest.mark.parametrize(("begins", "rate"), [(0, 64), (5, 64), (8, 0)])
def test_a_process_grows_as_it_does_now_and_not_since_it_began(begins, rate):
    """It may have rested for some looks before."""
    found = children.ChildProcesses(lambda: [(7, next(sizes), "python")])
    sizes = iter([20 * MIB + 64 * 1024 * max(0, i - begins) * (begins < 8) for i in range(12)])
    for step in range(12):
        found.read(step)
    assert [round(each / 1024) for _, each in found.growing()] == [rate] * (rate > 0)


def test_a_text_that_is_no_report_is_not_said(page, reports):
    for text in (b"[]", b"1", b"null", b'{"looks": 9}', b"\xff\xff"):
        slot = reports._page.take(os.getpid())
        reports._page.write(slot, 1, text)
        reports.ask()
        assert reports.findings(1) == reports.findings(2) == ()


def test_what_several_workers_hold_is_one_finding_with_the_sum_of_their_rates():
    same = [made(4, 16, worker=number)[0] for number in range(20)]
    (one,) = of_workers(same)
    assert one.rate_bytes == pytest.approx(sum(each.rate_bytes for each in same))
    assert one.process == "20 workers"
    assert one.what == f"{same[0].what}, in each"
    assert one.key == same[0].key, "however many they are"
    assert advice_for(one).endswith("; each worker has its own copy")
    assert of_workers(same[:1]) == same[:1]
    others = [replace(same[1], holder="list Frames.others"), replace(same[2], per="s")]
    assert len(of_workers([same[0], *others])) == 3


@pytest.mark.parametrize(("looks", "named"), [(3, True), (4, True), (5, False), (None, False)])
def test_what_two_looks_of_a_worker_do_not_name_has_ended(reports, monkeypatch, looks, named):
    """One does not show it: what grows may be another entry by then."""
    answers = [report(), report(), report(holders=[], looks=looks)]
    monkeypatch.setattr(Page, "read", lambda page: iter([(7, 100 + step, answers.pop(0))]))
    reports.ask()
    for step in (0, 16, 32):
        found = reports.findings(step)
    assert [one.holder for one in found] == ["dict Frames.seen"] * named


def test_what_workers_have_in_use_goes_on_in_those_that_follow_them(page, reports, monkeypatch):
    """Two loaders may each have a worker 2."""
    reports.ask()
    pids = {7: 50, 8: 10}
    monkeypatch.setattr(Page, "in_use", lambda page: dict(pids))
    monkeypatch.setattr(Page, "read", lambda page: iter([(pid, 1, report()) for pid in pids]))
    seen = []
    for now in ({7: 50, 8: 10}, {7: 60, 8: 30}, {8: 31, 9: 500}, {9: 510}):
        pids = now
        seen.append(reports.in_use())
    assert seen == [{"worker 2": size} for size in (0, 30, 31, 41)]
    reports.rest()
    assert reports.in_use() == {}


def test_a_worker_writes_what_it_has_in_use_between_its_looks(page, monkeypatch):
    one, sizes = worker.Worker(page), iter([600, 700, 800])
    one._census = Fast()
    monkeypatch.setattr(worker, "bytes_in_use", lambda: next(sizes))
    page.ask(True)
    one.before(1)
    assert page.in_use() == {os.getpid(): 700}
    one._weighs_at = 0.0
    one.before(2)  # of another queue: not between two batches
    assert page.in_use() == {os.getpid(): 700}
    one._rests_until, one._due = time.monotonic() + 3600, 99
    one.passed(1)
    one.before(1)
    assert page.in_use() == {os.getpid(): 800}
    assert [passed for _, passed, _ in page.read()] == [1]
    page.write(page.take(os.getpid()), 3, b"{}")
    assert page.in_use() == {os.getpid(): 800}


def test_what_malloc_and_the_interpreter_have_handed_out_is_in_use():
    before = worker.bytes_in_use()
    kept = [bytes(8 << 20), [object() for _ in range(50_000)]]
    after = worker.bytes_in_use()
    assert 8.5 * MIB <= after - before <= 12 * MIB
    assert kept


def test_a_long_report_leaves_out_the_last_holders(page):
    class Long(Fast):
        def holders(self) -> tuple[Holder, ...]:
            return tuple(
                Holder("x" * 9999 + str(i), "list", 1, None, 1, 1, what="é" * 999) for i in range(9)
            )

    one = worker.Worker(page)
    one._census = Long()
    page.ask(True)
    one.before(1)
    ((_, _, text),) = page.read()
    assert 1 <= len(text["holders"]) < 9

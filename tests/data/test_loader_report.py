"""loader_report(): what a batch takes, without a trace in this process, and what is advised."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, get_worker_info

from memtools import _core
from memtools.data import LoaderSettings, bounded, loader_report
from memtools.data import _report as report_module
from memtools.data._measure import Measured
from memtools.data._report import _Wanted
from tests.data.loadercases import KIB, Failing, Killed, Rows, Stream, alive, drawn, loader_of, same

MIB = 1 << 20


class Counting(Rows):
    """Counts what was read of it, and draws from every generator of the process."""

    def __init__(self) -> None:
        super().__init__(24, 64 * KIB)
        self.read = 0

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.read += 1
        random.random()
        return super().__getitem__(i)


class Hanging(Rows):
    """Nothing comes of it."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        print("a row")
        time.sleep(600)
        return {}


class Unsaid(Rows):
    """Raises without a message, as `assert` does."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        raise AssertionError


class Exiting(Rows):
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        os._exit(3)


class Shard(Rows):
    """Knows its worker, as a data set does that divides itself or its cache."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        return {"row": torch.zeros(100 * info.num_workers + info.id)}


class Linked:
    """A batch of a class of its own, which refers to itself."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows, self.batch = torch.stack([row["row"] for row in rows]), self


def states() -> list[Any]:
    generator = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), str(generator)]


def test_it_measures_a_batch_and_leaves_this_process_as_it_is():
    data = Counting()
    loader = loader_of(data, batch_size=4, shuffle=True)
    before = states()
    report = loader_report(loader)
    assert (states(), data.read) == (before, 0)
    assert report.batch_bytes is not None
    assert 4 * 64 * KIB <= report.batch_bytes < 4 * 64 * KIB + 4 * KIB
    assert report.batch_seconds is not None
    assert report.batch_seconds > 0
    assert report.cost.in_flight == 4 * report.batch_bytes
    assert report.cost.shm is not None
    assert report.cost.shm >= 5 * 4 * 64 * KIB
    assert report.cost.workers is not None
    assert report.cost.pinned == 0
    assert same(drawn(loader), drawn(loader_of(Rows(24, 64 * KIB), batch_size=4, shuffle=True)))


def test_a_bounded_loader_and_a_stream_are_measured_as_well():
    report = loader_report(bounded(loader_of(Stream(), batch_size=4, num_workers=1)), batches=1)
    assert report.batch_bytes is not None
    assert 32 <= report.batch_bytes < 200
    assert report.settings == LoaderSettings(1, 2, False, 4)


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Failing(), "what a batch takes: KeyError: 'row 9 is broken'"),
        (Killed(), "what a batch takes: the process that drew it was killed by signal 9"),
        (Hanging(), "what a batch takes: it did not come within 0.2 s; pass a larger timeout"),
        (Unsaid(), "what a batch takes: AssertionError"),
        (Exiting(), "what a batch takes: the process that drew it ended with exit code 3"),
        (Rows(0), "what a batch takes: the loader has no batch"),
    ],
)
def test_what_it_does_not_know_it_says(dataset, why, capfd):
    loader = loader_of(dataset, batch_size=12, sampler=SequentialSampler(dataset))
    report = loader_report(loader, timeout=0.2 if "0.2 s" in why else 60)
    assert report.unknown[0] == why
    assert (report.batch_bytes, report.cost.in_flight, report.cost.total) == (None, None, None)
    assert f"not known: {why}" in str(report)
    assert str(report).splitlines()[0] == "loader: the size of a batch is not known"
    assert str(report).endswith("No advice: the size of a batch is not known.")
    assert report.advised == report.settings
    assert capfd.readouterr() == ("", "")


def test_an_error_that_cannot_be_told_does_not_return_into_the_program(monkeypatch):
    def refuse(*_: object) -> None:
        raise BaseExceptionGroup("no", [KeyboardInterrupt()])

    monkeypatch.setattr("memtools.data._measure.json.dumps", refuse)
    before = os.getpid()
    report = loader_report(loader_of())
    assert os.getpid() == before  # and not the child
    assert report.unknown[0].endswith("ended with exit code 1")


def test_an_exception_while_it_waits_ends_the_child(monkeypatch):
    def interrupt(fd: int, timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memtools.data._measure._read_line", interrupt)
    before = alive()
    with pytest.raises(KeyboardInterrupt):
        loader_report(loader_of(Hanging()))
    assert alive() == before


def test_a_fork_that_fails_is_told(monkeypatch):
    def no_memory() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", no_memory)
    files = os.listdir("/proc/self/fd")
    why = loader_report(loader_of()).unknown[0]
    assert why.endswith("no process can be forked to draw it (Cannot allocate memory)")
    assert os.listdir("/proc/self/fd") == files


def test_the_child_is_a_worker_to_its_data_set():
    def begin(worker: int) -> None:
        assert get_worker_info().dataset.length == 24

    report = loader_report(loader_of(Shard(), worker_init_fn=begin))
    assert report.batch_bytes is not None
    assert 800 <= report.batch_bytes < 1200


@pytest.mark.parametrize(
    ("collate", "size"),
    [
        (Linked, 4 * KIB),
        (lambda rows: None, 0),
        (lambda rows: torch.eye(8).to_sparse(), 8 * (16 + 4)),
        (lambda rows: [rows[0]["row"], rows[0]["row"][3:]], 4 * KIB),
    ],
)
def test_batches_of_any_kind_are_measured(collate, size):
    report = loader_report(loader_of(collate_fn=collate), timeout=1e9)
    assert report.cost.shm is not None
    assert 5 * size <= report.cost.shm <= 5 * (size + 1000)


def test_a_process_of_the_data_set_that_lives_on_holds_nothing_up(tmp_path):
    class Forking(Rows):
        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            if not (tmp_path / "pid").exists():
                if (pid := os.fork()) == 0:
                    time.sleep(600)
                    os._exit(0)
                (tmp_path / "pid").write_text(str(pid))
            return super().__getitem__(i)

    try:
        assert loader_report(loader_of(Forking()), timeout=60).batch_bytes is not None
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


def test_the_child_does_without_the_threads_of_the_parent():
    class Computing(Rows):
        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"sum": torch.ones(1 << 20).exp().sum()}

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).exp().sum()
        assert loader_report(loader_of(Computing()), timeout=30).batch_bytes is not None
    finally:
        torch.set_num_threads(before)


def test_the_limit_of_a_bounded_loader_counts():
    loader = loader_of(Rows(24, 64 * KIB), prefetch_factor=8)
    report = loader_report(bounded(loader, "200 KiB"))
    assert report.batch_bytes is not None
    assert report.cost.in_flight == 3 * report.batch_bytes
    assert report.cost.shm is not None
    assert 4 * 64 * KIB <= report.cost.shm < 5 * 64 * KIB
    assert loader_report(bounded(loader, 1)).cost.in_flight == report.batch_bytes
    assert loader_report(loader).cost.in_flight == 16 * report.batch_bytes


def test_more_workers_are_not_advised_for_a_stream(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(report_module, "measure", lambda *_: Measured(8, (8,), 1.0, 0))
    for workers in (0, 1, 2):
        report = loader_report(loader_of(Stream(), num_workers=workers), step_seconds=0.1)
        assert report.advised.num_workers == max(1, workers)
        assert report.unknown == (
            "whether more workers are possible: a stream must divide itself among them",
        )
    assert loader_report(loader_of(), step_seconds=0.1).advised.num_workers == 8


def test_spawned_workers_take_more_than_is_measured():
    report = loader_report(loader_of(multiprocessing_context="spawn"), step_seconds=1)
    assert [line[:45] for line in report.unknown] == [
        "what a spawned worker takes: add Python, torc"
    ]


FOUND = Measured(10 * MIB, (8 * MIB, 2 * MIB - 1), 0.2, 50 * MIB)
NOW = LoaderSettings(4, 2, True, 64)


def advise(
    now: LoaderSettings = NOW,
    *,
    shm: int | None = 1 << 40,
    room: int | None = 1 << 40,
    step: float | None = None,
    cores: int = 64,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[LoaderSettings, list[str]]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    return _Wanted(now, FOUND, True, shm, room).advise(step)


@pytest.mark.parametrize(
    ("limits", "advised", "reason"),
    [
        ({}, NOW, ""),
        ({"shm": None, "room": None}, NOW, ""),
        ({"shm": 100 * MIB}, LoaderSettings(4, 1, True, 64), "batches take up to 90.0 MiB of the"),
        ({"shm": 64 * MIB}, LoaderSettings(2, 1, True, 64), "64.0 MiB that are free in /dev/shm"),
        ({"shm": 9 * MIB}, LoaderSettings(0, None, True, 64), "/dev/shm"),
        ({"room": 500 * MIB}, LoaderSettings(1, 1, True, 64), "the loader takes up to 290.0 MiB"),
        ({"room": 10 * MIB}, LoaderSettings(0, None, True, 16), "the job may still take"),
        ({"cores": 2}, LoaderSettings(2, 2, True, 64), "4 workers share 2 cores"),
        ({"step": 0.1}, LoaderSettings(2, 2, True, 64), "one process takes 0.20 s for a batch"),
        ({"step": 0.01, "cores": 8}, LoaderSettings(8, 2, True, 64), "and the loop 10 ms"),
    ],
)
def test_what_fits_is_advised_and_why(limits, advised, reason, monkeypatch):
    found, reasons = advise(**limits, monkeypatch=monkeypatch)
    assert found == advised
    assert reason in " ".join(reasons)
    assert bool(reasons) == bool(reason)


def test_costs_are_those_of_batches_workers_and_pinned_blocks():
    cost = _Wanted(NOW, FOUND, True, None, None).cost(NOW)
    assert (cost.in_flight, cost.workers) == (80 * MIB, 200 * MIB)
    assert cost.shm == 9 * (10 * MIB - 1)
    assert cost.pinned == 9 * (8 + 2) * MIB  # torch rounds blocks up
    assert cost.total == 290 * MIB
    assert _Wanted(NOW, FOUND, False, None, None).cost(NOW).pinned == 0


def test_the_table_and_the_sentence(monkeypatch):
    monkeypatch.setattr(report_module, "shm_room", lambda: (64 * MIB, 64 * MIB))
    monkeypatch.setattr(report_module, "measure", lambda *_: FOUND)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    report = loader_report(
        loader_of(batch_size=6, num_workers=4, pin_memory=True), step_seconds=0.05
    )
    lines = str(report).splitlines()
    assert lines[0] == "loader: a batch takes 10.0 MiB, and one process 0.20 s"
    assert [line.split()[0] for line in lines[2:6]] == [
        *["num_workers", "prefetch_factor", "pin_memory", "batch_size"]
    ]
    assert lines[8].split() == [
        "in",
        "/dev/shm",
        "90.0",
        "MiB",
        "30.0",
        "MiB",
        "64.0",
        "MiB",
        "free",
    ]
    assert lines[-1] == (
        "Set num_workers=2, prefetch_factor=1, pin_memory=False: there is no device to pin memory "
        "for, and batches take up to 90.0 MiB of the 64.0 MiB that are free in /dev/shm."
    )
    assert json.loads(json.dumps(report.to_dict()))["advised"]["num_workers"] == 2
    assert (report.shm_free, report.unknown) == (64 * MIB, ())


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader_of(batch_size=4, shuffle=True, drop_last=True, prefetch_factor=3),
        lambda: loader_of(batch_sampler=BatchSampler(range(24), 5, drop_last=True)),
        lambda: loader_of(Stream(), batch_size=2),
        lambda: loader_of(batch_size=None, collate_fn=list),
    ],
)
def test_apply_makes_a_loader_with_the_advised_settings(make, monkeypatch):
    monkeypatch.setattr(report_module, "measure", lambda *_: Measured(8, (8,), 0.001, 0))
    report = loader_report(make(), step_seconds=1.0)
    assert report.advised.num_workers == 1
    made = report.apply()
    old = vars(report._loader)
    differ = {name for name, value in vars(made).items() if value != old.get(name)}
    assert differ <= {"num_workers", "batch_sampler", "_IterableDataset_len_called", "sampler"}
    assert made.num_workers == 1
    assert len(list(made)) == len(list(make())) or isinstance(made.dataset, Stream)


def test_a_smaller_batch_is_advised_where_one_alone_is_too_large(monkeypatch):
    total = _core.Probe("/", True).read().total
    assert total is not None
    monkeypatch.setattr(report_module, "measure", lambda *_: Measured(total, (8,), 0.001, 0))
    made = loader_report(loader_of(batch_size=64, timeout=5)).apply()
    assert (made.num_workers, made.prefetch_factor, made.timeout) == (0, None, 0)
    assert made.batch_size is not None
    assert made.batch_size <= 16
    report = loader_report(loader_of(batch_size=1))
    assert report.advised == report.settings
    assert report.advice.endswith("that the job may still take, and no smaller settings fit.")


def test_a_class_of_its_own_is_not_made_anew():
    class Own(DataLoader[Any]):
        pass

    report = loader_report(Own(Rows(), num_workers=1))
    with pytest.raises(
        TypeError, match="this one is a Own; set num_workers=1 and prefetch_factor=2"
    ):
        report.apply()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "takes a torch DataLoader, got int", {"loader": 3}),
        (TypeError, "batches must be an int, got str", {"batches": "2"}),
        (ValueError, "batches must be at least 1, got 0", {"batches": 0}),
        (ValueError, "step_seconds must be above 0 and finite, got 0", {"step_seconds": 0}),
        (TypeError, "timeout must be a number, got str", {"timeout": "1"}),
        (ValueError, "timeout must be above 0 and finite, got -1", {"timeout": -1}),
    ],
)
def test_bad_input_gets_one_sentence(error, message, arguments):
    with pytest.raises(error, match=message):
        loader_report(**{"loader": loader_of(), **arguments})

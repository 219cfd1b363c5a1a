"""bounded(): the same batches as the plain loader, and no more of them in flight than allowed."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader, dataloader

from memtools import Budget, MemoryMonitor
from memtools.data import BoundedLoader, bounded
from memtools.data import _loader as loader_module
from tests.data.loadercases import (
    KIB,
    Failing,
    Killed,
    Rows,
    Unreachable,
    alive,
    drawn,
    loader_of,
    same,
)

ROW = 4 * KIB


@pytest.mark.slow
def test_spawned_workers_and_arrival_order_give_all_batches():
    spawned = loader_of(Rows(6), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert same(drawn(bounded(spawned)), drawn(loader_of(Rows(6), batch_size=2, num_workers=1)))
    free = bounded(loader_of(batch_size=2, in_order=False), "20 KiB")
    assert sorted(int(row) for batch in free for row in batch["row"][:, 0]) == list(range(24))


def test_no_more_is_in_flight_than_the_limit_and_one_batch():
    loader = bounded(loader_of(batch_size=2, prefetch_factor=4), 5 * ROW)
    seen = []
    for _ in loader:
        seen.append((loader.in_flight, loader.batches_in_flight))
    assert loader.batch_bytes > 2 * ROW
    assert max(batches for _, batches in seen) == 2  # where the plain loader has eight
    assert max(held for held, _ in seen) <= loader.peak <= 5 * ROW
    assert (loader.in_flight, loader.batches_in_flight) == (0, 0)
    assert len(seen) == len(loader) == 12


def test_one_batch_is_in_flight_where_the_limit_is_smaller():
    loader = bounded(loader_of(batch_size=4), 1)
    counts = [loader.batches_in_flight for _ in loader]
    assert counts == [1, 1, 1, 1, 1, 0]


def test_a_known_size_fills_the_workers_at_once():
    asked = bounded(loader_of(), "1 MiB", batch_bytes=ROW)
    iterator = iter(asked)
    assert asked.batches_in_flight == 4
    del iterator
    alone = bounded(loader_of(), "1 MiB")
    iterator = iter(alone)
    assert alone.batches_in_flight == 1
    next(iterator)
    assert alone.batches_in_flight == 4


def test_the_limit_drains_and_refills():
    loader = bounded(loader_of(batch_size=2, prefetch_factor=4), "1 MiB")
    counts = []
    for number, _ in enumerate(loader):
        counts.append(loader.batches_in_flight)
        if number == 0:
            loader.limit = 20 * KIB
        if number == 6:
            loader.limit = "1 MiB"
    assert counts == [8, 7, 6, 5, 4, 3, 2, 4, 3, 2, 1, 0]
    loader.shrink()
    assert loader.allowed == loader.batch_bytes
    assert loader.limit == 2**20


def test_a_monitor_under_pressure_shrinks_it_while_it_lives():
    monitor = MemoryMonitor()
    loader = bounded(loader_of(num_workers=0), "1 MiB", monitor=monitor)
    (handle,) = monitor._watermarks.all
    assert handle.fraction == 0.85
    handle.action("pressure")
    assert loader.allowed == 1
    del loader
    assert monitor._watermarks.all == ()


def test_an_early_break_leaves_no_process_and_no_batch():
    loader, before = bounded(loader_of(batch_size=2)), alive()
    for _ in loader:
        assert len(alive()) == len(before) + 2
        break
    assert alive() == before
    assert loader.in_flight == 0
    persistent = bounded(loader_of(batch_size=2, persistent_workers=True))
    gc.disable()
    try:
        next(iter(persistent))
        assert len(alive()) == len(before) + 2
        assert len(list(persistent)) == 12
        del persistent
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_loops_over_one_loader_at_the_same_time_each_get_all_batches():
    for in_flight in ("1 B", "1 GiB"):
        loader = bounded(loader_of(batch_size=2), in_flight)
        first = iter(loader)
        next(first)
        assert len(list(loader)) == 12
        assert len(list(first)) == 11
        assert len(list(zip(loader, loader, strict=True))) == 12
        assert loader.in_flight == 0


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [(Failing(), KeyError, "row 9 is broken"), (Unreachable(), OSError, "the server is gone")],
)
def test_the_error_of_a_worker_comes_through(dataset, kind, message):
    loader, said = bounded(loader_of(dataset), "20 KiB"), ""
    try:
        list(loader)
    except kind as error:
        said, notes = str(error), getattr(error, "__notes__", [])
    assert message in said
    assert notes == []
    assert loader.in_flight == 0


@pytest.mark.slow
def test_a_loop_that_catches_the_error_of_a_worker_goes_on():
    loader, rows = bounded(loader_of(Failing()), "20 KiB"), []
    batches = iter(loader)
    for _ in range(9):
        rows.append(next(batches)["row"][0, 0])
    with pytest.raises(KeyError):
        next(batches)
    rows += [batch["row"][0, 0] for batch in batches]
    assert rows == [*range(9), *range(10, 24)]
    batches = iter(first_fails := bounded(loader_of(Failing(), sampler=[9, 1, 2]), "20 KiB"))
    with pytest.raises(KeyError):
        next(batches)
    assert first_fails.batch_bytes == 0  # an error is not a batch
    assert len(list(batches)) == 2


def test_a_killed_worker_gives_the_loaders_own_error_with_what_was_in_flight():
    # Batches of plain numbers: of tensors the worker's end may be noticed where one is taken over.
    loader = bounded(loader_of(Killed(), num_workers=1, collate_fn=len), "1 MiB")
    with pytest.raises(RuntimeError, match="^DataLoader worker") as caught:
        list(loader)
    (note,) = caught.value.__notes__
    assert note.startswith("memtools: 2 batches in flight, about ")
    assert "/dev/shm has" in note


def test_a_worker_that_is_gone_when_its_batch_is_taken_over_is_told_as_well(monkeypatch):
    def gone(self):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_get_data", gone)
    with pytest.raises(ConnectionResetError) as caught:
        list(bounded(loader_of(num_workers=1), "1 MiB"))
    (note,) = caught.value.__notes__
    assert note.startswith("memtools: 1 batch in flight, ")


def test_a_budget_counts_all_batches_but_one():
    budget = Budget("1 MiB", device="cpu")
    loader = bounded(loader_of(batch_size=2), budget)
    held = []
    for _ in loader:
        held.append(budget.used == max(0, loader.in_flight - loader.batch_bytes))
    assert all(held)
    assert len(held) == 12
    assert budget.used == 0
    assert budget.peak == 3 * loader.batch_bytes
    assert [line.name for line in budget.report()] == ["bounded loader"]
    for _ in loader:
        assert loader.batches_in_flight == 4
        assert budget.used > 0
        break
    assert budget.used == 0
    full = bounded(loader_of(batch_size=2), Budget(1))
    assert [full.batches_in_flight for _ in full] == [1] * 11 + [0]


def test_the_loader_stays_as_it_is_and_its_attributes_are_there():
    loader = loader_of(batch_size=2, persistent_workers=True)
    before = dict(vars(loader))
    bound = bounded(loader)
    list(bound)
    assert vars(loader) == before
    assert bound.dataset is loader.dataset
    assert bound.sampler is loader.sampler
    assert bound.loader is loader
    assert bound.batch_size == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = bound.nothing
    assert repr(bounded(loader, "1 GiB")) == "BoundedLoader(0 batches, 0 B of 1.00 GiB in flight)"


@pytest.mark.slow
def test_a_loader_whose_workers_run_already_gets_others():
    loader = loader_of(batch_size=2, persistent_workers=True)
    next(iter(loader))
    bound = bounded(loader, 1)
    assert [bound.batches_in_flight for _ in bound] == [1] * 11 + [0]


def test_a_copy_in_another_process_has_the_same_settings():
    loader = bounded(loader_of(batch_size=3, num_workers=0), "3 MiB", batch_bytes="1 MiB")
    loader.limit = "5 MiB"
    copied = pickle.loads(pickle.dumps(loader))
    assert type(copied) is BoundedLoader
    assert (copied.limit, copied.batch_bytes, len(copied)) == (5 * 2**20, 2**20, 8)
    with pytest.raises(TypeError, match="Budget"):
        pickle.dumps(bounded(loader_of(), Budget("1 MiB")))


def test_a_loader_of_accelerate_is_bounded_inside():
    shard = pytest.importorskip("accelerate.data_loader").DataLoaderShard
    loader = shard(Rows(), batch_size=2, num_workers=2)
    with pytest.raises(TypeError, match="loader.base_dataloader = bounded"):
        bounded(loader)
    loader.base_dataloader = bounded(loader.base_dataloader, 1)
    counts = [loader.base_dataloader.batches_in_flight for _ in loader]
    assert counts == [1] * 10 + [0, 0]  # it is one batch ahead


class OwnIterators(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "takes a torch DataLoader, got list", ([1],)),
        (TypeError, "OwnIterators makes its own", (OwnIterators(Rows()),)),
        (
            ValueError,
            'in_flight must be a number of bytes or like "2 GiB", got',
            (loader_of(), "much"),
        ),
        (ValueError, "in_flight must be at least 1 byte", (loader_of(), 0)),
        (ValueError, "a bounded loader lies on cpu", (loader_of(), Budget(9, device="cuda"))),
    ],
)
def test_bad_input_gets_one_sentence(error, message, arguments):
    with pytest.raises(error, match=message):
        bounded(*arguments)


def test_a_bad_limit_changes_nothing():
    loader = bounded(loader_of(), "1 MiB")
    with pytest.raises(ValueError, match="limit must be at least 1 byte"):
        loader.limit = 0
    with pytest.raises(ValueError, match="batch_bytes"):
        bounded(loader_of(), batch_bytes="x")
    with pytest.raises(TypeError, match="monitor must be a MemoryMonitor, got int"):
        bounded(loader_of(), monitor=7)
    assert loader.limit == 2**20


def test_another_torch_is_refused_with_its_version(monkeypatch):
    monkeypatch.setattr(loader_module, "_classes", [])
    monkeypatch.setattr(loader_module, "_USED", ("_reset", "_put_next"))
    with pytest.raises(RuntimeError, match="which has no _put_next"):
        bounded(loader_of())

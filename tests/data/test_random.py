"""bounded() beside torch's DataLoader, and BudgetSampler beside its definition: random data sets,
workers, settings, epochs that are left early, and errors."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from memtools.data import BudgetSampler, bounded
from tests.data.loadercases import Lazy, alive, same
from tests.kit.long import LONG

pytestmark = pytest.mark.slow


def row(i: int, size: int, draws: bool = True) -> dict[str, Any]:
    """What a worker makes of sample i; its random numbers are those of the worker."""
    info = get_worker_info()
    drawn = (torch.rand(2), torch.tensor(np.random.rand())) if draws else ()
    return {"i": torch.tensor(i), "x": torch.full((size,), i), "random": drawn,
            "worker": torch.tensor(-1 if info is None else info.id)}  # fmt: skip


@dataclass
class Rows(Dataset[Any]):
    sizes: list[int]
    broken: int | None

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.broken:
            raise KeyError(f"row {i} is broken")
        return row(i, self.sizes[i])


@dataclass
class Stream(IterableDataset[Any]):
    sizes: list[int]
    broken: int | None
    draws: bool

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, len(self.sizes), step):
            if i == self.broken:
                raise ValueError(f"row {i} is broken")
            yield row(i, self.sizes[i], self.draws)


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Case:
    kind: str
    sizes: list[int]
    broken: int | None
    batch_size: int | None
    drop_last: bool
    workers: int
    persistent: bool
    prefetch: int
    generator: bool
    leave: list[int | None]  # for each epoch, after how many batches
    in_flight: int
    batch_bytes: int | None

    def loader(self) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": self.workers, "collate_fn": as_it_is}
        if self.workers:
            options |= {"persistent_workers": self.persistent, "prefetch_factor": self.prefetch}
        if self.generator:
            options["generator"] = torch.Generator().manual_seed(5)
        if self.kind == "budget":
            sampler = BudgetSampler(self.sizes, max([1, *self.sizes]) * 2, shuffle=True)
            return DataLoader(Rows(self.sizes, self.broken), batch_sampler=sampler, **options)
        options["batch_size"] = self.batch_size
        options["drop_last"] = self.drop_last and self.batch_size is not None
        if self.kind == "stream":
            # Of a stream that was left, what torch makes ahead is not made: other numbers follow.
            draws = not self.persistent or self.workers == 0
            return DataLoader(Stream(self.sizes, self.broken, draws), **options)
        if self.kind == "lazy":
            options["sampler"] = Lazy(len(self.sizes))
        if self.kind == "shuffled":
            options["shuffle"] = len(self.sizes) > 0
        return DataLoader(Rows(self.sizes, self.broken), **options)

    def epochs(self, loader: Any) -> list[Any]:
        """All that a loop gets, and the random numbers that it draws meanwhile."""
        torch.manual_seed(3)
        np.random.seed(3)
        found: list[Any] = []
        for epoch, taken in enumerate(self.leave):
            if self.kind == "budget":
                loader.batch_sampler.set_epoch(epoch)
            try:
                for batch in itertools.islice(loader, taken):
                    found.append(batch)
            except (KeyError, ValueError) as error:
                found.append(f"{type(error).__name__}: {str(error).splitlines()[-1]}")
            found.append(torch.rand(1))
        return found


CASES = st.builds(
    Case,
    kind=st.sampled_from(["in order", "shuffled", "lazy", "budget", "stream"]),
    sizes=st.integers(0, 31).flatmap(
        lambda count: st.lists(st.sampled_from([0, 1, 10, 300]), min_size=count, max_size=count)
    ),
    broken=st.none() | st.none() | st.integers(0, 12),
    batch_size=st.sampled_from([None, 1, 2, 5]),
    drop_last=st.booleans(),
    workers=st.sampled_from([0, 1, 2, 2]),
    persistent=st.booleans(),
    prefetch=st.sampled_from([1, 2, 7]),
    generator=st.booleans(),
    leave=st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=3),
    in_flight=st.sampled_from([1, 2000, 2**30]),
    batch_bytes=st.sampled_from([None, None, 10, 2**20]),
)


@settings(max_examples=300 if LONG else 8, deadline=None)
@given(CASES)
def test_a_loop_gets_what_it_gets_of_the_plain_loader(case):
    plain = case.epochs(case.loader())
    gc.collect()  # after an error torch's persistent workers live until then
    before = alive()
    loader = bounded(case.loader(), case.in_flight, batch_bytes=case.batch_bytes)
    found = case.epochs(loader)
    assert [*map(type, found)] == [*map(type, plain)]
    assert all(map(equal, found, plain))
    if not case.persistent:
        assert (loader.in_flight, loader.batches_in_flight) == (0, 0)
    del loader
    assert alive() == before


def equal(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, str) else same(one, other)


# --- BudgetSampler ---


def used(lengths: list[int], batch: list[int], padded: bool) -> int:
    mine = [lengths[i] for i in batch]
    return max(mine) * len(mine) if padded else sum(mine)


def cut(lengths: list[int], budget: int, most: int | None, padded: bool) -> list[list[int]]:
    """The batches by definition: the next sample that does not fit begins a new one."""
    batches: list[list[int]] = []
    for i in range(len(lengths)):
        batch = [*batches[-1], i] if batches else [i]
        if (
            batches
            and used(lengths, batch, padded) <= budget
            and len(batch) <= (most or len(batch))
        ):
            batches[-1] = batch
        else:
            batches.append([i])
    return batches


@settings(max_examples=5000 if LONG else 200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=60),
    room=st.integers(1, 60),
    most=st.none() | st.integers(1, 5),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    replicas=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**63 - 1),
    done=st.integers(0, 60),
)
def test_a_budget_sampler_gives_batches_of_its_definition(
    lengths, room, most, flags, replicas, seed, epoch, done
):
    padded, shuffle, drop_last = flags
    budget = max([room, *lengths])

    def make(rank: int, count: int = replicas, **changed: Any) -> BudgetSampler:
        options = {"max_count": most, "padded": padded, "shuffle": shuffle, "seed": seed,
                   "drop_last": drop_last, "num_replicas": count, "rank": rank}  # fmt: skip
        sampler = BudgetSampler(lengths, budget, **(options | changed))
        sampler.set_epoch(epoch)
        return sampler

    samplers = [make(rank) for rank in range(replicas)]
    shares = [list(sampler) for sampler in samplers]
    assert {*map(len, shares)} == {*map(len, samplers)} == {len(samplers[0])}
    batches = [batch for row in zip(*shares, strict=True) for batch in row]
    for batch in batches:
        assert 0 < len(batch) <= (most or len(batch))
        assert used(lengths, batch, padded) <= budget
    given_out = sorted(i for batch in batches for i in batch)
    assert given_out == sorted({*given_out} & {*range(len(lengths))})
    if not drop_last:
        assert len(lengths) - len(given_out) < replicas
    whole = list(make(0, 1, drop_last=False))
    if not shuffle:
        assert whole == cut(lengths, budget, most, padded)
    if drop_last and not (shuffle and padded):  # which brings the batches into another order
        kept = list(make(0, 1))
        assert kept == whole[: len(kept)]
        assert len(whole) - len(kept) <= 1
        assert batches == kept[: len(kept) - len(kept) % replicas]
    for rank, share in enumerate(shares):
        at = min(done, len(share))
        again = make(rank)
        again.load_state_dict(samplers[rank].state_dict(at))
        assert list(again) == share[at:]
        assert list(again) == share

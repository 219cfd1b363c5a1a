"""Leases against the torch.cat model, by whatever hypothesis thinks of."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memtools import BudgetError, KVLease
from tests.kv.model import BLOCK, LAYERS, MAX_TOKENS, Plain, same, small_pool, some

LIMIT = 60 * BLOCK


class Owners:
    """Keeps views that leases gave, and writes over all in them that is nobody's any more."""

    def __init__(self) -> None:
        self.views: list[tuple[KVLease, torch.Tensor]] = []
        self.scribbled: set[KVLease] = set()

    def look(self, lease: KVLease) -> None:
        for layer in range(LAYERS):
            self.views += [(lease, view) for view in lease.layer(layer)]

    def look_at_each(self, leases: Iterable[KVLease]) -> None:
        """Keeps views of those that show more tokens than any view of them before."""
        longest = dict[KVLease, int]()
        for lease, view in self.views:
            longest[lease] = max(longest.get(lease, 0), view.shape[2])
        for lease in leases:
            if max(lease.lengths, default=0) > longest.get(lease, 0):
                self.look(lease)

    def scribble(self) -> None:
        """Behind the last block of each row: in that block it would stay in sight."""
        for lease, view in self.views:
            step = lease.pool.block_tokens
            for row in range(view.shape[0]):
                held = lease.lengths[row] if row < lease.batch_size else 0
                view[row, :, -(-held // step) * step :] = 1e9
            self.scribbled.add(lease)

    def forget(self, lease: KVLease) -> None:
        self.views = [(of, view) for of, view in self.views if of is not lease]
        self.scribbled.discard(lease)

    def same(self, lease: KVLease, model: Plain) -> bool:
        """Whether tokens are the model's; and behind them zeros, if nobody wrote there."""
        if lease not in self.scribbled:
            return same(lease, model)
        return lease.lengths == model.lengths and all(
            torch.equal(view[number, :, : pair[which].shape[1]], pair[which])
            for layer in range(LAYERS)
            for which, view in enumerate(lease.layer(layer))
            for number, pair in enumerate(row[layer] for row in model.rows)
        )


class Machine(RuleBasedStateMachine):
    """Up to six leases of one pool, each beside its model; views that outlived theirs, and views
    that show less now than they did."""

    @initialize(
        layout=st.sampled_from([("head", 1), ("token", 1), ("token", 2)]),
        limit=st.sampled_from([None, LIMIT]),
        writes=st.booleans(),
    )
    def start(self, layout: tuple[str, int], limit: int | None, writes: bool) -> None:
        torch.manual_seed(0)
        self.pool = small_pool(layout=layout[0], layer_group=layout[1], limit=limit)
        self.limit = limit
        self.writes = writes  # into every view there has been, after every step
        self.pairs: list[tuple[KVLease, Plain]] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.owners = Owners()

    def pick(self, n: int):  # type: ignore[no-untyped-def]
        return self.pairs[n % len(self.pairs)]

    def leases(self) -> bool:
        return bool(self.pairs)

    @precondition(lambda self: len(self.pairs) < 6)
    @rule(
        rows=st.sampled_from([1, 2, 4]),
        hint=st.sampled_from([0, 0, 20, 100]),
        tokens=st.sampled_from([30, 48, 5, 0]),
    )
    def acquire(self, rows: int, hint: int, tokens: int) -> None:
        """With its first tokens: a pool of empty rows has little to go wrong."""
        try:
            self.pairs.append((self.pool.acquire(rows, hint), Plain(rows)))
        except BudgetError:
            assert self.limit is not None
        else:
            self.append(*self.pairs[-1], tokens, None, range(LAYERS))

    @precondition(leases)
    @rule(n=st.integers(0), tokens=st.sampled_from([1, 7, 16, 40]))
    def update(self, n: int, tokens: int) -> None:
        self.append(*self.pick(n), tokens, None, range(LAYERS))

    @precondition(leases)
    @rule(n=st.integers(0), tokens=st.integers(0, 40), data=st.data())
    def update_some(self, n: int, tokens: int, data: st.DataObject) -> None:
        lease, model = self.pick(n)
        rows = lease.batch_size
        counts = data.draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows))
        layers = data.draw(st.sampled_from([range(LAYERS), [0], [1]]))
        self.append(lease, model, tokens, counts, layers)

    def append(
        self,
        lease: KVLease,
        model: Plain,
        tokens: int,
        counts: list[int] | None,
        layers: Iterable[int],
    ) -> None:
        for layer in layers:
            k, v = some(lease.batch_size, tokens), some(lease.batch_size, tokens)
            try:
                lease.update(layer, k, v, counts)
            except IndexError:
                lengths = [row[layer][0].shape[1] for row in model.rows]
                added = counts or [tokens] * lease.batch_size
                assert max(a + b for a, b in zip(lengths, added, strict=True)) > MAX_TOKENS
            except BudgetError:
                assert self.limit is not None
            else:
                model.update(layer, k, v, counts)

    @precondition(lambda self: self.pairs and len(self.pairs) < 6)
    @rule(n=st.integers(0), times=st.integers(1, 4), tokens=st.sampled_from([None, 50]))
    def fork(self, n: int, times: int, tokens: int | None) -> None:
        lease, model = self.pick(n)
        if lease.batch_size * times > 8:
            return
        try:
            self.pairs.append((lease.fork(times, tokens), model.fork(times)))
        except BudgetError:
            assert self.limit is not None

    @precondition(leases)
    @rule(n=st.integers(0), data=st.data())
    def reorder(self, n: int, data: st.DataObject) -> None:
        lease, model = self.pick(n)
        rows = lease.batch_size
        index = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        try:
            lease.reorder(index)
        except BudgetError:
            assert self.limit is not None
        else:
            model.select(index)

    @precondition(leases)
    @rule(n=st.integers(0), data=st.data())
    def select(self, n: int, data: st.DataObject) -> None:
        lease, model = self.pick(n)
        rows = lease.batch_size
        index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
        try:
            lease.select(index)
        except BudgetError:
            assert self.limit is not None
        else:
            model.select(index)

    @precondition(leases)
    @rule(n=st.integers(0), row=st.integers(0), layer=st.integers(0, 1), token=st.integers(0))
    def write(self, n: int, row: int, layer: int, token: int) -> None:
        """Over a token that a row holds."""
        lease, model = self.pick(n)
        row %= lease.batch_size
        held = model.rows[row][layer][0].shape[1]
        if held == 0:
            return
        try:
            lease.reserve(0, private=True)
        except BudgetError:
            assert self.limit is not None
        else:
            for view in lease.layer(layer):
                view[row, :, token % held] = float(token)
            model.write(row, layer, token % held, float(token))

    @precondition(leases)
    @rule(n=st.integers(0), to=st.integers(-30, 100))
    def crop(self, n: int, to: int) -> None:
        lease, model = self.pick(n)
        lease.crop(to)
        model.crop(to)

    @precondition(leases)
    @rule(n=st.integers(0), keep=st.booleans())
    def release(self, n: int, keep: bool) -> None:
        lease, model = self.pick(n)
        self.pairs.remove((lease, model))
        if keep:
            view = lease.layer(0)[0]
            scribbled = lease in self.owners.scribbled
            self.kept.append((view, view.clone() if scribbled else model.layer(0)[0]))
        self.owners.forget(lease)
        lease.release()

    @precondition(lambda self: self.kept)
    @rule()
    def drop_views(self) -> None:
        self.kept.pop(0)

    @rule(down_to=st.sampled_from([0, 10 * BLOCK]))
    def trim(self, down_to: int) -> None:
        self.pool.trim(down_to)

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        if self.writes:
            self.owners.scribble()
        try:
            assert all(self.owners.same(lease, model) for lease, model in self.pairs)
            if self.writes:
                self.owners.look_at_each(lease for lease, _ in self.pairs)
        except BudgetError:  # to show rows of other lengths than their forks takes copies
            assert self.limit is not None
        assert all(torch.equal(view, wanted) for view, wanted in self.kept)
        stats = self.pool.stats()
        assert stats.leases == len(self.pairs) + len(self.kept)
        assert self.limit is None or stats.reserved_bytes <= self.limit
        assert stats.physical_bytes <= stats.live_bytes + stats.idle_bytes
        assert self.pool._check()

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.kept.clear()
        self.owners = Owners()
        for lease, _ in self.pairs:
            lease.release()
        assert self.pool.stats().live_bytes == 0
        self.pool.close()


Machine.TestCase.settings = settings(
    deadline=None,
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAgainstTorchCat = Machine.TestCase

"""However a lease ends, its pages come back then, and once; and views never lose theirs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from memtools import KVLease, KVPool
from tests.kit.children import in_child
from tests.kv.model import BLOCK, Plain, fill, same, small_pool, some, step

pytestmark = pytest.mark.usefixtures("either_way")

# A program of its own connects to torch by itself, by the shim: twice would be the same.
in_a_program = pytest.mark.parametrize("either_way", ["shim"], indirect=True)


def live(pool: KVPool) -> tuple[int, int, int]:
    stats = pool.stats()
    assert pool._check()
    return stats.leases, stats.live_bytes, stats.lingering


def update_and_fail(lease: KVLease) -> None:
    fill(lease, 20)
    lease.update(0, some(lease.batch_size, 999), some(lease.batch_size, 999))


def generation(lease: KVLease) -> Iterator[int]:
    with lease:
        while True:
            fill(lease, 1)
            yield lease.num_tokens


def test_leaving_the_block_by_its_end():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            fill(lease, 20)
            assert live(pool) == (1, 4 * BLOCK, 0)
        assert live(pool) == (0, 0, 0)
        assert pool.stats().idle_bytes == 4 * BLOCK
        assert lease.released


def test_leaving_the_block_by_an_exception():
    with small_pool() as pool:
        with pytest.raises(IndexError) as caught, pool.acquire(2) as lease:
            update_and_fail(lease)
        assert live(pool) == (0, 0, 0)
        assert (
            caught.value.__traceback__ is not None
        )  # frames that hold lease and tensors are alive


def test_an_exception_in_one_of_nested_leases_ends_them_all():
    with small_pool() as pool:
        with pytest.raises(IndexError), pool.acquire(1) as lease, lease.fork(4) as child:
            update_and_fail(child)
        assert live(pool) == (0, 0, 0)


def test_a_generator_that_is_closed_or_dropped():
    with small_pool() as pool:
        tokens = generation(pool.acquire(2))
        assert [next(tokens) for _ in range(3)] == [1, 2, 3]
        tokens.close()  # type: ignore[attr-defined]
        assert live(pool) == (0, 0, 0)
        tokens = generation(pool.acquire(2))
        next(tokens)
        del tokens
        assert live(pool) == (0, 0, 0)


@pytest.mark.slow
def test_the_last_reference_and_the_garbage_collector():
    with small_pool() as pool:
        lease = pool.acquire(1)
        fill(lease, 5)
        gone = weakref.ref(lease)
        del lease
        assert gone() is None
        assert live(pool) == (0, 0, 0)

        class Holder:
            pass

        holder = Holder()
        holder.itself, holder.lease = holder, pool.acquire(3)  # type: ignore[attr-defined]
        fill(holder.lease, 5)  # type: ignore[attr-defined]
        del holder
        assert live(pool)[0] == 1
        gc.collect()
        assert live(pool) == (0, 0, 0)


@pytest.mark.slow
def test_a_cycle_through_the_pool_itself_is_collected():
    class Pool(KVPool):
        last: KVLease

    pool = Pool(2, 2, 64, max_tokens=100, max_sequences=8, dtype=torch.float32)
    pool.last = pool.acquire(1)
    fill(pool.last, 5)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_releasing_twice_gives_back_once():
    with small_pool() as pool:
        lease, other = pool.acquire(2), pool.acquire(2)
        fill(lease, 20)
        fill(other, 20)
        with lease:
            lease.release()
            lease.release()
            assert live(pool) == (1, 4 * BLOCK, 0)
        again = pool.acquire(2)
        fill(again, 20)
        lease.release()
        assert live(pool) == (2, 8 * BLOCK, 0)
        assert pool.stats().released == 1


def test_views_keep_their_pages_until_the_last_dies():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            k, v = some(2, 40), some(2, 40)
            views = lease.update(0, k, v)
            part = views[0][1:, :, 3:5]
        assert live(pool) == (1, 6 * BLOCK, 1)
        for _ in range(3):
            with pool.acquire(2) as other:
                fill(other, 40)
        assert torch.equal(views[0], k)
        assert torch.equal(views[1], v)
        del views
        assert torch.equal(part, k[1:, :, 3:5])
        assert pool.stats().lingering_bytes == 6 * BLOCK
        del part
        assert live(pool) == (0, 0, 0)


def test_lingering_views_are_counted_and_named():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            kept = lease.update(0, some(2, 40), some(2, 40))
            with lease.fork(2) as child:
                more = child.layer(0)[0]
        stats = pool.stats()
        assert stats.lingering == 2
        names = sorted(stats.lingering_names)
        assert names[0].startswith("lease 1 (2 rows x 40 tokens), ")
        assert names[1].startswith("lease 2 (4 rows x 40 tokens), ")
        if "2 views" in names[0]:  # only the shim can count them
            assert names[1].endswith("1 view")
        del kept, more
        assert pool.stats().lingering_names == ()


def test_what_autograd_saved_is_a_view_like_any_other():
    with small_pool() as pool:
        q = some(1, 1).requires_grad_()
        with pool.acquire(1) as lease:
            k, v = lease.update(0, some(1, 20), some(1, 20))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            del k, v
        assert live(pool)[2] == 1
        out.sum().backward()
        assert q.grad is not None
        del out
        assert live(pool) == (0, 0, 0)


def test_views_may_die_on_any_thread():
    with small_pool() as pool:
        for _ in range(20):
            lease = pool.acquire(1)
            box = [lease.update(0, some(1, 20), some(1, 20))]
            lease.release()
            del lease
            threads = [threading.Thread(target=box.clear) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert live(pool) == (0, 0, 0)


@pytest.mark.slow
def test_closing_lends_no_more_and_lets_leases_go_on():
    pool = small_pool()
    lease, model = pool.acquire(1), Plain(1)
    step(lease, model, 20)
    pool.close()
    step(lease, model, 40)
    with lease.fork(2) as child:
        assert same(child, model.fork(2))
    kept = lease.layer(0)
    wanted = model.layer(0)
    lease.release()
    del pool, lease, child
    gc.collect()
    assert torch.equal(kept[0], wanted[0])  # the views still hold their pages, and nobody else does


@pytest.mark.slow
def test_a_pool_that_nobody_refers_to_lives_as_long_as_its_leases():
    lease = small_pool().acquire(1)
    gc.collect()
    fill(lease, 3)
    assert lease.pool.stats().leases == 1


def test_leaving_the_pools_own_block_closes_it():
    with small_pool() as pool:
        lease = pool.acquire(1)
    assert pool.closed
    assert not lease.released


# --- processes --------------------------------------------------------------------------------


POOL_USES: list[Callable[[Any], object]] = [
    KVPool.acquire,
    KVPool.stats,
    KVPool.trim,
    lambda pool: pool.would_fit(1, 1),
]
LEASE_USES: list[Callable[[Any], object]] = [
    KVLease.release,
    KVLease.fork,
    KVLease.buffers,
    lambda lease: lease.update(0, some(2, 1), some(2, 1)),
    lambda lease: lease.lengths,
    lambda lease: lease.layer(0),
    lambda lease: lease.crop(0),
    lambda lease: lease.reorder([0, 1]),
]


@pytest.mark.slow
def test_a_forked_child_can_neither_use_nor_spoil_the_parents_pool():
    pool = small_pool(limit="1 MiB")
    box = [pool.acquire(2)]
    model = Plain(2)
    step(box[0], model, 40)
    views = [box[0].layer(0)]
    lingering = pool.acquire(1)
    kept = [lingering.update(0, some(1, 20), some(1, 20))]
    wanted = kept[0][0].clone()
    lingering.release()

    def child() -> None:
        lease = box.pop()
        for use in (*POOL_USES, *LEASE_USES):
            with pytest.raises(RuntimeError, match=rf"belongs to process {os.getppid()}.*new pool"):
                use(pool if use in POOL_USES else lease)
        assert "of another process" in repr(pool)
        assert "in use elsewhere" in repr(lease)
        del lease
        views.clear()
        kept.clear()
        pool.close()
        gc.collect()
        mine, twin = small_pool().acquire(1), Plain(1)
        step(mine, twin, 30)
        assert same(mine, twin)

    for _ in range(3):
        assert in_child(child) == 0
    assert same(box[0], model)
    assert torch.equal(kept[0][0], wanted)
    step(box[0], model, 20)
    assert same(box[0], model)
    assert pool._check()


def test_a_child_that_drops_everything_leaves_a_closed_pools_pages_alone():
    pool = small_pool()
    model = Plain(1)
    with pool.acquire(1) as lease:
        step(lease, model, 40)
        leases = [lease.fork()]  # without views of its own
    twin = [pool.acquire(1)]
    views = [twin[0].update(0, some(1, 40), some(1, 40))]
    wanted = views[0][0].clone()
    twin[0].release()
    pool.close()  # from now on, what is given back goes to the system

    def child() -> None:
        leases.clear()
        twin.clear()
        views.clear()

    assert in_child(child) == 0
    assert same(leases[0], model)
    assert torch.equal(views[0][0], wanted)


AT_EXIT = """
import atexit, sys, torch, memtools
pool = memtools.KVPool(2, 2, 64, max_tokens=64, max_sequences=4, dtype="float32")
lease = pool.acquire(2)
kept = lease.update(0, torch.rand(2, 2, 9, 64), torch.rand(2, 2, 9, 64))
sys.modules["somewhere"] = lease
class Node: pass
node = Node(); node.self = node; node.lease = lease.fork(2); node.views = node.lease.layer(0)
atexit.register(lambda: lease.update(0, torch.rand(2, 2, 1, 64), torch.rand(2, 2, 1, 64)))
class AtDel:
    def __del__(self): lease.layer(0)
at_del = AtDel()
print("done")
"""


@pytest.mark.slow
@in_a_program
def test_interpreter_shutdown_with_leases_and_views_everywhere():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", AT_EXIT], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


KEPT = """
import sys
import torch
from memtools import KVPool
pool = KVPool(2, 2, 64, max_tokens=256, max_sequences=4, dtype="float32", device=sys.argv[1])
lease = pool.acquire(1, 64)
if sys.argv[1] == "cpu":
    for layer in range(2): lease.update(layer, *torch.rand(2, 1, 2, 64, 64))
    lease = lease.fork(2)  # which shows pages of the other one twice
    sys.kept = [view for layer in range(2) for view in lease.layer(layer)]
else:
    sys.kept = lease.buffers()
del pool, lease
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_view_may_be_the_last_thing_of_a_process(device):
    """Its pages end after the module has, by which they were counted or came from the device."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", KEPT, device], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Numbers(Dataset[torch.Tensor]):
    """What a worker is to have: no view of a lease."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.numbers[at]


@pytest.mark.slow
def test_forked_workers_of_a_data_loader_come_and_go_while_a_lease_lives():
    with small_pool() as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 20)
        numbers = lease.layer(0)[0].clone()
        loader = DataLoader(
            Numbers(numbers), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        for _ in range(2):
            assert torch.equal(torch.stack(list(loader)), numbers)
            step(lease, model, 5)
            assert same(lease, model)
        assert pool._check()


def test_a_child_that_touches_a_view_ends_there_and_the_parent_goes_on():
    with small_pool() as pool, pool.acquire(1) as lease, small_pool() as other:
        model = Plain(1)
        step(lease, model, 20)
        view = lease.layer(0)[0]
        other.close()  # a pool that is gone is nothing to close
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            view.fill_(7)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert same(lease, model)


COUNTED = """
import os, torch, memtools
def pool(): return memtools.KVPool(2, 2, 64, max_tokens=64, max_sequences=8, dtype="float32")
def again(): return memtools._core.Probe().read().mapped_again
def fork(prompt):
    rows = prompt.fork(4)
    for view in rows.update(0, *torch.rand(2, 4, 2, 1, 64)): view.sum()
    return rows
mine = pool()
prompt = mine.acquire(1)
prompt.update(0, *torch.rand(2, 1, 2, 33, 64))
rows = fork(prompt)
counted = again()
assert counted == mine.stats().mapped_again_bytes > 0
if (child := os.fork()) == 0:
    assert again() == 0, again()
    own = pool()
    prompt = own.acquire(1)
    prompt.update(0, *torch.rand(2, 1, 2, 33, 64))
    del rows  # the parent's: nothing of them counts here
    rows = fork(prompt)
    assert again() == own.stats().mapped_again_bytes == counted
    rows.release()
    assert again() == 0, again()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert again() == counted
print("done")
"""


@pytest.mark.slow
@in_a_program
def test_a_child_counts_only_what_it_maps_itself():
    """What its parent's views show more than once is closed there; taken off the child's resident
    bytes, it would make them too few."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


CHILDREN = """
import gc, os, sys, threading, torch, memtools
sys.setswitchinterval(1e-4)  # the thread at work would make each step of a fork wait for 5 ms
def pool(): return memtools.KVPool(2, 2, 64, max_tokens=64, max_sequences=8, dtype="float32")
old = pool(); old.acquire(1).release(); old.close()
tokens = torch.rand(2, 4, 2, 33, 64)  # here: a fork while torch.rand has its lock leaves it held
mine, at_work, enough = pool(), threading.Event(), threading.Event()
def work():
    while not enough.is_set():
        with mine.acquire(1) as prompt:
            prompt.update(0, *tokens[:, :1])
            with prompt.fork(4) as rows:
                rows.update(0, *tokens[:, :, :, :1])
        mine.trim(0)
        at_work.set()
threads = [threading.Thread(target=work, daemon=True)]
for thread in threads: thread.start()
at_work.wait()
kept = mine.acquire(2)
views = kept.update(0, *tokens[:, :2, :, :20])
def ends(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def fork(generation):
    if (child := os.fork()) == 0:
        own = pool()
        lease = own.acquire(1)
        lease.update(0, *tokens[:, :1, :, :9])
        if generation < 3: fork(generation + 1)
        lease.layer(0)[0].sum().item()
        lease.release()
        own.close()
        if generation == 2: del globals()["kept"], globals()["views"], globals()["mine"]
        gc.collect()
        if generation > 1: os._exit(0)
        sys.exit(0)  # one ends as a program does: in a child of torch that takes half a second
    assert ends(child) == 0
def from_a_thread():
    if (child := os.fork()) == 0: os._exit(0)
    assert ends(child) == 0
wanted = views[0].clone()
fork(1)
thread = threading.Thread(target=from_a_thread)
thread.start()
thread.join()
enough.set()
for thread in threads: thread.join()
assert torch.equal(views[0], wanted) and mine._check()
print("done", flush=True)
os._exit(0)  # the end of a program beside leases is AT_EXIT
"""


@pytest.mark.slow
@in_a_program
def test_children_of_any_thread_end_cleanly_while_the_pool_is_at_work():
    """They make pools of their own, fork again, collect, drop everything, and end as any program
    does; whatever locks of the parent's pool were held when they began."""
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_rows_that_came_after_buffers_show_zeros_and_nothing_of_a_released_lease():
    pool = KVPool(1, 1, 64, max_tokens=512, max_sequences=4, dtype="float32")
    with pool.acquire(4) as other:
        other.update(0, *torch.full((2, 4, 1, 512, 64), 7.0))
    with pool.acquire(4) as lease:
        lease.select([0])
        lease.buffers()
        lease.select([0, 0, 0])
        lease.advance(512)
        for view in lease.layer(0):
            assert view.shape == (3, 1, 512, 64)
            assert not view.any()

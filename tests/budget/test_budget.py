"""One budget for several parts: exact sums, who gives way to whom, and what the error says."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch

import memtools
import memtools.types
from memtools import Budget, BudgetError, GateHistory, KVPool
from tests.budget.budgets import KIB, MIB, ROW, gates, reserved


def small_pool(limit: Budget, name: str = "KVPool") -> KVPool:
    """A block of 16 tokens takes 64 KiB: pages of 4 KiB, 2 x 4 x 2 of them."""
    return KVPool(
        2, 4, 64, max_tokens=256, max_sequences=16, dtype="float32", limit=limit, name=name
    )


# --- the object -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "size"), [(4096, 4096), ("20 GiB", 20 * 2**30), ("1.5 KB", 1500), (None, None)]
)
def test_a_limit_is_bytes_or_text_or_none(limit, size):
    budget = Budget(limit)
    assert (budget.limit, budget.used, budget.available, budget.peak) == (size, 0, size, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "limit must be at least 1 byte, got 0"),
        ((-1,), ValueError, "at least 1 byte"),
        (("20 gigs",), ValueError, "like \"64 MiB\", got '20 gigs'"),
        ((2**64,), ValueError, "limit must be at most"),
        ((1.5,), TypeError, 'limit must be an int or like "64 MiB", got float'),
        ((True,), TypeError, "got bool"),
        ((), TypeError, "limit"),
    ],
)
def test_another_limit_is_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        Budget(*arguments)


def test_repr_and_names_say_what_it_is():
    budget = Budget("1 MiB", device="cuda", name="training")
    assert (budget.name, budget.device) == ("training", "cuda")
    assert repr(budget) == "Budget('training', 0 B of 1.0 MiB used on cuda, 0 parts)"
    assert repr(Budget(None)) == "Budget('budget', 0 B used, 0 parts)"
    assert Budget(1, device=torch.device("cuda", 1)).device == "cuda:1"
    assert Budget(1, name="ä" * 40).name == "ä" * 23  # 47 bytes hold 23 whole characters


def test_it_is_of_this_process_and_there_is_one_of_it():
    budget = Budget("1 MiB")
    assert copy.copy(budget) is budget
    assert copy.deepcopy([budget])[0] is budget
    with pytest.raises(TypeError, match="counts memory of this process"):
        pickle.dumps(budget)


# --- budgets in budgets ---------------------------------------------------------------------------


def test_a_suballocation_has_a_limit_of_its_own_and_counts_above():
    budget = Budget("1 MiB", device="cpu", name="training")
    gate_budget = budget.suballocate("gates", "256 KiB")
    everything = budget.suballocate("everything")
    assert (gate_budget.limit, everything.limit) == (256 * KIB, MIB)
    assert (gate_budget.device, gate_budget.name) == ("cpu", "gates")
    history = GateHistory(max_bytes=gate_budget, trim="oldest")
    for _ in range(10):
        history.append(gates(100))
    assert len(history) == 2
    assert budget.used == gate_budget.used == 256 * KIB
    assert everything.available == budget.available == 768 * KIB
    with pytest.raises(ValueError, match=r"asks for 2.0 MiB, more than the 1.0 MiB of 'training'"):
        budget.suballocate("too much", "2 MiB")
    assert Budget(None).suballocate("some", "2 MiB").limit == 2 * MIB


def test_the_sentence_names_the_budget_that_refused():
    budget = Budget("1 MiB", name="training")
    half = budget.suballocate("half", "512 KiB")
    history, other = GateHistory(max_bytes=half), GateHistory(max_bytes=budget)
    other.append(gates(800))
    with pytest.raises(
        BudgetError, match='800.0 KiB of 1.0 MiB in budget "training" .GateHistory 8'
    ):
        history.append(gates(400))
    other.clear()
    history.append(gates(400))
    second = GateHistory(max_bytes=half)
    with pytest.raises(BudgetError, match='400.0 KiB of 512.0 KiB in budget "half" .GateHistory 4'):
        second.append(gates(200))


@pytest.mark.slow
def test_a_part_keeps_its_budget():
    budget = Budget("1 MiB")
    history = GateHistory(max_bytes=budget.suballocate("gates", "512 KiB"))
    history.append(gates(100))
    assert [line.name for line in budget.report()] == ["gates", "GateHistory"]
    del budget
    gc.collect()
    history.append(gates(100))
    assert history[1].shape == (100 * KIB // ROW, 8)


def test_the_report_is_a_table():
    budget = Budget("4 MiB", name="training")
    pool = small_pool(budget)
    history = GateHistory(max_bytes=budget.suballocate("gates", "512 KiB"))
    history.append(gates(100))
    with pool.acquire(2, 32):
        report = budget.report()
        assert str(report) == (
            "budget 'training': 356.0 KiB of 4.0 MiB used, peak 356.0 KiB\n"
            "  part            reserved  idle       peak      limit\n"
            "  KVPool         256.0 KiB   0 B  256.0 KiB\n"
            "  gates          100.0 KiB   0 B  100.0 KiB  512.0 KiB\n"
            "    GateHistory  100.0 KiB   0 B  100.0 KiB"
        )
    assert [(line.name, line.depth, line.suballocation) for line in report] == [
        ("KVPool", 0, False),
        ("gates", 0, True),
        ("GateHistory", 1, False),
    ]
    assert report[1].limit == 512 * KIB
    assert (len(report), report.used, report.peak) == (3, 356 * KIB, 356 * KIB)
    assert repr(report) == (
        "BudgetReport(budget 'training': 356.0 KiB of 4.0 MiB used, peak 356.0 KiB; parts: 3)"
    )
    assert str(Budget(None).report()) == "budget 'budget': 0 B used, peak 0 B\n  no parts"


# --- who gives way --------------------------------------------------------------------------------


def fill(pool: KVPool, rows: int, tokens: int) -> None:
    """Uses so many tokens and leaves their pages idle."""
    step = torch.rand(rows, 4, tokens, 64)
    with pool.acquire(rows, tokens) as lease:
        for layer in range(2):
            lease.update(layer, step, step)


def test_a_history_gets_what_a_pool_holds_idle_before_it_trims():
    budget = Budget("1 MiB")
    pool = small_pool(budget)
    fill(pool, 14, 16)
    assert pool.stats().idle_bytes == budget.used == 14 * 64 * KIB
    history = GateHistory(max_bytes=budget)
    for _ in range(8):
        history.append(gates(100))
    assert len(history) == 8
    assert pool.stats().physical_bytes <= 3 * 64 * KIB
    assert budget.used == sum(reserved(budget).values()) <= MIB


def asks_at(way: str, budget: Budget, rows: torch.Tensor) -> Callable[[], object]:
    """A call of a history that needs what others in the budget have idle: they fill the budget."""
    history = GateHistory(max_bytes=budget)
    if way == "append":
        return lambda: history.append(rows)
    if way == "an append to a copy":
        mine = copy.copy(history)
        return lambda: mine.append(rows)
    history.append(rows[:400])
    return (lambda: history[:]) if way == "a slice" else (lambda: copy.copy(history))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["append", "an append to a copy", "a slice", "a copy"])
def test_other_threads_run_while_a_pool_gives_back_for_a_history(way):
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            os.sched_yield()  # gives the interpreter up

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give it up
    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        # The other thread may not be there in time, least on a busy machine; with the GIL held it
        # never would be.
        for _ in range(5000):
            budget = Budget("1 MiB")
            ask = asks_at(way, budget, gates(800))
            pool = small_pool(budget)
            fill(pool, budget.available // (64 * KIB), 16)
            assert budget.available < 64 * KIB
            before = turns[0]
            ask()
            if ran := turns[0] > before:
                break
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert ran


def test_pools_give_way_to_each_other_and_live_pages_stay():
    budget = Budget("1 MiB")
    first, second = small_pool(budget, "first"), small_pool(budget, "second")
    fill(first, 16, 16)
    fill(second, 12, 16)
    assert reserved(budget) == {"first": 256 * KIB, "second": 768 * KIB}
    lease = second.acquire(4, 16)
    with pytest.raises(BudgetError, match=r"second \d+.0 KiB"):
        first.acquire(13, 16)
    fill(first, 12, 16)
    assert reserved(budget) == {"first": 768 * KIB, "second": 256 * KIB}
    lease.release()


def test_a_suballocations_own_limit_asks_nobody_outside():
    budget = Budget("2 MiB")
    pool = small_pool(budget)
    fill(pool, 8, 16)
    history = GateHistory(max_bytes=budget.suballocate("gates", "256 KiB"), trim="oldest")
    for _ in range(10):
        history.append(gates(100))
    assert pool.stats().idle_bytes == 8 * 64 * KIB


def test_many_threads_share_one_budget():
    budget = Budget("1 MiB")
    start, over = threading.Barrier(4), []

    def work(seed: int) -> None:
        start.wait()
        history = GateHistory(max_bytes=budget, trim="oldest")
        for i in range(300):
            try:
                history.append(gates(1 + (i * 37 + seed * 11) % 90))
            except BudgetError:
                history.clear()
            if budget.used > MIB or sum(reserved(budget).values()) > MIB:
                over.append(i)
        history.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (over, budget.used, len(budget.report())) == ([], 0, 0)
    assert budget.peak > MIB // 2


def test_a_forked_child_has_a_budget_of_its_own():
    budget = Budget("1 MiB")
    history = GateHistory(max_bytes=budget)
    history.append(gates(100))
    if (child := os.fork()) == 0:
        history.append(gates(400))
        in_child = budget.used
        history.close()
        os._exit(0 if (in_child, budget.used) == (500 * KIB, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (budget.used, len(history)) == (100 * KIB, 1)


def test_a_child_leaves_what_its_parents_pool_holds_idle():
    budget = Budget("1 MiB")
    pool = small_pool(budget)
    fill(pool, 14, 16)
    idle = pool.stats().idle_bytes
    assert idle == budget.used == 14 * 64 * KIB
    if (child := os.fork()) == 0:
        code = 1
        try:
            history = GateHistory(max_bytes=budget)
            for _ in range(20):
                history.append(gates(40))
            assert 0 < history.nbytes <= MIB - idle
            assert budget.used <= MIB
            assert [line.idle for line in budget.report()] == [0, 0]
            history.close()
            assert budget.used == idle
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (pool.stats().idle_bytes, budget.used) == (idle, idle)


def test_the_package_offers_it_and_nothing_that_it_only_uses():
    assert memtools.Budget is Budget
    public = {name for name in dir(memtools) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(memtools, name), types.ModuleType)}
    assert public - modules == set(memtools.__all__) - {"__version__"}
    assert isinstance(Budget(None).report(), memtools.types.BudgetReport)

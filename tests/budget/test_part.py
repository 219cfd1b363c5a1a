"""A part of a budget that is written in Python."""

from __future__ import annotations

import threading

import pytest
import torch

from memtools import Budget, BudgetError, _core
from tests.budget.budgets import MIB


def test_it_reserves_and_releases():
    budget = Budget("1 MiB", name="training")
    part = _core.BudgetPart(budget, "mine")
    part.reserve(1000, "mine()", "ask for less")
    part.reserve(0, "mine()", "ask for less")
    assert (part.reserved, budget.used) == (1000, 1000)
    part.release(400)
    assert [(line.name, line.reserved, line.peak) for line in budget.report()] == [
        ("mine", 600, 1000)
    ]
    part.close()
    part.close()
    assert (part.reserved, budget.used, len(budget.report())) == (0, 0, 0)


def test_its_end_releases_everything():
    budget = Budget("1 MiB")
    part = _core.BudgetPart(budget, "mine")
    part.reserve(1000, "mine()", "ask for less")
    del part
    assert (budget.used, len(budget.report())) == (0, 0)


def test_what_does_not_fit_is_refused_in_its_own_words():
    part = _core.BudgetPart(Budget(1000, name="training"), "mine")
    part.reserve(600, "mine()", "ask for less")
    with pytest.raises(
        BudgetError, match=r"mine\(\): asked 500 B, used 600 B of 1000 B .mine 600 B.; ask for less"
    ):
        part.reserve(500, "mine()", "ask for less")
    assert part.reserved == 600


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda part: part.reserve(-1, "x", "y"), ValueError, "bytes must be at least 0, got -1"),
        (lambda part: part.reserve("1", "x", "y"), TypeError, "bytes must be an int, got str"),
        (lambda part: part.release(11), ValueError, r"release\(11\) of 10 reserved bytes"),
        (
            lambda part: part.release(-1),
            ValueError,
            r"release\(\): bytes must be at least 0, got -1",
        ),
        (lambda part: part.release(2**70), ValueError, "bytes must be at most"),
        (lambda part: _core.BudgetPart("1 MiB", "x"), TypeError, "a Budget is needed, got str"),
    ],
)
def test_other_numbers_are_refused(call, error, match):
    part = _core.BudgetPart(Budget("1 MiB"), "mine")
    part.reserve(10, "mine()", "ask for less")
    with pytest.raises(error, match=match):
        call(part)
    assert part.reserved == 10


def test_a_closed_part_says_so():
    part = _core.BudgetPart(Budget("1 MiB"), "mine")
    part.close()
    for call in (lambda: part.reserve(1, "x", "y"), lambda: part.release(0)):
        with pytest.raises(ValueError, match="this part of the budget is closed"):
            call()


def test_others_are_asked_for_what_they_hold_idle():
    from memtools import KVPool

    budget = Budget(2 * MIB)
    pool = KVPool(2, 4, 64, max_tokens=256, max_sequences=16, dtype="float32", limit=budget)
    with pool.acquire(2, 64) as lease:
        lease.update(0, *(torch.ones(2, 4, 64, 64),) * 2)
    idle = pool.stats().idle_bytes
    part = _core.BudgetPart(budget, "mine")
    with pytest.raises(BudgetError, match="asked 2.0 MiB"):
        part.reserve(2 * MIB + 1, "mine()", "ask for less")
    assert pool.stats().idle_bytes == idle > 0  # what cannot help is not asked for
    part.reserve(2 * MIB, "mine()", "ask for less")
    assert budget.used == 2 * MIB


def test_threads_count_exactly():
    budget = Budget(None)
    part = _core.BudgetPart(budget, "mine")

    def work() -> None:
        for _ in range(2000):
            part.reserve(3, "mine()", "ask for less")
            part.release(2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert part.reserved == budget.used == 8000


def test_it_keeps_its_budget():
    part = _core.BudgetPart(Budget("1 MiB").suballocate("half", "512 KiB"), "mine")
    part.reserve(1000, "mine()", "ask for less")
    assert part.reserved == 1000

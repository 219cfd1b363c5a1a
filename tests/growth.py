"""What grows with each round, told from what grows once: a page that is touched for the first time,
another thread's arena, what malloc gave back to the system before and takes again."""

from __future__ import annotations

from collections.abc import Callable

STRETCHES = 4


def least_growth(run: Callable[[int], object], rounds: int, read: Callable[[], int]) -> int:
    """The least that a reading grew by in a quarter of the rounds, times four: a leak grows in
    every quarter, and what happens once is in one of them."""
    grown = []
    for _ in range(STRETCHES):
        before = read()
        run(rounds // STRETCHES)
        grown.append(read() - before)
    return STRETCHES * min(grown)

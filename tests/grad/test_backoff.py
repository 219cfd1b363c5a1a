"""step(): a run that ran out of memory equals, bit for bit, the one that began with its split."""

from __future__ import annotations

import functools

import pytest

from tests.grad.backoffcases import ROWS, run, sizes_of
from tests.kit.oominject import Inject

# A retry collects cycles: not among all that the other tests have imported.
pytestmark = pytest.mark.usefixtures("frozen")

MODES = ("scratch", "redo")
SETTINGS = {
    "plain": {},
    "max_norm": {"max_norm": 0.05},
    "fp16": {"precision": "fp16", "max_norm": 0.05},
    "bf16": {"precision": "bf16"},
}


def split_after(index: int, size: int = 4) -> list[list[int]]:
    """Sizes of two windows in which micro-batch `index` of the first did not fit."""
    first = [size] * index + [size // 2] * ((ROWS - size * index) // (size // 2))
    return [first, [size // 2] * ROWS]


@functools.cache
def from_the_start(settings: str, index: int) -> list[bytes]:
    """The run that nothing happened to; the way of undoing changes no bit."""
    return run(sizes=split_after(index), size=4, **SETTINGS[settings])[0].bits()


@pytest.mark.slow
@pytest.mark.parametrize("undo", MODES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("settings", "index"), [("plain", 0), ("max_norm", 1), ("fp16", 2), ("bf16", 3)]
)
def test_an_oom_at_a_micro_batch_equals_the_run_with_that_split(settings, index, phase, undo):
    """Where memory runs out in any operator is for tests/grad/test_backoff_random.py."""
    inject = Inject(**{phase: {index}})
    got, acc = run(inject, undo=undo, size=4, **SETTINGS[settings])
    assert got.bits() == from_the_start(settings, index)
    (retry,) = acc.report().retries
    assert (retry.micro_batch, retry.rows, retry.phase, retry.next_rows) == (index, 4, phase, 2)


@pytest.mark.parametrize("undo", MODES)
def test_the_way_of_undoing_changes_no_bit(undo):
    """Halved twice in one window, in a forward and in a backward pass, from the whole batch on."""
    inject = Inject(forward={2}, backward={0})
    got, acc = run(inject, undo=undo)
    want, _ = run(undo="scratch", sizes=[[8, 4, 4], [4] * 4])
    assert got.bits() == want.bits()
    assert [r.next_rows for r in acc.report().retries] == [8, 4]
    assert [r.rows for r in acc.report().retries] == [16, 8]


def test_a_window_that_runs_again_may_fail_earlier_than_before():
    """The first time in its third micro-batch, then in its second one."""
    got, acc = run(Inject(backward={2, 4}), undo="redo", size=4)
    first, second = acc.report().retries
    assert (first.micro_batch, first.rows, first.next_rows) == (2, 4, 2)
    assert (second.micro_batch, second.rows, second.next_rows) == (1, 4, 2)
    sizes = sizes_of([first, second], ROWS, 4)
    assert sizes == ([4, 2, 2, 2, 2, 2, 2], 2)
    assert got.bits() == run(sizes=[sizes[0], [2] * 8], size=4)[0].bits()


def test_the_injected_run_differs_from_the_one_without_a_split():
    want, _ = run(size=4)
    got, _ = run(Inject(backward={1}), size=4)
    assert got.bits() != want.bits()

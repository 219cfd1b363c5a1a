"""The size of micro-batches over many windows: halved, remembered, tried upward, kept if proven."""

from __future__ import annotations

import itertools
import json
import math

from memtools._grad.backoff import FIRST_WAIT, LONGEST_WAIT, PROVEN, SizeControl

BATCH = 64


def window(control: SizeControl, fits: float, batch: int = BATCH) -> list[int]:
    """One window on a machine that `fits` so many rows; the sizes that were tried."""
    tried, left, size = [], batch, control.size
    used = lowest = 0
    while left:
        rows = int(min(size, left))
        tried.append(rows)
        if rows > fits:
            size = (rows + 1) // 2
            lowest = size
            continue
        used = max(used, rows)
        left -= rows
    control.end_window(batch, used, lowest)
    return tried


def failures(control: SizeControl, fits: float, windows: int) -> list[int]:
    return [i for i in range(windows) if max(window(control, fits)) > fits]


def test_steps_up_that_fail_come_at_growing_distances():
    control = SizeControl(None)
    found = failures(control, 10, 6000)
    between = [b - a for a, b in itertools.pairwise(found)]
    assert between[:8] == [9, 17, 33, 65, 129, 257, 513, 1025]
    assert set(between[8:]) == {LONGEST_WAIT + 1}
    assert control.size == 8


def test_a_size_that_fits_again_is_found_again_step_by_step_and_ends_at_the_top():
    control = SizeControl(32)
    window(control, 4)
    sizes = []
    for _ in range(40):
        window(control, math.inf)
        sizes.append(control.size)
    assert sizes[FIRST_WAIT - 2 : FIRST_WAIT] == [4, 8]
    assert sizes[2 * FIRST_WAIT - 1] == 16
    assert sizes[3 * FIRST_WAIT - 1] == sizes[-1] == 32
    assert control.wait == FIRST_WAIT


def test_it_never_goes_above_what_it_began_with():
    control = SizeControl(8)
    for _ in range(100):
        assert window(control, math.inf) == [8] * 8
    assert control.size == 8


def test_a_step_up_that_failed_goes_back_to_the_size_before():
    control = SizeControl(12)
    window(control, 3)
    for _ in range(FIRST_WAIT):
        assert control.size == 3
        window(control, 3)
    assert (control.size, control.before) == (6, 3)
    window(control, 5)
    assert (control.size, control.before, control.wait) == (3, 0, 2 * FIRST_WAIT)


def test_a_short_step_to_the_top_that_failed_keeps_what_is_known_to_fit():
    """Half of 12 would be 6, and 8 fitted; where 6 failed as well, 8 is not known any more."""
    for fits, size in ((10, 8), (5, 3)):
        control = SizeControl(12)
        control.load({"size": 12, "good": 0, "wait": FIRST_WAIT, "before": 8})
        window(control, fits)
        assert (control.size, control.before, control.wait) == (size, 0, 2 * FIRST_WAIT)


def test_one_giant_does_not_cost_a_proven_size_and_a_second_one_does():
    control = SizeControl(16)
    for _ in range(PROVEN):
        window(control, math.inf)
    assert window(control, 5)[:3] == [16, 8, 4]
    assert control.size == 16
    assert window(control, 10)[:2] == [16, 8]
    assert control.size == 8


def test_short_batches_prove_nothing_about_a_larger_size():
    control = SizeControl(16)
    window(control, 8)
    for _ in range(50):
        window(control, math.inf, batch=4)
    assert (control.size, control.good) == (8, 0)


def test_a_state_goes_on_as_the_original():
    control = SizeControl(None)
    for i in range(100):
        window(control, 9 if i % 40 else math.inf)
        copied = SizeControl(None)
        copied.load(json.loads(json.dumps(control.state())))
        assert copied.state() == control.state()
    one, two = failures(control, 20, 300), failures(copied, 20, 300)
    assert one == two

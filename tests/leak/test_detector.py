"""LeakDetector: the same answers as a numpy version of its description, on synthetic series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memtools import LeakDetector
from tests.leak import reference
from tests.traces import synthetic

SEED = 11
BAR = 2**19


def several() -> list[synthetic.Series]:
    """Of every family and every kind of leak; lengths that end within a block too."""
    free = [
        synthetic.leak_free(family, SEED, i, n=2000 + 611 * i)
        for family in synthetic.FAMILIES
        for i in range(10)
    ]
    return free + [
        synthetic.leaking(base, leak, rate, SEED, 0, n=4001)
        for base in synthetic.BASES
        for leak in synthetic.LEAKS
        for rate in synthetic.RATES
    ]


@pytest.mark.slow
def test_every_change_of_kind_is_that_of_the_description():
    series, kinds = several(), set()
    for s in series:
        expected = reference.changes(s.bytes, BAR)
        assert LeakDetector(bar_bytes=BAR).update_many(0, rss=s.bytes) == expected
        kinds |= {kind for _, kind in expected}
    assert len(series) == 300
    assert kinds == {"quiet", "growing", "likely", "leak"}


@pytest.mark.slow
def test_rates_and_forecasts_are_those_of_the_description():
    for s in several():
        detector = LeakDetector(bar_bytes=BAR)
        detector.update_many(0, rss=s.bytes)
        for limit in (s.bytes.max() * 0.99, s.bytes.max() + 2**26, 2.0**33):
            expected = reference.forecast(s.bytes, int(limit))
            got = detector.forecast(int(limit), signal="rss")
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
        verdict = detector.verdict()
        if verdict.signal:
            assert verdict.rate_bytes_per_step == pytest.approx(reference.rate(s.bytes))


def test_one_call_a_step_is_the_same_as_one_call_for_all():
    s = synthetic.leaking("warm", "epoch", 50, SEED, 1, n=4000)
    one, many = LeakDetector(), LeakDetector()
    kinds = ["early"]
    found = []
    for step, size in enumerate(s.bytes.astype(np.int64)):
        one.update(step, heap=size, rss=int(size) + 5)
        if one.kind != kinds[-1]:
            kinds.append(one.kind)
            found.append((step, one.kind))
    changes = many.update_many(0, heap=s.bytes, rss=s.bytes + 5)
    assert changes == found
    assert len(found) > 2
    assert one.verdict() == many.verdict()


class Meddling:
    """A number of bytes that is asked for its value: it runs code of the user's before."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self.meddle = meddle

    def __index__(self) -> int:
        self.meddle()
        return 1


@pytest.mark.parametrize("later", [10, 11])
def test_steps_never_go_back_although_a_reading_updates_the_detector(later):
    detector = LeakDetector()
    detector.update(5, heap=1, rss=1)
    with pytest.raises(ValueError, match=f"step 10 of rss comes after step {later}"):
        detector.update(10, rss=1, heap=Meddling(lambda: detector.update(later, rss=1)))
    detector.update(later + 1, rss=1, heap=1)

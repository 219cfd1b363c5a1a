"""What the report judges of a record's own series: evenly in steps, on recorded training loops."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memtools
from memtools import _core
from memtools._leak.judge import THRESHOLDS
from memtools._record import kinds
from memtools._record.figures import figures_of
from memtools._record.growth import Growth, even, judge
from memtools._record.record import UNKNOWN
from memtools._record.series import timeline
from tests.report.reportcases import MIB
from tests.traces import record

NAMES = {"heap": "heap_used", "children": "children_private", "rss": "rss"}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**9)), max_size=900),
    st.randoms(use_true_random=False),
)
def test_even_readings_are_at_equal_distances_and_within_the_given_ones(parts, rng):
    steps, at = [], 0
    for gap, _ in parts:
        at += gap + 1
        steps.append(at)
    values = [value if rng.random() < 0.7 else UNKNOWN for _, value in parts]
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v != UNKNOWN]
    found = even(steps, values)
    if len(known) < THRESHOLDS.record_readings:
        assert found == []
        return
    assert THRESHOLDS.record_readings <= len(found) <= len(known)
    distances = {b[0] - a[0] for a, b in pairwise(found)}
    assert max(distances) - min(distances) <= 1
    assert (found[0][0] >= known[0][0], found[-1][0]) == (True, known[-1][0])
    assert min(v for _, v in found) == min(v for _, v in known)
    assert max(v for _, v in found) <= max(v for _, v in known)


def judged(path: str) -> list[Growth]:
    """What the test says, without the lines of signals that it does not speak of."""
    growth = judge(timeline(memtools.read_record(path)), []).growth
    return [one for one in growth if not one.over]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*record.LEAK_FREE, *record.LEAKS])
def test_a_record_of_a_recorded_loop_is_judged_right(name, tmp_path):
    series = {signal: v.tolist() for signal, v in record.load(name).items() if signal in NAMES}
    path = str(tmp_path / "run.mem")
    columns = [("step", ""), *((NAMES[signal], "B") for signal in series)]
    with _core.RecordWriter(path, columns) as writer:
        for step, row in enumerate(zip(*series.values(), strict=True)):
            writer.append(10**15 + step * 10**7, [step, *row])
    found = [(growth.grade, growth.signal) for growth in judged(path)]
    _, seen_by = record.LEAKS.get(name, (0, ()))
    expected = [("leak", signal) for signal in seen_by if signal in NAMES]  # no column of "python"
    assert [growth for growth in found if growth[0] == "leak"] == expected


def test_slow_steps_and_seldom_readings_do_not_bend_the_rate(tmp_path):
    """Steps that take one sample at first and five later, the heap read at each tenth sample."""
    path, rng, sample = str(tmp_path / "run.mem"), random.Random(5), 0
    columns = [("step", ""), ("rss", "B"), ("heap_used", "B")]
    with _core.RecordWriter(path, columns, rows=32768) as writer:
        for step in range(6000):
            for _ in range(1 if step < 3000 else 5):
                heap = 300 * MIB + step * 65536 + rng.randrange(MIB)
                seldom = heap if sample % 10 == 0 else None
                writer.append(10**15 + sample * 10**7, [step, heap + 200 * MIB, seldom])
                sample += 1
    (growth,) = judged(path)
    assert (growth.grade, growth.signal, growth.per) == ("leak", "heap", "step")
    assert growth.rate_bytes == pytest.approx(65536, rel=0.1)


def test_a_long_run_is_judged_by_its_buckets_and_its_newest_samples_alike(tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B")], rows=2048) as writer:
        for i in range(200_000):
            writer.append(10**15 + i * 10**7, [i // 4, 400 * MIB + (i // 4) * 4096 + i % 7 * 9999])
    (growth,) = judged(path)
    assert (growth.grade, growth.signal) == ("leak", "rss")
    assert growth.rate_bytes == pytest.approx(4096, rel=0.1)


@pytest.mark.parametrize(
    ("steps", "every", "short"),
    [
        (300, 2, "too few readings to judge: rss has 149 of 256"),
        (300, 1, None),
        (258, 1, None),
        (257, 1, "too early to say: 255 of 256 steps"),
        (100, 2, "too early to say: 98 of 256 steps"),
    ],
)
def test_what_is_too_few_says_which_number_is(steps, every, short, tmp_path):
    """The first step and the last one are not judged; resident memory is read at each so many
    samples, of which each step has one."""
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B")]) as writer:
        for step in range(steps):
            rss = 300 * MIB if step % every == 0 else None
            writer.append(10**15 + step * 10**8, [step, rss])
    assert judge(timeline(memtools.read_record(path)), []).short == short


@pytest.mark.parametrize(("shared", "short"), [
    (0, None),
    (1 << 20, "too few readings to judge: shm"),
])  # fmt: skip
def test_memory_that_the_program_does_not_use_is_not_missed(shared, short, tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B"), ("shm", "B")]) as writer:
        for step in range(300):
            row = [step, 300 * MIB, shared if step % 30 == 0 else None]
            writer.append(10**15 + step * 10**8, row)
    assert judge(timeline(memtools.read_record(path)), []).short == short


def test_a_device_of_which_too_little_is_known_is_named(tmp_path):
    path = str(tmp_path / "run.mem")
    columns = [("step", ""), ("rss", "B"), ("cuda0_allocated", "B")]
    with _core.RecordWriter(path, columns) as writer:
        for step in range(300):
            device = 64 * MIB if step % 3 == 1 else None
            writer.append(10**15 + step * 10**8, [step, 300 * MIB, device])
    short = judge(timeline(memtools.read_record(path)), [0]).short
    assert short == "too few readings to judge: device of cuda:0 has 100 of 256"


@pytest.mark.parametrize(
    ("allocated", "limit", "grade", "kind", "says"),
    [
        (2000, 4000, "fills", "first writes", ""),
        (2000, 1000, "fills", "first writes", "allocate less if it does not fit"),
        (500, 4000, "fragmentation", "", ""),  # of what is allocated nothing is left to be written
        (850, 4000, "fragmentation", "", ""),  # or little, wherever that lies
    ],
)
def test_what_was_allocated_and_is_written_for_the_first_time_fills(
    allocated, limit, grade, kind, says, tmp_path
):
    """Resident memory grows from 100 to 700 MiB, while malloc has given out the same all the
    time. As the program ends it frees all."""
    path = str(tmp_path / "run.mem")
    columns = [(name, "B") for name in ("rss", "heap_used", "cgroup_limit", "cgroup_used")]
    with _core.RecordWriter(path, columns) as writer:
        event = kinds.payload("start", kinds.Start("run", tests_leaks=False))
        writer.event("start", event)
        for i in range(2001):
            rss, heap = (100 * MIB + 3 * i * MIB // 10, allocated * MIB) if i < 2000 else (0, 0)
            row = [rss, heap, limit * MIB, rss]
            writer.append(10**15 + i * 10**7, row)
    (found,) = figures_of(memtools.read_record(path)).verdict.findings
    assert (found.grade, found.kind) == (grade, kind)
    assert says in found.advice
    if kind:
        assert "1.27 GiB more are allocated and not written yet" in found.what
        assert (found.cause == "too large") is bool(says)
        assert (found.seconds_left is None) is not bool(says)

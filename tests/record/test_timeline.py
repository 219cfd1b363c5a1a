"""The report's table of cells: shorter, and not a peak or a floor less."""

from __future__ import annotations

import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from memtools import _core
from memtools._record.record import UNKNOWN
from memtools._record.series import (
    Timeline,
    _of_one_group,
    _reduce,
    cuts,
    median_step_seconds,
    timeline,
)


def view(numbers: list[int]) -> memoryview:
    return memoryview(array.array("Q", numbers)).cast("B").cast("Q")


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=300),
    st.integers(1, 80),
    st.booleans(),
)
def test_cuts_cover_every_index_once_in_at_most_so_many_cells(times, cells, in_order):
    times = sorted(times) if in_order else times
    ends = cuts(times, cells)
    assert len(ends) <= max(cells, 0) if times else ends == []
    assert ends == sorted(set(ends))
    assert not times or (ends[-1] == len(times) and ends[0] > 0)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2**64 - 1)), max_size=200),
    st.integers(1, 50),
)
def test_each_cell_has_the_least_and_the_most_of_its_samples(rows, cells):
    times, values = view([t for t, _ in rows]), view([v if v % 5 else UNKNOWN for _, v in rows])
    line = _reduce(times, times, None, {"x": values}, {"x": values}, cells)
    assert sum(line.counts) == len(rows)
    at = 0
    for i, count in enumerate(line.counts):
        part = [value for value in values[at : at + count] if value != UNKNOWN]
        at += count
        assert line.least["x"][i] == min(part, default=UNKNOWN)
        assert line.most["x"][i] == max(part, default=UNKNOWN)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=400),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(2, 200),
)
def test_whatever_the_ring_kept_the_peak_and_the_floor_are_those_of_all_samples(
    tmp_path_factory, values, rows, buckets, cells
):
    path = str(tmp_path_factory.mktemp("ring") / "run.mem")
    with _core.RecordWriter(path, [("x", "B")], rows=rows, buckets=2 * buckets) as writer:
        for i, value in enumerate(values):
            writer.append(1000 * i + 10**15, [value])
    line = timeline(memtools.read_record(path), cells)
    assert len(line) <= cells
    assert max(line.most["x"]) == max(values)
    assert min(line.least["x"]) == min(values)
    assert line.first_ns == sorted(line.first_ns)
    assert line.last("x") == values[-1]


def test_the_newest_samples_keep_their_detail_after_a_long_run(tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("x", "B")], rows=100, buckets=16) as writer:
        for i in range(5000):
            writer.append(1000 * i + 10**15, [i])
    line = timeline(memtools.read_record(path))
    assert line.most["x"][-100:] == list(range(4900, 5000))
    assert line.counts[-1] == 1
    assert line.counts[0] == 512


def test_a_column_without_readings_has_no_peak(tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("x", "B"), ("y", "B")]) as writer:
        writer.append(10**15, [None, 5])
    line = timeline(memtools.read_record(path))
    assert not line.known("x")
    assert line.peak("x") is None
    assert line.peak("y") == (5, pytest.approx(line.first_ns[0]))
    assert line.last("x") is None
    assert line.first("y") == 5


def of_steps(*seen: tuple[float, int]) -> float | None:
    """The median time of a step of samples at these seconds, with these counts of steps."""
    times, steps = [round(1e9 * at) for at, _ in seen], [step for _, step in seen]
    return median_step_seconds(_reduce(times, times, None, {"step": steps}, {"step": steps}, 10**6))


def test_the_time_of_a_step_is_the_median_whatever_comes_before_and_between():
    imports, first = [(0.0, 0), (6.0, 0)], [(9.0, 1)]
    even = [(9 + 0.5 * step, step + 1) for step in range(1, 40)]
    pause = [(at + 60.0, step + 39) for at, step in even[1:]]
    assert of_steps(*imports, *first, *even, *pause) == pytest.approx(0.5)


def test_samples_that_are_further_apart_than_steps_do_not_round_it():
    every_10_ms = [(0.01 * i, int(0.01 * i / 0.0123)) for i in range(4000)]
    assert of_steps(*every_10_ms) == pytest.approx(0.0123, rel=0.01)


@pytest.mark.parametrize("seen", [[], [(0.0, 0)], [(0.0, 0), (1.0, 1)], [(0.0, 1), (9.0, 2)]])
def test_of_too_few_steps_no_time_is_known(seen):
    assert of_steps(*seen) is None


@pytest.mark.parametrize(
    ("limits", "begin"),
    [
        ([UNKNOWN, UNKNOWN, 640, 640], 2),
        ([900, 900, UNKNOWN, 640], 3),
        ([640, 640, 640, 640], 0),
        ([UNKNOWN, 640, UNKNOWN, UNKNOWN], 1),
        ([500, 640, 640, 640], 0),
        ([UNKNOWN] * 4, 0),
    ],
    ids=["into a group", "into a lower one", "never", "read seldom", "raised", "no limit"],
)
def test_what_another_control_group_used_is_not_set_against_the_limit(limits, begin):
    """A program that moves itself into a group of 640 does not say 2,000 of 640."""
    used = [2000, 1999, 600, 610]
    columns = {"cgroup_used": used, "cgroup_limit": limits}
    newest = {"cgroup_limit": next((one for one in reversed(limits) if one != UNKNOWN), None)}
    times = [0, 1, 2, 3]
    line = Timeline(times, times, [1] * 4, dict(columns), dict(columns), newest)
    for readings in (_of_one_group(line).least, line.most):
        assert readings["cgroup_used"] == [UNKNOWN] * begin + used[begin:]
    assert used == [2000, 1999, 600, 610], "the record itself"

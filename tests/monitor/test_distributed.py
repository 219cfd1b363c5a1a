"""monitor_ranks: by real processes on gloo, and without any process group."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtools.distributed import RankMetrics, RankStat, monitor_ranks
from tests.export.metricsource import Figures, usual
from tests.kit.ranks import run_ranks


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """job(case, world): what each rank wrote down."""

    def run(case: str, world: int = 2) -> list[Any]:
        return run_ranks("tests.monitor.rankworker", case, world, tmp_path)

    return run


@pytest.mark.slow
def test_every_rank_gets_the_least_the_mean_the_most_and_whose_they_are(job):
    first, second = job("together")
    assert first == second
    figures, too_much, collectives = first
    assert figures == {
        "rss": [1e9, 2e9, 3e9, 0, 1, 2],
        "same": [7.0, 7.0, 7.0, 0, 0, 2],
        "nan": [4.0, 4.0, 4.0, 0, 0, 1],
        "left": [10.0, math.inf, math.inf, 0, 1, 2],
        "pressure": [1.0, 1.0, 1.0, 0, 0, 1],
        "cuda1": [5.0, 5.0, 5.0, 1, 1, 1],
    }
    assert too_much[0].startswith("the figures take more than max_bytes=64 bytes: rank 1 has 1,")
    assert too_much[1] == {"a": [0.0, 0.5, 1.0, 0, 1, 2]}, "the next call works on all ranks"
    assert collectives == [[2, 4100, "cpu"]], "one, and small"


@pytest.mark.slow
def test_a_group_of_some_ranks_names_those_of_the_job(job):
    outside, *inside = job("subset", 3)
    assert outside == ("this rank is not in the group; call monitor_ranks() on its members only")
    assert inside == [{"rss": [1.0, 1.5, 2.0, 1, 2, 2]}] * 2


@pytest.mark.slow
def test_where_a_rank_is_dead_torch_says_so(job):
    first, second = job("dead")
    assert first in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistError")
    assert second is None


def test_without_a_process_group_it_is_one_rank():
    figures = usual()
    result = monitor_ranks(figures)
    assert result["memory/host_percent"] == RankStat(37.5, 37.5, 37.5, 0, 0, 1)
    assert "memory/pressure_percent" not in result  # NaN
    assert result["memory/steps_left"].max == math.inf
    assert monitor_ranks(figures.values) == result


def test_torch_is_not_imported_for_it():
    code = "import sys; from memtools.distributed import monitor_ranks as m; print(m({'a': 1.0}))"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "a: 1 (rank 0) to 1 (rank 0), mean 1 of 1\nFalse\n"


def test_the_result_can_be_written_like_a_monitors_figures():
    result = RankMetrics({"memory/a_bytes": RankStat(1.0, 2.0, 3.0, 5, 4, 2)})
    assert result.metrics() == {
        "memory/a_bytes/mean": 2.0, "memory/a_bytes/max": 3.0, "memory/a_bytes/max_rank": 4,
    }  # fmt: skip
    assert len(result.metrics(expert=True)) == 6


def test_bad_arguments_are_refused_before_anybody_waits():
    with pytest.raises(ValueError, match="max_bytes must be at least 64, got 8"):
        monitor_ranks(Figures(a=1.0), max_bytes=8)

"""Cleanups on all ranks at the same step: by real processes on gloo."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.kit.ranks import run_ranks

STEPS_DIFFER = (
    "RuntimeError: the ranks are at different steps: this one is at {}, another is not; give every "
    "rank the same CleanupPolicy, and start and step it at the same points"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """job(case, world): what each rank wrote down."""

    def run(case: str, world: int = 2) -> list[Any]:
        return run_ranks("tests.cleanup.rankworker", case, world, tmp_path_factory.mktemp(case))

    return run


@pytest.fixture(scope="module")
def ranks(job: Any) -> Any:
    """ranks(case): what each of three wrote down."""
    results = job("healthy", 3)
    return lambda case: [result.get(case) for result in results]


@pytest.mark.slow
def test_what_one_rank_asks_for_all_do_and_where_one_cannot_nobody(ranks):
    answers = ranks("alone")
    every = (1 << len(answers)) - 1
    for rank, answer in enumerate(answers):
        assert answer == {
            "or": every,
            "none": 0,
            "highest": every << 13,
            "one cannot": 0,
            "again": every,
            "other steps": STEPS_DIFFER.format(60 + rank),
            "goes on": every,
        }


@pytest.mark.slow
def test_inference_mode_and_a_default_device_change_nothing(ranks):
    answers = ranks("modes")
    every = (1 << len(answers)) - 1
    assert answers == [[every, 2 * every]] * len(answers)


@pytest.mark.slow
def test_it_is_one_small_collective_of_host_memory(ranks):
    assert all(calls == [[24, "cpu"]] for calls in ranks("one_collective"))


@pytest.mark.slow
def test_a_group_without_a_cpu_backend_gets_one_gloo_group_or_is_refused(job):
    first, second = job("no_cpu")
    assert first == second
    assert first[:3] == [3, 0, 1]
    assert first[3].startswith("ValueError: the group's ranks cannot agree on the CPU: its backend")
    assert 'dist.new_group(ranks, backend="gloo")' in first[3]


@pytest.mark.slow
def test_a_group_of_some_ranks_agrees_without_the_others(ranks):
    outside, *inside = ranks("subset")
    assert outside.startswith("ValueError: this rank is not in the policy's group")
    assert inside == ["6", "6"]


@pytest.mark.slow
def test_a_destroyed_process_group_and_none_are_said_in_words(ranks):
    answers = ranks("destroyed")
    for answer in answers:
        assert answer[0] == (1 << len(answers)) - 1
        assert answer[1].startswith("RuntimeError: the ranks cannot agree: their process group was")
        assert answer[2].startswith("RuntimeError: the ranks cannot agree: torch.distributed has")


@pytest.mark.slow
def test_where_a_rank_is_dead_torch_says_so(job):
    first, second = job("dead")
    assert "Error" in first
    assert "ranks" not in first  # torch's own words
    assert second is None


# --- of a CleanupPolicy ---


@pytest.mark.slow
def test_pressure_on_one_rank_is_answered_by_all_at_the_same_update(ranks):
    (first, calm), (_, pressed), *_ = answers = ranks("pressure")
    assert [seen for seen, _ in answers] == [first] * len(answers)
    assert first
    assert first[0] % 10 == 0
    assert (calm, pressed) == (False, True)


@pytest.mark.slow
def test_ranks_of_other_costs_act_at_the_same_updates(ranks):
    (seen, *light), *others = ranks("costs")
    assert len(seen) > 5
    assert all(other[0] == seen for other in others)
    assert light != others[-1][1:]  # each has its own budget and back-off


@pytest.mark.slow
def test_where_one_rank_captures_a_graph_all_wait(ranks):
    assert all(seen == [50, 60, 80] for seen in ranks("capture"))


@pytest.mark.slow
def test_policies_that_are_not_alike_are_told_on_all_ranks(ranks):
    first, *others = ranks("unlike")
    assert first == STEPS_DIFFER.format(10)
    assert all(other == STEPS_DIFFER.format(5) for other in others)


@pytest.mark.slow
def test_ranks_that_decide_alone_are_told_once(ranks):
    for warned in ranks("alone_warns"):
        assert len(warned) == 1
        assert "ranks decides alone when to clean up" in warned[0]


@pytest.mark.slow
def test_without_torch_imported_it_refuses_and_imports_nothing():
    code = "import sys; from memtools._cleanup.ranks import Agreement\ntry: Agreement()\n"
    code += "except RuntimeError as error: print(error, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == (
        "the ranks cannot agree: torch.distributed has no process group; call "
        "torch.distributed.init_process_group() first, or leave ranks=None False\n"
    )

"""Ranks that accumulate: what goes over the wire, and windows by a small loop, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtools._grad.ranks import Ranks, find_ranks
from tests.grad.gradrankcases import Net, counts, data, reference, windows_of
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.slow  # each job of ranks imports torch


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ranks(case): what each of two, and of three, wrote down."""
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks("tests.grad.gradrankworker", "by_hand", request.param, folder)
    return lambda case: [result[case] for result in results]


def same(answers: list[Any]) -> Any:
    """What all ranks say alike."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def expected_ends(lengths: list[int], steps: int = 4) -> list[Any]:
    """[weight, micro-batches of each rank, finished] of every window of an epoch."""
    own = [windows_of(data(rank)[:n], steps) for rank, n in enumerate(lengths)]
    ends: list[Any] = []
    while not ends or not ends[-1][2]:
        windows = [w[len(ends)] if len(ends) < len(w) else [] for w in own]
        flushed = all(len(ends) >= n // steps for n in lengths)
        weight = sum(len(x) for window in windows for x, _ in window)
        ends.append([float(weight), [len(window) for window in windows], flushed])
    return ends


def close(found: list[float], wanted: list[float]) -> bool:
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return bool((a - b).norm() <= 1e-6 * b.norm())


def test_a_table_has_every_ranks_row_to_the_last_bit(ranks):
    rows, sums, alone, none = same(ranks("table"))
    world = len(rows)
    assert rows == [[rank + 0.1, 2.0**60 + rank] for rank in range(world)]
    assert sums == [world, sum(range(world))]
    assert (alone, none) == ([[float(rank)] for rank in range(world)], [])


def test_a_sum_takes_all_kinds_of_tensors_and_leaves_them_where_they_are(ranks):
    answers = ranks("sums")
    stays, sent, values = same(answers)
    total = 0.5 * sum(rank + 1 for rank in range(len(answers)))
    assert stays
    assert sent == 6  # a bucket of each of 4 dtypes, two more of float32
    assert values == [[total]] * 5 + [[]] + [[total]] * 3


def test_half_floats_are_summed_in_float32_and_rounded_once(ranks):
    answers = ranks("half_sums")
    kept, large = same(answers)
    assert kept == (256.0 if len(answers) == 2 else 258.0)
    assert large == [90000.0 - 30000.0 * len(answers), len(answers)]


def test_a_broadcast_is_the_first_ranks(ranks):
    assert same(ranks("copies")) == [[0.0] * 3, [0] * 2]


def test_inference_mode_and_a_default_device_change_nothing(ranks):
    rows, made = same(ranks("modes"))
    assert rows == [[float(rank)] for rank in range(len(rows))]
    assert made == [sum(range(len(rows)))] * 2


@pytest.mark.parametrize("case", ["windows", "without_ddp"])
def test_uneven_loaders_give_the_gradient_of_all_their_data(ranks, case):
    answers = ranks(case)
    found, ends = same(answers)  # parameters bit for bit
    lengths = counts(len(answers))
    batches = [data(rank)[:n] for rank, n in enumerate(lengths)]
    assert close(found, reference(Net(), batches, epochs=2))
    assert ends == expected_ends(lengths) * 2


def test_overlap_reduces_in_the_last_backward_pass_and_flushes_by_hand(ranks):
    answers = ranks("overlapped")
    found, ends, by_hand = same(answers)
    batches = [data(rank)[:6] for rank in range(len(answers))]
    assert close(found, reference(Net(), batches))
    assert ends == expected_ends([6] * len(answers))
    assert by_hand == 1


def test_no_forward_or_backward_pass_waits_for_another_rank(ranks):
    answers = ranks("no_collective")
    ends = same(answers)
    assert [end[1] for end in ends] == [[3] + [1] * (len(answers) - 1)] * 2


def test_batch_norm_sees_the_buffers_that_ddps_own_loop_sees(ranks):
    ours, theirs = same(ranks("batch_norm"))
    assert ours == theirs


def test_a_parameter_that_one_rank_alone_uses_gets_its_gradient_everywhere(ranks):
    answers = ranks("unused")
    assert same(answers) == [[[1.0, 1.0]]] * len(answers) + [None] * (4 - len(answers))


def test_where_a_rank_fails_all_are_told_and_go_on_together(ranks):
    answers = ranks("failing")
    world = len(answers)
    assert same([found for _, found in answers])
    for rank, (told, _) in enumerate(answers):
        assert told[0] == told[3] == "False"
        assert told[2] is True
        wanted = "its own" if rank == world - 1 else (
            f"RankError: rank {world - 1} failed in this window, its own error says how; "
            f"rank {rank} has not stepped: reset() drops its window"
        )  # fmt: skip
        assert told[1] == wanted
    batches = [data(rank)[:4] + data(rank)[8:12] for rank in range(world)]
    assert close(answers[0][1], reference(Net(), batches))


def test_what_a_rank_finds_at_the_end_is_its_own_error(ranks):
    first, *others = ranks("problem")
    assert first == "TypeError: sparse"
    assert all("RankError: rank 0 failed" in other for other in others)


def test_windows_of_two_kinds_are_an_error_on_every_rank(ranks):
    weighted, scale = same(ranks("unlike"))
    assert weighted.startswith("ValueError: some ranks gave their losses a weight")
    assert scale.startswith("ValueError: the ranks have different loss scales, [65536.0, 131072.0")


def test_what_is_not_supported_is_refused_at_once(ranks):
    words = ("static_graph", "communication hook", "mixed_precision", "fully_shard",
             "overlap=True is for", "overlap=True is for", "different models: [3, 4")  # fmt: skip
    found = same(ranks("refused"))
    assert len(found) == len(words)
    for word, told in zip(words, found, strict=True):
        assert told.startswith("ValueError: ")
        assert word in told


def test_the_model_says_which_way_its_ranks_work(ranks):
    answers = ranks("kinds")
    for rank, found in enumerate(answers):
        world = len(answers)
        many, alone = ["DataParallelRanks", world, rank, False], ["Ranks", 1, 0, False]
        plain = ["PlainRanks", world, rank, False]
        assert found == [alone, many, many, alone, plain, plain, plain[:3] + [True]]


def test_what_ddp_ignores_stays_each_ranks_own(ranks):
    answers = ranks("left_out")
    total = sum(rank + 1.0 for rank in range(len(answers)))
    assert answers == [[total] * 3 + [rank + 1.0] for rank in range(len(answers))]


# --- one process ----------------------------------------------------------------------------------


def test_one_process_agrees_with_itself():
    model = Net()
    ranks = find_ranks(model, list(model.parameters()))
    assert type(ranks) is Ranks
    assert (ranks.world, ranks.rank, ranks.no_retry) == (1, 0, "")
    assert (ranks.reduces, ranks.sharded, ranks.surrounds, ranks.finished) == (
        False,
        False,
        False,
        True,
    )
    with ranks.forward(True):
        pass
    ranks.fail(MemoryError())
    assert (ranks.guess(0.5), ranks.agree("full")) == (0.5, "full")


def test_overlap_without_ddp_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="overlap=True is for models"):
        find_ranks(model, list(model.parameters()), overlap=True)

"""GradAccumulator on three ranks, on gloo: the gradient of all their data, and no rank that
waits for one that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.grad.fsdprankcases import Deep
from tests.grad.gradrankcases import Net, counts, data, flat, reference
from tests.grad.pressurerankcases import whole_of_ranks
from tests.grad.test_ranks import close, expected_ends, same
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.slow  # each job of ranks imports torch

TORN = (
    "RuntimeError: micro_batch(): {} came after a backward pass had begun, so the gradients of "
    "this window are not those of whole micro-batches; reset() drops the window"
)
FAILED = (
    "RankError: rank {} failed in this window, its own error says how; rank {} has not stepped: "
    "reset() drops its window"
)


@pytest.fixture(scope="module", params=[3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ranks(case): what each of three wrote down."""
    folder = tmp_path_factory.mktemp("accumulating")
    results = run_ranks("tests.grad.accrankworker", "healthy", request.param, folder)
    return lambda case: [result[case] for result in results]


def test_uneven_loaders_give_the_gradient_of_all_their_data(ranks):
    answers = ranks("windows")
    found, ends, updates, micro_batches, steps = same(answers)
    lengths = counts(len(answers))
    batches = [data(rank)[:n] for rank, n in enumerate(lengths)]
    assert close(found, reference(Net(), batches, epochs=2))
    windows = expected_ends(lengths)
    *_, last = [[sum(each), weight, False] for weight, each, _ in windows if weight]
    assert ends == [last] * 2
    assert updates == steps == 2 * sum(weight > 0 for weight, _, _ in windows)
    assert micro_batches == 2 * sum(lengths)


def test_without_weights_each_micro_batch_counts_one_wherever_it_was(ranks):
    answers = ranks("means")
    model = Net().double()
    batches = [batch for rank in range(len(answers)) for batch in data(rank)[: 2 + rank]]
    losses = [(model(x.double()) - y.double()).square().sum() / len(x) for x, y in batches]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert close(same(answers), flat(model))


def test_gradients_that_are_views_of_ddps_buckets_have_the_same_bits(ranks):
    for wrong in ranks("views"):
        assert wrong == []


def test_a_job_of_one_rank_is_one_of_many(tmp_path):
    (found,) = run_ranks("tests.grad.accrankworker", "alone", 1, tmp_path)
    assert found["views"] == []
    batches = [data(0)[:10]]
    assert close(found["windows"][0], reference(Net(), batches, epochs=2))
    assert found["losses"][0] == [pytest.approx(found["losses"][1][0]), *found["losses"][1][1:]]
    assert found["clipped"][2] < 1
    assert found["out_of_memory"][0] == []
    assert found["fsdp_out_of_memory"] == []


def test_a_closed_accumulator_leaves_ddp_as_it_was(ranks):
    before, after, gradients = same(ranks("closed"))
    assert (before, after) == (True, True)
    assert gradients


def test_a_closed_accumulator_leaves_nothing_around_fsdps_calls_and_a_newer_one_wraps_once(ranks):
    for answer in ranks("fsdp_closed"):
        assert answer == [[1], [1], [1], [0], []]


def test_loss_and_sums_are_each_ranks_own_and_the_weight_is_that_of_all(ranks):
    answers = ranks("losses")
    for (loss, weight, extras), (own_loss, rows, own_extras), _ in answers:
        assert loss == pytest.approx(own_loss, rel=1e-6)
        assert (weight, extras) == (rows, own_extras)
    together = sum(weight for (_, weight, _), _, _ in answers)
    assert [whole for _, _, whole in answers] == [together] * len(answers)


def test_the_norm_is_that_of_the_whole_gradient(ranks):
    answers = ranks("clipped")
    found, norm, coefficient = same(answers)
    model = Net().double()
    together = [batch for rank in range(len(answers)) for batch in data(rank)[:4]]
    x, y = (torch.cat(parts).double() for parts in zip(*together, strict=True))
    ((model(x) - y).square().sum() / len(x)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert norm == pytest.approx(wanted, rel=1e-6)
    assert coefficient == pytest.approx(0.05 / wanted, rel=1e-4)
    assert close(found, flat(model))


def test_fp32_gradients_of_bf16_are_what_the_ranks_sum(ranks):
    """Two windows of bf16 parameters, the second of rank 0 alone."""
    answers = ranks("wide_gradients")
    found, updates, refused, both = same(answers)
    batches = [data(rank)[: 8 if rank == 0 else 3] for rank in range(len(answers))]
    wanted = torch.tensor(reference(Net(), batches))
    assert (torch.tensor(found) - wanted).norm() < 0.01 * wanted.norm()
    assert updates == 2
    assert refused.startswith("ValueError: grad_dtype is not for fully_shard")
    assert both.startswith("ValueError: overlap=True reduces the gradients of the last")


def test_an_inf_on_one_rank_leaves_the_update_out_on_all(ranks):
    seen, _, scale = same(ranks("skips"))
    first, unmoved, second, stayed = seen
    assert first == [True, True, first[2], "module.body.weight", 256.0]
    assert second == [False, False, 0, None, 128.0]
    assert (unmoved, stayed, scale) == (True, False, 128.0)


def test_an_exception_after_a_backward_pass_drops_the_window_on_all_ranks(ranks):
    answers = ranks("torn")
    world = len(answers)
    batches = [data(rank)[:4] + data(rank)[8:12] for rank in range(world)]
    assert close(same([found for _, found, _ in answers]), reference(Net(), batches))
    for rank, (told, _, updates) in enumerate(answers):
        alone = rank == world - 1
        error = "ValueError: a bad batch" if alone else FAILED.format(world - 1, rank)
        torn = TORN.format("ValueError" if alone else "RankError")
        assert told == ["None", error, torn, True, "None"]
        assert updates == 2


def test_a_batch_that_fails_before_its_backward_pass_can_be_left_out(ranks):
    answers = ranks("skipped_batch")
    first = [data(0)[i] for i in (0, 1, 3, 4)]
    batches = [first] + [data(rank)[:4] for rank in range(1, len(answers))]
    found, micro_batches = same(answers)
    assert close(found, reference(Net(), batches))
    assert micro_batches == 4 * len(answers)


def test_a_gradient_that_cannot_be_summed_is_one_ranks_error_and_told_to_the_others(ranks):
    first, *others = ranks("sparse_error")
    assert first.startswith("TypeError: the gradient of 0.weight is sparse")
    assert others == [FAILED.format(0, rank + 1) for rank in range(len(others))]


def test_weights_of_zero_count_over_all_ranks(ranks):
    answers = ranks("no_weight")
    good, refused, found, updates = same(answers)
    world = len(answers)
    once = [[data(rank)[0]] * 4 for rank in range(1, world)]
    assert close(good, reference(Net(), once))
    assert refused.startswith("ValueError: the weights of this window sum to 0")
    after = [data(rank)[0] for rank in range(world)]
    assert close(found, reference(Net(), [[*once[0], *after], *once[1:]]))
    assert updates == 2


def test_a_flush_of_nothing_anywhere_does_nothing(ranks):
    assert same(ranks("nothing")) == [None, None, 0]


def test_a_state_of_the_middle_of_a_window_goes_on_to_the_same_bits(ranks):
    assert same(ranks("resumed")) is True


# --- step() under OOM -----------------------------------------------------------------------------


def test_an_oom_on_one_rank_at_any_micro_batch_equals_the_run_with_that_split(ranks):
    answers = ranks("out_of_memory")
    assert [wrong for wrong, _ in answers] == [[]] * len(answers)
    left = same([left for _, left in answers])  # parameters and buffers, on every rank
    assert len(left) == 8
    assert left[0][0] != left[2][0]  # another split is another run


def test_a_rank_that_fails_for_good_raises_its_own_error_and_the_others_are_told(ranks):
    answers = ranks("hopeless")
    world = len(answers)
    same([parameters for _, parameters in answers])
    for rank, (found, _) in enumerate(answers):
        told = f"RankError: rank {world - 1} failed in this window"
        wanted = "OutOfMemoryError: CUDA out of memory" if rank == world - 1 else told
        assert found[0].startswith(wanted[:30])
        assert found[1:] == [[True, 0], True]


def test_an_exception_of_a_loss_function_is_its_ranks_own(ranks):
    answers = ranks("raises")
    same([parameters for _, parameters in answers])
    firsts = [found[0] for found, _ in answers]
    assert firsts[0].startswith("KeyError")
    assert all(first.startswith("RankError: rank 0 failed") for first in firsts[1:])
    assert [found[1] for found, _ in answers] == [True] * len(answers)


def test_a_rank_without_batches_flushes_while_others_step(ranks):
    _, updates = same(ranks("ended"))
    assert updates == 3


def test_a_rank_that_died_is_torchs_error_on_the_others(tmp_path):
    first, second = run_ranks("tests.grad.accrankworker", "dead", 2, tmp_path)
    assert first in ("RuntimeError", "DistBackendError", "DistNetworkError")
    assert second is None


# --- fully_shard ----------------------------------------------------------------------------------


def test_sharded_models_have_the_gradient_and_the_norm_of_all_data(ranks):
    answers = ranks("fsdp")
    model, world = Deep().double(), len(answers)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for start, end in ((0, 4), (4, 8), (8, 10)):
        together = [batch for rank in range(world) for batch in data(rank)[start:end]]
        x, y = (torch.cat(parts).double() for parts in zip(*together, strict=True))
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / len(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item()
        optimizer.step()
    for found, seen, weight, micro_batches in same(answers):  # one dimension, and with replicas
        assert close(found, flat(model))
        assert seen == pytest.approx(norm, rel=1e-6)
        assert (weight, micro_batches) == (len(x), 2 * world)


def test_an_inf_in_one_ranks_part_is_seen_by_all(ranks):
    skipped, counted, first_bad, unmoved, scale = same(ranks("fsdp_scale"))
    assert (skipped, counted, unmoved, scale) == (True, True, True, 128.0)
    assert first_bad == "first.weight"


def test_an_oom_between_two_collectives_lets_all_ranks_halve_together(ranks):
    assert same(ranks("fsdp_out_of_memory")) == []


def test_whatever_takes_a_sharded_micro_batch_back_has_the_same_bits(ranks):
    assert same(ranks("fsdp_undo")) == []


def test_a_sharded_rank_that_fails_for_good_ends_the_window_of_all(ranks):
    first, *others = ranks("fsdp_hopeless")
    assert first[0].startswith("OutOfMemoryError: CUDA")
    assert all(other[0] == "PeerMemoryError: out of memory on rank 0" for other in others)
    assert all(answer[1:] == [True, "True", False] for answer in (first, *others))


def test_an_exception_on_a_sharded_rank_is_told_in_the_middle_of_a_pass(ranks):
    answers = ranks("fsdp_raises")
    same([parameters for _, parameters in answers])
    for rank, (found, _) in enumerate(answers):
        assert found == ["KeyError: 'label'" if rank == 0 else FAILED.format(0, rank)] * 2 + [
            True,
            "None",
        ]


def test_uneven_loaders_of_a_sharded_model_are_an_error_on_every_rank(ranks):
    for told in same(ranks("fsdp_uneven")):
        assert told.startswith(
            "RankError: the ranks do not have the same micro-batches: rank 0 is in a micro-batch, "
            "rank 1 is at flush()"
        )


def test_parts_that_are_not_sharded_are_refused(ranks):
    part, ignored, overlap = same(ranks("fsdp_refused"))
    assert part.startswith("ValueError: first.weight is not sharded")
    assert ignored.startswith("ValueError: last.bias is not sharded")
    assert overlap.startswith("ValueError: overlap=True is for models in Distributed")


def test_only_micro_batches_ask_the_ranks(ranks):
    outside, inside = same(ranks("fsdp_outside"))
    assert outside == 0
    assert inside >= 2 * 4  # a gather and a reduction of each of 4 groups, at least


def test_a_rank_that_is_short_of_memory_takes_fewer_rows_and_the_gradient_is_that_of_all(ranks):
    """By a monitor, before anything runs out: alone with DDP, together with fully_shard, whose
    ranks go through each micro-batch at once."""
    answers = ranks("pressure")
    world = len(answers)
    found = same([answer[0] for answer in answers])
    assert close(found, whole_of_ranks(world))
    sizes = [answer[1] for answer in answers]
    assert sizes[:-1] == [[[2, 2, 4, 8, 8], [16, 8]]] * (world - 1)
    assert sizes[-1] == [[2, 2, 4, 4, 4, 4, 4], [4] * 6]


def test_sharded_ranks_take_the_rows_that_the_shortest_of_them_has_room_for(ranks):
    answers = ranks("pressure_sharded")
    parameters = same([answer[0] for answer in answers])
    assert close(parameters, whole_of_ranks(len(answers), sharded=True))
    sizes = same([answer[1] for answer in answers])
    assert sizes == [[2, 2, 4, 4, 4, 4, 4], [4] * 6]


def test_a_monitor_on_some_ranks_alone_is_refused_and_one_that_does_not_run_is_told_to_all(ranks):
    answers = ranks("pressure_refused")
    for rank, (sharded, plain) in enumerate(answers):
        assert sharded.startswith("ValueError: some ranks have a monitor and others none")
        last = rank == len(answers) - 1
        assert plain.startswith("RuntimeError: step(): the monitor" if last else "RankError: rank")

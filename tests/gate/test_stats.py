"""GateStats against float64 torch."""

from __future__ import annotations

import math
import re

import pytest
import torch

from memtools import GateHistory, GateStats


def reference(tensors: list[torch.Tensor], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean gate in float64, and how often each expert is among the top_k."""
    rows = torch.cat([tensor.double() for tensor in tensors])
    top = rows.topk(top_k, dim=-1).indices
    return rows.mean(0), torch.bincount(top.flatten(), minlength=rows.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
@pytest.mark.parametrize("experts", [9, 16, 31, 48, 64, 100, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_importance_and_load_are_exact_over_everything_ever_appended(experts, top_k, dtype):
    tensors = [torch.softmax(torch.randn(n * 13, experts), -1).to(dtype) for n in range(1, 9)]
    history = GateHistory(max_entries=2, top_k=top_k)
    history.extend(tensors)
    stats = history.stats()
    importance, load = reference(tensors, top_k)
    assert stats.tokens == sum(len(tensor) for tensor in tensors)
    assert stats.entries == len(tensors)
    got = torch.tensor(stats.importance, dtype=torch.float64)
    assert torch.allclose(got, importance, rtol=1e-13, atol=0)
    assert list(stats.load) == load.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gates_are_counted_as_they_are_with_ties_to_the_lower_expert(dtype):
    tensor = torch.softmax(torch.randn(4000, 16), -1).to(dtype)
    history = GateHistory()
    history.append(tensor)
    winner = [row.index(max(row)) for row in tensor.tolist()]
    assert list(history.stats().load) == torch.bincount(torch.tensor(winner), minlength=16).tolist()
    got = torch.tensor(history.stats().importance, dtype=torch.float64)
    assert torch.allclose(got, tensor.double().mean(0), rtol=1e-13, atol=0)


def test_a_router_that_starts_at_zero_gives_all_tokens_to_the_first_expert():
    history = GateHistory()
    history.append(torch.full((1000, 64), 1 / 64))
    assert history.stats().load == (1000, *[0] * 63)
    assert len(history.stats().dead_experts) == 63


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_non_finite_gates_are_recorded_counted_and_left_out_of_the_sums(bad, dtype):
    tensor = torch.softmax(torch.randn(600, 16), -1).to(dtype)
    tensor[::100, 3] = bad
    history = GateHistory()
    history.append(tensor)
    stats = history.stats()
    assert (stats.tokens, stats.nonfinite_tokens) == (600, 6)
    finite = tensor[torch.isfinite(tensor).all(-1)]
    importance, load = reference([finite], 1)
    assert torch.allclose(torch.tensor(stats.importance, dtype=torch.float64), importance)
    if dtype != torch.float16:  # ties go another way in topk
        assert list(stats.load) == load.tolist()
    assert torch.equal(history[0].isfinite(), tensor.isfinite())


def test_largest_floats_do_not_overflow_into_non_finite():
    history = GateHistory()
    top = torch.finfo(torch.float32).max
    history.append(torch.tensor([[top, -top, 0.0]] * 8))
    assert history.stats().nonfinite_tokens == 0
    assert history.stats().importance == (top, -top, 0.0)


def test_derived_figures_have_their_textbook_values():
    stats = GateStats(1, 12, 0, 1, (0.5, 0.25, 0.25, 0.0), (6, 3, 3, 0))
    assert stats.n_experts == 4
    assert stats.load_fraction == (0.5, 0.25, 0.25, 0.0)
    assert stats.entropy == pytest.approx(1.5 * math.log(2))
    assert stats.importance_entropy == pytest.approx(1.5 * math.log(2))
    assert stats.cv == pytest.approx(math.sqrt(4.5) / 3)
    assert stats.max_violation == 1.0
    assert stats.dead_experts == (3,)
    balanced = GateStats(1, 8, 0, 2, (0.5, 0.5), (8, 8))
    assert (balanced.cv, balanced.max_violation, balanced.dead_experts) == (0.0, 0.0, ())
    assert balanced.entropy == pytest.approx(math.log(2))


def test_an_empty_history_has_empty_statistics():
    stats = GateHistory().stats()
    assert (stats.entries, stats.tokens, stats.n_experts) == (0, 0, 0)
    assert (stats.entropy, stats.cv, stats.max_violation) == (0.0, 0.0, 0.0)
    assert stats.dead_experts == ()
    assert GateHistory().windows() == []


def test_zero_rows_are_an_entry_without_tokens():
    history = GateHistory()
    history.append(torch.empty(0, 8))
    assert history.stats().entries == 1
    assert history.stats().tokens == 0
    assert history.stats().dead_experts == ()
    assert history[0].shape == (0, 8)


def test_a_window_covers_the_newest_records(gates):
    tensors = [gates(n) for n in range(1, 30)]
    history = GateHistory(max_entries=20, trim="oldest")
    history.extend(tensors)
    for window in (0, 1, 7, 20):
        newest = GateHistory()
        newest.extend(tensors[len(tensors) - window :])
        got, want = history.stats(window=window), newest.stats()
        assert (got.tokens, got.load or want.load) == (want.tokens, want.load or got.load)
        assert got.importance == pytest.approx(want.importance or got.importance, rel=1e-14)
    for window in (-1, 21):
        with pytest.raises(ValueError, match="holds 20"):
            history.stats(window=window)


@pytest.mark.parametrize("entries", [1, 5, 127, 128, 129, 130, 255, 256, 257, 1000, 5000])
def test_windows_cover_the_whole_run_in_constant_memory(entries):
    tensors = [torch.softmax(torch.randn(3, 4), -1) for _ in range(entries)]
    history = GateHistory(max_entries=2)
    history.extend(tensors)
    windows = history.windows()
    assert len(windows) <= 129
    assert sum(window.entries for window in windows) == entries
    assert len({window.entries for window in windows[:-1]}) <= 1
    loads = torch.tensor([window.load for window in windows])
    assert loads.sum(0).tolist() == list(history.stats().load)
    first = reference(tensors[: windows[0].entries], 1)
    assert windows[0].importance == pytest.approx(first[0].tolist(), rel=1e-12)
    last = reference(tensors[-windows[-1].entries :], 1)
    assert windows[-1].importance == pytest.approx(last[0].tolist(), rel=1e-10)


def test_clear_keeps_statistics_and_reset_stats_keeps_records(gates):
    history = GateHistory()
    history.append(gates(5))
    history.clear()
    assert history.stats().tokens == 5
    history.append(gates(7))
    history.reset_stats()
    assert (len(history), history.stats().tokens, history.windows()) == (1, 0, [])
    history.append(gates(2))
    assert history.stats().tokens == 2


def test_statistics_are_the_same_for_every_record_format(gates):
    tensor = gates(100)
    plain = GateHistory(top_k=2)
    plain.append(tensor)
    for options in ({"dtype": "float16"}, {"keep": "topk"}, {"dtype": "bfloat16", "keep": "topk"}):
        history = GateHistory(top_k=2, **options)
        history.append(tensor)
        assert history.stats() == plain.stats()


def test_str_is_one_line_of_figures(gates):
    history = GateHistory()
    history.append(gates(1000))
    pattern = (
        r"1,000 tokens in 1 entries, 8 experts: load entropy \d\.\d+ of 2\.079 nats, cv 0\.\d+ and "
        r"max violation 0\.\d+ of the mean load, 0 dead experts"
    )
    assert re.fullmatch(pattern, str(history.stats()))


@pytest.mark.parametrize("dtype", [None, "float64", "float16"])
def test_a_slice_of_topk_records_of_negative_gates_counts_what_was_kept(dtype):
    tensor = -torch.rand(50, 8) - 1.0
    history = GateHistory(keep="topk", top_k=2, dtype=dtype)
    history.append(tensor)
    assert history[:].stats().load == history.stats().load == history.stats(window=1).load


@pytest.mark.slow
@pytest.mark.parametrize("experts", [8, 16, 32, 48, 64, 60, 128, 1100])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("special", ["distinct", "ties", "nan"])
def test_large_entries_that_are_copied_while_they_are_counted(experts, before, special):
    tensor = torch.softmax(torch.randn(2051 if experts < 1000 else 67, experts), -1)
    if special == "ties":
        tensor[::3, 1] = tensor[::3, 5] = 2.0
    if special == "nan":
        tensor[7, 2] = math.nan
    history = GateHistory(max_bytes="64 MiB")
    for _ in range(before):  # 2 * experts bytes each: not every record starts on a cache line
        history.append(torch.zeros(1, experts, dtype=torch.float16))
    history.reset_stats()
    history.append(tensor)
    assert torch.equal(history[-1].nan_to_num(-1.0), tensor.nan_to_num(-1.0))
    finite = tensor[tensor.isfinite().all(-1)].double()
    winner = [row.index(max(row)) for row in finite.tolist()]
    assert (
        list(history.stats().load)
        == torch.bincount(torch.tensor(winner), minlength=experts).tolist()
    )
    got = torch.tensor(history.stats().importance, dtype=torch.float64)
    assert torch.allclose(got, finite.mean(0), rtol=1e-13, atol=0)

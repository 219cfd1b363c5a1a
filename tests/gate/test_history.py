"""GateHistory as a list: contents, limits, slices, torch.cat; against a plain list."""

from __future__ import annotations

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import memtools
from memtools import GateHistory
from tests.kit.ownprocess import in_own_process


def same(history: GateHistory, tensors: list[torch.Tensor]) -> bool:
    return len(history) == len(tensors) and all(
        got.dtype == want.dtype and torch.equal(got, want)
        for got, want in zip(history, tensors, strict=True)
    )


def test_keeps_order_values_and_dtype_like_a_list(gates):
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    tensors = [gates(n, 8, dtypes[n % 4]) for n in range(1, 20)]
    history = GateHistory()
    history.extend(tensors)
    assert same(history, tensors)
    assert [history[i].tolist() for i in range(-19, 19)] == [
        tensors[i].tolist() for i in range(-19, 19)
    ]


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_eight_bit_gates_come_back_bit_for_bit(gates, name):
    tensor = gates(16).to(getattr(torch, name))
    history = GateHistory()
    history.append(tensor)
    assert history[0].dtype == tensor.dtype
    assert torch.equal(history[0].view(torch.uint8), tensor.view(torch.uint8))
    expected = tensor.double().mean(0)
    assert torch.allclose(
        torch.tensor(history.stats().importance, dtype=torch.float64), expected, rtol=1e-12
    )


def test_is_false_when_empty_and_true_when_not(gates):
    history = GateHistory()
    assert not history
    history.append(gates())
    assert history
    history.clear()
    assert not history
    assert list(history) == []


def test_an_index_past_either_end_is_an_index_error(gates):
    history = GateHistory()
    history.append(gates())
    for index in (1, -2, 10**30):
        with pytest.raises(IndexError):
            history[index]
    with pytest.raises(TypeError, match="integers or slices"):
        history["0"]


class ClosesWhenUsed:
    """An index whose conversion runs code of the user's, which closes the history."""

    def __init__(self, history: GateHistory, index: int) -> None:
        self.history, self.index = history, index

    def __index__(self) -> int:
        self.history.close()
        return self.index


CONVERTED = {
    "index": lambda history, one: history[one],
    "start": lambda history, one: history[one:],
    "stop": lambda history, one: history[:one],
    "step": lambda history, one: history[::one],
    "window": lambda history, one: history.stats(one),
}


@pytest.mark.parametrize("value", [1, -1])
@pytest.mark.parametrize("convert", CONVERTED)
def test_an_index_that_closes_the_history_is_told_so(gates, convert, value):
    history = GateHistory()
    history.append(gates())
    with pytest.raises(ValueError, match="this GateHistory is closed"):
        CONVERTED[convert](history, ClosesWhenUsed(history, value))


@pytest.mark.slow
@pytest.mark.parametrize("read", ["history[0]", "history._cat()"])
def test_a_history_that_is_closed_while_its_first_read_imports_torch(gates, read, tmp_path):
    history = GateHistory()
    history.append(gates())
    history.save(tmp_path / "gates")
    said = in_own_process(
        """
        import sys
        from memtools import GateHistory

        class ClosesAtTheImport:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    history.close()

        history = GateHistory.load(sys.argv[1])
        sys.meta_path.insert(0, ClosesAtTheImport())
        try:
            eval(sys.argv[2])
        except ValueError as error:
            print(error)
        """,
        tmp_path / "gates",
        read,
    )
    assert said == "this GateHistory is closed\n"


@pytest.mark.parametrize("layout", ["transposed", "column_step", "expanded", "row_step", "offset"])
def test_reads_any_memory_layout(layout):
    base = torch.rand(24, 24)
    tensor = {
        "transposed": base.t()[:, :8],
        "column_step": base[:, ::3],
        "expanded": base[:1, :8].expand(5, 8),
        "row_step": base[::2, :8],
        "offset": base[3:, 5:13],
    }[layout]
    history = GateHistory()
    history.append(tensor)
    assert torch.equal(history[0], tensor)


def test_an_entry_is_a_copy_and_pins_nothing():
    base = torch.rand(512, 512)
    history = GateHistory()
    part = base[:, :8]
    history.append(part)
    expected = part.clone()
    base.zero_()
    assert torch.equal(history[0], expected)
    assert history.nbytes == 512 * 8 * 4


def test_what_is_read_owns_its_bytes(gates):
    history = GateHistory()
    tensor = gates()
    history.append(tensor)
    first, second = history[0], history[0]
    first.zero_()
    assert torch.equal(second, tensor)
    history.close()
    assert torch.equal(second, tensor)
    assert second.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_takes_leaves_parameters_and_graph_outputs(requires_grad):
    leaf = torch.rand(4, 8, requires_grad=requires_grad)
    tensors = [leaf, torch.softmax(leaf, -1), torch.nn.Parameter(leaf.detach())]
    history = GateHistory()
    history.extend(tensors)
    assert all(not entry.requires_grad for entry in history)
    assert torch.equal(history[1], tensors[1].detach())


def test_works_under_no_grad_inference_mode_and_autocast(gates):
    history = GateHistory()
    tensor = gates()
    with torch.no_grad():
        history.append(tensor)
    with torch.inference_mode():
        history.append(tensor * 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        history.append(tensor)
    assert same(history, [tensor] * 3)


def test_a_tensor_subclass_with_its_own_memory_is_taken(gates):
    class Gate(torch.Tensor):
        pass

    tensor = gates()
    history = GateHistory()
    history.append(tensor.as_subclass(Gate))
    assert type(history[0]) is torch.Tensor
    assert torch.equal(history[0], tensor)


def test_a_lazily_negated_view_is_recorded_with_the_right_sign():
    negated = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    history = GateHistory()
    history.append(negated)
    assert torch.equal(history[0], negated.clone())


@pytest.mark.parametrize("name", ["cat", "concat", "concatenate", "vstack"])
def test_torch_cat_and_its_names_give_what_they_give_for_a_list(gates, name):
    tensors = [gates(n) for n in (3, 1, 0, 7)]
    history = GateHistory()
    history.extend(tensors)
    function = getattr(torch, name)
    assert torch.equal(function(history), function(tensors))


def test_torch_functions_of_a_list_take_a_history(gates):
    tensors = [gates(6) for _ in range(5)]
    history = GateHistory()
    history.extend(tensors)
    assert torch.equal(torch.cat(history, dim=0), torch.cat(tensors, dim=0))
    assert torch.equal(torch.cat(history, -2), torch.cat(tensors, -2))
    assert torch.equal(torch.cat(history, dim=1), torch.cat(tensors, dim=1))
    assert torch.equal(torch.stack(history), torch.stack(tensors))
    assert torch.equal(torch.stack(history, dim=1), torch.stack(tensors, dim=1))
    assert torch.equal(torch.hstack(history), torch.hstack(tensors))
    assert torch.equal(torch.cat(history[-2:]), torch.cat(tensors[-2:]))


def test_cat_of_mixed_dtypes_promotes_as_torch_does(gates):
    tensors = [gates(2), gates(2, dtype=torch.float64), gates(2, dtype=torch.bfloat16)]
    history = GateHistory()
    history.extend(tensors)
    assert torch.equal(torch.cat(history), torch.cat(tensors))


def test_cat_of_nothing_fails_as_torch_does():
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        torch.cat([])
    with pytest.raises(type(theirs.value)):
        torch.cat(GateHistory())


def test_a_slice_is_a_history_with_the_same_limits_and_its_own_life(gates):
    tensors = [gates(n + 1) for n in range(20)]
    history = GateHistory(max_entries=30, max_bytes="1 MiB", trim="oldest")
    history.extend(tensors)
    part = history[-5:]
    assert isinstance(part, GateHistory)
    assert (part.max_entries, part.max_bytes, part.trim) == (30, 2**20, "oldest")
    part.append(tensors[0])
    assert same(part, [*tensors[-5:], tensors[0]])
    assert same(history, tensors)
    history.close()
    assert same(part, [*tensors[-5:], tensors[0]])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    start=st.none() | st.integers(-25, 25),
    stop=st.none() | st.integers(-25, 25),
    step=st.none() | st.integers(-4, 4).filter(bool),
)
def test_every_slice_is_the_list_slice(start, stop, step):
    tensors = [torch.rand(n % 5, 3) for n in range(20)]
    history = GateHistory(max_entries=20)
    history.extend(tensors)
    part = history[start:stop:step]
    assert same(part, tensors[start:stop:step])
    assert part.stats().tokens == sum(len(tensor) for tensor in tensors[start:stop:step])


def test_trim_half_leaves_what_the_hand_written_rule_leaves(gates):
    history, plain = GateHistory(max_entries=100), []
    for n in range(1000):
        tensor = gates(n % 3 + 1)
        history.append(tensor)
        plain.append(tensor)
        if len(plain) > 100:
            plain = plain[-50:]
        assert len(history) == len(plain)
    assert same(history, plain)


@pytest.mark.parametrize("trim", ["half", "oldest"])
def test_both_limits_hold_at_every_step(trim):
    history = GateHistory(max_entries=40, max_bytes=20_000, trim=trim)
    for n in range(2000):
        rows = (n * 37) % 200
        history.append(torch.rand(rows, 8))
        assert len(history) <= 40
        assert history.nbytes <= 20_000
        assert history.arena_bytes <= 20_000
        assert len(history[-1]) == rows


def test_equal_entries_use_no_more_memory_than_they_hold():
    history = GateHistory(max_entries=100, max_bytes="64 MiB")
    for _ in range(1000):
        history.append(torch.rand(32, 8))
    assert history.arena_bytes == 100 * 32 * 8 * 4


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_record_dtype_rounds_as_torch_does(dtype, source):
    tensor = torch.cat([torch.rand(300, 8), torch.randn(300, 8) * 1e-6, torch.randn(99, 8) * 7e4])
    tensor = tensor.to(source)
    wanted = tensor.to(getattr(torch, dtype))
    for spelled in (dtype, getattr(torch, dtype)):
        history = GateHistory(dtype=spelled)
        history.append(tensor)
        assert history[0].dtype == wanted.dtype
        assert torch.equal(history[0], wanted)
    assert history.nbytes == wanted.nbytes


@pytest.mark.parametrize("experts", [8, 300, 70_000])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_topk_records_hold_the_largest_gates_and_read_back_dense(experts, dtype):
    tensor = torch.rand(6, experts)
    history = GateHistory(keep="topk", top_k=2, dtype=dtype)
    history.append(tensor)
    values, index = tensor.topk(2, dim=-1)
    kept = getattr(torch, dtype or "float32")
    wanted = torch.zeros(6, experts, dtype=kept).scatter(1, index, values.to(kept))
    assert torch.equal(history[0], wanted)
    width = 1 if experts <= 256 else 2 if experts <= 65536 else 4
    assert history.nbytes == 6 * 2 * (width + kept.itemsize)
    assert torch.equal(torch.cat(history), wanted)


def test_statistics_false_only_records(gates):
    history = GateHistory(statistics=False)
    history.append(gates())
    assert len(history) == 1
    for ask in (history.stats, history.windows, history.reset_stats):
        with pytest.raises(ValueError, match="statistics=True"):
            ask()


def test_deepcopy_and_pickle_give_an_equal_independent_history(gates):
    history = GateHistory(max_entries=5, trim="oldest", top_k=2)
    history.extend(gates(n) for n in range(1, 9))
    for clone in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert type(clone) is GateHistory
        assert same(clone, list(history))
        assert clone.stats() == history.stats()
        assert clone.windows() == history.windows()
        clone.clear()
    assert len(history) == 5


def test_a_model_with_a_history_can_be_deep_copied():
    model = torch.nn.Linear(2, 2)
    model.gate_history = GateHistory()
    model.gate_history.append(torch.rand(1, 2))
    assert len(copy.deepcopy(model).gate_history) == 1
    assert list(model.state_dict()) == ["weight", "bias"]


def test_repr_says_how_full_it_is(gates):
    history = GateHistory(max_entries=10, max_bytes="1 MiB")
    history.append(gates(32))
    assert repr(history) == (
        "GateHistory(1 of 10 entries, 1.0 KiB of 1.0 MiB, 8 experts, 1 appended)"
    )
    history.close()
    assert repr(history) == "GateHistory(closed)"


class Against(RuleBasedStateMachine):
    """Random operations on a history and on a plain list with the limits written out by hand."""

    MAX_ENTRIES, MAX_BYTES = 9, 2000

    def __init__(self) -> None:
        super().__init__()
        self.trim = "oldest"
        self.history = GateHistory(self.MAX_ENTRIES, self.MAX_BYTES, trim=self.trim)
        self.plain: list[torch.Tensor] = []
        self.tokens = 0

    @rule(rows=st.integers(0, 30), dtype=st.sampled_from([torch.float32, torch.float16]))
    def append(self, rows: int, dtype: torch.dtype) -> None:
        tensor = torch.rand(rows, 5).to(dtype)
        self.history.append(tensor)
        self.tokens += rows
        self.plain = [*self.plain, tensor][-self.MAX_ENTRIES :]
        while sum(t.nbytes for t in self.plain) > self.MAX_BYTES:
            del self.plain[0]

    @rule()
    def clear(self) -> None:
        self.history.clear()
        self.plain = []

    @rule(keep=st.integers(0, 9))
    def take_a_slice(self, keep: int) -> None:
        self.history = self.history[len(self.plain) - min(keep, len(self.plain)) :]
        self.plain = self.plain[len(self.plain) - min(keep, len(self.plain)) :]
        self.tokens = sum(len(tensor) for tensor in self.plain)

    @rule()
    def pickle(self) -> None:
        self.history = pickle.loads(pickle.dumps(self.history))

    @rule()
    def refuse_what_is_too_large(self) -> None:
        with pytest.raises(memtools.BudgetError):
            self.history.append(torch.rand(101, 5))

    @invariant()
    def equal(self) -> None:
        assert same(self.history, self.plain)
        assert self.history.nbytes == sum(t.nbytes for t in self.plain)
        assert self.history.stats().tokens == self.tokens
        if self.plain:
            assert torch.equal(torch.cat(self.history), torch.cat(self.plain))


Against.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestAgainstAPlainList = Against.TestCase


def test_half_subnormals_survive_in_a_process_that_flushes_denormals():
    tensor = torch.full((2, 2), 2.0**-24, dtype=torch.float16)
    history = GateHistory(dtype="float32")
    torch.set_flush_denormal(True)
    try:
        history.append(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert history[0].tolist() == [[2.0**-24] * 2] * 2
    assert history.stats().importance == (2.0**-24, 2.0**-24)

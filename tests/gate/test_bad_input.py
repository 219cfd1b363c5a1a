"""Whatever cannot be recorded is refused in one clear sentence, and changes nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memtools
from memtools import GateHistory


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4, 8)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantised tensors
        return torch.quantize_per_tensor(torch.rand(4, 8), 0.1, 0, torch.quint8)


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR support beta
        return torch.ones(4, 8).to_sparse_csr()


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "meta": (lambda: torch.zeros(4, 8, device="meta"), TypeError, "meta device"),
    "fake": (fake, TypeError, "FakeTensor"),
    "zero tensor": (lambda: torch._efficientzerotensor((4, 8)), TypeError, "no plain memory"),
    "sparse": (lambda: torch.rand(4, 8).to_sparse(), TypeError, r"to_dense\(\)"),
    "sparse csr": (sparse_csr, TypeError, r"to_dense\(\)"),
    "quantised": (quantised, TypeError, r"dequantize\(\)"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.rand(2, 8)], layout=torch.jagged),
        TypeError,
        "nested|wrapper",
    ),
    "complex": (lambda: torch.rand(4, 8, dtype=torch.complex64), TypeError, "complex"),
    "conjugated": (lambda: torch.rand(4, 8, dtype=torch.complex64).conj(), TypeError, "complex"),
    "integers": (lambda: torch.zeros(4, 8, dtype=torch.int64), TypeError, "torch.int64"),
    "booleans": (lambda: torch.zeros(4, 8, dtype=torch.bool), TypeError, "torch.bool"),
    "a list": (lambda: [[0.5, 0.5]], TypeError, "got list"),
    "None": (lambda: None, TypeError, "got NoneType"),
    "a scalar": (lambda: torch.tensor(1.0), ValueError, "0 dimensions"),
    "one dimension": (lambda: torch.rand(8), ValueError, "1 dimensions"),
    "three dimensions": (lambda: torch.rand(2, 4, 8), ValueError, "reshape"),
    "no experts": (lambda: torch.rand(4, 0), ValueError, "at least one expert"),
    "more experts": (lambda: torch.rand(4, 9), ValueError, "got 9 experts, .* 8"),
    "fewer experts": (lambda: torch.rand(4, 7), ValueError, "got 7 experts, .* 8"),
    "too large": (
        lambda: torch.rand(1001, 8),
        memtools.BudgetError,
        "32032 bytes, max_bytes is 32000",
    ),
}


def observed(history: GateHistory) -> tuple[object, ...]:
    return (
        len(history),
        history.nbytes,
        history.appended,
        history.stats(),
        [entry.tolist() for entry in history],
    )


@pytest.mark.parametrize("shim", ["with", "without"])
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_and_changes_nothing(name, shim, gates, without_shim):
    make, error, sentence = REFUSED[name]
    history = GateHistory(max_bytes=32_000)
    history.append(gates())
    before = observed(history)
    bad = make()
    mode = without_shim() if shim == "without" else contextlib.nullcontext()
    with mode, pytest.raises(error, match=sentence) as caught:
        history.append(bad)
    assert "\n" not in str(caught.value)
    assert observed(history) == before


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"more experts", "fewer experts"}))
def test_refused_as_the_first_entry_leaves_the_history_new(name, gates):
    make, error, sentence = REFUSED[name]
    history = GateHistory(max_bytes=32_000)
    with pytest.raises(error, match=sentence):
        history.append(make())
    assert (len(history), history.n_experts, history.stats().tokens) == (0, 0, 0)
    history.append(gates(3, 5))
    assert history.n_experts == 5


def test_vmapped_gates_are_refused(gates):
    history = GateHistory()

    def router(x: torch.Tensor) -> torch.Tensor:
        history.append(x)
        return x

    with pytest.raises(TypeError, match="functorch"):
        torch.vmap(router)(torch.rand(2, 4, 8))
    assert len(history) == 0


def test_an_entry_of_exactly_the_budget_fits():
    history = GateHistory(max_entries=3, max_bytes=4 * 8 * 4)
    for _ in range(5):
        history.append(torch.rand(4, 8))
    assert len(history) == 1


def test_a_budget_error_is_a_memory_error():
    assert issubclass(memtools.BudgetError, MemoryError)
    assert issubclass(memtools.BudgetError, memtools.MemtoolsError)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_entries": 0}, ValueError, "max_entries must be at least 1, got 0"),
        ({"max_entries": -5}, ValueError, "max_entries must be at least 1, got -5"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": -1}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": "64 parsecs"}, ValueError, "64 MiB"),
        ({"max_bytes": "0 MiB"}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes"),
        ({"max_bytes": True}, TypeError, "max_bytes"),
        ({"max_entries": 2.0}, TypeError, "max_entries must be an int, got float"),
        ({"trim": "newest"}, ValueError, '"half" or "oldest", got .newest.'),
        ({"keep": "some"}, ValueError, '"all" or "topk", got .some.'),
        ({"dtype": "int8"}, ValueError, "dtype must be .* got .int8."),
        ({"dtype": torch.float8_e4m3fn}, ValueError, "dtype must be"),
        ({"top_k": 0}, ValueError, "top_k must be from 1 to 64, got 0"),
        ({"top_k": 65}, ValueError, "top_k must be from 1 to 64, got 65"),
        ({"max_entries": 2**62}, ValueError, "give smaller ones"),
        ({"max_bytes": 2**62}, MemoryError, "address space"),
        ({"max_bytes": 2**63}, ValueError, r"max_bytes must be at most 2\*\*63 - 1 bytes"),
        ({"max_bytes": "9" * 400 + ".5 GiB"}, ValueError, r"at most 2\*\*63 - 1 bytes"),
        (
            {"max_entries": 2**63},
            ValueError,
            "max_entries must be at most 9223372036854775807, got",
        ),
        ({"max_entries": 10**5000}, ValueError, r"got 10\*\*40 or more"),
        ({"top_k": 2**64}, ValueError, "top_k must be from 1 to 64, got 18446744073709551616"),
    ],
)
def test_impossible_options_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        GateHistory(**options)


def test_top_k_larger_than_the_number_of_experts_is_refused(gates):
    history = GateHistory(top_k=9)
    with pytest.raises(ValueError, match="top_k=9"):
        history.append(gates(4, 8))
    history.append(gates(4, 9))


def test_a_closed_history_says_so(gates):
    history = GateHistory()
    history.append(gates())
    history.close()
    history.close()
    assert history.closed
    uses: list[Callable[[], object]] = [
        lambda: history.append(gates()),
        lambda: len(history),
        lambda: bool(history),
        lambda: history[0],
        lambda: history[:],
        lambda: list(history),
        lambda: torch.cat(history),
        lambda: history.stats(),
        lambda: history.windows(),
        lambda: history.clear(),
        lambda: history.reset_stats(),
        lambda: history.nbytes,
        lambda: history.dtype,
        lambda: history._state(),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_extend_keeps_what_came_before_the_refused_one(gates):
    history = GateHistory()
    with pytest.raises(ValueError, match="dimensions"):
        history.extend([gates(), gates(), torch.rand(3), gates()])
    assert len(history) == 2


def test_sizes_are_read_as_people_write_them():
    from memtools._base.size import format_bytes, parse_bytes

    for text, count in {
        "1": 1,
        "64 MiB": 64 << 20,
        "64mib": 64 << 20,
        " 1.5 GiB ": 3 << 29,
        "2 GB": 2 * 10**9,
        "10kB": 10_000,
        "1 TiB": 1 << 40,
        "7 B": 7,
    }.items():
        assert parse_bytes(text) == count
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.50 GiB",
        "5120.0 TiB",
    ]

"""What a pool does not take is refused in one sentence, and changes nothing."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtools import KVLease, KVPool
from tests.kit import refusedcalls
from tests.kit.children import in_child
from tests.kv.model import MAX_TOKENS, Plain, same, small_pool, some, step

GOOD = torch.randn(2, 2, 1, 64)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 2, 1, 64)


TENSORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a list": (lambda: [[0.5]], TypeError, "as a torch.Tensor, got list"),
    "None": (lambda: None, TypeError, "as a torch.Tensor, got NoneType"),
    "half": (GOOD.half, TypeError, r"of torch.float32.* got torch.float16; pass k.to\(torch.fl"),
    "complex": (lambda: GOOD.to(torch.complex64), TypeError, "got torch.complex64"),
    "three dimensions": (lambda: GOOD[0], ValueError, r"\[2 rows, 2 heads, tokens, 64\], got \[2,"),
    "one row more": (lambda: some(3, 1), ValueError, r"got \[3, 2, 1, 64\]"),
    "another head": (lambda: torch.randn(2, 3, 1, 64), ValueError, r"got \[2, 3, 1, 64\]"),
    "another width": (lambda: torch.randn(2, 2, 1, 63), ValueError, r"got \[2, 2, 1, 63\]"),
    "meta": (lambda: GOOD.to("meta"), TypeError, "meta device"),
    "fake": (fake, TypeError, "wrapper .*FakeTensor"),
    "zero tensor": (
        lambda: torch._efficientzerotensor((2, 2, 1, 64)),
        TypeError,
        "does not own memory",
    ),
    "sparse": (lambda: GOOD.to_sparse(), TypeError, "sparse"),
    "a graph": (lambda: GOOD.clone().requires_grad_(), ValueError, r"under torch.no_grad\(\)"),
    "too many tokens": (
        lambda: some(2, MAX_TOKENS + 1),
        (IndexError, ValueError),  # type: ignore[dict-item] # k and v no longer match, or too long
        "tokens",
    ),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_and_changes_nothing(name):
    make, error, sentence = TENSORS[name]
    with small_pool() as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 20, [20, 7])
        before = pool.stats()
        bad = make()
        with pytest.raises(error, match=sentence) as caught:
            lease.update(0, bad, GOOD)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        with pytest.raises(error):
            lease.update(0, GOOD, bad)  # type: ignore[arg-type]
        assert pool.stats() == before
        assert same(lease, model)


CALLS: dict[str, tuple[Callable[[KVLease], object], type[Exception], str]] = {
    "layer too high": (lambda x: x.update(2, GOOD, GOOD), IndexError, "layer 2 of a pool of 2"),
    "layer below 0": (lambda x: x.layer(-1), IndexError, "layer -1 of a pool of 2 layers"),
    "layer of no number": (lambda x: x.layer("0"), TypeError, "layer must be an int, got str"),  # type: ignore[arg-type]
    "k and v differ": (lambda x: x.update(0, GOOD, some(2, 2)), ValueError, "got 1 and 2"),
    "no v": (lambda x: x.update(0, GOOD), TypeError, "layer, k, v and counts"),  # type: ignore[call-arg]
    "k twice": (lambda x: x.update(0, GOOD, GOOD, k=GOOD), TypeError, "k twice"),  # type: ignore[misc]
    "a wrong name": (lambda x: x.update(0, GOOD, v=GOOD, x=1), TypeError, "got x"),  # type: ignore[call-arg]
    "five arguments": (lambda x: x.update(0, GOOD, GOOD, 1, 1), TypeError, "got 5"),  # type: ignore[call-arg]
    "three counts": (
        lambda x: x.update(0, GOOD, GOOD, [1, 1, 1]),
        ValueError,
        "3 counts, .* 2 rows",
    ),
    "count too high": (
        lambda x: x.update(0, GOOD, GOOD, [1, 2]),
        ValueError,
        "count of 2, .* 1 tok",
    ),
    "count below 0": (lambda x: x.update(0, GOOD, GOOD, [1, -1]), IndexError, "0 or more, got -1"),
    "one count below 0": (lambda x: x.update(0, GOOD, GOOD, -1), ValueError, "0 or more, got -1"),
    "counts of floats": (lambda x: x.update(0, GOOD, GOOD, [1.0, 1]), TypeError, "float among"),  # type: ignore[list-item]
    "too long": (
        lambda x: x.update(0, some(2, 81), some(2, 81)),
        IndexError,
        "101 tokens, .* is 100",
    ),
    "one row too long": (
        lambda x: x.update(0, some(2, 90), some(2, 90), [81, 90]),
        IndexError,
        "crop",
    ),
    "advance too far": (lambda x: x.advance(81), IndexError, "advance.*101 tokens"),
    "advance back": (lambda x: x.advance(-1), ValueError, "0 or more"),
    "reserve too much": (lambda x: x.reserve(101), IndexError, "0 to 100 tokens"),
    "reserve less than nothing": (lambda x: x.reserve(-1), ValueError, "got -1"),
    "show too much": (lambda x: x.layer(0, tokens=101), IndexError, "101 tokens: max_tokens"),
    "show less": (lambda x: x.layer(0, tokens=-1), ValueError, "got -1"),
    "a wrong layout": (lambda x: x.layer(0, layout="TBHD"), ValueError, '"BHTD" or "BTHD"'),
    "reorder too few": (lambda x: x.reorder([0]), ValueError, "each of the 2 rows, got 1"),
    "reorder no such row": (lambda x: x.reorder([0, 2]), IndexError, "row 2, .* rows 0 to 1"),
    "reorder below 0": (lambda x: x.reorder([0, -1]), IndexError, "0 or more, got -1"),
    "reorder by a mask": (lambda x: x.reorder([True, False]), TypeError, "bool"),
    "reorder by a mask tensor": (
        lambda x: x.reorder(torch.tensor([True, False])),
        TypeError,
        r"mask.nonzero\(\).flatten\(\)",
    ),
    "reorder by floats": (lambda x: x.reorder(torch.ones(2)), TypeError, "tensor of torch.float32"),
    "reorder by a matrix": (
        lambda x: x.reorder(torch.ones(2, 1).int()),
        ValueError,
        "2 dimensions",
    ),
    "reorder by one number": (lambda x: x.reorder(0), TypeError, "sequence.*got int"),  # type: ignore[arg-type]
    "reorder by text": (lambda x: x.reorder("01"), TypeError, "got str"),  # type: ignore[arg-type]
    "select nothing": (lambda x: x.select([]), ValueError, "1 to 2 rows, .* got 0"),
    "select too many": (lambda x: x.select([0, 0, 0]), ValueError, "1 to 2 rows, .* got 3"),
    "select no such row": (lambda x: x.select([5]), IndexError, "row 5"),
    "crop three": (lambda x: x.crop([1, 2, 3]), ValueError, "3 lengths, this lease has 2 rows"),
    "crop below 0 each": (lambda x: x.crop([1, -2]), IndexError, "0 or more"),
    "crop by text": (lambda x: x.crop("1"), TypeError, "got str"),  # type: ignore[arg-type]
    "fork none": (lambda x: x.fork(0), ValueError, "at least 1"),
    "fork too many": (lambda x: x.fork(5), ValueError, "10 rows was asked for, .* is 8"),
    "fork below 0": (lambda x: x.fork(1, -1), ValueError, "num_tokens must be at least 0, got -1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_makes_no_sense_is_refused_and_changes_nothing(name):
    call, error, sentence = CALLS[name]
    with small_pool() as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 20, [20, 7])
        before = pool.stats()
        with pytest.raises(error, match=sentence) as caught:
            call(lease)
        assert "\n" not in str(caught.value)
        assert pool.stats() == before
        assert same(lease, model)
        assert pool._check()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"num_layers": 0}, ValueError, "num_layers must be from 1 to 2147483647, got 0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be at least 1"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be from 1 to"),
        ({"max_sequences": 0}, ValueError, "max_sequences must be at least 1"),
        ({"layer_group": 0}, ValueError, "layer_group must be at least 1"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be an int, got float"),
        ({"dtype": "complex64"}, ValueError, "real number type .* got complex64"),
        ({"dtype": torch.quint8}, ValueError, "got quint8"),
        ({"dtype": 32}, TypeError, "a torch.dtype or its name, got int"),
        ({"device": "meta"}, ValueError, '"cpu" or "cuda", got "meta"'),
        ({"layout": "paged"}, ValueError, '"head" or "token", got .paged.'),
        ({"layer_group": 2}, ValueError, "layer_group of 2"),
        ({"page_bytes": 4097}, ValueError, "power of two"),
        ({"page_bytes": 1024}, ValueError, "multiple of 4096 here, got 1024"),
        ({"limit": 0}, ValueError, "limit must be at least 1"),
        ({"limit": 1.5}, TypeError, "limit must be"),
        ({"name": 5}, TypeError, "str"),
        ({"head_dim": 2**62}, ValueError, "give smaller ones"),
        ({"max_tokens": 2**31}, ValueError, "max_tokens must be from 1 to 2147483647"),
        ({"max_tokens": 2**64}, ValueError, "from 1 to 2147483647, got 18446744073709551616"),
        ({"num_layers": 2**31}, ValueError, "num_layers must be from 1 to 2147483647"),
        ({"limit": 2**64}, ValueError, "limit must be at most"),
    ],
)
def test_impossible_options_are_refused(options, error, sentence):
    usual = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_tokens": 9,
        "max_sequences": 9,
    }
    with pytest.raises(error, match=sentence):
        KVPool(**{**usual, **options})


@pytest.mark.parametrize(
    "arguments",
    [(0,), (-1,), (9,), (1, -1), (2**63,), (1, -(2**63) - 1), ("x",), (1.5,), (1, 0, True)],
    ids=str,
)
def test_impossible_leases_are_refused(arguments):
    with small_pool() as pool:
        with pytest.raises((ValueError, TypeError)):
            pool.acquire(*arguments)
        for timeout in (-1, float("nan"), "soon"):
            with pytest.raises((ValueError, TypeError)):
                pool.acquire(wait=True, timeout=timeout)  # type: ignore[arg-type]
        assert pool.stats().leases == 0


def test_whatever_a_lease_had_done_it_does_nothing_after_its_end():
    with small_pool() as pool:
        lease = pool.acquire(2)
        lease.release()
        lease.release()
        uses: list[Callable[[], object]] = [
            lambda: lease.update(0, GOOD, GOOD),
            lambda: lease.layer(0),
            lambda: lease.buffers(),
            lambda: lease.crop(0),
            lambda: lease.reorder([0, 1]),
            lambda: lease.select([0]),
            lambda: lease.fork(),
            lambda: lease.advance(1),
            lambda: lease.reserve(1),
            lambda: lease.lengths,
            lambda: lease.num_tokens,
            lambda: lease.batch_size,
            lambda: lease.seq_length(0),
            lambda: lease.__enter__(),
        ]
        for use in uses:
            with pytest.raises(ValueError, match="this lease was released"):
                use()


def test_neither_pools_nor_leases_are_copied_or_pickled():
    with small_pool() as pool, pool.acquire(1) as lease:
        for thing in (pool, lease):
            for copier in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="memory of this process"):
                    copier(thing)


def test_a_closed_pool_says_so():
    pool = small_pool()
    pool.close()
    pool.close()
    uses: list[Callable[[], object]] = [
        pool.acquire,
        lambda: pool.acquire(wait=True),
        lambda: pool.would_fit(1, 1),
        pool.stats,
        pool.trim,
        pool.__enter__,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="this KVPool is closed"):
            use()


# --- Python code that runs while update() looks ---------------------------------------------------


class Meddler(torch.Tensor):
    """A tensor whose attributes run code of its own, as any subclass may."""

    meddle: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.meddle()
        return super().__torch_function__(func, types, args, kwargs or {})


def freed(k: torch.Tensor) -> None:
    k.untyped_storage().resize_(0)


def shortened(k: torch.Tensor) -> None:
    k.data = k[:, :, :1].clone()


def of_other_heads(k: torch.Tensor) -> None:
    k.data = torch.ones(1, 1, 3, 64)


def moved(k: torch.Tensor) -> None:
    k.data = torch.full_like(k, 2.0)


@pytest.mark.parametrize("order", ["k first", "v first"])
@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (freed, "does not own memory"),
        (shortened, "as many tokens"),
        (of_other_heads, "was changed while update|of shape"),
        (moved, None),
    ],
)
def test_one_tensor_changes_while_the_other_is_looked_at(meddle, message, order):
    with small_pool() as pool, pool.acquire(1) as lease:
        victim, other = some(1, 3), some(1, 3).as_subclass(Meddler)
        Meddler.meddle = lambda: meddle(victim)
        pair = (victim, other) if order == "k first" else (other, victim)
        if message is None:
            got = lease.update(0, *pair)[order != "k first"]
            assert got.eq(2).all()
            return
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            lease.update(0, *pair)
        assert lease.lengths == [0]


def test_a_process_with_the_most_arenas_says_how_many_and_what_helps():
    """Each lease of a pool of one sequence has an arena of its own."""
    with KVPool(1, 1, 64, max_tokens=16, max_sequences=1, dtype="float32") as pool:
        leases: list[KVLease] = []
        with pytest.raises(MemoryError) as caught:
            leases.extend(pool.acquire(1) for _ in range(2049))
        assert str(caught.value) == (
            "acquire(): the KV pools of this process have 2048 ranges of addresses for "
            "max_sequences rows each (1 in this pool), the most that can be closed in forked "
            "children; make pools with a larger max_sequences, or close those that are not in use"
        )
        leases.pop().release()
        leases.append(pool.acquire(1))
        for lease in leases:  # what was raised keeps all of them until a collection
            lease.release()


def test_a_pool_whose_descriptor_was_closed_says_so(tmp_path):
    """And what it has already stays as it is."""
    before = _numbers()
    with small_pool() as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 20, [20, 7])
        numbers, own = _numbers() - before, os.open(tmp_path, os.O_RDONLY)
        for number in numbers:
            os.dup2(own, number)  # as a program that has closed all descriptors and opens its own
        with pytest.raises(MemoryError, match=r"has closed the descriptor .*; make a new pool"):
            lease.fork(2)
        same(lease, model)
    for number in (*numbers, own):
        os.close(number)  # the pool has left them open


def _numbers() -> set[int]:
    """The descriptors that are open, less that of the list itself."""
    return {int(name) for name in os.listdir("/proc/self/fd") if _is_open(int(name))}


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_memory_that_the_kernel_refuses_is_one_sentence(error):
    """A pool's memory has no name, and takes a memfd."""
    doing, remedy = "may not call", "allow it in the seccomp profile of the container or sandbox"
    if error == errno.EMFILE:
        doing, remedy = "has no descriptor left for", "close files, or raise the limit by ulimit -n"

    def work():
        refusedcalls.refuse("memfd_create", error)
        with pytest.raises(MemoryError) as caught:
            KVPool(1, 1, 8, max_tokens=64, max_sequences=2, dtype="float32")
        assert str(caught.value) == (
            f"KVPool(): this process {doing} memfd_create ({os.strerror(error)}); {remedy}"
        )

    assert in_child(work) == 0

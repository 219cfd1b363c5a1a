"""Calls of memtools._core's KVPool and KVLease, good and bad, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memtools import BudgetError, KVLease, KVPool, _core
from memtools._kv import tensors
from tests.kit.refusals import refused

Case = Callable[[], object]
ONE = torch.ones(1, 1, 1, 64)
POOL = KVPool(1, 1, 64, max_tokens=64, max_sequences=4, dtype="float32", limit="64 KiB")
LEASE = POOL.acquire()
DTYPE, CPU = torch.float32, torch.device("cpu")


def raw(*changed: object) -> object:
    """_core.KVPool with some of its first arguments changed."""
    given: list[object] = [1, 1, 64, 64, 4, DTYPE, 4, CPU, -1, None, "head", 1, 0, "raw", tensors]
    given[: len(changed)] = changed
    return _core.KVPool(*given)  # type: ignore[arg-type]


def with_lease(use: Callable[[KVLease], object]) -> Case:
    """A lease of two rows and three tokens, used and let go."""

    def case() -> None:
        with POOL.acquire(2, 16) as lease:
            lease.update(0, *(torch.ones(2, 1, 3, 64),) * 2)
            use(lease)

    return case


def with_bad(error: type[BaseException], use: Callable[[KVLease], object]) -> Case:
    return with_lease(lambda lease: refused(error, lambda: use(lease)))


def closed() -> None:
    pool = KVPool(1, 1, 64, max_tokens=64, max_sequences=4, dtype="float32")
    lease = pool.acquire()
    pool.close()
    lease.update(0, ONE, ONE)
    refused(ValueError, pool.acquire)


def outlived() -> object:
    with POOL.acquire() as lease:
        return lease.update(0, ONE, ONE)


CASES: dict[str, list[Case]] = {
    "KVPool": [
        raw,
        lambda: raw(2, 2, 64, 64, 4, DTYPE, 4, CPU, -1, "1 MiB", "token", 2),
        lambda: refused(ValueError, lambda: raw(0)),
        lambda: refused(ValueError, lambda: raw(1, 1, 2**62)),
        lambda: refused(ValueError, lambda: raw(1, 1, 64, 64, 4, DTYPE, 3)),
        lambda: refused(ValueError, lambda: raw(1, 1, 64, 64, 4, DTYPE, 4, CPU, -1, "much")),
        lambda: refused(ValueError, lambda: raw(1, 1, 64, 64, 4, DTYPE, 4, CPU, -1, None, "x")),
        lambda: refused(
            ValueError, lambda: raw(1, 1, 64, 64, 4, DTYPE, 4, CPU, -1, None, "head", 1, 77)
        ),
        lambda: refused(TypeError, lambda: _core.KVPool()),  # type: ignore[call-arg]
    ],
    "KVPool._acquire": [
        lambda: POOL._acquire(KVLease, 2, 16, False, None),
        lambda: POOL._acquire(_core.KVLease, 1, 0, True, 1.0),
        lambda: refused(ValueError, lambda: POOL._acquire(KVLease, 0, 0, False, None)),
        lambda: refused(ValueError, lambda: POOL._acquire(KVLease, 9, 0, False, None)),
        lambda: refused(BudgetError, lambda: POOL._acquire(KVLease, 4, 64, False, None)),
        lambda: refused(BudgetError, lambda: POOL._acquire(KVLease, 4, 64, True, None)),
        lambda: refused(ValueError, lambda: POOL._acquire(KVLease, 1, 0, True, -1.0)),
        lambda: refused(TypeError, lambda: POOL._acquire(int, 1, 0, False, None)),  # type: ignore[type-var]
        with_lease(
            lambda _: refused(TimeoutError, lambda: POOL._acquire(KVLease, 2, 60, True, 0.0))
        ),
        outlived,
    ],
    "KVPool._would_fit": [
        lambda: POOL._would_fit(1, 1, 0),
        lambda: refused(ValueError, lambda: POOL._would_fit(0, 1, 0)),
    ],
    "KVPool._stats": [POOL._stats, lambda: (outlived(), POOL._stats()), lambda: repr(POOL)],
    "KVPool._trim": [lambda: POOL._trim(0), lambda: refused(ValueError, lambda: POOL._trim(-1))],
    "KVPool._check": [POOL._check],
    "KVPool.close": [closed],
    "KVPool.__new__": [raw],
    "KVPool.__enter__": [POOL.__enter__],
    "KVPool.__exit__": [lambda: KVPool(1, 1, 8, max_tokens=8, max_sequences=1).__exit__()],
    "KVLease": [POOL.acquire, lambda: refused(TypeError, lambda: _core.KVLease())],
    "KVLease.update": [
        with_lease(lambda x: x.update(0, torch.ones(2, 1, 1, 64), v=torch.ones(2, 1, 1, 64))),
        with_lease(lambda x: x.update(0, *(torch.ones(2, 1, 2, 64),) * 2, [1, 2])),
        with_lease(lambda x: x.update(0, *(torch.ones(2, 1, 64, 2).transpose(2, 3),) * 2)),
        with_bad(ValueError, lambda x: x.update(0, ONE, ONE)),
        with_bad(TypeError, lambda x: x.update(0, None, None)),  # type: ignore[arg-type]
        with_bad(TypeError, lambda x: x.update(0, *(torch.ones(2, 1, 1, 64),) * 2, [1, "x"])),  # type: ignore[list-item]
        with_bad(IndexError, lambda x: x.update(0, *(torch.ones(2, 1, 62, 64),) * 2)),
        with_bad(TypeError, lambda x: x.update(0, k=ONE, w=ONE)),  # type: ignore[call-arg]
        outlived,
    ],
    "KVLease.layer": [
        with_lease(lambda x: x.layer(0, layout="BTHD", tokens=9)),
        with_bad(IndexError, lambda x: x.layer(1)),
        with_bad(ValueError, lambda x: x.layer(0, layout="x")),
    ],
    "KVLease.crop": [
        with_lease(lambda x: x.crop(-1)),
        with_lease(lambda x: x.crop(torch.tensor([1, 2]))),
        with_bad(ValueError, lambda x: x.crop([1])),
        with_bad(TypeError, lambda x: x.crop("x")),  # type: ignore[arg-type]
    ],
    "KVLease.reorder": [
        with_lease(lambda x: x.reorder([1, 1])),
        with_bad(IndexError, lambda x: x.reorder([0, 2])),
        with_bad(TypeError, lambda x: x.reorder(torch.ones(2))),
    ],
    "KVLease.select": [
        with_lease(lambda x: x.select((1,))),
        with_bad(ValueError, lambda x: x.select([])),
    ],
    "KVLease.fork": [
        with_lease(lambda x: x.fork(2, 10)),
        with_lease(lambda x: x.fork().fork().layer(0)),
        with_bad(ValueError, lambda x: x.fork(3)),
        with_bad(BudgetError, lambda x: x.fork(2, 64)),
    ],
    "KVLease.advance": [
        with_lease(lambda x: x.advance([1, 0])),
        with_bad(IndexError, lambda x: x.advance(99)),
    ],
    "KVLease.reserve": [
        with_lease(lambda x: x.reserve(8)),
        with_lease(lambda x: x.reserve(8, private=True)),
        with_bad(IndexError, lambda x: x.reserve(99)),
    ],
    "KVLease.buffers": [with_lease(lambda x: x.buffers())],
    "KVLease.seq_length": [
        with_lease(lambda x: x.seq_length(0)),
        with_bad(IndexError, lambda x: x.seq_length(9)),
    ],
    "KVLease.release": [with_lease(lambda x: x.release())],
    "KVLease.__enter__": [with_lease(lambda x: x.__enter__())],
    "KVLease.__exit__": [with_lease(lambda x: x.__exit__(None, None, None))],
}
for _name in [
    *["dtype", "device", "name", "budget", "num_layers", "num_kv_heads", "head_dim", "closed"],
    *["max_tokens", "max_sequences", "layer_group", "block_tokens", "block_bytes", "layout"],
]:
    CASES[f"KVPool.{_name}"] = [lambda name=_name: getattr(POOL, name)]  # type: ignore[misc]
for _name in ["pool", "name", "released"]:
    CASES[f"KVLease.{_name}"] = [lambda name=_name: getattr(LEASE, name)]  # type: ignore[misc]
for _name in ["lengths", "num_tokens", "batch_size"]:
    CASES[f"KVLease.{_name}"] = [
        lambda name=_name: getattr(LEASE, name),  # type: ignore[misc]
        with_bad(ValueError, lambda x, name=_name: (x.release(), getattr(x, name))),  # type: ignore[misc]
    ]

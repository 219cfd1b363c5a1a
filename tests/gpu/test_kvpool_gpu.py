"""What only a GPU can show of a KVPool: run by `make test-gpu`, beside tests/kv/test_device.py.

Two layers of two heads of 64 float32: 4096 tokens fill a page of 2 MiB with K or V of one layer, so
tests that are to cross pages use rows of more than that. `busy()` keeps the current stream busy for
about a second and returns an event behind that: until it is reached, nothing has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from memtools import DeviceError, KVPool
from tests.kit.cudadevice import RealDevice
from tests.kv.model import HEADS, LAYERS, WIDTH, OnDevice, Plain, same, small_pool, some, step

CUDA = torch.device("cuda")
MIB = 2**20
BLOCK = 2 * LAYERS * 2 * MIB
PAGE_TOKENS = 4096


def gpu_pool(**changes: Any) -> KVPool:
    return small_pool(**{"device": CUDA, "max_tokens": 3 * PAGE_TOKENS, **changes})


def lend(pool: KVPool) -> OnDevice:
    return OnDevice(pool.acquire(), RealDevice())


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def busy() -> torch.cuda.Event:
    torch.cuda._sleep(int(2e9))
    behind = torch.cuda.Event()
    behind.record()
    return behind


@pytest.fixture(autouse=True)
def _no_fault_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


# --- values -----------------------------------------------------------------------------------


def test_views_are_normal_tensors_under_inference_mode() -> None:
    with gpu_pool() as pool, torch.inference_mode(), pool.acquire() as lease:
        k, _ = lease.update(0, some(1, 4).to(CUDA), some(1, 4).to(CUDA))
        assert not k.is_inference()
        assert k.device.type == "cuda"


# --- attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["token", "head"])
def test_attention_over_the_views_is_that_over_contiguous_tensors(
    dtype: torch.dtype, layout: str
) -> None:
    with gpu_pool(dtype=dtype, layout=layout) as pool, pool.acquire(4) as lease:
        k, v = (some(4, 777, dtype).to(CUDA) for _ in range(2))
        views = lease.update(0, k, v)
        for queries in (1, 5):
            q = torch.randn(4, 2 * HEADS, queries, WIDTH, device=CUDA).to(dtype)
            got = attend(q, *views, enable_gqa=True)
            torch.testing.assert_close(got, attend(q, k, v, enable_gqa=True))


def test_attention_over_rows_that_share_their_pages() -> None:
    with gpu_pool() as pool, pool.acquire() as prompt:
        k, v = (some(1, PAGE_TOKENS + 50).to(CUDA) for _ in range(2))
        prompt.update(0, k, v)
        with prompt.fork(8) as rows:
            new = some(8, 1).to(CUDA)
            views = rows.update(0, new, new)
            q = torch.randn(8, HEADS, 1, WIDTH, device=CUDA)
            want = (torch.cat([x.expand(8, -1, -1, -1), new], 2) for x in (k, v))
            torch.testing.assert_close(attend(q, *views), attend(q, *want))


# --- memory -----------------------------------------------------------------------------------


def test_memory_that_torch_holds_idle_is_found() -> None:
    k = some(8, PAGE_TOKENS + 1).to(CUDA)
    hog = torch.empty(free_bytes() - 40 * MIB, dtype=torch.uint8, device=CUDA)
    del hog  # to torch's allocator, not to the driver
    assert torch.cuda.mem_get_info()[0] < 8 * 2 * BLOCK
    with gpu_pool() as pool, pool.acquire(8) as lease:
        got, _ = lease.update(0, k, k)
        assert torch.equal(got, k)


def test_a_device_that_is_full_says_so_and_the_lease_goes_on() -> None:
    k = some(8, 2 * PAGE_TOKENS).to(CUDA)
    with gpu_pool() as pool, OnDevice(pool.acquire(8), RealDevice()) as lease:
        model = Plain(8)
        step(lease, model, 10)
        hog = torch.empty(free_bytes() - 20 * MIB, dtype=torch.uint8, device=CUDA)
        with pytest.raises(MemoryError, match="cuMemCreate"):
            lease.lease.update(0, k, k)
        del hog
        torch.cuda.empty_cache()
        assert same(lease, model)
        assert pool._check()


# --- order ------------------------------------------------------------------------------------


def test_an_update_waits_for_nothing() -> None:
    with gpu_pool() as pool, pool.acquire(2) as lease:
        k = some(2, 100).to(CUDA)
        lease.update(0, k, k)
        behind = busy()
        for _ in range(20):
            lease.update(0, k[:, :, :1], k[:, :, :1])
        assert not behind.query()


def test_no_page_goes_from_under_a_kernel() -> None:
    with gpu_pool() as pool:
        lease = pool.acquire(4)
        k = some(4, PAGE_TOKENS + 9).to(CUDA)
        got, _ = lease.update(0, k, k)
        busy()
        total = got.double().sum()  # reads the views a second from now
        del got
        lease.release()
        pool.trim()
        torch.testing.assert_close(total, k.double().sum())


def test_a_stream_sees_what_another_wrote_before() -> None:
    with gpu_pool() as pool, pool.acquire() as prompt:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        k = some(1, 500).to(CUDA)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            busy()
            prompt.update(0, k, k)
        with torch.cuda.stream(second), prompt.fork(2) as rows:
            got = rows.layer(0)[0].clone()
        second.synchronize()
        assert torch.equal(got, k.expand(2, -1, -1, -1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_the_other_gpu_is_used_and_the_current_one_stays() -> None:
    with small_pool(device="cuda:1") as pool, pool.acquire() as lease:
        k = some(1, 20).to("cuda:1")
        got, _ = lease.update(0, k, k)
        assert torch.equal(got, k)
        assert torch.cuda.current_device() == 0


# --- CUDA graphs ------------------------------------------------------------------------------

Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def decode_step(k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, q: torch.Tensor) -> Decode:
    """One step over whole buffers, as static caches do it: write at `at`, attend up to there."""

    def run(new_k: torch.Tensor, new_v: torch.Tensor) -> torch.Tensor:
        k.index_copy_(2, at, new_k)
        v.index_copy_(2, at, new_v)
        seen = torch.arange(k.shape[2], device=CUDA) <= at
        return attend(q, k, v, attn_mask=seen[None, None, None])

    return run


def test_a_graph_replays_over_the_pages_of_the_next_lease() -> None:
    with gpu_pool() as pool:
        q, new_k, new_v = (some(2, 1).to(CUDA) for _ in range(3))
        at = torch.zeros(1, dtype=torch.long, device=CUDA)
        lease = pool.acquire(2)
        lease.reserve(64)
        k, v = lease.layer(0, tokens=64)
        where, run = k.data_ptr(), decode_step(k, v, at, q)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            run(new_k, new_v)  # what a first call allocates cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(new_k, new_v)
        del k, v, run
        lease.release()
        with pool.acquire(2) as again:
            again.reserve(64)
            assert again.layer(0, tokens=64)[0].data_ptr() == where
            model = Plain(2)
            for position in range(10):
                pair = some(2, 1), some(2, 1)
                new_k.copy_(pair[0])
                new_v.copy_(pair[1])
                at.fill_(position)
                graph.replay()
                again.advance(1)
                for layer in range(LAYERS):
                    model.update(layer, *(x if layer == 0 else torch.zeros_like(x) for x in pair))
                want = attend(q, *(x.to(CUDA) for x in model.layer(0)))
                torch.testing.assert_close(out, want)
            assert same(OnDevice(again, RealDevice()), model)


def test_while_a_graph_is_captured_reserved_rows_may_grow_and_others_not() -> None:
    with gpu_pool() as pool, lend(pool) as lease:
        model = Plain(1)
        step(lease, model, 5)
        lease.reserve(16)
        k = some(1, 1).to(CUDA)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lease.lease.update(0, k, k)
            with pytest.raises(DeviceError, match="CUDA graph capture"):
                lease.lease.update(1, *(k.expand(-1, -1, 2 * PAGE_TOKENS, -1),) * 2)
        graph.replay()
        model.update(0, k.cpu(), k.cpu())
        assert same(lease, model)

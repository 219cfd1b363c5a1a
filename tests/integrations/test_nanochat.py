"""integrations.nanochat.KVCache beside plain twins of nanochat's own two caches."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it

import memtools
from memtools.integrations.nanochat import KVCache, cache_class, pool_for
from tests.kv.poolback import everything_is_back

SIZES = {"num_heads": 2, "head_dim": 16, "num_layers": 3}
CPU32 = {"device": "cpu", "dtype": torch.float32}
L, H, D = 3, 2, 16


class Twin:
    """The new style in plain torch: what KVCache stands in for."""

    def __init__(self, batch_size: int, seq_len: int) -> None:
        self.batch_size, self.max_seq_len, self.n_layers = batch_size, seq_len, L
        self.n_heads, self.head_dim, self.prev_embedding = H, D, None
        self.k_cache = torch.zeros(L, batch_size, seq_len, H, D)
        self.v_cache = torch.zeros(L, batch_size, seq_len, H, D)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32)

    def reset(self) -> None:
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.cache_seqlens.zero_()

    def get_pos(self) -> int:
        return int(self.cache_seqlens[0].item())

    def get_layer_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_cache[layer], self.v_cache[layer]

    def advance(self, n: int) -> None:
        self.cache_seqlens += n

    def prefill(self, other: Any) -> None:
        pos = other.get_pos()
        self.k_cache[:, :, :pos] = other.k_cache[:, :, :pos]
        self.v_cache[:, :, :pos] = other.v_cache[:, :, :pos]
        self.cache_seqlens.fill_(pos)


def cache(batch_size: int, seq_len: int, **keywords: Any) -> KVCache:
    return KVCache(batch_size, seq_len=seq_len, **SIZES, **{**CPU32, **keywords})


@pytest.fixture
def pool() -> Iterator[memtools.KVPool]:
    """A pool of these sizes; everything is back at the end."""
    with memtools.KVPool(L, H, D, max_tokens=4096, max_sequences=8, dtype=torch.float32) as pool:
        yield pool
        assert everything_is_back(pool)


def attend(c: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """flash_attn_with_kvcache as nanochat does it without that library; all (B, T, H, D)."""
    k_cache, v_cache = c.get_layer_cache(layer)
    pos, end = c.get_pos(), c.get_pos() + q.shape[1]
    k_cache[:, pos:end] = k
    v_cache[:, pos:end] = v
    mask = torch.arange(end) <= torch.arange(pos, end)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k_cache[:, :end], v_cache[:, :end]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def forward(c: Any, tokens: int, seed: int) -> torch.Tensor:
    """A model's forward, as far as the cache sees it; rows differ."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for layer in range(c.n_layers):
        q, k, v = torch.randn(3, c.batch_size, tokens, H, D, generator=draw)
        out.append(attend(c, layer, q, k, v))
        if layer == c.n_layers - 1:
            c.advance(tokens)
    c.prev_embedding = torch.full((c.batch_size, 1, 4), float(seed))
    return torch.stack(out)


def same(c: KVCache, twin: Any) -> bool:
    """Whether both hold the same tokens, and zeros after them."""
    return (
        c.get_pos() == twin.get_pos()
        and torch.equal(c.k_cache, twin.k_cache)
        and torch.equal(c.v_cache, twin.v_cache)
        and torch.equal(c.cache_seqlens, twin.cache_seqlens)
    )


# --- the new style --------------------------------------------------------------------------------


def test_its_attributes_are_those_of_nanochat() -> None:
    c = KVCache(4, 2, 64, 16, 3, "cpu", torch.bfloat16)
    assert (c.n_layers, c.n_heads, c.head_dim, c.batch_size, c.max_seq_len) == (3, 2, 16, 4, 64)
    assert c.k_cache.shape == c.v_cache.shape == (3, 4, 64, 2, 16)
    assert (c.k_cache.dtype, c.k_cache.device.type) == (torch.bfloat16, "cpu")
    assert (c.cache_seqlens.dtype, c.cache_seqlens.shape) == (torch.int32, (4,))
    assert (c.get_pos(), c.prev_embedding) == (0, None)
    assert all(x.shape == (4, 64, 2, 16) for x in c.get_layer_cache(2))
    assert not c.k_cache.any()


@pytest.mark.parametrize("given", [False, True])
def test_an_engine_gets_what_the_plain_cache_gives(pool: memtools.KVPool, given: bool) -> None:
    keywords = {"pool": pool} if given else {}
    c, twin = cache(1, 40, **keywords), Twin(1, 40)
    assert torch.equal(forward(c, 30, 1), forward(twin, 30, 1))
    assert torch.equal(forward(c, 3, 2), forward(twin, 3, 2))
    rows, rows_twin = cache(4, 60, **keywords), Twin(4, 60)
    rows.prefill(c)
    rows_twin.prefill(twin)
    assert torch.equal(rows.prev_embedding, torch.full((4, 1, 4), 2.0))
    del c, twin
    for step in range(18):
        tokens = 1 + step % 3 * (step % 2)
        assert torch.equal(forward(rows, tokens, step), forward(rows_twin, tokens, step))
    assert same(rows, rows_twin)


def test_random_engines_agree_with_plain_ones(pool: memtools.KVPool) -> None:
    rng = random.Random(4)
    for _ in range(15):
        pairs = [(cache(n, 48, pool=pool), Twin(n, 48)) for n in (1, 1, 3, 3)]
        for step in range(40):
            (c, twin), (other, other_twin) = rng.choice(pairs), rng.choice(pairs)
            tokens = rng.randint(1, 6)
            act = rng.random()
            if act < 0.6 and c.get_pos() + tokens <= 48:
                assert torch.equal(forward(c, tokens, step), forward(twin, tokens, step))
            elif act < 0.9 and c.get_pos() == 0 and other.batch_size in (1, c.batch_size):
                if other is not c and other.get_pos() > 0:
                    c.prefill(other)
                    twin.prefill(other_twin)
            elif act > 0.95:
                c.reset()
                twin.reset()
            assert c.get_pos() == twin.get_pos()
        assert all(same(c, twin) for c, twin in pairs)


def test_memory_comes_with_the_tokens_and_the_prompt_once(pool: memtools.KVPool) -> None:
    token = 2 * L * H * D * 4
    prompt = cache(1, 1024, pool=pool)
    assert pool.stats().physical_bytes == 0
    forward(prompt, 1024, 1)
    before = pool.stats().live_bytes
    assert 1024 * token <= before <= 1.1 * 1024 * token
    rows = cache(8, 2048, pool=pool)
    rows.prefill(prompt)
    del prompt
    forward(rows, 1, 2)
    stats = pool.stats()
    page = 4096 * 2 * L * H
    assert stats.live_bytes <= before + 8 * 2 * page
    assert stats.payload_bytes == 8 * 1025 * token


def test_without_a_pool_the_rows_still_share_the_prompt() -> None:
    prompt, rows = cache(1, 500), cache(8, 600)
    forward(prompt, 500, 1)
    rows.prefill(prompt)
    stats = rows._rows().pool.stats()
    assert (stats.forked, stats.leases) == (1, 2)
    assert stats.live_bytes < stats.payload_bytes / 4


@pytest.mark.parametrize("how", ["another pool", "views handed out", "another dtype", "a twin"])
def test_what_cannot_be_shared_is_copied(pool: memtools.KVPool, how: str) -> None:
    prompt: Any = Twin(1, 30) if how == "a twin" else cache(1, 30, pool=pool)
    forward(prompt, 30, 1)
    if how == "another dtype":
        rows = cache(3, 40, dtype=torch.bfloat16)
    else:
        rows = cache(3, 40, pool=None if how == "another pool" else pool)
    views = rows.k_cache if how == "views handed out" else None
    rows.prefill(prompt)
    twin = Twin(3, 40)
    twin.prefill(prompt)
    assert torch.equal(rows.k_cache, twin.k_cache.to(rows.k_cache.dtype))
    assert torch.equal(rows.v_cache, twin.v_cache.to(rows.k_cache.dtype))
    assert views is None or torch.equal(views, rows.k_cache)
    assert rows._rows().pool.stats().forked == 0


def test_a_cache_goes_on_after_others_took_its_tokens(pool: memtools.KVPool) -> None:
    """Pages are shared both ways, and nobody's writes reach another."""
    caches = [(cache(1, 100, pool=pool), Twin(1, 100)), (cache(2, 100, pool=pool), Twin(2, 100))]
    for x in caches[0]:
        forward(x, 70, 1)
    caches[1][0].prefill(caches[0][0])
    caches[1][1].prefill(caches[0][1])
    for number, (c, twin) in enumerate(caches):
        assert torch.equal(forward(c, 5, number), forward(twin, 5, number))
    caches[0][0].pos = 20
    caches[0][1].cache_seqlens.fill_(20)
    assert torch.equal(*(forward(x, 5, 7) for x in caches[0]))
    caches[0][0].reset()
    caches[0][1].reset()
    for x in caches[0]:
        forward(x, 80, 9)
    assert all(same(c, twin) for c, twin in caches)


@pytest.mark.parametrize("length", [20, 57])
def test_lengths_that_were_set_by_hand_count(pool: memtools.KVPool, length: int) -> None:
    prompt, twin = cache(1, 64, pool=pool), Twin(1, 64)
    for x in (prompt, twin):
        forward(x, 50, 1)
        x.k_cache[:, :, 50:length] = x.v_cache[:, :, 50:length] = 5
        x.cache_seqlens.fill_(length)
    rows, rows_twin = cache(2, 64, pool=pool), Twin(2, 64)
    rows.prefill(prompt)
    rows_twin.prefill(twin)
    assert torch.equal(forward(rows, 4, 2), forward(rows_twin, 4, 2))
    assert same(rows, rows_twin)
    assert torch.equal(forward(prompt, 4, 3), forward(twin, 4, 3))


def fits(**wrong: int) -> Any:
    sizes = {"batch_size": 2, "num_heads": 2, "seq_len": 32, "head_dim": 16, "num_layers": 3}
    return KVCache(**{**sizes, **wrong}, **CPU32)


@pytest.mark.parametrize(
    "wrong",
    [{"num_heads": 1}, {"head_dim": 8}, {"num_layers": 2}, {"batch_size": 3}, {"seq_len": 33}],
)
def test_prefill_from_what_does_not_fit_is_an_assertion_error(wrong: dict[str, int]) -> None:
    c = cache(4, 32)
    with pytest.raises(AssertionError):
        c.prefill(fits(**wrong))
    assert c.get_pos() == 0


def test_prefill_of_a_cache_that_holds_something_is_an_assertion_error() -> None:
    c, other = cache(2, 32), cache(1, 32)
    c.prefill(other)  # nothing into nothing
    assert c.get_pos() == 0
    forward(c, 2, 1)
    forward(other, 3, 1)
    with pytest.raises(AssertionError, match="Cannot prefill a non-empty KV cache"):
        c.prefill(other)
    c.reset()
    assert c.prev_embedding is None
    c.prefill(other)
    assert c.get_pos() == 3


def test_advance_past_seq_len_is_an_index_error() -> None:
    c = cache(2, 32)
    c.advance(30)
    with pytest.raises(IndexError, match="from 30 by 3 tokens: seq_len is 32"):
        c.advance(3)
    assert c.get_pos() == 30
    c.advance(2)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"dtype": torch.bfloat16}, r"dtype torch.float32, not torch.bfloat16"),
        ({"num_layers": 4}, "num_layers 3, not 4"),
        ({"seq_len": 5000}, "max_tokens 4096, less than seq_len 5000"),
        ({"batch_size": 9}, "max_sequences 8, less than 9 rows"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(
    pool: memtools.KVPool, keywords: dict[str, Any], said: str
) -> None:
    arguments = {"batch_size": 2, "seq_len": 32, **SIZES, **CPU32, **keywords}
    with pytest.raises(ValueError, match=said):
        KVCache(**arguments, pool=pool)


def test_pages_go_back_when_the_object_dies(pool: memtools.KVPool) -> None:
    gc.disable()
    try:
        c = cache(2, 64, pool=pool)
        forward(c, 50, 1)
        assert pool.stats().live_bytes > 0
        del c
        assert (pool.stats().leases, pool.stats().live_bytes) == (0, 0)

        def engine() -> Iterator[int]:
            c = cache(2, 64, pool=pool)
            while True:
                forward(c, 1, 1)
                yield c.get_pos()

        running = engine()
        assert [next(running), next(running)] == [1, 2]
        assert pool.stats().live_bytes > 0
        running.close()
        assert (pool.stats().leases, pool.stats().live_bytes) == (0, 0)
    finally:
        gc.enable()


@torch.inference_mode()
def test_it_works_in_inference_mode_and_outside_of_it_after(pool: memtools.KVPool) -> None:
    c, twin = cache(2, 64, pool=pool), Twin(2, 64)
    assert torch.equal(forward(c, 9, 1), forward(twin, 9, 1))
    with torch.inference_mode(False):
        c.advance(1)
        assert not c.k_cache.is_inference()
        assert c.get_pos() == 10


def test_without_the_shim_everything_is_the_same(without_shim: Any, pool: memtools.KVPool) -> None:
    with without_shim():
        test_an_engine_gets_what_the_plain_cache_gives(pool, True)


# --- an engine's own cache class ------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    """As much of nanochat's GPTConfig as a cache needs."""

    n_layer: int = L
    n_head: int = 2 * H
    n_kv_head: int = H
    n_embd: int = 2 * H * D


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = Config()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))


def generation(caches: Any, tokens: int, rows: int, steps: int) -> torch.Tensor:
    """As nanochat's Engine.generate: a cache for the prompt, then one for all rows."""
    sizes = {"num_heads": H, "head_dim": D, "num_layers": L, **CPU32}
    prompt = caches(batch_size=1, seq_len=tokens, **sizes)
    outs = [forward(prompt, tokens, seed=1)]
    decode = caches(batch_size=rows, seq_len=tokens + steps, **sizes)
    decode.prefill(prompt)
    del prompt
    outs += [forward(decode, 1, seed=2 + step)[:, :1] for step in range(steps)]
    return torch.cat(outs, 3)


def test_one_call_makes_the_pool_of_an_engine_and_one_its_cache_class():
    for model, options in ((Model(torch.float32), {}), (Config(), {"dtype": torch.float32})):
        with pool_for(model, 512, 8, "8 MiB", **options) as pool:
            assert (pool.num_layers, pool.num_kv_heads, pool.head_dim) == (L, H, D)
            assert (pool.max_tokens, pool.max_sequences) == (512, 8)
            assert (pool.dtype, str(pool.device)) == (torch.float32, "cpu")
            assert pool.stats().limit_bytes == 8 << 20
            caches = cache_class(pool)
            own = [generation(KVCache, 100, 4, 9) for _ in range(2)]
            shared = [generation(caches, 100, 4, 9) for _ in range(2)]
            assert all(torch.equal(out, own[0]) for out in (*own, *shared))
            stats = pool.stats()
            assert (stats.acquired, stats.forked) == (2, 2)
            assert everything_is_back(pool)


def test_generations_of_one_length_find_their_pages_again():
    with pool_for(Config(), 1024, 17, dtype=torch.float32) as pool:
        caches = cache_class(pool)
        taken = []
        for _ in range(4):
            generation(caches, 600, 16, 40)
            taken.append(pool.stats().taken)
        assert taken == [taken[0]] * 4
        assert pool.stats().dropped == 0


@pytest.mark.slow
def test_pages_stay_level_through_generations_of_other_lengths():
    """These caches are written to in place: pages come where code writes, and idle ones elsewhere
    go for that. No row takes blocks only because another's lie in its home."""
    lengths, alone = (600, 200, 450, 700, 100, 600, 50, 300), []
    for tokens in sorted(set(lengths)):
        with pool_for(Config(), 1024, 17, dtype=torch.float32) as pool:
            generation(cache_class(pool), tokens, 16, 40)
            alone.append(pool.stats().peak_bytes)
    with pool_for(Config(), 1024, 17, dtype=torch.float32) as pool:
        for tokens in lengths:
            generation(cache_class(pool), tokens, 16, 40)
            assert pool.stats().physical_bytes <= max(alone)
            assert pool._check()
        assert pool.stats().peak_bytes == max(alone)


def test_pool_for_refuses_what_is_no_config_of_this_style_and_takes_sizes_by_name():
    with pytest.raises(ValueError, match="dict has no n_layer, n_head, n_embd"):
        pool_for({}, 64, 2)
    config = Config(n_kv_head=0)
    config.head_dim = 32  # type: ignore[attr-defined]
    with pool_for(Model(torch.bfloat16), 64, 2) as pool:
        assert pool.dtype is torch.bfloat16
    with pool_for(config, 64, 2, device="cpu", dtype="float16", name="mine") as pool:
        assert (pool.num_kv_heads, pool.head_dim, pool.name) == (2 * H, 32, "mine")


def test_a_cache_class_takes_another_pool_and_refuses_other_sizes(pool):
    with pool_for(Config(), 64, 2, dtype=torch.float32) as small:
        caches = cache_class(small)
        assert issubclass(caches, KVCache)
        with pytest.raises(ValueError, match="max_tokens 64, less than seq_len 65"):
            caches(1, seq_len=65, **SIZES, **CPU32)
        with pytest.raises(ValueError, match="dtype torch.float32, not torch.float16"):
            caches(1, seq_len=9, **SIZES, device="cpu", dtype=torch.float16)
        other = caches(1, seq_len=65, **SIZES, **CPU32, pool=pool)
        forward(other, 3, seed=0)
        assert pool.stats().acquired == 1
        assert small.stats().acquired == 0

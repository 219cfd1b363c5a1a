"""KVPool.estimate beside the live bytes of a pool that is really filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtools import KVLease, KVPool


def config_of(layers: int, queries: int, heads: int | None, width: int, **more: Any) -> Any:
    return SimpleNamespace(
        num_hidden_layers=layers,
        num_attention_heads=queries,
        num_key_value_heads=heads,
        hidden_size=queries * width,
        **more,
    )


def fill(lease: KVLease, tokens: int) -> None:
    pool = lease.pool
    shape = lease.batch_size, pool.num_kv_heads, tokens, pool.head_dim
    for layer in range(pool.num_layers):
        lease.update(layer, *(torch.ones(shape, dtype=pool.dtype) for _ in range(2)))


@pytest.mark.parametrize("options", [
    {},
    {"dtype": "float32"},
    {"layout": "token"},
    {"layout": "token", "layer_group": 2},
    {"layout": "token", "layer_group": 3, "page_bytes": "64 KiB"},
    {"page_bytes": 16384},
])  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 4, 2, 64), (2, 3, 3, 80), (4, 8, 1, 128)])
@pytest.mark.parametrize(("tokens", "rows"), [(0, 2), (1, 1), (37, 3), (300, 2)])
def test_it_is_what_a_filled_pool_holds(
    options: dict[str, Any], shape: tuple[int, int, int, int], tokens: int, rows: int
) -> None:
    layers, _, heads, width = shape
    expected = KVPool.estimate(config_of(*shape), tokens, rows, **options)
    pool = KVPool(layers, heads, width, max_tokens=512, max_sequences=8, **options)
    with pool, pool.acquire(rows) as lease:
        if tokens:
            fill(lease, tokens)
        assert pool.stats().live_bytes == expected
        assert (expected > 0) == (tokens > 0)


@pytest.mark.parametrize("tokens", [1, 64, 100, 128, 200])
def test_what_rows_share_counts_once(tokens: int) -> None:
    pool = KVPool(2, 2, 64, max_tokens=512, max_sequences=8)
    with pool, pool.acquire() as prompt:
        fill(prompt, tokens)
        with prompt.fork(4) as lease:
            fill(lease, 50)
            prompt.release()
            found = KVPool.estimate(config_of(2, 4, 2, 64), tokens + 50, 4, shared_tokens=tokens)
            assert pool.stats().live_bytes == found


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (config_of(3, 8, None, 64), {}),
        (config_of(3, 16, 8, 32, head_dim=64), {}),
        (config_of(3, 8, 8, 64, dtype=torch.float16), {}),
        (config_of(3, 8, 8, 64, torch_dtype="float32"), {"dtype": torch.bfloat16}),
        ({"n_layer": 3, "n_head": 8, "n_embd": 512}, {}),
        (config_of(3, 8, 4, 64, new_decoder_architecture=True), {}),
        (SimpleNamespace(get_text_config=lambda: config_of(3, 8, 8, 64)), {}),
    ],
)
def test_configurations_are_read_as_they_are_written(config: Any, options: Any) -> None:
    # 64 tokens of 64 halves fill two pages of a head.
    assert KVPool.estimate(config, 64, **options) == 3 * 2 * 8 * 2 * 4096


def test_configurations_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    assert KVPool.estimate(llama, 64, 3) == KVPool.estimate(config_of(2, 4, 2, 64), 64, 3)
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4)
    assert KVPool.estimate(gpt2, 64) == KVPool.estimate(config_of(2, 4, 4, 64), 64)


def test_a_device_need_not_be_there() -> None:
    # A page of 2 MiB holds 8,192 tokens of 2 heads.
    found = KVPool.estimate(config_of(3, 4, 2, 64), 8193, device="cuda:0")
    assert found == 3 * 2 * 2 * (2 << 20)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"config": None}, ValueError, "config has no num_hidden_layers: pass a model's config"),
        ({"config": config_of(2, 4, 0, 64)}, ValueError, "config.num_key_value_heads must be at"),
        ({"config": {"n_layer": 1, "n_head": 3, "n_embd": 64}}, ValueError, "not a multiple of 3"),
        ({"tokens": -1}, ValueError, "tokens must be at least 0"),
        ({"tokens": 1.5}, TypeError, "tokens must be an int"),
        ({"sequences": 0}, ValueError, "sequences must be at least 1"),
        ({"shared_tokens": 9}, ValueError, "shared_tokens must be at most tokens, got 9 of 8"),
        ({"dtype": "complex64"}, ValueError, "dtype must be a real number type"),
        ({"layout": "page"}, ValueError, 'layout must be "head" or "token"'),
        ({"layer_group": 2}, ValueError, 'layer_group of 2 goes with layout="token"'),
        ({"page_bytes": 12288}, ValueError, "page_bytes must be a power of two and a mult"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    change: dict[str, Any], kind: type[Exception], says: str
) -> None:
    given: dict[str, Any] = {"config": config_of(2, 4, 2, 64), "tokens": 8, **change}
    with pytest.raises(kind, match=says):
        KVPool.estimate(**given)

"""PooledCache in transformers' generate(): the tokens of DynamicCache in every mode, and the pages
back in the pool in every case."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools
from memtools.integrations.transformers import PooledCache, pool_for
from tests.integrations.tinyhf import CACHE, prompt, ragged, tiny
from tests.kv.poolback import everything_is_back

MODELS = ["llama", "gpt2", "qwen3"]
NEW = 12
ENDS = list(range(10, 40))


@pytest.fixture
def pool() -> Iterator[memtools.KVPool]:
    """A pool for the tiny Llama; every row is back at the end."""
    with pool_for(tiny("llama"), max_tokens=128, max_sequences=16) as pool:
        yield pool
        assert everything_is_back(pool)


def both(model: Any, ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What generate() gives without a cache of ours, and with one, from the same seed."""
    keywords = {"max_new_tokens": NEW, "use_cache": True} | keywords
    torch.manual_seed(5)
    expected = model.generate(ids, **keywords)
    with pool_for(model, max_tokens=128, max_sequences=16) as pool:
        with PooledCache.for_model(model, pool) as cache:
            torch.manual_seed(5)
            got = model.generate(ids, **{CACHE: cache}, **keywords)
            assert cache.get_seq_length() >= ids.shape[1]  # it was this cache that was used
        assert everything_is_back(pool)
    return expected, got


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "beams with ends": {"num_beams": 3, "eos_token_id": ENDS, "num_return_sequences": 2},
    "beam samples": {"num_beams": 3, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 4},
    "ends": {"do_sample": True, "eos_token_id": ENDS},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_tokens_of_a_dynamic_cache(name: str, mode: str) -> None:
    expected, got = both(tiny(name), prompt(11, rows=2), **MODES[mode])
    assert torch.equal(expected, got)


@pytest.mark.parametrize("name", MODELS)
def test_padded_prompts_give_the_same_tokens(name: str) -> None:
    ids, mask = ragged(11, 4, 7)
    expected, got = both(tiny(name), ids, attention_mask=mask, do_sample=True)
    assert torch.equal(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampling", "beams"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_same_tokens_in_bfloat16(name: str, mode: str) -> None:
    expected, got = both(tiny(name, torch.bfloat16), prompt(11, rows=2), **MODES[mode])
    assert torch.equal(expected, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_pool_has_the_dtype_of_the_model_or_of_autocast(
    dtype: torch.dtype,
) -> None:
    model, ids = tiny("llama"), prompt(11, rows=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(ids, max_new_tokens=NEW)
        with pool_for(model, 64, 2, dtype=dtype) as pool, PooledCache(pool) as cache:
            got = model.generate(ids, **{CACHE: cache}, max_new_tokens=NEW)
            assert torch.equal(expected, got)
            assert cache.layers[0].keys.dtype is dtype
            assert PooledCache.for_model(model, pool).pool is pool
    half = pool_for(model, 64, 2, dtype=torch.float16)
    with half as pool, pytest.raises(ValueError, match="dtype torch.float16"):
        PooledCache.for_model(model, pool)


@pytest.mark.parametrize("sample", [False, True])
def test_assisted_decoding_crops_what_was_not_accepted(sample: bool) -> None:
    expected, got = both(
        tiny("llama"), prompt(6), assistant_model=tiny("llama", torch.bfloat16), do_sample=sample
    )
    assert torch.equal(expected, got)


def test_prompt_lookup_decoding_gives_the_same_tokens() -> None:
    ids = prompt(5).repeat(1, 3)
    expected, got = both(tiny("llama"), ids, prompt_lookup_num_tokens=4, max_new_tokens=30)
    assert torch.equal(expected, got)


def test_rejected_drafts_of_a_short_prompt_are_not_taken_for_a_missing_cache() -> None:
    """All 4 drafts are cropped, and 1 + 4 tokens come: one more than the 4 that the cache holds."""
    assistant = copy.deepcopy(tiny("qwen3"))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    expected, got = both(tiny("llama"), prompt(4), assistant_model=assistant)
    assert torch.equal(expected, got)


def test_a_sliding_window_is_kept_by_the_mask() -> None:
    expected, got = both(tiny("mistral"), prompt(20, rows=2), max_new_tokens=20)
    assert torch.equal(expected, got)
    wide = copy.deepcopy(tiny("mistral"))
    wide.config.sliding_window = None
    assert not torch.equal(wide.generate(prompt(20, rows=2), max_new_tokens=20), got)


@pytest.mark.parametrize("keywords", [{}, {"batch_size": 2, "num_tokens": 30}])
def test_the_module_itself_takes_the_cache(pool: memtools.KVPool, keywords: dict[str, int]) -> None:
    ids, model = prompt(9, rows=2), tiny("llama")
    with torch.no_grad(), PooledCache(pool, **keywords) as cache:
        model(ids[:, :5], **{CACHE: cache})
        out = model(ids[:, 5:], **{CACHE: cache})
        assert torch.allclose(out.logits, model(ids).logits[:, 5:], atol=1e-5)
        assert (cache.get_seq_length(), cache.batch_size, len(cache)) == (9, 2, 2)
        del out


def test_rows_are_acquired_by_the_first_update_or_at_once(pool: memtools.KVPool) -> None:
    lazy = PooledCache(pool)
    assert (lazy.batch_size, lazy.lease, lazy.get_seq_length()) == (-1, None, 0)
    assert (lazy.layers[0].keys, lazy.layers[0].is_initialized) == (None, False)
    assert (lazy.is_compileable, lazy.is_croppable, lazy.get_max_length()) == (False, True, 128)
    assert lazy.is_sliding == [False, False]
    assert pool.stats().leases == 0
    eager = PooledCache(pool, batch_size=3)
    assert (eager.batch_size, pool.stats().leases) == (3, 1)
    with torch.no_grad():
        tiny("llama")(prompt(4, rows=2), **{CACHE: lazy})
    assert (lazy.batch_size, lazy.get_seq_length(), pool.stats().leases) == (2, 4, 2)
    lazy.release()
    eager.release()
    eager.release()
    assert pool.stats().leases == 0


def test_reset_gives_the_pages_back_and_takes_another_batch(pool: memtools.KVPool) -> None:
    model = tiny("llama")
    lazy, fixed = PooledCache(pool), PooledCache(pool, batch_size=2)
    for cache in (lazy, fixed):
        with cache, torch.no_grad():
            model(prompt(10, rows=2), **{CACHE: cache})
            cache.reset()
            assert (cache.get_seq_length(), pool.stats().live_bytes) == (0, 0)
            rows = 3 if cache is lazy else 2
            model(prompt(4, rows=rows), **{CACHE: cache})
            assert (cache.batch_size, cache.get_seq_length()) == (rows, 4)


def test_rewind_lets_one_cache_serve_the_same_prompt_twice(pool: memtools.KVPool) -> None:
    model, ids = tiny("llama"), prompt(10, rows=2)
    expected = model.generate(ids, max_new_tokens=NEW)
    with PooledCache(pool) as cache:
        for _ in range(3):
            got = model.generate(ids, **{CACHE: cache}, max_new_tokens=NEW)
            assert torch.equal(got, expected)
            assert cache.get_seq_length() == 10 + NEW - 1
            cache.rewind(9)


def test_a_conversation_goes_on_with_its_cache(pool: memtools.KVPool) -> None:
    model, ids = tiny("llama"), prompt(5)
    with PooledCache(pool) as cache:
        first = model.generate(ids, **{CACHE: cache}, max_new_tokens=1)
        for more in (first.shape[1] - 1, 1, 7):  # the first: one more than the cache holds
            ids = torch.cat([first, prompt(more, seed=more)], 1)
            expected = model.generate(ids, max_new_tokens=4)
            first = model.generate(ids, **{CACHE: cache}, max_new_tokens=4)
            assert torch.equal(first, expected)


@pytest.mark.parametrize("keywords", [{}, {"num_beams": 2}, {"do_sample": True}])
@pytest.mark.parametrize("tokens", [1, 6])
def test_use_cache_false_is_refused(
    pool: memtools.KVPool, tokens: int, keywords: dict[str, Any]
) -> None:
    with PooledCache(pool) as cache, pytest.raises(ValueError, match="use_cache=False"):
        tiny("llama").generate(
            prompt(tokens), **{CACHE: cache}, use_cache=False, max_new_tokens=5, **keywords
        )


def test_a_pool_that_does_not_fit_the_model_is_refused(pool: memtools.KVPool) -> None:
    for model, said in [
        (tiny("gpt2"), r"num_kv_heads 4.*pool_for|head_dim 8 \(the model has 16\).*pool_for"),
        (tiny("llama", torch.bfloat16), r"float32 \(the model has torch.bfloat16\)"),
    ]:
        with pytest.raises(ValueError, match=said):
            PooledCache.for_model(model, pool)
        with PooledCache(pool) as cache, pytest.raises(ValueError, match="pool_for"):
            model.generate(prompt(4), **{CACHE: cache}, max_new_tokens=2)
        assert cache.get_seq_length() == 0


def test_a_model_with_more_layers_than_the_pool_is_refused() -> None:
    model = tiny("llama")
    with memtools.KVPool(1, 4, 8, max_tokens=8, max_sequences=1, dtype="float32") as pool:
        with pytest.raises(ValueError, match=r"num_layers 1 \(the model has 2\)"):
            PooledCache.for_model(model, pool)
        with PooledCache(pool) as cache, pytest.raises((ValueError, IndexError), match="layer"):
            model.generate(prompt(4), **{CACHE: cache}, max_new_tokens=2)


def test_the_wrong_number_of_rows_is_refused_at_once(pool: memtools.KVPool) -> None:
    with PooledCache(pool, batch_size=1) as cache:
        with pytest.raises(ValueError, match=r"has 1 rows, the model runs 4.*repeat_interleave"):
            tiny("llama").generate(prompt(6, rows=4), **{CACHE: cache}, max_new_tokens=2)
        assert cache.get_seq_length() == 0


def test_overflow_is_an_index_error_and_writes_nothing() -> None:
    model, ids = tiny("llama"), prompt(10)
    with pool_for(model, max_tokens=12, max_sequences=1) as pool, PooledCache(pool) as cache:
        with pytest.raises(IndexError, match="12"):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=4)
        assert cache.get_seq_length() == 12
        cache.rewind(9)
        assert torch.equal(
            model.generate(ids, **{CACHE: cache}, max_new_tokens=3),
            model.generate(ids, max_new_tokens=3),
        )


def test_training_through_the_cache_is_refused(pool: memtools.KVPool) -> None:
    with PooledCache(pool) as cache, pytest.raises((TypeError, ValueError), match="grad"):
        tiny("llama")(prompt(4), **{CACHE: cache})


def test_a_released_cache_is_refused(pool: memtools.KVPool) -> None:
    with PooledCache(pool) as cache:
        pass
    with pytest.raises(ValueError, match="was released"):
        tiny("llama").generate(prompt(4), **{CACHE: cache}, max_new_tokens=2)
    assert cache.get_seq_length() == 0


def test_dropping_the_cache_gives_the_pages_back_without_the_collector(
    pool: memtools.KVPool,
) -> None:
    gc.disable()
    try:
        cache = PooledCache(pool)
        tiny("llama").generate(prompt(10), **{CACHE: cache}, max_new_tokens=2)
        assert pool.stats().live_bytes > 0
        del cache
        assert pool.stats().live_bytes == 0
    finally:
        gc.enable()


def test_an_exception_in_generate_gives_the_pages_back(pool: memtools.KVPool) -> None:
    def stop(*_: Any) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError) as caught, PooledCache(pool) as cache:
        tiny("llama").generate(
            prompt(10), **{CACHE: cache}, max_new_tokens=9, stopping_criteria=[stop]
        )
    assert (pool.stats().leases, pool.stats().live_bytes) == (0, 0)
    del caught  # until here its traceback held the frames, and these the cache


def test_the_limit_of_the_pool_is_kept() -> None:
    model = tiny("llama")
    with pool_for(model, max_tokens=1 << 14, max_sequences=16, limit=1 << 18) as pool:
        with pytest.raises(memtools.BudgetError):
            PooledCache(pool, batch_size=16, num_tokens=1 << 14)
        with PooledCache(pool, batch_size=1, num_tokens=64) as cache:
            assert cache.batch_size == 1


def test_without_the_shim_the_tokens_are_the_same(without_shim: Any) -> None:
    with without_shim():
        for mode in ("sampling", "beams"):
            expected, got = both(tiny("llama"), prompt(11, rows=2), **MODES[mode])
            assert torch.equal(expected, got)


def test_pool_for_reads_the_config() -> None:
    with pool_for(tiny("qwen3"), 64, 4, "1 MiB", name="mine") as pool:
        assert (pool.num_layers, pool.num_kv_heads, pool.head_dim) == (2, 2, 16)
        assert (pool.max_tokens, pool.max_sequences, pool.name) == (64, 4, "mine")
        assert (pool.dtype, str(pool.device)) == (torch.float32, "cpu")


def test_a_transformers_that_is_too_old_is_refused_with_its_number(tmp_path):
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.3'")
    code = "import memtools.integrations.transformers"
    here = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{here}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "ImportError: memtools needs transformers 5.21 or newer, and 4.57.3 is" in done.stderr

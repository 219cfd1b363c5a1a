"""Models of other kinds: each has the tokens of plain generate(), or is refused for what it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memtools
from memtools.integrations.transformers import PooledCache, generate_group, pool_for
from tests.integrations.tinyhf import CACHE, needs_padding, prompt, ragged, tiny
from tests.kv.poolback import everything_is_back

SERVED = [
    *("falcon of one head", "falcon with alibi", "falcon, newer"),
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "data2vec"),
    *("bart", "whisper", "trocr", "roformer"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl"),
    *("deepseek-v2", "deepseek-v3", "minicpm3"),  # latent attention: V narrower than K
    "gemma4",  # heads of two widths
    "phi3 of long texts",
]
HYBRID = [  # some layers keep a state of their own, or nothing
    *("qwen3-next", "qwen3.5", "lfm2", "bamba", "jamba", "granite-moe-hybrid", "gemma3n"),
]
COPIED = [  # no pool holds what they keep
    *(["mamba"] if CACHE == "cache" else []),  # before, it takes an argument of another name
    *("falcon-h1", "minimax", "moshi", "mimo-v2-flash", "cpmant", "gpt-neox-japanese"),
    *("t5", "bart, both"),
]
COUNTS_FROM_THE_CACHE = ["bart", "whisper", "trocr", "roformer"]
KEYWORDS = {"do_sample": True, "max_new_tokens": 8, "use_cache": True}


def plain(model: Any, ids: torch.Tensor, samples: int, **keywords: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(ids, num_return_sequences=samples, **KEYWORDS | keywords)


def group(model: Any, ids: torch.Tensor, samples: int, **keywords: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return generate_group(model, ids, samples, **KEYWORDS | keywords)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["unpadded", "padded"])
@pytest.mark.parametrize("lengths", [(9, 9), (11, 4, 7)])
@pytest.mark.parametrize("name", [*SERVED, *HYBRID])
def test_groups_have_the_samples_of_generate(
    name: str, lengths: tuple[int, ...], prefill: str
) -> None:
    ids, mask = ragged(*lengths)
    model = tiny(name)
    expected = plain(model, ids, 3, attention_mask=mask)
    with pool_for(model, max_tokens=40, max_sequences=9) as pool:
        got = group(model, ids, 3, pool=pool, attention_mask=mask, prefill=prefill)
        assert everything_is_back(pool)
    assert torch.equal(got, expected)
    assert len(got.view(len(lengths), 3, -1)[0].unique(dim=0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9, 9), (11, 4, 7)])
@pytest.mark.parametrize("name", COPIED)
def test_a_prompt_that_no_pool_holds_is_computed_once_and_copied(
    name: str, lengths: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    ids, mask = ragged(*lengths)
    model = copy.deepcopy(tiny(name))
    expected = plain(model, ids, 3, attention_mask=mask)
    greedy = plain(model, ids, 1, attention_mask=mask, do_sample=False)
    group(model, ids, 3, attention_mask=mask)  # the first call compares
    seen = forwards(model)
    with caplog.at_level("INFO", logger="memtools"):
        assert torch.equal(group(model, ids, 3, attention_mask=mask), expected)
    assert "copies the prompt's cache for each answer" in caplog.text
    assert [rows for rows, _ in seen[:2]] == [len(ids), 3 * len(ids)]
    got = group(model, ids, 3, attention_mask=mask, do_sample=False)
    assert torch.equal(got, greedy.repeat_interleave(3, 0))
    with pytest.raises(ValueError, match="compact_every drops rows of a pool, and there is none"):
        group(model, ids, 3, attention_mask=mask, compact_every=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SERVED, *HYBRID])
def test_a_pooled_cache_has_the_tokens_of_the_models_own(name: str) -> None:
    ids, mask = ragged(11, 4, 7)
    model = tiny(name)
    expected = plain(model, ids, 1, attention_mask=mask)
    with (
        pool_for(model, max_tokens=40, max_sequences=3) as pool,
        PooledCache.for_model(model, pool) as cache,
    ):
        got = plain(model, ids, 1, attention_mask=mask, **{CACHE: cache})
    assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek-v3", "gemma4", "gemma3n", "bamba", "lfm2", "phi3 of long texts"]
)
def test_rows_of_layers_of_other_kinds_go_with_those_of_the_pool(name: str) -> None:
    """Beams reorder them, answers that have ended drop them, forks repeat them."""
    ids, mask = ragged(11, 4)
    model = tiny(name)
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8, "attention_mask": mask}
    expected = model.generate(ids, **beams)
    ends = {"do_sample": False, "eos_token_id": list(range(10, 40)), "pad_token_id": 0}
    rows = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    with pool_for(model, max_tokens=40, max_sequences=8) as pool:
        with PooledCache.for_model(model, pool) as cache:
            assert torch.equal(model.generate(ids, **{CACHE: cache}, **beams), expected)
        got = group(model, ids, 2, pool=pool, attention_mask=mask, compact_every=2, **ends)
        assert torch.equal(got, plain(model, rows[0], 1, attention_mask=rows[1], **ends))
        with PooledCache.for_model(model, pool) as cache, torch.no_grad():
            model(ids[:1, :-1], **{CACHE: cache})
            with copy.deepcopy(cache) as other, cache.fork(2) as two:
                row = model.generate(ids[:1], **{CACHE: other}, max_new_tokens=8)
                both = model.generate(ids[:1].repeat(2, 1), **{CACHE: two}, max_new_tokens=8)
                assert torch.equal(row, model.generate(ids[:1], max_new_tokens=8))
                assert torch.equal(both, row.repeat(2, 1))
                assert other.layers[1].keys.shape == two.layers[1].keys[:1].shape
        assert everything_is_back(pool)


def test_a_cache_with_a_state_of_all_tokens_cannot_rewind() -> None:
    model = tiny("bamba")
    with (
        pool_for(model, max_tokens=40, max_sequences=1) as pool,
        PooledCache.for_model(model, pool) as cache,
    ):
        model.generate(prompt(5), **{CACHE: cache}, max_new_tokens=2)
        with pytest.raises(ValueError, match=r"whose state has all tokens in it; fork\(\)"):
            cache.rewind(4)
        assert cache.get_seq_length() == 6


def test_heads_are_as_wide_as_the_widest_of_keys_and_values() -> None:
    model = tiny("deepseek-v3")
    with pool_for(model, max_tokens=40, max_sequences=2) as pool:
        assert (pool.num_kv_heads, pool.head_dim) == (1, 16)  # K of 16, V of 8
        with PooledCache.for_model(model, pool) as cache, torch.no_grad():
            model(prompt(5), **{CACHE: cache})
            assert [x.shape[3] for x in (cache.layers[0].keys, cache.layers[0].values)] == [16, 8]


@pytest.mark.slow
def test_inputs_besides_ids_go_through_the_prefill_of_generate() -> None:
    model, (ids, mask) = tiny("bert"), ragged(11, 4)
    kinds = prompt(11, rows=2) % 2
    keywords = {"attention_mask": mask, "token_type_ids": kinds}
    expected = plain(model, ids, 3, **keywords)
    assert torch.equal(group(model, ids, 3, **keywords), expected)
    assert not torch.equal(group(model, ids, 3, attention_mask=mask), expected)
    model = tiny("llama")
    embeds = model.get_input_embeddings()(ids)
    keywords = {"attention_mask": mask, "inputs_embeds": embeds}
    expected = plain(model, None, 3, **keywords)
    assert torch.equal(group(model, None, 3, **keywords), expected)
    with pool_for(model, 40, 6) as pool, pytest.raises(ValueError, match="give input_ids"):
        group(model, None, 3, pool=pool, **keywords)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "patch"), [("qwen2.5-vl", 14), ("qwen3-vl", 16)])
def test_images_of_a_prompt_are_seen_once(name: str, patch: int) -> None:
    model, ids = tiny(name), prompt(14, rows=2) % 80 + 3
    start, image, end = (getattr(model.config, f"{n}_token_id")
                         for n in ("vision_start", "image", "vision_end"))  # fmt: skip
    ids[:, 3:9] = torch.tensor([start, *[image] * 4, end])
    seen = {
        "pixel_values": torch.randn(32, 6 * patch**2, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == image).long(),
    }
    expected = plain(model, ids, 3, **seen)
    assert not torch.equal(plain(model, ids, 3, **seen | {"pixel_values": -seen["pixel_values"]}),
                           expected)  # fmt: skip
    with pool_for(model, max_tokens=40, max_sequences=6) as pool:
        assert torch.equal(group(model, ids, 3, pool=pool, **seen), expected)
        with PooledCache.for_model(model, pool) as cache:
            assert torch.equal(plain(model, ids, 3, **seen, **{CACHE: cache}), expected)


def test_a_model_with_a_generate_of_its_own_is_refused() -> None:
    sound = torch.zeros(2, 8, 40)
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration has its own generate.."):
        generate_group(tiny("whisper, both"), num_samples=3, input_features=sound, **KEYWORDS)


REFUSED = {
    "big-bird": "it turns sparse attention off for good at its first short text",
    "xlnet": "its forward takes no cache",
    "xlm": "in its own dictionary",
    "openai-gpt": "its forward takes no cache",
    "xlstm": "its forward takes no cache|it is a recurrent model without keys and values",
}
NO_POOL = {
    "mimo-v2-flash": "its sliding layers have twice the heads of the others",
    "cpmant": "it adds its own tokens before each prompt",
    "moshi": "it has no mask for its window",
    "gpt-neox-japanese": "keys and values only where they lie packed",
    "t5": "it is an encoder-decoder model, with two caches",
    "mamba": "it has layers of type LinearAttentionLayer|its forward takes no cache",
    "falcon-h1": "it has layers of type LinearAttentionAndFullAttentionLayer",
    "minimax": "a forward pass of one token fails .ValueError: MiniMax uses cache of its own",
}


@pytest.mark.parametrize(("name", "why"), (REFUSED | NO_POOL).items(), ids=[*REFUSED, *NO_POOL])
def test_a_model_that_a_pool_cannot_serve_is_refused_for_what_it_is(name: str, why: str) -> None:
    model = tiny(name)
    ids, small = prompt(9, rows=2), {"max_tokens": 40, "max_sequences": 4}
    with memtools.KVPool(2, 4, 16, dtype=torch.float32, **small) as pool:  # type: ignore[arg-type]
        uses = [
            lambda: pool_for(model, **small),  # type: ignore[arg-type]
            lambda: PooledCache.for_model(model, pool),
            lambda: group(model, ids, 2, pool=pool),
        ]
        for use in [*uses, lambda: group(model, ids, 2)] if name in REFUSED else uses:
            with pytest.raises(ValueError, match=why):
                use()
        assert everything_is_back(pool)


def test_layers_that_transformers_does_not_know_are_refused() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.layer_types = ["full_attention", "retention"]
    with pytest.raises(ValueError, match="layers of type retention, which transformers' cache doe"):
        pool_for(model, 40, 4)


@pytest.mark.parametrize("most", [1.3, 1.4])
def test_a_pool_that_is_mostly_padding_is_refused(most: float) -> None:
    model = copy.deepcopy(tiny("deepseek-v3"))
    limit = "memtools.integrations.transformers._model._MOST_PADDING"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limit, most)
        if most > 16 * 2 / 24:
            pool_for(model, 40, 4).close()
            return
        with pytest.raises(ValueError, match=r"heads of 16 elements it would take 1\.3 x the mem"):
            pool_for(model, 40, 4)


def test_a_model_whose_logits_would_differ_is_refused_at_its_first_call() -> None:
    """It counts the rows that it is given, which no cache knows of."""
    model = copy.deepcopy(tiny("llama"))

    def by_rows(_: Any, args: Any, output: Any) -> None:
        output.logits.mul_(1 + len(output.logits))

    model.register_forward_hook(by_rows)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has other logits .*: use model.gen"):
        group(model, prompt(9), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SERVED, "llama", "gpt2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_tells_whether_a_model_needs_the_padding(name: str, dtype: torch.dtype) -> None:
    assert needs_padding(tiny(name, dtype), prompt(9)) == (name in COUNTS_FROM_THE_CACHE)


def test_it_is_told_from_prompts_of_any_kind() -> None:
    for ids in (
        prompt(1),
        torch.full((2, 9), 5),
        prompt(5000),
        torch.zeros(1, 4, dtype=torch.long),
    ):
        assert needs_padding(copy.deepcopy(tiny("bart")), ids)
        assert not needs_padding(copy.deepcopy(tiny("llama")), ids)


def forwards(model: Any) -> list[tuple[int, ...]]:
    """The shapes of the ids that the model is given from now on."""
    seen: list[tuple[int, ...]] = []

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        seen.append(tuple((args[0] if args else ids).shape))

    model.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def test_only_the_first_call_for_a_model_compares() -> None:
    model, (ids, mask) = copy.deepcopy(tiny("llama")), ragged(11, 4)
    seen = forwards(model)
    keywords = {"attention_mask": mask, "max_new_tokens": 2}
    compares = [(1, 9), (1, 1), (1, 1)]  # by generate()
    group(model, ids, 3, prefill="padded", **keywords)
    assert seen == [*compares, (1, 9), (2, 1), (2, 1), (2, 11), (6, 1)]
    seen.clear()
    group(model, ids, 3, **keywords)
    assert seen[:7] == [*compares, (1, 5), (2, 1), (2, 1), (2, 1)]
    assert seen[7:] == [(1, 10), (1, 3), (6, 1), (6, 1)]
    for prefill in ("unpadded", "padded"):
        seen.clear()
        group(model, ids, 3, prefill=prefill, **keywords)
        assert (
            seen
            == {"unpadded": [(1, 10), (1, 3), (6, 1), (6, 1)], "padded": [(2, 11), (6, 1)]}[prefill]
        )


def test_a_model_that_needs_the_padding_is_given_all_prompts_at_once() -> None:
    model, (ids, mask) = copy.deepcopy(tiny("roformer")), ragged(11, 4)
    for _ in range(2):
        seen = forwards(model.base_model)
        group(model, ids, 3, attention_mask=mask, max_new_tokens=2)
    assert seen == [(2, 11), (6, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_groups_after_a_batch_of_another_size(name: str) -> None:
    """These models keep a number for each row of the batch before."""
    model = copy.deepcopy(tiny(name))
    for rows in (1, 3, 4):
        ids = prompt(9, rows=2, seed=rows)
        plain(model, prompt(6, rows=rows), 1)
        got = group(model, ids, 3, prefill_chunk_size=4)
        assert torch.equal(got, plain(model, ids, 3))


@pytest.mark.parametrize("name", ["bart", "llama"])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_token_forced_at_the_end_is_forced_there_alone(name: str, every: int) -> None:
    ids, mask = ragged(11, 4)
    model = tiny(name)
    keywords = {
        "attention_mask": mask,
        "do_sample": False,
        "forced_eos_token_id": 50,
        "eos_token_id": [50, *range(10, 16)],
        "pad_token_id": 0,
    }
    repeated = ids.repeat_interleave(2, 0), {"attention_mask": mask.repeat_interleave(2, 0)}
    expected = plain(model, repeated[0], 1, **keywords | repeated[1])
    assert torch.equal(group(model, ids, 2, compact_every=every, **keywords), expected)
    assert (expected == 50).any()

"""Models of other kinds: each has the tokens of plain generate(), or is refused for what it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memtools
from memtools.integrations.transformers import PooledCache, generate_group, pool_for
from memtools.integrations.transformers._prefill import needs_padding
from tests.integrations.tinyhf import CACHE, prompt, ragged, tiny
from tests.kv.poolback import everything_is_back

SERVED = [
    *("falcon of one head", "falcon with alibi", "falcon, newer"),
    *("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "data2vec"),
    *("bart", "whisper", "trocr", "roformer"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl"),
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
@pytest.mark.parametrize("name", SERVED)
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
@pytest.mark.parametrize("name", SERVED)
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


REFUSED = {
    "mimo-v2-flash": "its sliding layers have twice the heads of the others",
    "cpmant": "it puts tokens of its own before each prompt",
    "gpt-neox-japanese": "keys and values only where they lie packed",
    "xlnet": "its forward takes no cache",
    "xlm": "in a dictionary of its own",
    "openai-gpt": "its forward takes no cache",
    "xlstm": "its forward takes no cache|it is a recurrent model without keys and values",
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items(), ids=REFUSED)
def test_a_model_that_a_pool_cannot_serve_is_refused_for_what_it_is(name: str, why: str) -> None:
    model = tiny(name)
    ids, small = prompt(9, rows=2), {"max_tokens": 40, "max_sequences": 4}
    with memtools.KVPool(2, 4, 16, dtype=torch.float32, **small) as pool:  # type: ignore[arg-type]
        for use in (
            lambda: pool_for(model, **small),  # type: ignore[arg-type]
            lambda: PooledCache.for_model(model, pool),
            lambda: group(model, ids, 2),
            lambda: group(model, ids, 2, pool=pool),
        ):
            with pytest.raises(ValueError, match=why):
                use()
        assert everything_is_back(pool)


def test_keys_and_values_of_other_sizes_are_refused() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.head_dim, model.config.v_head_dim = 16, 8
    with pytest.raises(ValueError, match="its keys have heads of 16 elements and its values of 8"):
        pool_for(model, 40, 4)


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
        seen.append(tuple((args[0] if args else kwargs["input_ids"]).shape))

    model.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def test_only_the_first_call_for_a_model_asks_and_only_without_padding() -> None:
    model, (ids, mask) = copy.deepcopy(tiny("llama")), ragged(11, 4)
    seen = forwards(model)
    keywords = {"attention_mask": mask, "max_new_tokens": 2}
    group(model, ids, 3, prefill="padded", **keywords)
    assert seen == [(2, 10), (6, 1), (6, 1)]
    seen.clear()
    group(model, ids, 3, **keywords)
    assert seen[:6] == [(1, 7), (1, 1), (1, 1), (1, 4), (1, 1), (1, 1)]
    assert seen[6:] == [(1, 10), (1, 3), (6, 1), (6, 1)]
    seen.clear()
    group(model, ids, 3, **keywords)
    assert seen == [(1, 10), (1, 3), (6, 1), (6, 1)]


def test_a_model_that_needs_the_padding_is_given_all_prompts_at_once() -> None:
    model, (ids, mask) = copy.deepcopy(tiny("roformer")), ragged(11, 4)
    for _ in range(2):
        seen = forwards(model.base_model)
        group(model, ids, 3, attention_mask=mask, max_new_tokens=2)
    assert seen == [(2, 10), (6, 1), (6, 1)]


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

"""generate_group: the tokens of plain generate() with num_return_sequences, from prompts that are
computed and stored once."""

from __future__ import annotations

import copy
import functools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

import memtools
from memtools.integrations.transformers import PooledCache, generate_group, pool_for
from memtools.integrations.transformers._group import which_way
from tests.integrations.tinyhf import CACHE, VOCAB, needs_padding, prompt, ragged, tiny
from tests.kv.poolback import everything_is_back

MODELS = ["llama", "gpt2", "qwen3"]
NEW = 12
ENDS = list(range(10, 30))  # so many tokens end a row that most rows end early
SAMPLE = {"do_sample": True, "max_new_tokens": NEW, "use_cache": True}


def plain(model: Any, ids: torch.Tensor, samples: int, **keywords: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(ids, **SAMPLE | {"num_return_sequences": samples} | keywords)


def group(model: Any, ids: torch.Tensor, samples: int, **keywords: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return generate_group(model, ids, samples, **SAMPLE | keywords)


def watched() -> tuple[Any, list[tuple[int, ...]]]:
    """A tiny Llama that has had its first call, and the shapes of the ids that it is given from now
    on, each with logits of one token."""
    model, seen = copy.deepcopy(tiny("llama")), []
    assert not needs_padding(model, prompt(6))

    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))
        assert kwargs["logits_to_keep"] == 1

    model.register_forward_pre_hook(look, with_kwargs=True)
    return model, seen


@pytest.fixture
def pool() -> Iterator[memtools.KVPool]:
    """A pool for the tiny Llama; every row is back at the end."""
    with pool_for(tiny("llama"), max_tokens=64, max_sequences=12) as pool:
        yield pool
        assert everything_is_back(pool)


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["unpadded", "padded"])
@pytest.mark.parametrize("lengths", [(13,), (9, 9), (11, 4, 7), (6, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_same_samples_as_in_generate(
    name: str, lengths: tuple[int, ...], prefill: str
) -> None:
    ids, mask = ragged(*lengths)
    model = tiny(name)
    expected = plain(model, ids, 4, attention_mask=mask)
    got = group(model, ids, 4, attention_mask=mask, prefill=prefill)
    assert torch.equal(expected, got)
    rows = got.view(len(lengths), 4, -1)
    assert torch.equal(rows[:, :, : max(lengths)], ids[:, None].expand(-1, 4, -1))
    assert len(rows[0].unique(dim=0)) > 1  # they are samples


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(13,), (11, 4, 7)])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_with_a_padded_prefill_is_the_same_too(
    name: str, lengths: tuple[int, ...]
) -> None:
    ids, mask = ragged(*lengths)
    model = tiny(name, torch.bfloat16)
    expected = plain(model, ids, 4, attention_mask=mask)
    assert torch.equal(group(model, ids, 4, attention_mask=mask, prefill="padded"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_same_samples_too(dtype: torch.dtype) -> None:
    model, (ids, mask) = tiny("llama"), ragged(11, 4)
    with torch.autocast("cpu", torch.bfloat16), pool_for(model, 64, 6, dtype=dtype) as pool:
        expected = plain(model, ids, 3, attention_mask=mask)
        got = group(model, ids, 3, pool=pool, attention_mask=mask, prefill="padded")
        assert torch.equal(got, expected)
        got = group(model, ids, 3, pool=pool, attention_mask=mask)  # rounds differently
        assert got.shape == expected.shape


@pytest.mark.parametrize("keywords", [{}, {"do_sample": False}, {"min_new_tokens": 5}])
def test_rows_that_end_early(pool: memtools.KVPool, keywords: dict[str, Any]) -> None:
    ids, model = prompt(8, rows=2), tiny("llama")
    keywords = keywords | {"eos_token_id": ENDS, "pad_token_id": 0}
    repeated = ids.repeat_interleave(3, 0)  # greedy search takes no num_return_sequences
    expected = plain(model, repeated, 1, **keywords)
    assert torch.equal(group(model, ids, 3, pool=pool, **keywords), expected)


def test_a_mask_is_inferred_from_the_padding_as_in_generate() -> None:
    model = tiny("gpt2")
    ids, mask = ragged(11, 4, 7)
    expected = plain(model, ids, 2, attention_mask=mask)
    assert torch.equal(plain(model, ids, 2), expected)
    for prefill in ("padded", "unpadded"):
        assert torch.equal(group(model, ids, 2, prefill=prefill), expected)


def test_a_padding_token_that_ends_rows_masks_nothing() -> None:
    model, ids = tiny("gpt2"), ragged(11, 4)[0]
    for keywords in ({"pad_token_id": 0, "eos_token_id": 0}, {"eos_token_id": [0, 9]}):
        expected = plain(model, ids, 2, **keywords)
        assert torch.equal(group(model, ids, 2, **keywords), expected)
    assert not torch.equal(group(model, ids, 2), expected)


def test_a_mask_of_ones_outweighs_padding_tokens_in_the_prompt() -> None:
    model, ids = tiny("gpt2"), prompt(8).masked_fill(torch.arange(8) % 3 == 2, 0)
    mask = torch.ones_like(ids)
    expected = plain(model, ids, 2, attention_mask=mask)
    assert torch.equal(group(model, ids, 2, attention_mask=mask), expected)
    with pytest.raises(ValueError, match="mask of prompt 0 has zeros between its tokens"):
        group(model, ids, 2)
    assert torch.equal(group(model, ids, 2, prefill="padded"), plain(model, ids, 2))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("prefill", ["unpadded", "padded"])
def test_the_prompt_may_be_prefilled_in_chunks(name: str, prefill: str) -> None:
    ids, mask = ragged(21, 14)
    keywords = {"attention_mask": mask, "prefill_chunk_size": 5}
    expected = plain(tiny(name), ids, 2, **keywords)
    assert torch.equal(group(tiny(name), ids, 2, prefill=prefill, **keywords), expected)


def test_each_prompt_goes_through_the_model_once_and_without_its_padding() -> None:
    model, seen = watched()
    ids, mask = ragged(11, 4)
    group(model, ids, 3, attention_mask=mask, max_new_tokens=3)
    assert seen == [(1, 10), (1, 3), (6, 1), (6, 1), (6, 1)]
    seen.clear()
    assert which_way(model, ids, ("padded",))
    seen.clear()
    group(model, ids, 3, attention_mask=mask, max_new_tokens=2, prefill="padded")
    assert seen == [(2, 11), (6, 1)]
    seen.clear()
    group(model, ids, 3, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=6)
    assert seen == [(1, 6), (1, 4), (1, 3), (6, 1), (6, 1)]


def test_the_prompt_is_stored_once() -> None:
    model, ids, stats = tiny("llama"), prompt(513), []

    def look(*_: Any) -> torch.Tensor:
        stats.append(pool.stats())
        return torch.zeros(16, dtype=torch.bool)

    with pool_for(model, max_tokens=1024, max_sequences=16) as pool:
        group(model, ids, 16, pool=pool, max_new_tokens=8, stopping_criteria=[look])
    token, block = 2 * 2 * 4 * 8 * 4, 2 * 2 * 4 * mmap.PAGESIZE
    assert stats[-1].payload_bytes == 16 * (512 + 8) * token
    assert stats[-1].live_bytes == 512 * token + 16 * block  # a page a range for each answer
    assert stats[-1].rows == 16


def test_a_second_group_takes_no_new_page(pool: memtools.KVPool) -> None:
    first = group(tiny("llama"), prompt(20), 4, pool=pool)
    taken = pool.stats().taken
    assert torch.equal(group(tiny("llama"), prompt(20), 4, pool=pool), first)
    assert pool.stats().taken == taken


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3, 5, 50])
@pytest.mark.parametrize("name", MODELS)
def test_compaction_leaves_greedy_answers_as_they_are(name: str, every: int) -> None:
    ids, mask = ragged(11, 4, 7, 9)
    keywords = {"do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0, "attention_mask": mask}
    expected = plain(tiny(name), ids, 1, **keywords)
    ends = torch.isin(expected[:, 11:], torch.tensor(ENDS)).any(1).sum()
    assert ends > 0
    assert torch.equal(group(tiny(name), ids, 1, compact_every=every, **keywords), expected)
    twice = group(tiny(name), ids, 2, compact_every=every, **keywords)
    assert torch.equal(twice, expected.repeat_interleave(2, 0))


def test_compaction_drops_rows_that_have_ended() -> None:
    model, seen = watched()
    out = group(model, prompt(6), 12, compact_every=2, eos_token_id=ENDS, max_new_tokens=20)
    steps = [rows for rows, _ in seen[1:]]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 12 > steps[-1]
    ends = torch.isin(out[:, 6:], torch.tensor(ENDS))
    lengths = [row.nonzero()[0, 0] + 1 if row.any() else 20 for row in ends]
    alive = [sum(length > step - step % 2 for length in lengths) for step in range(len(steps))]
    assert steps == alive
    tails = [row[6 + length :] for row, length in zip(out, lengths, strict=True)]
    assert all((tail == model.generation_config.pad_token_id).all() for tail in tails)


@pytest.mark.parametrize(
    "keywords",
    [
        {"min_new_tokens": 7},
        {"min_length": 15},
        {"max_new_tokens": None, "max_length": 17},
        {"max_new_tokens": None},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_compaction_keeps_what_is_said_about_lengths(keywords: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompt(9, rows=4)
    keywords = {"do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0} | keywords
    expected = plain(model, ids, 1, **keywords)
    assert torch.equal(group(model, ids, 1, compact_every=3, **keywords), expected)


def test_a_generation_config_counts_and_stays_as_it_was() -> None:
    model, ids = tiny("llama"), prompt(9, rows=2)
    config = GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=ENDS, pad_token_id=0)
    before, expected = config.to_dict(), model.generate(ids, generation_config=config)
    for every in (None, 2):
        got = generate_group(model, ids, 1, generation_config=config, compact_every=every)
        assert torch.equal(got, expected)
    assert config.to_dict() == before


def test_an_output_object_comes_without_its_cache(pool: memtools.KVPool) -> None:
    keywords = {"return_dict_in_generate": True, "output_scores": True}
    expected = plain(tiny("llama"), prompt(6), 3, **keywords)
    got = group(tiny("llama"), prompt(6), 3, pool=pool, **keywords)
    assert type(got) is type(expected)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == NEW
    assert getattr(got, CACHE) is None
    assert pool.stats().leases == 0


def test_use_cache_that_is_false_in_a_config_is_overruled() -> None:
    """Trainers have it so for their training. It changes no answer."""
    model, ids = copy.deepcopy(tiny("llama")), prompt(6)
    keywords = {"do_sample": True, "max_new_tokens": NEW}
    expected = group(tiny("llama"), ids, 2)
    model.generation_config.use_cache = model.config.use_cache = False
    for config in (None, GenerationConfig(use_cache=False)):
        torch.manual_seed(7)
        got = generate_group(model, ids, 2, generation_config=config, **keywords)
        assert torch.equal(got, expected)
    assert model.generation_config.use_cache is False


@pytest.mark.parametrize("in_config", [False, True])
def test_arguments_are_those_of_generate(in_config: bool) -> None:
    ids, mask = ragged(9, 4)
    model = tiny("llama")
    expected = plain(model, ids, 3, attention_mask=mask)
    keywords = {"num_return_sequences": 3, "attention_mask": mask, **SAMPLE}
    if in_config:
        keywords = {"generation_config": GenerationConfig(**SAMPLE, num_return_sequences=3)}
        keywords |= {"attention_mask": mask, "synced_gpus": False, "pixel_values": None}
    for arguments in ((ids,), ()):
        more = {} if arguments else {"inputs": ids}
        torch.manual_seed(7)
        assert torch.equal(generate_group(model, *arguments, **keywords, **more), expected)


def test_a_first_call_in_training_mode_does_not_make_later_ones_padded() -> None:
    """Dropout changes logits in any case: a model's way of counting is found in eval mode."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1
    )
    model = GPT2LMHeadModel(config)
    assert config.resid_pdrop > 0
    model.train()
    model.transformer.h[0].eval()  # frozen, say
    assert not needs_padding(model, prompt(6))
    modes = [module.training for module in model.modules()]
    assert modes[0]
    assert not model.transformer.h[0].training
    model.eval()
    assert not needs_padding(model, prompt(6))


def test_a_prompt_of_one_token_needs_no_prefill(pool: memtools.KVPool) -> None:
    expected = plain(tiny("llama"), prompt(1), 3)
    assert torch.equal(group(tiny("llama"), prompt(1), 3, pool=pool), expected)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"use_cache": False}, "use_cache is False: leave it out"),
        (
            {"generation_config": GenerationConfig(num_beams=2)},
            "takes no num_beams, which generation_config has: .*; pass num_beams=1 to do without",
        ),
        ({"num_return_sequences": 2}, "num_samples says how many"),
        (
            {"num_beams": 2},
            "takes no num_beams: for beams use model.generate",
        ),
        ({"cache_implementation": "static"}, "the cache is the pool's"),
        ({"prompt_lookup_num_tokens": 3}, "one row only"),
        ({CACHE: 1}, f"takes no {CACHE}: it makes the cache"),
        ({"streamer": 1}, "takes no streamer: it prints the tokens of one row"),
        ({"assistant_model": 1}, "takes no assistant_model: .* one row only"),
        ({"custom_generate": "x"}, "takes no custom_generate: "),
        ({"negative_prompt_ids": 1}, "takes no negative_prompt_ids: they are a second prompt"),
        ({"compact_every": 2, "token_type_ids": 1}, "have no use for token_type_ids"),
        ({"prefill": "left"}, '"unpadded" or "padded"'),
        ({"compact_every": 0}, "at least 1 token"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[prompts, tokens\], got \[3\]"),
        ({"attention_mask": torch.ones(1, 3)}, r"is \[1, 3\], input_ids are \[2, 6\]"),
        ({"attention_mask": torch.ones(2, 6).tril(4)}, "prompt 0 has padding at its end"),
        ({"attention_mask": torch.zeros(2, 6)}, "prompt 0 has padding at its end"),
        ({"max_new_tokens": None, "max_length": 6}, "nothing to generate: the prompt has 6"),
        ({"compact_every": 2, "stop_strings": ["x"]}, "stop_strings does not survive"),
        ({"compact_every": 2, "max_time": 1}, "max_time does not survive"),
        ({"compact_every": 2, "return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"compact_every": 2, "stopping_criteria": [print]}, "stopping_criteria"),
        ({"compact_every": 2, "guidance_scale": 2}, "guidance_scale"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_runs(
    pool: memtools.KVPool, keywords: dict[str, Any], said: str
) -> None:
    arguments = {"input_ids": prompt(6, rows=2), "num_samples": 2} | SAMPLE | keywords
    with pytest.raises(ValueError, match=said):
        generate_group(tiny("llama"), pool=pool, **arguments)
    assert pool.stats().acquired == 0


def test_an_argument_that_generate_does_not_know_is_refused_by_it(pool: memtools.KVPool) -> None:
    with pytest.raises(ValueError, match="'max_new_token'"):
        group(tiny("llama"), prompt(6), 2, pool=pool, max_new_token=3)


@pytest.mark.slow
def test_settings_that_do_nothing_are_let_through(pool: memtools.KVPool) -> None:
    off = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "stop_strings": None,
           "return_dict_in_generate": False, "encoder_repetition_penalty": 1.0}  # fmt: skip
    assert group(tiny("llama"), prompt(6), 2, pool=pool, compact_every=3, **off).shape == (2, 18)


def test_too_small_a_pool_is_refused_before_anything_runs(pool: memtools.KVPool) -> None:
    model, ids = tiny("llama"), prompt(10)
    with pytest.raises(IndexError, match=r"take 65 tokens, the pool holds sequences of 64"):
        generate_group(model, ids, 2, pool, max_new_tokens=56)
    with pytest.raises(ValueError, match="13 rows are asked for, the pool lends 12"):
        generate_group(model, ids, 13, pool, max_new_tokens=2)
    with pytest.raises(ValueError, match="does not fit GPT2LMHeadModel"):
        generate_group(tiny("gpt2"), ids, 2, pool, max_new_tokens=2)
    assert pool.stats().acquired == 0
    assert generate_group(model, ids, 12, pool, max_new_tokens=55, do_sample=True).shape == (12, 65)


def test_the_limit_is_met_before_the_first_new_token() -> None:
    (model, seen), ids = watched(), prompt(600)
    token = 2 * 2 * 4 * 8 * 4
    with pool_for(model, max_tokens=1200, max_sequences=16, limit=4096 * token) as pool:
        with pytest.raises(memtools.BudgetError):
            generate_group(model, ids, 16, pool, max_new_tokens=600, do_sample=True)
        assert seen == [(1, 599)]
        assert everything_is_back(pool)
        assert generate_group(model, ids, 16, pool, max_new_tokens=8, do_sample=True).shape[0] == 16


@pytest.mark.parametrize("compact_every", [None, 2])
def test_an_exception_gives_all_rows_back(pool: memtools.KVPool, compact_every: int | None) -> None:
    model, left = copy.deepcopy(tiny("llama")), [0]
    which_way(model, prompt(6), ("unpadded",))

    def stop(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyError("stop")

    model.register_forward_pre_hook(stop)
    for forwards in (1, 2, 3, 5):
        left[0] = forwards
        with pytest.raises(KeyError) as caught:
            group(model, prompt(6, rows=2), 3, pool=pool, compact_every=compact_every)
        assert (pool.stats().leases, pool.stats().live_bytes) == (0, 0)
        del caught  # until here its traceback held the frames, and these the cache


def test_a_model_that_goes_without_its_cache_is_noticed() -> None:
    """As gradient checkpointing in training mode has it before transformers 5.24."""
    model = copy.deepcopy(tiny("llama"))
    assert group(model, prompt(6), 2).shape == (2, 18)
    forward = model.forward

    @functools.wraps(forward)
    def without_cache(*arguments: Any, **keywords: Any) -> Any:
        return forward(*arguments, **keywords | {CACHE: None, "use_cache": False})

    model.forward = without_cache
    with pytest.raises(RuntimeError, match=r"\[0\] of \d prompt tokens.*model.eval\(\)"):
        group(model, prompt(6), 2)
    model.forward = forward
    assert group(model, prompt(6), 2).shape == (2, 18)


def test_a_cache_with_all_of_the_prompt_would_be_wrong() -> None:
    """Why generate_group() keeps one token back: generate() would feed the whole prompt again."""
    model, ids = tiny("llama"), prompt(10)
    expected = model.generate(ids, max_new_tokens=4)
    with pool_for(model, max_tokens=64, max_sequences=4) as pool:
        for crop, same in ((-1, True), (0, False)):
            with PooledCache(pool) as cache, torch.no_grad():
                model(ids, **{CACHE: cache})
                cache.crop(crop)
                got = model.generate(ids, **{CACHE: cache}, max_new_tokens=4)
                assert (cache.get_seq_length() == 13) is same
                assert torch.equal(got, expected) or not same
                if same:
                    group(model, ids, 2, pool=pool)


def test_without_the_shim_the_samples_are_the_same(without_shim: Any) -> None:
    ids, mask = ragged(11, 4, 7)
    expected = plain(tiny("llama"), ids, 3, attention_mask=mask)
    with without_shim():
        assert torch.equal(group(tiny("llama"), ids, 3, attention_mask=mask), expected)

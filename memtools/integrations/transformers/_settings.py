"""What a generate() call will do, read from its keywords and configs before anything runs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from memtools._base.torch import connect

if TYPE_CHECKING:
    import torch
else:
    torch = connect().torch

_DEFAULT_NEW_TOKENS = 20  # The default of transformers if no length is given.

# Keywords of generate() that are not settings, and mean the same for the rows of a group.
_PASSED_ON = {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "tokenizer",
}
# Settings that generate_group() makes itself or that do not work with a shared prompt, and why.
_REFUSED = {
    "num_return_sequences": "num_samples says how many",
    "cache": "it makes the cache; give a pool, or use model.generate",
    "past_key_values": "it makes the cache; give a pool, or use model.generate",
    "streamer": "it prints the tokens of one row",
    "assistant_model": "assisted decoding takes one row only",
    "custom_generate": "what it does with the cache is not known",
    "negative_prompt_ids": "they are a second prompt, which generate() computes for each row",
    "num_beams": "for beams use model.generate, in which a PooledCache shares their pages",
    "prompt_lookup_num_tokens": "it takes one row only",
    "cache_implementation": "the cache is the pool's",
    "token_healing": "it changes the prompt after its cache is there",
    "penalty_alpha": "contrastive search goes back to the prompt's activations",
    "dola_layers": "it goes back to the prompt's activations",
}
# Settings that depend on where generate() began or on what it returns: in every chunk they would
# mean something else.
_WHOLE_RUN_ONLY = (
    "stop_strings",
    "max_time",
    "return_dict_in_generate",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
    "watermarking_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)
# The values, besides None and False, with which a setting does nothing.
_NEUTRAL = {
    "num_return_sequences": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "cache_implementation": "hybrid",  # in old checkpoints; generate() takes it for None
}


class Settings:
    """The settings of a call, by generate()'s own precedence: keywords, then the generation_config
    among them, then the model's.

    Args:
        model: the model that generates.
        keywords: the keywords of generate().
    """

    def __init__(self, model: Any, keywords: dict[str, Any]) -> None:
        self.model = model
        self.keywords = keywords

    def get(self, name: str) -> Any:
        """The value of a setting; None if it is not set."""
        return self._found(name)[0]

    def _found(self, name: str) -> tuple[Any, str]:
        """The value of a setting, and in words where it stands."""
        if name in self.keywords:
            return self.keywords[name], "the call"
        given, own = self.keywords.get("generation_config"), self.model.generation_config
        for config, place in ((given, "generation_config"), (own, "model.generation_config")):
            value = getattr(config, name, None)
            if value is not None:
                return value, place
        return None, ""

    def _does_something(self, name: str) -> bool:
        value = self.get(name)
        return not (value is None or value is False or value == _NEUTRAL.get(name))

    def _place(self, name: str) -> str:
        """Where a setting stands that the program did not write into the call."""
        place = self._found(name)[1]
        return "" if place == "the call" else f", which {place} has"

    def take_samples(self, num_samples: int | None) -> int:
        """The number of answers to each prompt: `num_samples`, or num_return_sequences, which is
        then 1 for generate().

        Raises ValueError if it is less than 1.
        """
        if num_samples is None:
            num_samples = self.get("num_return_sequences") or 1
            self.keywords["num_return_sequences"] = 1
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        return num_samples

    def inputs(self) -> list[str]:
        """The arguments that are no settings: inputs of the model besides ids and their mask."""
        known = vars(GenerationConfig()).keys() | _PASSED_ON
        return [k for k, value in self.keywords.items() if k not in known and value is not None]

    def check(self) -> None:
        """Raise ValueError if a setting does not work with a prompt that is prefilled once."""
        uses_cache, place = self._found("use_cache")
        if uses_cache is False and place == "the call":
            raise ValueError(
                "generate_group() works by the cache, and use_cache is False: leave it out"
            )
        self.keywords["use_cache"] = True  # TRL, for one, has False in configs for its training
        for name, why in _REFUSED.items():
            if self._does_something(name):
                is_elsewhere = self._found(name)[1] != "the call" and name in _NEUTRAL
                remedy = f"; pass {name}={_NEUTRAL[name]} to do without" if is_elsewhere else ""
                raise ValueError(
                    f"generate_group() takes no {name}{self._place(name)}: {why}{remedy}"
                )

    def check_chunks(self) -> None:
        """Raise ValueError if a setting or an input does not work with `compact_every`."""
        if inputs := self.inputs():
            raise ValueError(
                "compact_every runs generate() in chunks, and the later ones have no use for "
                f"{', '.join(inputs)}; leave one of them out"
            )
        for name in _WHOLE_RUN_ONLY:
            if self._does_something(name):
                raise ValueError(
                    f"compact_every runs generate() in chunks, which {name}{self._place(name)} "
                    "does not survive; leave one of them out"
                )

    def new_tokens(self, prompt: int) -> int:
        """The most tokens that generate() adds to a prompt of `prompt` tokens."""
        asked, longest = self.get("max_new_tokens"), self.get("max_length")
        if asked is None and longest is not None:
            asked = longest - prompt
        elif asked is None:
            most = getattr(self.model.config, "max_position_embeddings", None)
            asked = _DEFAULT_NEW_TOKENS if most is None else min(_DEFAULT_NEW_TOKENS, most - prompt)
        if asked < 1:
            raise ValueError(
                f"there is nothing to generate: the prompt has {prompt} tokens, "
                f"max_new_tokens is {self.get('max_new_tokens')} and max_length {longest}"
            )
        return int(asked)

    def shortest(self, prompt: int) -> int:
        """The least length of a sequence, the `prompt` tokens included."""
        least = self.get("min_new_tokens")
        return int(self.get("min_length") or 0) if least is None else prompt + int(least)

    def eos(self) -> list[int]:
        """The tokens that end a sequence."""
        return _ids(self.get("eos_token_id"))

    def pad(self) -> int | None:
        """The token that fills up rows: without a pad token, the first that ends a sequence."""
        return next(iter(_ids(self.get("pad_token_id")) + self.eos()), None)

    def mask(self, input_ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """The attention mask, `[prompts, tokens]`: the given one, or inferred as generate() does.

        Raises ValueError if it has another shape, or a prompt is empty or padded on the right.
        """
        if given is None:
            pad = self.pad()
            mask = torch.ones_like(input_ids)
            if pad is not None and pad not in self.eos():
                mask = input_ids.ne(pad).long()
        else:
            mask = given
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask is {list(mask.shape)}, input_ids are {list(input_ids.shape)}"
            )
        empty = (mask[:, -1] == 0).nonzero()
        if len(empty):
            raise ValueError(
                f"prompt {int(empty[0])} has padding at its end: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        return mask.to(input_ids.device)


def accepts(model: Any, name: str) -> bool:
    """Whether the forward of the model, or of the model in PEFT's wrapper, has this parameter."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(inner.forward).parameters


def cache_argument(model: Any) -> str:
    """The name of the argument that takes the cache, for forward() and generate(): `cache` from
    transformers 5.24 on, `past_key_values` before. Empty if the model takes no cache."""
    return next((name for name in ("cache", "past_key_values") if accepts(model, name)), "")


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [int(token) for token in (value if isinstance(value, (list, tuple)) else [value])]

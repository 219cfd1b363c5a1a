"""The first call for a model: whether a row of few tokens has the logits of model.generate.

tokens   . . . a b c d e f | g h     '.': padding, g and h: given, so that both ways go the same way
plain                      | x y     logits of generate()
ours                       | x y     the same, up to rounding, in each row of a group of two
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from memtools._base.torch import connect
from memtools.integrations.transformers._model import without_chance
from memtools.integrations.transformers._prefill import forget_positions
from memtools.integrations.transformers._settings import Settings

if TYPE_CHECKING:
    import torch
else:
    torch = connect().torch

_PADDING, _TOKENS = 3, 6
NEW_TOKENS = 3  # tokens that are generated
# By this share of their spread logits may differ, in 32 bits and in 16. Rounding makes 1e-6 and a
# few hundredths; a token in another place makes about 1.
_ROUNDING, _ROUNDING_16 = 1e-3, 0.2

_found: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


def gives_the_same_logits(
    model: Any, input_ids: torch.Tensor, way: str, answer: Callable[..., Any]
) -> bool:
    """Whether a way to answer gives the logits of model.generate. This is found at the first call
    for a model and a way, in eval mode, and remembered for as long as the model lives.

    Args:
        model: the model.
        input_ids: prompts of the program, whose tokens are taken.
        way: the name of the way.
        answer: called as model.generate; it returns rows that all answer the first prompt.
    """
    found = _found.setdefault(model, {})
    if way not in found:
        ids, mask = _short_row(model, input_ids)
        with without_chance(model):
            forget_positions(model)
            plain = _logits(model, model.generate, ids, mask)
            found[way] = _close(plain, _logits(model, answer, ids, mask), model)
            forget_positions(model)
    return found[way]


def _logits(
    model: Any, generate: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The logits of a few given tokens, `[rows, tokens, vocabulary]`."""
    ends = Settings(model, {}).eos()
    token = next((token for token in ids[0].tolist() if token not in ends), 0)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=1,
        num_beams=1,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    out = generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=config,
        prefix_allowed_tokens_fn=lambda *_: [token],
    )
    return torch.stack(out.logits, 1).double()


def _close(plain: torch.Tensor, ours: torch.Tensor, model: Any) -> bool:
    """Whether all logits are the same up to rounding."""
    coarse = model.dtype.itemsize < 4 or torch.is_autocast_enabled(model.device.type)
    most = (_ROUNDING_16 if coarse else _ROUNDING) * float(plain.std())
    if plain.shape[1:] != ours.shape[1:]:
        return False
    return bool((plain - ours).abs().max() <= most)  # not if there is a NaN


def _short_row(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of padding and different tokens, those of the program's prompts first, and its mask.
    Tokens that stand for an image or the like are left out."""
    config = model.config.get_text_config(decoder=True)
    both = (*vars(model.config).items(), *vars(config).items())
    marks = {value for name, value in both if "_token_i" in name and isinstance(value, int)}
    some = [token for token in input_ids.flatten()[-64:].tolist() if token not in marks]
    tokens = list(dict.fromkeys([*reversed(some), *range(min(config.vocab_size, 64))]))[:_TOKENS]
    ids = torch.tensor([[0] * _PADDING + tokens], device=model.device)
    return ids, (torch.arange(ids.shape[1], device=ids.device) >= _PADDING)[None].long()

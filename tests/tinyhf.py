"""Small transformers models with random weights, made from configs: nothing is downloaded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MAKERS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**_SIZES, num_key_value_heads=4, sliding_window=8)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=2048,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    ),
}


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """One model of each kind per process, in eval mode; weights large enough that tokens vary."""
    torch.manual_seed(len(name))
    model = _MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.to(dtype)


def fresh(name: str) -> Any:
    """A new model of the kind, to be trained; the caller seeds its weights."""
    return _MAKERS[name]()


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids `[rows, tokens]` without the ids 0 to 2."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def ragged(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths, padded on the left with 0: ids and mask."""
    longest = max(lengths)
    mask = torch.tensor([[int(i >= longest - n) for i in range(longest)] for n in lengths])
    return prompt(longest, len(lengths), seed=longest) * mask, mask

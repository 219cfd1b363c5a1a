"""Small transformers models with random weights, made from configs: nothing is downloaded."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
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

from memtools.integrations.transformers._group import which_way

VOCAB = 97
# The name of the argument that takes a cache: it changed in transformers 5.24.
_FORWARD = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"
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
_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "max_position_embeddings": 2048,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}


def _of(name: str, suffix: str = "ForCausalLM", config: str = "Config", **sizes: Any) -> Any:
    """How a model is made: its name in transformers less the ending, and entries of its config."""
    return lambda: getattr(transformers, name + suffix)(
        getattr(transformers, name + config)(**sizes)
    )


def _seeing(name: str, **vision: int) -> Any:
    """The same of a model that also takes images; its text part."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {**_SIZES, "num_key_value_heads": 4, "rope_parameters": rope}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return _of(
        name,
        "ForConditionalGeneration",
        text_config=text,
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, **vision},
        **dict(zip(ids, range(VOCAB - 4, VOCAB), strict=True)),
    )


_MAKERS |= {
    "falcon of one head": _of("Falcon", **_SIZES, multi_query=True, alibi=False),
    "falcon with alibi": _of("Falcon", **_SIZES, multi_query=False, alibi=True),
    "falcon, newer": _of(
        "Falcon", **_SIZES, new_decoder_architecture=True, num_kv_heads=2, alibi=False
    ),
    "bert": _of("Bert", "LMHeadModel", **_SIZES, is_decoder=True),
    "roberta": _of("Roberta", **_SIZES, is_decoder=True),
    "camembert": _of("Camembert", **_SIZES, is_decoder=True),
    "xlm-roberta": _of("XLMRoberta", **_SIZES, is_decoder=True),
    "xlm-roberta-xl": _of("XLMRobertaXL", **_SIZES, is_decoder=True),
    "data2vec": _of("Data2VecText", **_SIZES, is_decoder=True),
    "bart": _of("Bart", **_DECODER),
    "whisper": _of("Whisper", **_DECODER, suppress_tokens=None, begin_suppress_tokens=None),
    "trocr": _of("TrOCR", **_DECODER),
    "roformer": _of("RoFormer", **_SIZES, is_decoder=True),
    "qwen2-vl": _seeing("Qwen2VL", embed_dim=32),
    "qwen2.5-vl": _seeing("Qwen2_5_VL", out_hidden_size=64, intermediate_size=32),
    "qwen3-vl": _seeing("Qwen3VL", out_hidden_size=64, deepstack_visual_indexes=[0]),
    "mimo-v2-flash": _of("MiMoV2Flash", **_SIZES, n_routed_experts=8, moe_intermediate_size=32),
    "cpmant": _of("CpmAnt", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2),
    "gpt-neox-japanese": _of(
        "GPTNeoXJapanese", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2
    ),
    "big-bird": _of("BigBird", **_SIZES, is_decoder=True),
    "xlnet": _of("XLNet", "LMHeadModel", vocab_size=VOCAB, d_model=64, n_layer=2, n_head=4),
    "xlm": _of("XLM", "WithLMHeadModel", vocab_size=VOCAB, emb_dim=64, n_layers=2, n_heads=4),
    "openai-gpt": _of("OpenAIGPT", "LMHeadModel", vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4),
    "xlstm": _of("xLSTM", vocab_size=VOCAB, hidden_size=64, num_heads=4, num_hidden_layers=2),
}
_GROUPED = {**_SIZES, "num_key_value_heads": 4}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "v_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "head_dim": 8,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    **_GROUPED,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_value_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
}
_MAMBA = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_SHARED = {  # the last two layers use the keys and values of those before
    **_GROUPED,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
}
_BOTH = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 1,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "forced_eos_token_id": None,
}
_MAKERS |= {
    "deepseek-v2": _of("DeepseekV2", **_LATENT, **_EXPERTS),
    "deepseek-v3": _of("DeepseekV3", **_LATENT, **_EXPERTS),
    "minicpm3": _of("MiniCPM3", **_LATENT),
    "qwen3-next": _of(
        "Qwen3Next",
        **_LINEAR,
        num_experts=4,
        moe_intermediate_size=32,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=32,
    ),
    "qwen3.5": _of("Qwen3_5", config="TextConfig", **_LINEAR),
    "lfm2": _of(
        "Lfm2",
        **_GROUPED | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        conv_L_cache=3,
    ),
    "bamba": _of("Bamba", **_MAMBA, attn_layer_indices=[1, 3]),
    "jamba": _of(
        "Jamba",
        **_GROUPED | {"num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=8,
        mamba_d_state=8,
        num_experts=2,
    ),
    "granite-moe-hybrid": _of(
        "GraniteMoeHybrid",
        **_MAMBA,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=2,
        shared_intermediate_size=32,
    ),
    "gemma3n": _of(
        "Gemma3n",
        config="TextConfig",
        **_SHARED
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
        },
        laurel_rank=8,
    ),
    "gemma4": _of(
        "Gemma4",
        config="TextConfig",
        **_SHARED
        | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        global_head_dim=16,
    ),
    "phi3 of long texts": _of(  # positions are rotated by the longest row of a batch
        "Phi3",
        **_GROUPED,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 8,
        },
    ),
    "falcon-h1": _of("FalconH1", **_MAMBA | {"num_hidden_layers": 2}, mamba_d_ssm=128),
    "mamba": _of("Mamba", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8),
    "minimax": _of(
        "MiniMax",
        **_GROUPED,
        head_dim=8,
        num_local_experts=2,
        layer_types=["full_attention", "linear_attention"],
    ),
    "moshi": _of("Moshi", **_SIZES, sliding_window=8, num_codebooks=2),
    "t5": _of(
        "T5",
        "ForConditionalGeneration",
        vocab_size=VOCAB,
        d_model=64,
        d_kv=8,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
    ),
    "bart, both": _of("Bart", "ForConditionalGeneration", **_BOTH),
    "whisper, both": _of(
        "Whisper",
        "ForConditionalGeneration",
        **_BOTH,
        num_mel_bins=8,
        max_source_positions=20,
        suppress_tokens=None,
        begin_suppress_tokens=None,
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


def needs_padding(model: Any, ids: torch.Tensor) -> bool:
    """Whether generate_group() computes the padding of this model's prompts."""
    return which_way(model, ids, ("unpadded", "padded")) == "padded"


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids `[rows, tokens]` without the ids 0 to 2."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def ragged(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths, padded on the left with 0: ids and mask."""
    longest = max(lengths)
    mask = torch.tensor([[int(i >= longest - n) for i in range(longest)] for n in lengths])
    return prompt(longest, len(lengths), seed=longest) * mask, mask

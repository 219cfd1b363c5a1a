"""The examples train, alike with and without memtools, and memtools keeps to its bytes."""

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
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"memtools_{script}", EXAMPLES / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
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


@pytest.mark.slow
def test_the_demo_prints_a_table_and_finds_the_losses_the_same(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    page = tmp_path / "report.html"
    kept = ["--report", str(page), "--records", str(tmp_path / "records")]
    options = ["--only", "moe_world_model", "--updates", "8", "--json", str(out), *kept]
    done = execute("demo.py", *options, "--", "--batch", "32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"Wrote {page} (")
    for variant in ("list", "memtools"):
        record = memtools.read_record(tmp_path / "records" / f"moe_world_model-{variant}.mem")
        assert record.samples.values["step"][-1] == 8
        assert record.events[-1].text == "exit: code 0"
        assert f"moe_world_model-{variant}.mem" in page.read_text()
    lines = [line.split() for line in done.stdout.splitlines()]
    rule = next(i for i, line in enumerate(lines) if line and set("".join(line)) == {"-"})
    before, after = lines[rule + 1 : rule + 3]
    assert (before[0], before[-1]) == ("list", "(reference)")
    assert (after[0], after[-1]) == ("memtools", "yes")
    results = json.loads(out.read_text())["moe_world_model"]
    assert before[1] == f"{results['list']['peak_rss_bytes'] / 2**20:.1f}"
    assert before[2] == f"{max(results['list']['samples']['held_bytes']) / 2**20:.1f}"
    assert results["list"]["final_loss"] == results["memtools"]["final_loss"]


@pytest.mark.slow
def test_the_demo_fails_when_an_example_fails() -> None:
    options = ["--only", "moe_world_model", "--updates", "8"]
    done = execute("demo.py", *options, "--", "--env", "NoSuchEnvironment-v0")
    assert done.returncode == 1
    assert "NoSuchEnvironment" in done.stderr
    assert "moe_world_model.py (list) failed" in done.stderr


COSTS = {
    **dict.fromkeys(("peak_rss_bytes", "growth_bytes_per_1000_updates", "seconds"), 1),
    "samples": {"held_bytes": [1]},
    "final_loss": 1,
}


@pytest.mark.parametrize(
    ("losses", "same"),
    [
        ([0.5, 0.25], "yes"),
        ([0.5, 0.25000000000000006], "NO, from update 2"),
        ([0.5], "NO, from update 2"),
    ],
)
def test_the_demo_tells_losses_that_differ_in_one_bit(losses: list[float], same: str) -> None:
    demo = load("demo")
    results = {
        "list": {**COSTS, "losses": [loss.hex() for loss in (0.5, 0.25)]},
        "memtools": {**COSTS, "losses": [loss.hex() for loss in losses]},
    }
    assert demo.table(results, "gates").endswith(same)
    assert demo.all_same(results) is (same == "yes")


@pytest.mark.parametrize(("tokens", "same"), [("ab", "yes"), ("ac", "NO, other samples")])
def test_the_demo_tells_samples_that_differ(tokens: str, same: str) -> None:
    demo = load("demo")
    results = {
        "naive": {**COSTS, "losses": ["0x1p-1"], "tokens": "ab"},
        "memtools": {**COSTS, "losses": ["0x1p-1"], "tokens": tokens},
    }
    assert demo.table(results, "cache").endswith(same)
    assert demo.all_same(results) is (same == "yes")


def test_the_demo_passes_options_on_to_one_example_only() -> None:
    done = execute("demo.py", "--updates", "8", "--", "--batch", "32")
    assert done.returncode == 2
    assert "--only" in done.stderr


# --- rl_generation.py -----------------------------------------------------------------------------

RL_TINY = ["--updates", "4", "--pretrain-steps", "40", "--new-tokens", "32", "--max-tokens", "512"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """rl_generation.py in both variants, run by the demo: what it printed, and the results."""
    out = tmp_path_factory.mktemp("rl") / "demo.json"
    options = ["--json", str(out), "--report", str(out.with_suffix(".html"))]
    done = execute("demo.py", "--only", "rl_generation", *options, "--", *RL_TINY)
    assert done.returncode == 0, done.stderr
    return {**json.loads(out.read_text())["rl_generation"], "printed": done.stdout}


@pytest.mark.slow
def test_the_pool_samples_and_trains_as_the_naive_cache_does(sampled: dict[str, Any]) -> None:
    naive, pool = sampled["naive"], sampled["memtools"]
    assert (naive["cache"], pool["cache"]) == ("naive", "pool")
    assert len(naive["losses"]) == 4
    for what in ("losses", "tokens", "rewards", "pretrain_loss"):
        assert naive[what] == pool[what], what
    table, _, wrote = sampled["printed"].rstrip().rpartition("\n\n")
    assert table.endswith("yes")
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

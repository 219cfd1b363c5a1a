"""The examples train, alike with and without memtools, and memtools keeps to its bytes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = ["--updates", "16", "--batch", "64"]
BLOCKS, LIMIT_KIB = 3, 64


def execute(script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def load_demo() -> Any:
    spec = importlib.util.spec_from_file_location("memtools_demo", EXAMPLES / "demo.py")
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


def test_the_losses_are_the_same_to_the_last_bit(trained: dict[str, Any]) -> None:
    assert len(trained["list"]["losses"]) == 16
    assert trained["list"]["losses"] == trained["memtools"]["losses"]
    assert trained["list"]["mean_episode_return"] == trained["memtools"]["mean_episode_return"]


def test_the_losses_are_those_of_a_model_that_learns(trained: dict[str, Any]) -> None:
    losses = [float.fromhex(loss) for loss in trained["memtools"]["losses"]]
    assert len(set(losses)) == 16
    assert losses[-1] < losses[0]


def test_the_list_holds_every_gate_ever_seen(trained: dict[str, Any]) -> None:
    # Each update: 4 training steps over 64 rows and 3 planning steps over 32, 8 floats a row.
    per_update = BLOCKS * (4 * 64 + 3 * 32) * 8 * 4
    samples = trained["list"]["samples"]
    assert samples["held_bytes"] == [per_update * update for update in samples["update"]]


def test_memtools_holds_no_more_than_its_limit(trained: dict[str, Any]) -> None:
    held = trained["memtools"]["samples"]["held_bytes"]
    limit = BLOCKS * LIMIT_KIB * 1024
    assert max(trained["list"]["samples"]["held_bytes"]) > 2 * limit
    assert limit // 4 <= max(held) <= limit


def test_the_summary_counts_entries_that_were_evicted(trained: dict[str, Any]) -> None:
    tokens = 16 * (4 * 64 + 3 * 32)
    assert f"{tokens:,} tokens in {16 * 7} entries" in trained["memtools"]["printed"]


def test_the_demo_prints_a_table_and_finds_the_losses_the_same(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    done = execute("demo.py", "--updates", "8", "--json", str(out), "--", "--batch", "32")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rule = next(i for i, line in enumerate(lines) if line and set("".join(line)) == {"-"})
    before, after = lines[rule + 1 : rule + 3]
    assert (before[0], before[-1]) == ("list", "(reference)")
    assert (after[0], after[-1]) == ("memtools", "yes")
    results = json.loads(out.read_text())["moe_world_model"]
    assert before[1] == f"{results['list']['peak_rss_bytes'] / 2**20:.1f}"
    assert results["list"]["final_loss"] == results["memtools"]["final_loss"]


def test_the_demo_fails_when_an_example_fails() -> None:
    done = execute("demo.py", "--updates", "8", "--", "--env", "NoSuchEnvironment-v0")
    assert done.returncode == 1
    assert "NoSuchEnvironment" in done.stderr
    assert "moe_world_model.py (list) failed" in done.stderr


@pytest.mark.parametrize(
    ("losses", "same"),
    [
        ([0.5, 0.25], "yes"),
        ([0.5, 0.25000000000000006], "NO, from update 2"),
        ([0.5], "NO, from update 2"),
    ],
)
def test_the_demo_tells_losses_that_differ_in_one_bit(losses: list[float], same: str) -> None:
    demo = load_demo()
    costs = {"peak_rss_bytes": 1, "growth_bytes_per_1000_updates": 1, "seconds": 1, "final_loss": 1}
    results = {
        "list": {**costs, "losses": [loss.hex() for loss in (0.5, 0.25)]},
        "memtools": {**costs, "losses": [loss.hex() for loss in losses]},
    }
    assert demo.table(results).endswith(same)
    assert demo.all_same(results) is (same == "yes")

"""The peak of real models, beside torch's profiler, and the advice that their truth asks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memtools import read_record
from memtools._record.kinds import Peak
from memtools._record.peaks import advice, peak_of, stack_of
from tests.blocks.peakmodels import MODELS

HERE = Path(__file__).parent
MIB = 1 << 20
pytestmark = pytest.mark.slow


class Runs:
    """All models, run once beside the profiler and once under a monitor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = [sys.executable, str(HERE / "peakmodels.py"), "all", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    def lines(self, kind: str, suffix: str) -> list[str]:
        return (self.folder / f"{kind}.{suffix}").read_text().splitlines()

    def truth(self, kind: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.lines(kind, "truth")[-1])
        return found

    def __call__(self, kind: str) -> Peak:
        peak = peak_of(read_record(str(self.folder / f"{kind}.mem")))
        assert peak is not None
        return peak


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("peaks"))


@pytest.mark.parametrize("kind", MODELS)
def test_results_are_the_same_bit_by_bit(peaks, kind):
    assert peaks.lines(kind, "losses") == peaks.lines(kind, "truth")[:-1]


@pytest.mark.parametrize("kind", MODELS)
def test_the_peak_is_that_of_the_profiler_and_sizes_are_those_of_shapes(peaks, kind):
    peak, true = peaks(kind), peaks.truth(kind)
    assert peak.step == 3
    assert peak.lost == 0
    assert peak.peak_bytes == true["peak"], (peak.peak_bytes, true)
    assert sum(part.bytes for part in peak.parts) == peak.peak_bytes
    assert peak.bytes_of("parameters") == true["parameters"]
    assert peak.bytes_of("optimizer state") == true["optimizer state"]
    rest = peak.bytes_of("not seen") + peak.bytes_of("other temporaries")
    if kind not in ("rollout", "sampler"):  # which stack what they keep
        assert rest <= 0.05 * peak.peak_bytes


@pytest.mark.parametrize("kind", MODELS)
def test_the_highest_of_the_step_over_time_is_the_peak_with_its_parts(peaks, kind):
    peak = peaks(kind)
    stack = stack_of(peak)
    assert stack is not None
    at_peak = {what: row[stack.highest] for what, row in stack.rows if row[stack.highest]}
    assert at_peak == {part.what: part.bytes for part in peak.parts}
    phases = [span.phase for span in stack.spans]
    assert phases == (
        ["forward"] if kind == "rollout" else ["forward", "backward", "optimizer", ""]
    )


ADVICE = {
    "mlp loop": "whose temporaries take 8.0 MiB: pass fused=True",
    "mlp foreach": "whose temporaries take 8.0 MiB: pass fused=True",
    "mlp fused": "the model, its gradients and the optimizer's state take",
    "gpt": "most of it by Gpt.Block (",
    "gpt words": "logits and the temporaries of their loss take",
    "gpt checkpointed": "the backward pass's own temporaries take",
    "gru": "by passes that repeat, most of it by Gru (",
    "sampler": "in sample: detach() what is kept or passed on from one to the next",
    "rollout": "were kept, and this step had no backward pass: run it under torch.no_grad()",
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_advice_is_the_one_that_helps(peaks, kind):
    assert ADVICE[kind] in advice(peaks(kind))


@pytest.mark.parametrize("kind", ["mlp loop", "mlp foreach"])
def test_the_optimizers_peak_has_its_temporaries_and_all_gradients(peaks, kind):
    peak = peaks(kind)
    assert (peak.phase, peak.backward) == ("optimizer", True)
    assert peak.bytes_of("gradients") == peak.bytes_of("parameters")
    assert peak.bytes_of("optimizer's temporaries") == pytest.approx(8 * MIB, rel=0.01)
    assert peak.line.endswith(" in step")


def test_advice_that_is_followed_lowers_the_peak(peaks):
    assert peaks("mlp fused").peak_bytes < 0.9 * peaks("mlp foreach").peak_bytes
    assert peaks("gpt checkpointed").peak_bytes < 0.5 * peaks("gpt").peak_bytes


def test_what_is_saved_is_the_layers(peaks):
    peak = peaks("gpt")
    assert peak.saved[0].where.startswith("Gpt.Block (")
    assert sum(one.bytes for one in peak.saved) >= 0.95 * peak.bytes_of("saved for backward")
    assert peak.bytes_of("inputs") == 2 * 8 * 128 * 8, "both of int64"


def test_a_command_has_it_in_its_summary(peaks, tmp_path):
    words = ["-m", "memtools", "run", "--log", str(tmp_path / "x.mem"), str(HERE / "peakmodels.py")]
    done = subprocess.run(
        [sys.executable, *words, "mlp foreach"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == peaks.lines("mlp foreach", "truth")[:-1]
    line = next(
        line for line in done.stderr.splitlines() if "Peak of step 3, the only step of " in line
    )
    assert "in the optimizer's step (aten::_foreach_sqrt, " in line
    assert "memtools: fix: the peak is in the optimizer's step" in done.stderr

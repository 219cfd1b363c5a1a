"""What lived at the peak, against a run under torch.profiler."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.blocks.peaktruth import LOOPS

pytestmark = pytest.mark.slow
FORWARD, BACKWARD, OPTIMIZER = 1, 2, 3
MOMENTS = {
    "mlp_loop": (OPTIMIZER, "aten::div"),
    "mlp_foreach": (OPTIMIZER, "aten::_foreach_sqrt"),
    "mlp_fused": (BACKWARD, "AddmmBackward0"),
    "gru": (BACKWARD, "PowBackward0"),
    "language": (BACKWARD, "LogSoftmaxBackward0"),
    "checkpointed": (BACKWARD, "LogSoftmaxBackward0"),
    "sampler": (BACKWARD, "PowBackward0"),
}


@functools.cache
def found(way: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.blocks.peaktruth", way],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    loops: dict[str, Any] = json.loads(done.stdout)
    return loops


@pytest.mark.parametrize("name", LOOPS)
def test_the_peak_is_that_of_the_profiler(name: str) -> None:
    told = found("recorded")[name]
    assert told["peak"] == found("profiled")[name]["peak"]
    assert (told["lost"], told["older"]) == (0, 0)
    assert (told["phase"], told["operator"]) == MOMENTS[name]
    assert told["line"] == "one_step"


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_marked_is_exact_from_its_shapes_and_all_is_told(name: str) -> None:
    told = found("recorded")[name]
    for kind in ("1", "3", "4"):
        assert told["sums"].get(kind, 0) == told["shapes"][kind]
    # A gradient is there when the backward pass has made it.
    if told["phase"] == OPTIMIZER:
        assert told["sums"]["2"] == told["shapes"]["2"]
    assert sum(told["sums"].values()) == told["peak"]


@pytest.mark.parametrize("name", LOOPS)
def test_results_are_the_same_bit_by_bit(name: str) -> None:
    alone = found("plain")[name]
    told = found("recorded")[name]
    assert {key: told[key] for key in alone} == alone

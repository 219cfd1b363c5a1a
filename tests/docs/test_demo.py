"""examples/demo.py: what it says of each run. test_examples.py runs it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from tests.docs.test_examples import EXAMPLES, load

MIB = 2**20
FREE = "a limit of 128 MiB for training"
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "a run that finished": (
        {},
        "Finished all 250 updates with at most 431.0 MiB of the 768.0 MiB.",
    ),
    # 263 MiB are left, at 318 MiB per 1,000 updates: 827 more updates, at 0.12 s each.
    "growth towards the limit": (
        {"peak": 505 * MIB, "growth": 318.0 * MIB},
        "Grows by 318.0 MiB per 1,000 updates and held 505.0 MiB after 250 updates. At that rate "
        "it reaches the limit of 768.0 MiB in update 1,077, 2 min 19 s after its start "
        "(extrapolated).",
    ),
    "growth that would take more than twenty times as long": (
        {"growth": 0.3 * MIB},
        "Finished all 250 updates with at most 431.0 MiB of the 768.0 MiB, and does not grow "
        "towards it.",
    ),
    "a run that passed the limit": (
        {"passed_after": 12.5, "peak": 800 * MIB},
        "Passed the limit of 768.0 MiB after 12.5 s and peaked at 800.0 MiB: where that limit is "
        "enforced, the run is killed there.",
    ),
    "memory ended it": (
        {"ended": "out of memory in update 16", "enforced": FREE},
        "Out of memory in update 16, under a limit of 128 MiB for training, after 40.0 s.",
    ),
    "a limit that is enforced": (
        {"enforced": FREE, "remark": "It went on."},
        "Finished all 250 updates under a limit of 128 MiB for training with at most 431.0 MiB. "
        "It went on.",
    ),
    "without that limit, with workers": (
        {"enforced": FREE, "free": True, "workers": True},
        "Finished all 250 updates without the limit with at most 431.0 MiB in all processes.",
    ),
    "generation, and the same losses": (
        {"generation_peak": 1048 * MIB, "generation_cpu": 20.1, "same": "yes"},
        "Finished all 250 updates with at most 431.0 MiB of the 768.0 MiB. Generation peaked at "
        "1.02 GiB and took 20.1 s of processor time. The losses are the same to the last bit.",
    ),
    "other losses": (
        {"same": "they differ from update 2"},
        "Finished all 250 updates with at most 431.0 MiB of the 768.0 MiB. The losses are NOT the "
        "same: they differ from update 2.",
    ),
}


@pytest.fixture(scope="module")
def demo() -> Any:
    return load("demo")


@pytest.mark.parametrize("what", SAID)
def test_what_is_said_of_a_run(what: str, demo: Any) -> None:
    facts, text = SAID[what]
    facts = dict(facts)
    of_case = {name: facts.pop(name) for name in ("enforced", "workers") if name in facts}
    case = dataclasses.replace(demo.CASES[0], **of_case)
    way = demo.Way((), "made up", facts.pop("free", False))
    calm = {"updates": 250, "seconds": 40.0, "pace": 0.12, "peak": 431 * MIB, "limit": 768 * MIB}
    assert demo.Outcome(case, way, **{**calm, **facts}).sentences() == text


@pytest.mark.parametrize(
    ("losses", "tokens", "same"),
    [
        ([0.5, 0.25], "ab", "yes"),
        ([0.5, 0.25000000000000006], "ab", "they differ from update 2"),
        ([0.5], "ab", "they differ from update 2"),
        ([0.5, 0.25], "ac", "the samples differ"),
    ],
)
def test_one_bit_and_one_token_are_told(
    losses: list[float], tokens: str, same: str, demo: Any
) -> None:
    one = {"losses": [loss.hex() for loss in (0.5, 0.25)], "tokens": "ab"}
    other = {"losses": [loss.hex() for loss in losses], "tokens": tokens}
    assert demo.same(one, other) == same


@pytest.mark.slow
def test_options_after_the_dashes_need_one_example() -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--", "--batch", "32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "name it with --only" in done.stderr

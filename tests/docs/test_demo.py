"""examples/demo.py: how it says that runs ended. test_examples.py runs it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from memtools._cli.demo import rescues, table
from tests.docs.test_examples import EXAMPLES, execute, load

WORKER = "exception RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
ENDED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "killed": (-9, {}, {}, "killed in update 16"),
    "an exception": (1, {"out_of_memory": "host"}, {}, "out of memory in update 16"),
    "a worker": (1, {"text": WORKER}, {}, "worker killed in update 16"),
    "the example says": (1, {}, {"ended": "out of memory"}, "out of memory"),
    "something else": (1, {"text": "exception KeyError: 3"}, {}, ""),
    "finished": (0, {"text": "finished"}, {"ended": "finished"}, ""),
}


@pytest.fixture(scope="module")
def demo() -> Any:
    return load("demo")


@pytest.mark.parametrize("what", ENDED)
def test_how_memory_ended_a_run(what: str, demo: Any) -> None:
    status, ending, result, text = ENDED[what]
    ending = argparse.Namespace(**{"text": "", "out_of_memory": None, **ending})
    figures = argparse.Namespace(ending=ending)
    assert demo.out_of_memory(status, figures, result, 16) == text


@pytest.mark.parametrize(
    ("losses", "ended"),
    [
        ({1: "loss 0.5", 2: "loss 0.25", 3: "loss 0.1"}, "finished, same losses"),
        ({1: "loss 0.5", 2: "loss 0.25000000000000006"}, "finished, OTHER losses"),
        ({1: "samples ab, loss 0.5"}, "finished, OTHER losses"),
        ({7: "loss 0.5"}, "finished"),
    ],
)
def test_losses_are_compared_as_far_as_both_got(
    losses: dict[int, str], ended: str, demo: Any
) -> None:
    killed = demo.Outcome("list", "killed in update 3", 1.0, False, None, {1: "loss 0.5"})
    killed.losses[2] = "loss 0.25"
    ours = demo.Outcome("GateHistory", "finished", 1.0, True, 5, losses)
    demo.compared(demo.CASES[0], [killed, ours])
    assert (ours.ended, ours.good) == (ended, "OTHER" not in ended)


@pytest.mark.slow
def test_options_after_the_dashes_need_one_example() -> None:
    done = execute("demo.py", "--", "--batch", "32")
    assert done.returncode == 2
    assert "name it with --only" in done.stderr


def test_the_page_shows_the_table_of_the_last_full_run() -> None:
    assert "\n".join(table(json.loads(rescues()))) in (EXAMPLES / "README.md").read_text()


def test_the_last_full_run_has_all_examples(demo: Any) -> None:
    last = json.loads(rescues())["rescues"]
    assert [one["name"] for one in last] == [case.name for case in demo.CASES]
    for one, case in zip(last, demo.CASES, strict=True):
        assert (one["title"], one["limit"].rpartition(", ")[0]) == (case.title, case.limit)
        assert [way["label"] for way in one["ways"]] == [label for label, _ in case.ways.values()]

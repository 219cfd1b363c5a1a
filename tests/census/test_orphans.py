"""What no path of the program leads to: cycles of autograd, garbage, and what C code holds."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memtools._census.growth import GrowthCensus
from tests.census.test_growth import named

CYCLES = "cycles of .grad made by backward(create_graph=True)"
WIDTH = 64
#: of a step: weight and bias with their gradients, and what tensors and nodes take
BYTES = 2 * 4 * (WIDTH * WIDTH + WIDTH)


class Trainer:
    """What the loops of these tests keep their model in."""

    model: torch.nn.Module


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    global TRAINER
    TRAINER = Trainer()
    TRAINER.model = torch.nn.Linear(WIDTH, WIDTH)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the cycle
        yield TRAINER
    TRAINER.model.zero_grad()
    del TRAINER


def backward(model: torch.nn.Module) -> None:
    (model(torch.randn(4, WIDTH)) ** 2).sum().backward(create_graph=True)


def test_models_that_cycles_of_autograd_keep(trainer):
    models: list[Any] = []

    def step(i: int) -> None:
        trainer.model = torch.nn.Linear(WIDTH, WIDTH)
        backward(trainer.model)
        models.append(trainer.model.weight.data_ptr())  # a number keeps nothing

    (holder,) = [h for h in named(step).values() if "models" not in h.path]
    assert (holder.path, holder.kind) == (CYCLES, "autograd graph")
    # The second look is the first to look for them, as the first one has seen how they are made.
    assert (holder.what, holder.new_objects, holder.length) == ("leaf tensors", 48, 94)
    assert BYTES < holder.rate_bytes < 1.5 * BYTES
    assert len(set(models)) == len(models), "none of them was freed"


def test_gradients_that_add_up_with_their_graphs(trainer):
    (holder,) = named(lambda i: backward(trainer.model)).values()
    assert (holder.path, holder.what, holder.since_step) == (CYCLES, "nodes", 16)
    assert holder.containers == 2  # weight and bias


def test_gradients_that_are_let_go_of_are_not_named(trainer):
    def step(i: int) -> None:
        trainer.model.zero_grad()
        backward(trainer.model)

    assert named(step) == {}


def test_a_graph_beside_cycles_keeps_its_name(trainer):
    weight = torch.ones(8, requires_grad=True)
    trainer.hidden = weight

    def step(i: int) -> None:
        trainer.model.zero_grad()
        backward(trainer.model)
        for _ in range(4):
            trainer.hidden = trainer.hidden * 2

    (holder,) = named(step).values()
    assert holder.path.endswith("in Trainer.hidden")


def test_code_in_the_place_of_the_collectors_list_may_look_itself(trainer, monkeypatch):
    census, whole = GrowthCensus(least_rate=1024), gc.get_objects
    backward(trainer.model)
    census.look(1)

    def look_too() -> list[Any]:
        monkeypatch.setattr(gc, "get_objects", whole)
        census.look(5)
        return whole()

    monkeypatch.setattr(gc, "get_objects", look_too)
    with pytest.raises(ValueError, match="step 3 does not come after step 5"):
        census.look(3)
    census.look(6)
    assert census.looks == 3


LOOPS = {
    "autograd": (
        """
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.randn(4, 64)) ** 2).sum().backward(create_graph=True)
        optimizer.step()
        """,
        CYCLES,
    ),
    "garbage": (
        """
        batch = Batch()
        batch.self, batch.data = batch, bytearray(20_000)
        train(batch)
        """,
        "cycles that wait for the garbage collector",
    ),
    "C code": (
        """
        batch = [bytearray(20_000)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(batch))
        train(batch)
        """,
        "Python objects whose holder is not known",
    ),
}
BEGIN = """
import ctypes, gc, torch, warnings
warnings.simplefilter("ignore")
gc.disable()
class Batch: pass
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(batch):
    optimizer.zero_grad()
    model(torch.randn(64, 64)).sum().backward()
    optimizer.step()
def main():
    for i in range(140):"""


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOPS)
def test_a_run_says_what_is_known_and_no_wrong_name(case, tmp_path: Path):
    body, words = LOOPS[case]
    (tmp_path / "loop.py").write_text(f"{BEGIN}{body}\nmain()\n")
    command = [sys.executable, "-m", "memtools", "run", "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "/step" in line]
    assert words in said[-1], done.stderr
    holders = [re.split(r" \(|/step", line)[0] for line in said]  # after it comes what is new
    assert not any(name in one for one in holders for name in ("Batch", "list", "Linear", "local"))

"""`memtools plan`: a module of the folder, its output, and what is wrong with a target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memtools._cli.plan import sizes_of
from tests.kit.ownprocess import ENV

PROGRAM = """
import torch

def make():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    def step():
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    return step

def item():
    return lambda: torch.ones(1).mul(2).sum().nonzero()
"""


def command(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    (folder / "broken.py").write_text("import torch\n1 / 0\n")
    (folder / "needs.py").write_text("import no_such_library\n")
    words = [sys.executable, "-m", "memtools", "plan", *given]
    return subprocess.run(words, cwd=folder, env=ENV, capture_output=True, text=True, check=False)


def test_a_function_of_a_module_is_planned(tmp_path: Path) -> None:
    shown = command(tmp_path, "train:make", "--limits", "1,64MiB")
    assert shown.returncode == 0, shown.stderr
    assert "The step needs " in shown.stdout
    assert "1.0 MiB: does not fit" in shown.stdout
    assert "64.0 MiB: fits" in shown.stdout
    facts = json.loads(command(tmp_path, "train:make", "--json").stdout)
    assert facts["peak_bytes"] == max(facts["curve"]) == sum(facts["parts"].values())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["train"], "give MODULE:FUNCTION"),
        (["train.py:make"], "not its file"),
        (["nowhere:make"], "there is no module nowhere"),
        (["train:other"], "the module train has no function other"),
        (["broken:make"], "importing broken raised ZeroDivisionError"),
        (["needs:make"], "the module needs imports no_such_library, which is not there"),
        (["train:item"], "the step needs the values of a tensor"),
        (["train:make", "--limits", "8Gb"], "unit of bits"),
        (["train:make", "--limits", "much"], "a limit must be a number of bytes"),
    ],
)
def test_what_is_wrong_is_one_line(given: list[str], says: str, tmp_path: Path) -> None:
    shown = command(tmp_path, *given)
    assert shown.returncode == 2
    assert not shown.stdout
    assert says in shown.stderr
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("", []),
        ("8,12, 16GiB", ["8GiB", "12GiB", "16GiB"]),
        ("512MiB,1,2GiB", ["512MiB", "1GiB", "2GiB"]),
        ("1.5 GiB", ["1.5 GiB"]),
        ("4096", ["4096"]),
        ("8GiB,,", ["8GiB", "", ""]),
    ],
)
def test_sizes_may_share_a_unit(text: str, sizes: list[str]) -> None:
    assert sizes_of(text) == sizes

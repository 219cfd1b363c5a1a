"""`memtools plan`: a module of the folder, its output, and what is wrong with a target."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtools._cli import main
from memtools._cli.plan import lever_of, sizes_of
from tests.kit.ownprocess import ENV

PROGRAM = """
import torch

def make(rows=8):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    def step():
        model(torch.randn(rows, 64)).sum().backward()
        optimizer.step()
    return step

def nonzero():
    return lambda: torch.ones(1).nonzero()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of these modules, in which the test runs."""
    (tmp_path / "planned.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "needs.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("planned", "broken", "needs"):
        sys.modules.pop(name, None)


def test_a_function_of_a_module_is_planned(folder: Path) -> None:
    words = [sys.executable, "-m", "memtools", "plan", "planned:make", "--limits", "1,64MiB"]
    shown = subprocess.run(words, cwd=folder, env=ENV, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "The step needs " in shown.stdout
    assert "1.0 MiB: does not fit" in shown.stdout
    assert "64.0 MiB: fits" in shown.stdout


@pytest.mark.usefixtures("folder")
def test_the_facts_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "planned:make", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["peak_bytes"] == max(facts["curve"]) == sum(facts["parts"].values())


@pytest.mark.usefixtures("folder")
def test_levers_are_values_of_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["plan", "planned:make", "--vary", "rows=8,4096", "--limits", "1,64MiB", "--json"]
    given += ["--vary", "precision=float32, bfloat16", "--device", "cpu"]
    assert main(given) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert [one["values"] for one in facts["settings"]] == [
        {"rows": rows, "precision": precision}
        for rows in (4096, 8)
        for precision in ("float32", "bfloat16")
    ]
    assert [one["values"]["rows"] for one in facts["best"]] == [8, 4096]
    assert shown.err == ""  # It is not a terminal.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*given[:4], "--markdown"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("| rows | peak | reserved |\n| --- | --- | --- |\n| 4096 | ")
    lines = shown.err.split("\r\x1b[K")
    assert lines == ["", "planning 1 of 2: rows=4096 ...", "planning 2 of 2: rows=8 ...", ""]


@pytest.mark.parametrize(
    ("text", "lever"),
    [
        ("batch=8,16", ("batch", [8, 16])),
        ("drop = 0.1, 0", ("drop", [0.1, 0])),
        ("fused=true,False", ("fused", [True, False])),
        ("kind=adamw,sgd", ("kind", ["adamw", "sgd"])),
    ],
)
def test_a_lever_has_values_as_they_are_written(text: str, lever: tuple[str, list[object]]) -> None:
    assert repr(lever_of(text)) == repr(lever)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["planned"], "give MODULE:FUNCTION"),
        (["planned.py:make"], "not its file"),
        (["nowhere:make"], "there is no module nowhere"),
        (["planned:other"], "the module planned has no function other"),
        (["broken:make"], "importing broken raised ZeroDivisionError"),
        (["needs:make"], "the module needs imports no_such_library, which is not there"),
        (["planned:nonzero"], "the step needs the values of a tensor"),
        (["planned:make", "--limits", "8Gb"], "unit of bits"),
        (["planned:make", "--vary", "rows"], "give a lever as NAME=VALUES"),
        (["planned:make", "--vary", "rows=1,,2"], "give a lever as NAME=VALUES"),
        (["planned:make", "--vary", "batch=1"], "has no argument batch: it has rows"),
        (["planned:make", "--vary", "precision=int8"], "precision must be one of float32, bfl"),
        (["planned:make", "--limits", "much"], "each of limits must be a number of bytes"),
    ],
)
def test_what_is_wrong_is_one_line(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *given]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert says in shown.err
    assert shown.err.count("\n") == 1


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

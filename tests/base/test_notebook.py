"""Cells of notebooks: what they are called, and commands that are started by one."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtools import _cli as cli
from memtools._base import notebook
from memtools._base.libraries import USER, owner_of
from memtools._base.place import Place, function_at, name_of
from memtools._monitor.places import place_of

CELL = "/tmp/ipykernel_4711/1234.py"
SOURCE = "x = []\ndef train():\n    x.append(1)\n"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """IPython with one cell, which was executed as the second."""
    names = {CELL: ("Cell", "In[2]"), "<ipython-input-2-abc>": ("Cell", "In[2]")}
    compiler = SimpleNamespace(format_code_name=names.get)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(linecache.cache, CELL, (len(SOURCE), None, SOURCE.splitlines(True), CELL))
    return shell


@pytest.mark.usefixtures("shell")
def test_a_line_of_a_cell_is_named_as_in_a_traceback_of_ipython() -> None:
    assert name_of(Place(CELL, 3)) == "In[2]:3 in train"
    assert name_of(Place(CELL, 1)) == "In[2]:1"
    assert name_of(Place(CELL, 3, "fit.<locals>.<lambda>")) == "In[2]:3 in fit"
    assert function_at(CELL, 3) == "train"


@pytest.mark.parametrize(
    ("kernel", "given", "code", "name"),
    [
        (True, "work/train.ipynb", None, "train.ipynb"),
        (True, "work/train.ipynb", "c:\\work\\vs.ipynb", "vs.ipynb"),
        (True, "console-1-abc", None, ""),
        (True, None, None, ""),
        (False, "work/train.ipynb", None, ""),  # a command of a cell
    ],
)
def test_the_file_of_the_notebook(
    kernel: bool, given: str | None, code: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__vsc_ipynb_file__=code))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    assert notebook.file_name({} if given is None else {"JPY_SESSION_NAME": given}) == name


@pytest.mark.usefixtures("shell")
def test_other_files_keep_their_names_beside_ipython() -> None:
    assert name_of(Place("/x/train.py", 3, "fit")) == "/x/train.py:3 in fit"
    assert notebook.source_of("/x/train.py") is None


def test_without_ipython_nothing_is_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert notebook.cell_of(CELL) is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook.cell_of(CELL) is None


def test_another_version_of_ipython_is_no_error(shell: SimpleNamespace) -> None:
    del shell.compile.format_code_name
    assert notebook.cell_of(CELL) is None
    assert name_of(Place(CELL, 3, "train")) == f"{CELL}:3 in train"


def test_a_cell_is_the_code_of_the_user_also_where_no_file_is_its_name() -> None:
    assert owner_of("<ipython-input-2-abc>") == USER
    assert owner_of(CELL) == USER
    library = Place(f"{sys.prefix}/lib/python3.11/site-packages/torch/nn/x.py", 1)
    cell = Place("<ipython-input-2-abc>", 1)
    assert place_of([Place("<string>", 1), library, cell]) == cell


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TERM": "xterm-color"}, False),
        ({"TERM": "xterm-color", "CLICOLOR": "1", "GIT_PAGER": "cat"}, True),
        ({"TERM": "xterm-256color", "CLICOLOR": "1", "GIT_PAGER": "cat"}, False),
        ({"JPY_PARENT_PID": "1"}, True),
    ],
)
def test_a_command_knows_that_a_cell_has_started_it(
    environment: dict[str, str], expected: bool
) -> None:
    assert notebook.is_in_cell(environment) is expected


@pytest.mark.slow
def test_watch_in_a_cell_writes_lines_and_moves_no_cursor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memtools import _core

    with _core.RecordWriter(str(tmp_path / "run.mem"), [("step", ""), ("rss", "B")]) as writer:
        for step in range(20):
            writer.append(None, [step, 2**20])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert cli.main(["watch", str(tmp_path / "run.mem")]) == 0
    text, _ = capfd.readouterr()
    assert "1.0 MiB" in text
    assert "\x1b" not in text

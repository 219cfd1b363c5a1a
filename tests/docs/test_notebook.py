"""The notebook in examples/notebook, and cells of our own, in a real kernel: what is said comes out
in the cell, once, and not on the terminal of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks_of
from tests.kit.ownprocess import ENV, PROJECT

NOTEBOOK = PROJECT / "examples" / "notebook" / "memory.ipynb"
EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

source, folder, errors = sys.argv[1:]
cells = json.loads(source)
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
client = NotebookClient(notebook, timeout=600, kernel_name="python3")
with open(errors, "wb") as file:
    client.execute(cwd=folder, stdout=file, stderr=file)
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


class Executed:
    """The outputs of cells, and what came out on the terminal of the server."""

    def __init__(self, cells: list[str], folder: Path) -> None:
        self.folder, terminal = folder, folder / "terminal"
        words = [sys.executable, "-c", EXECUTE, json.dumps(cells), str(folder), str(terminal)]
        done = subprocess.run(words, cwd=PROJECT, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.outputs: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
        self.terminal = terminal.read_text()

    def stream(self, cell: int, name: str) -> str:
        return "".join(one["text"] for one in self.outputs[cell] if one.get("name") == name)

    def picture(self, cell: int) -> str:
        [data] = [one["data"] for one in self.outputs[cell] if "text/html" in one.get("data", {})]
        return "".join(data["text/html"])


def sources() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    assert NOTEBOOK.stat().st_size < 10_000


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return Executed(sources(), tmp_path_factory.mktemp("notebook"))


@pytest.mark.slow
def test_the_leak_of_the_notebook_is_found_and_named_by_its_cell(executed: Executed) -> None:
    at = next(i for i, text in enumerate(sources()) if text.startswith("model ="))
    said = executed.stream(at, "stderr").splitlines()
    line = sources()[at].splitlines().index("                prediction = model(batch)") + 1
    assert any("autograd graphs in predictions" in one for one in said)
    assert any(f" at In[{at + 1}]:{line} in train" in one for one in said)
    assert len(said) == len(set(said)) <= 5
    assert executed.stream(at, "stdout") == ""
    assert "predictions" not in executed.terminal


@pytest.mark.slow
def test_the_records_of_the_notebook_draw_themselves(executed: Executed) -> None:
    cells = sources()
    leaky, fixed = (
        next(i for i, cell in enumerate(cells) if cell.endswith(f'read_record("{name}.mem")'))
        for name in ("leaky", "fixed")
    )
    assert "autograd graphs in predictions" in executed.picture(leaky)
    assert "does not grow" in executed.picture(fixed)
    pictures = [
        out for cell in executed.outputs for out in cell if "text/html" in out.get("data", {})
    ]
    assert len(pictures) == 2
    sizes = [len("".join(one["data"]["text/html"])) for one in pictures]
    assert max(sizes) <= 30 * 1024


PAGE = (PROJECT / "docs" / "guides" / "notebooks.md").read_text()
BLOCKS = [block.text for block in blocks_of(PAGE) if block.is_program]


@pytest.mark.slow
def test_the_blocks_of_the_page_run_as_cells_and_write_what_it_shows(tmp_path: Path) -> None:
    executed = Executed(BLOCKS, tmp_path)
    assert "list kept" in executed.picture(0)
    assert "at In[1]:8" in executed.stream(0, "stderr")
    assert "live.mem" in executed.picture(1)  # drawn again in the same place
    assert (tmp_path / "run.html").stat().st_size > 50_000  # the charts' script alone


KEPT = """
import gc, weakref, torch
def look():
    global seen
    made = torch.ones(9)
    seen = weakref.ref(made)
    return made
def fail():
    global held
    made = torch.ones(9)
    held = weakref.ref(made)
    raise ValueError
look();
@@gc.collect(); print(seen() is None); look()
@@gc.collect(); print(seen() is None)
@@
try:
    get_ipython().run_cell("fail()")
finally:
    gc.collect()
@@gc.collect(); print(held() is None)
@@get_ipython().run_cell("1/0"); gc.collect(); print(held() is None)
"""

LINES = [
    """
import logging, memtools, torch
monitor = memtools.MemoryMonitor(log="run.mem", print_every=50)
monitor.start()
for _ in range(120):
    monitor.step()
monitor.stop()
""",
    """
logging.basicConfig(level=logging.INFO)
monitor.start()
monitor.log_memory(step=7, force=True)
monitor.stop()
""",
    """
again = memtools.MemoryMonitor(log="run.mem")
with again, memtools.MemoryMonitor(log="run.mem"):
    pass
""",
    """
with memtools.MemoryMonitor(log="failed.mem") as monitor:
    monitor.guard(1e-6, print)
    monitor.step()
memtools.read_record("failed.mem")
""",
]

NAMED = """
import os, memtools
os.environ["JPY_SESSION_NAME"] = "work/train.ipynb"  # as Jupyter's server does
with memtools.MemoryMonitor(log="run.mem"):
    pass
from memtools.report import write_report
record = memtools.read_record("run.mem")
write_report(record, "run.html")
record
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """The cells of KEPT, LINES and NAMED, one after the other in one kernel."""
    folder = tmp_path_factory.mktemp("cells")
    return Executed([*KEPT.split("@@"), *LINES, NAMED], folder)


@pytest.mark.slow
def test_a_notebook_keeps_alive_what_the_page_says(cells: Executed) -> None:
    assert cells.stream(1, "stdout") == "True\n"  # a line that ends with ; is not kept
    assert cells.stream(2, "stdout") == "False\n"
    assert cells.stream(4, "stdout") == "False\n"
    assert cells.stream(5, "stdout").endswith("True\n")


@pytest.mark.slow
def test_lines_come_out_in_their_cell_once_and_not_on_the_terminal(cells: Executed) -> None:
    first = len(KEPT.split("@@"))
    assert cells.stream(first, "stderr").count("Memory Usage:") == 2
    assert cells.stream(first + 1, "stderr").count("INFO:memtools:step 7: Memory Usage:") == 1
    assert cells.stream(first + 1, "stderr").count("Memory Usage:") == 1
    assert cells.stream(first + 2, "stderr").count("another monitor writes run.mem already") == 1
    assert cells.picture(first + 3).startswith("<div")
    for words in ("Memory Usage", "another monitor", "memtools:"):
        assert words not in cells.terminal


@pytest.mark.slow
def test_a_page_and_a_picture_have_the_notebooks_name(cells: Executed) -> None:
    assert "train.ipynb" in cells.picture(-1)
    assert "<title>Memory of train.ipynb</title>" in (cells.folder / "run.html").read_text()

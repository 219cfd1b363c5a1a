"""`make wheels`: what is built needs no compiler, and a Python that is not here is named."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest

from tests.package import wheels
from tests.package.environments import pip, run

pytestmark = pytest.mark.slow


def test_a_wheel_has_a_tag_and_is_installed_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    made = wheels.repaired(wheel, tmp_path / "tagged")
    assert "-manylinux_2_" in made.name
    venv.create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    words = ["install", "--no-index", "--find-links", made.parent, "memtools"]
    pip(python, *words, cwd=tmp_path, PATH=str(tmp_path))
    code = "import memtools; print(memtools.__file__, memtools.KVPool.__name__)"
    assert run(python, "-c", code, cwd=tmp_path).startswith(str(tmp_path / "env"))


def test_a_python_that_is_not_here_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wheels.main(str(tmp_path / "made"), "3.14=") == 0
    said = "no wheel for Python 3.14: there is no such interpreter here\n"
    assert capsys.readouterr().out == said
    assert [*(tmp_path / "made").iterdir()] == []

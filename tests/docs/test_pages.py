"""The programs and commands of docs and examples run, and write what is shown there. The tutorials
and the pages on migrating are walked in test_tutorials.py, README.md in test_front.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Programs, programs, walk, with_outputs
from tests.kit.ownprocess import PROJECT

FOLDERS = ("docs", "docs/background", "docs/guides", "docs/internals", "docs/symptoms", "examples")
PAGES = sorted(page for folder in FOLDERS for page in PROJECT.glob(f"{folder}/*.md"))
KERNEL = "notebooks"  # The programs of this page run as cells in test_notebook.py.


@pytest.fixture(scope="module")
def ways() -> Iterator[Programs]:
    with programs() as found:
        yield found


def has_programs(page: Path) -> bool:
    return any(
        block.language == "console" or block.is_program
        for block, _ in with_outputs(page.read_text())
        if page.stem != KERNEL
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if has_programs(page)], ids=lambda page: page.stem
)
def test_a_page_shows_what_its_programs_write(page: Path, ways: Programs, tmp_path: Path) -> None:
    walk(page.read_text(), tmp_path, ways)


PAGE = """
# A
```python
import sys
print("one 1"), print("two 2", file=sys.stderr)
```
On stderr:
```text
two 7
```
```text
{}
```
```console
$ cat train.py | wc -l; echo three
2
three
```
## B
```text
of no program
```
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shown", "is_right"), [("one 5", True), ("one", False), ("", False)])
def test_another_output_is_noticed(
    shown: str, is_right: bool, ways: Programs, tmp_path: Path
) -> None:
    page = PAGE.format(shown)
    ((_, outputs), _) = with_outputs(page)
    assert len(outputs) == 3
    if is_right:
        walk(page, tmp_path, ways)
    else:
        with pytest.raises(AssertionError, match="one 1"):
            walk(page, tmp_path, ways)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import warnings; warnings.warn('so')", "UserWarning: so"),
        ("raise SystemExit(3)", "ended with 3"),
        ("import sys; assert 'memtools' in sys.modules", "AssertionError"),
    ],
)
def test_a_program_that_fails_or_warns_is_noticed(
    program: str, why: str, ways: Programs, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=why):
        walk(f"```python\n{program}\n```\n", tmp_path, ways)

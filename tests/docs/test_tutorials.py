"""The tutorials and the pages on migrating, done as their readers do them: by copy and paste."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import blocks_of, changed, compare, masked, sides_of, walk

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
MIGRATING = sorted((DOCS / "migrating").glob("*.md"))
VALUES = ("step ", "loss ", "tokens ")  # lines of figures that no change may touch


def values(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(VALUES)]


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    outputs = walk(page.read_text(), tmp_path)
    assert len(outputs) >= 3
    said = " ".join(output for _, output in outputs)
    for where in re.findall(r"\b\w+\.py:\d+(?= in | {2})", page.read_text()):  # masked above
        assert f"{where} " in said, where
    finished = [values(output) for _, output in outputs if "Traceback" not in output]
    trained = [found for found in finished if found]
    assert all(found == trained[0] for found in trained)  # whatever the limit, to the last digit


@pytest.mark.slow
@pytest.mark.parametrize("page", MIGRATING, ids=lambda page: page.stem)
def test_both_sides_of_a_migration_give_the_same_values(page: Path, tmp_path: Path) -> None:
    outputs = dict(walk(page.read_text(), tmp_path))
    before, after = (outputs[f"python {name}"] for name in (pages.BEFORE, pages.AFTER))
    assert len(values(before)) >= 1
    assert values(before) == values(after)


@pytest.mark.parametrize("page", [*TUTORIALS, *MIGRATING], ids=lambda page: page.stem)
def test_a_page_is_made_of_whole_blocks(page: Path) -> None:
    text = page.read_text()
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(blocks_of(text))  # none without a language, or never closed
    assert {block.language for block in blocks_of(text)} <= {"python", "diff", "console", "text"}
    for block in blocks_of(text):
        if block.language == "python":
            compile(block.text, block.file, "exec")
        assert block.file or block.language in ("console", "text"), block.text
        assert len(block.text.splitlines()) <= 120


# --- the walk itself ------------------------------------------------------------------------------

PAGE = """
```sh a.sh
x=1
echo x $x
```

```console
$ sh a.sh
x 7
```

```diff a.sh
-x=1
+x=2.5
```

```sh a.sh
x=2.5
echo x $x
```

```console
$ sh a.sh; false
x 1.25
$ echo $?
3
```
"""


def test_a_walk_saves_changes_and_runs(tmp_path: Path) -> None:
    outputs = walk(PAGE, tmp_path)
    assert [(command, output.strip()) for command, output in outputs] == [
        ("sh a.sh", "x 1"), ("sh a.sh; false", "x 2.5"), ("echo $?", "1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("x 7", "y 7", "not found: y"),
        ("x 7", "", "not in the page: x"),
        ("-x=1", "-x=3", "found 0 times"),
        ("+x=2.5", "+x=2.6", "is not what the diff makes"),
        ("+x=2.5", "+x=2.5\n+y=1\n+z=1\n+w=1", "x=2.5"),
    ],
)
def test_a_walk_tells_what_is_wrong(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=why):
        walk(PAGE.replace(old, new), tmp_path)


def test_a_diff_of_all_lines_is_two_programs() -> None:
    assert sides_of(" a\n-b\n+c\n\n d\n") == ("a\nb\n\nd\n", "a\nc\n\nd\n")
    assert changed("a\nb\nc\n", "@@ x @@\n-b\n+d\n@@ y @@\n c\n+e\n") == "a\nd\nc\ne\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("limit in 22,000 to 81,000 steps", "limit in # to # steps"),
        (
            "memtools: suspect: x (1); made at a.py:3 in f, kept at a.py:9",
            "memtools: <grade>: x (#); kept at a.py:#",
        ),
        ("x grows, limit in 2 to 8 steps, as memory as a whole grows by 1 B/step", "x grows"),
        ("+515.0 KiB/step, -3 B", "# B/step, # B"),
        ("1 h 47 min and 36.1 s", "# s and # s"),
        ('File "/a/b/c.py", line 3', 'File "c.py", line #'),
        ("a     -----  1e-07", "a --- #"),
        ("[2048, 64] float32", "[#, #] float#"),
    ],
)
def test_figures_are_masked_and_words_are_not(text: str, line: str) -> None:
    assert masked(text) == [line]


def test_lines_may_be_left_out_only_where_the_page_says_so() -> None:
    compare("a\n...\nd\n", "a\nb\nc\nd\n")
    compare("...\nd\n...\n", "c\nd\ne\n")
    compare("a\n...\nb\nc\n...\nd\n", "a\nb\nd\nb\nc\nd\nd\n")
    with pytest.raises(AssertionError, match="not found: b / c"):
        compare("...\nb\nc\n...\n", "b\nd\nc\n")
    with pytest.raises(AssertionError, match="not found: d"):
        compare("a\nd\n", "a\nb\nd\n")
    with pytest.raises(AssertionError, match="not in the page: b"):
        compare("a\n", "a\nb\n")

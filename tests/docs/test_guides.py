"""What the guides show below a program is what that program writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.walkthrough import Block, blocks_of, compare, masked, run, typed

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = (
    "accumulation",
    "budget",
    "budget_sampler",
    "byte_cache",
    "census",
    "checkpointing",
    "gate_history",
    "grad_norm",
    "h5_episodes",
    "host_memory",
    "integrations",
    "kv_cache",
    "leak_test",
    "leaks",
    "loader",
    "made_at",
    "monitor",
    "oom_backoff",
    "peak",
    "records_in_workers",
    "run",
    "testing",
    "trajectories",
)


def shown_below_programs(page: str) -> Iterator[tuple[str, list[Block]]]:
    """Each program of a page, with the outputs between it and the next heading or program.

    A `text` block is what the program writes on one of its streams, a `console` block what is typed
    in its folder, where it is train.py."""
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE):
        found: list[tuple[str, list[Block]]] = []
        for block in blocks_of(section):
            if block.language == "python":
                found.append((block.text, []))
            elif block.language in ("text", "console") and found:
                found[-1][1].append(block)
        yield from ((program, outputs) for program, outputs in found if outputs)


def without_grades(text: str) -> str:
    """The lines with figures and grades masked, those that are then equal to the one before left
    out: how certain it is after so many steps depends on what else memory does meanwhile."""
    text = re.sub(
        r"^((?:Leak test: )?)(?:suspect|growing|likely):", r"\1<grade>:", text, flags=re.M
    )
    return "\n".join(line for line, _ in itertools.groupby(masked(text)))


def check(program: str, outputs: list[Block], folder: Path) -> None:
    """Raise AssertionError where a program writes something else than is shown."""
    (folder / "train.py").write_text(program)
    texts = [block.text for block in outputs if block.language == "text"]
    if texts:
        out, warnings, _ = run(["python train.py 2>warnings", "cat warnings"], folder)
        for text in texts:
            found = is_shown(text, out) or is_shown(text, warnings)
            assert found, f"shown:\n{text}\nwritten:\n{out}\non stderr:\n{warnings}"
    for block in outputs:
        if block.language == "console":
            session = typed(block.text)
            got = run([command for command, _ in session], folder)
            for (_, shown), output in zip(session, got, strict=False):
                compare(shown, output)


def is_shown(shown: str, written: str) -> bool:
    try:
        compare(without_grades(shown), without_grades(written))
    except AssertionError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_program_writes_what_its_guide_shows(name: str, tmp_path: Path) -> None:
    programs = list(shown_below_programs((GUIDES / f"{name}.md").read_text()))
    assert programs
    for number, (program, outputs) in enumerate(programs):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(program, outputs, folder)


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


@pytest.mark.parametrize(("shown", "is_right"), [("one 5", True), ("one", False), ("", False)])
def test_another_output_is_noticed(shown: str, is_right: bool, tmp_path: Path) -> None:
    ((program, outputs),) = shown_below_programs(PAGE.format(shown))
    assert len(outputs) == 3
    if is_right:
        check(program, outputs, tmp_path)
    else:
        with pytest.raises(AssertionError, match="one 1"):
            check(program, outputs, tmp_path)

"""Does what a reader of a page does, by copy and paste, in an empty folder.

    ```python              a program: train.py, in a folder of its own
    ```text                below a program, up to the next program or heading: what it writes on one
                           of its streams
    ```python train.py     saved as train.py
    ```diff train.py       changes the file of that name. Where there is none yet, the block is the
                           whole of two programs: before.py without the lines that begin with "+",
                           after.py without those that begin with "-"
    ```console             each line that begins with "$ " is typed, in the folder of the program
                           that it is below, if there is one; the lines below it are what it writes,
                           on both streams. A line "..." stands for any lines

Outputs are compared with figures masked: numbers, units of size and time, paths, and the grades of
what grows. A block of a file that a diff has changed is there to be copied instead of the diff: it
has to be the same file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.kit.ownprocess import ENV, PROJECT

BEFORE, AFTER = "before.py", "after.py"
MOST_CHANGED = 3  # lines of a diff: what the reader has to type
_FENCE = re.compile(r"^```(\w+)(?: ([\w./-]+))?\n((?s:.*?))^```$", re.MULTILINE)
_PART = re.compile(rf"^(##+) .*|{_FENCE.pattern}", re.MULTILINE)
_MARK = "@@ end of a command @@"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is, if any, and its text."""

    language: str
    file: str
    text: str

    @property
    def is_program(self) -> bool:
        return self.language == "python" and not self.file


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(*found) for found in _FENCE.findall(page)]


def with_outputs(page: str) -> list[tuple[Block, list[Block]]]:
    """The blocks of a page, in order, each program with the outputs below it."""
    found: list[tuple[Block, list[Block]]] = []
    program: list[Block] | None = None
    for heading, *block in _PART.findall(page):
        if heading:
            program = None
            continue
        one = Block(*block)
        if program is not None and one.language in ("text", "console"):
            program.append(one)
            continue
        found.append((one, []))
        if one.is_program:
            program = found[-1][1]
    return found


def sides_of(diff: str) -> tuple[str, str]:
    """The program before and after a diff that has all of its lines."""
    lines = diff.splitlines(keepends=True)
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "".join(line or "\n" for line in before), "".join(line or "\n" for line in after)


def changed(source: str, diff: str) -> str:
    """A file with a diff applied: its old lines stand in the file once, one after the other.

    Raises ValueError where they do not.
    """
    for hunk in filter(None, re.split(r"^@@.*\n", diff, flags=re.MULTILINE)):
        old, new = sides_of(hunk)
        if source.count(old) != 1:
            raise ValueError(f"found {source.count(old)} times in the file:\n{old}")
        source = source.replace(old, new)
    return source


def lines_to_type(diff: str) -> int:
    """How many lines a reader adds or changes, imports apart."""
    lines = [line[1:].split() for line in diff.splitlines() if line.startswith("+")]
    return sum(words[:1] not in ([], ["import"], ["from"]) for words in lines)


def masked(text: str) -> list[str]:
    """The lines of an output without what differs from run to run and from machine to machine; of
    lines that are then equal the first."""
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.-]+)", r"\1", text)  # of a path the last part
    # How certain it is after so many steps depends on what else memory does meanwhile.
    text = re.sub(r"\b(?:suspect|growing|likely)\b", "<grade>", text)
    text = re.sub(r", stalled \d+% of the last 10 s", "", text)  # by other programs
    text = re.sub(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", "#", text)
    text = re.sub(r"# (?:[KMGT]i?B|B|bytes)\b", "# B", text)
    text = re.sub(r"# (?:us|ms|s|min|h|d)(?: # (?:us|ms|s|min|h))*\b", "# s", text)
    text = re.sub(r"[+-](?=#)", "", text)
    # When it is known how much time is left, and which line makes it, depends on that, too.
    text = re.sub(r"; made (?:at \S+(?: in \w+)?, kept|and kept)", "; kept", text)
    grows = r"(?:, as memory as a whole grows by # B/step)?"
    text = re.sub(rf"(?:,|  ) ?limit in # to # steps{grows}", "", text)
    text = re.sub(
        r"^memtools: at # s a step that is # s to # s; the limit .*\n", "", text, flags=re.M
    )
    text = re.sub(r"[-=~^]{3,}", "---", text)
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return [line for line, _ in itertools.groupby(filter(None, lines))]


def compare(shown: str, got: str) -> None:
    """Raise AssertionError where an output is not what the page shows. The lines between two lines
    "..." have to stand one below the other, at the first place where all of them do."""
    lines = masked(got)
    first, *others = _between_dots(masked(shown))
    for at, line in enumerate(first):
        assert lines[at : at + 1] == [line], f"not found: {line}\nin the output:\n{got}"
    at = len(first)
    for i, part in enumerate(others, 1):
        ends = len(lines) - len(part) if part and i == len(others) else at  # the last lines end it
        places = range(max(ends, at), len(lines) - len(part) + 1)
        found = [place for place in places if lines[place : place + len(part)] == part]
        assert found, f"not found: {' / '.join(part)}\nin the output:\n{got}"
        at = found[0] + len(part)
    assert others or at == len(lines), f"not in the page: {lines[at]}\nin the output:\n{got}"


def _between_dots(lines: list[str]) -> list[list[str]]:
    """The lines before, between and after lines "..."."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def typed(session: str) -> list[tuple[str, str]]:
    """(command, what the page shows below it) of a console block."""
    parts = re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def run(commands: list[str], folder: Path, env: Mapping[str, str] = ENV) -> Iterator[str]:
    """What each command of one shell writes."""
    script = "".join(
        f"(exit $end)\n{command}\nend=$?; echo; echo '{_MARK}'\n" for command in commands
    )
    tools = os.pathsep.join((os.path.dirname(sys.executable), env["PATH"]))
    # A reader sits at a terminal of 80 columns; on a server of CI pytest does not cut its lines.
    others = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS")
    reader = {name: value for name, value in env.items() if name not in others}
    done = subprocess.run(
        ["bash", "-c", f"end=0\n{script}"], cwd=folder,
        env={**reader, "PATH": tools, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    return iter(done.stdout.split(_MARK))


class Programs:
    """Runs programs in processes that have torch already: see blocks.py."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self.requests, self.answers = server.stdin, server.stdout

    def run(self, folder: Path, *, is_strict: bool) -> tuple[int, str, str]:
        """What train.py there ends with and writes; if it is strict, a warning is an error."""
        print(json.dumps([str(folder), is_strict]), file=self.requests, flush=True)
        code = int(self.answers.readline())
        return code, (folder / ".out").read_text(), (folder / ".err").read_text()


@contextlib.contextmanager
def programs() -> Iterator[Programs]:
    command = [sys.executable, "-m", "tests.docs.blocks"]
    with subprocess.Popen(
        command, cwd=PROJECT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        found = Programs(server)
        yield found
        found.requests.close()


def type_in(block: Block, folder: Path) -> list[tuple[str, str]]:
    """Type a console block, and compare what is shown. Returns each command and its output."""
    session = typed(block.text)
    outputs = []
    got = run([command for command, _ in session], folder)
    for (command, shown), output in zip(session, got, strict=False):
        outputs.append((command, output))
        compare(shown, output)
    return outputs


def run_program(program: Block, outputs: list[Block], folder: Path, ways: Programs) -> None:
    """Run a program and what is typed below it. Raises AssertionError where it fails, warns
    though no output is shown, or writes another one."""
    (folder / "train.py").write_text(program.text)
    shown = [block.text for block in outputs if block.language == "text"]
    if shown or not outputs:
        code, out, err = ways.run(folder, is_strict=not outputs)
        assert code == 0, f"{program.text}\nended with {code}:\n{out}{err}"
        for text in shown:
            is_right = is_shown(text, out) or is_shown(text, err)
            assert is_right, f"shown:\n{text}\nwritten:\n{out}\non stderr:\n{err}"
    for block in outputs:
        if block.language == "console":
            type_in(block, folder)


def is_shown(shown: str, written: str) -> bool:
    try:
        compare(shown, written)
    except AssertionError:
        return False
    return True


def walk(page: str, folder: Path, ways: Programs | None = None) -> list[tuple[str, str]]:
    """Do what a page says in a folder, and compare what it shows. Returns each command with its
    output. `ways` runs the programs of the page, if it has any."""
    outputs, patched = list[tuple[str, str]](), set[str]()
    for number, (block, below) in enumerate(with_outputs(page)):
        path = folder / block.file
        if block.is_program:
            assert ways is not None
            (folder / f"{number}").mkdir()
            run_program(block, below, folder / f"{number}", ways)
        elif block.language == "diff" and block.file:
            assert lines_to_type(block.text) <= MOST_CHANGED, block.text
            if path.exists():
                path.write_text(changed(path.read_text(), block.text))
                patched.add(block.file)
            else:
                for name, text in zip((BEFORE, AFTER), sides_of(block.text), strict=True):
                    (folder / name).write_text(text)
        elif block.file in patched:
            assert path.read_text() == block.text, f"{block.file} is not what the diff makes of it"
        elif block.file:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "console":
            outputs += type_in(block, folder)
    return outputs

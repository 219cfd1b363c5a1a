"""Names of the program and texts of a record reach no terminal and no log with an escape."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import memtools
from memtools import _core, cli, read_record
from memtools._base.notice import logger, notice

HOSTILE = "\x1b]0;x\x07\x9b31m\u202e"


def test_what_is_printed_and_logged_has_no_escapes(tmp_path, capsys, caplog) -> None:
    path = tmp_path / f"{HOSTILE}.mem"
    with _core.RecordWriter(str(path), ["rss"], command=["train.py", HOSTILE]) as writer:
        writer.append(None, [1])
        writer.phase(HOSTILE, 1)
        writer.event("mark", HOSTILE)
    texts = [str(read_record(path))]
    for words in (["export", str(path), "--to", "jsonl"], ["explain", str(path)],
                  ["explain", f"{path}.no"], ["run", f"{path}.py"], [HOSTILE],
                  ["run", "--", HOSTILE]):  # fmt: skip
        cli.main(words)
        texts += capsys.readouterr()
    with caplog.at_level(logging.WARNING, "memtools"):
        logger.warning("%s grows", HOSTILE)
    texts.append(caplog.text)
    with pytest.warns(RuntimeWarning) as caught:
        notice(HOSTILE)
    texts.append(str(caught[0].message))
    assert all(not set(HOSTILE) & set("\x1b\x07\x9b\u202e") & set(text) for text in texts)
    assert (tmp_path / f"{HOSTILE}.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-o", HOSTILE, "-c", ""], ["-o", f"{HOSTILE}/x", "-c", ""],
                                   ["-o", HOSTILE, "--", "true"]])  # fmt: skip
def test_what_a_run_says_has_no_escapes(tmp_path, words: list[str]) -> None:
    command = [sys.executable, "-m", "memtools", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "memtools" in done.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr)


SECRET = "sk-proj-abcDEFghiJKL"


class Named:
    """Its class and its attributes have the names that a program gave them."""


def hostile_instance() -> Named:
    kind = type(HOSTILE, (Named,), {})
    made = kind()
    vars(made)[HOSTILE] = {SECRET: [bytearray(64) for _ in range(9)]}
    return made


def test_holders_findings_and_phases_have_neither_escapes_nor_secrets() -> None:
    made = hostile_instance()
    holders = memtools.holder_of(vars(made)[HOSTILE][SECRET])
    assert holders
    texts = [part for one in holders for part in (one.path, str(one), repr(one))]
    finding = memtools.LeakFinding(
        "leak", holder=f"dict X['{SECRET}'] {HOSTILE}", what=HOSTILE, made_at=f"{HOSTILE}.py:3",
        process=HOSTILE, advice=f"clear {HOSTILE} of {SECRET}",
    )  # fmt: skip
    texts += [str(finding), repr(finding), finding.line(), str(finding.as_json())]
    with memtools.MemoryMonitor(leaks=False) as monitor, monitor.phase(HOSTILE):
        pass
    texts.append(monitor.summary())
    for text in texts:
        assert not set("\x1b\x07\x9b\u202e") & set(text), text
        assert SECRET not in text

"""Names of the program and texts of a record reach no terminal and no log with an escape."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from memtools import _cli as cli
from memtools import _core, data, read_record
from memtools._base.notice import logger, notice
from tests.kit.long import LONG

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


# --- names that are drawn -------------------------------------------------------------------------

PARTS = (
    HOSTILE, "\x1b]0;x\x07", "\x9b31m", "\u202e", "\u2066", "\ud800", "\udc80", "\0", "\n", "\r",
    "\x7f", "\u2028", "\U000e0041", "<script>alert(1)</script>", "&amp;", '"', "'", "{}", "%s",
    "\\", "a", "é", "[bold]", "x" * 10_000,
)  # fmt: skip
NAMES = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=4).map("".join)


def is_harmless(text: str) -> bool:
    """Whether a terminal only shows it, and each encoding of Unicode has it."""
    kinds = {unicodedata.category(char) for char in text if char not in "\n\t"}
    return not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class Source:
    def __init__(self, name: str) -> None:
        self.name = name

    def metrics(self, expert: bool = False) -> dict[str, float]:
        return {self.name: 1.0, f"memory/phase/{self.name}/peak_bytes": 2.0}


def suballocated(name: str) -> str:
    budget = memtools.Budget("1 MiB")
    part = budget.suballocate(name, "1 KiB")
    return f"{part!r} {budget.report()}"


def phased(name: str) -> str:
    with memtools.MemoryMonitor(leaks=False) as monitor, monitor.phase(name):
        pass
    return f"{monitor.summary()} {list(monitor.metrics(True))}"


def called(name: str) -> Callable[..., None]:
    def call(*_: object) -> None:
        pass

    call.__qualname__ = call.__name__ = name
    return call


def stored(name: str) -> str:
    store = memtools.TrajectoryStore(2)
    store.append({name: torch.ones(4)})
    return f"{store!r} {store.stats()}"


def made(name: str) -> str:
    """What is said of objects under a key and an attribute of that name, in such a class."""
    text = "".join(char for char in name if char != "\0" and not "\ud800" <= char <= "\udfff")
    one = type(text, (), {"__module__": text})()
    vars(one)[name] = {name: [bytearray(9) for _ in range(9)]}
    return "".join(f"{holder} {holder!r}" for holder in memtools.holder_of(vars(one)[name][name]))


def pooled(**options: Any) -> str:
    given = {"max_tokens": 64, "max_sequences": 2, "dtype": "float32"} | options
    return repr(memtools.KVPool(1, 1, 8, **given))


#: what is made with a name, or refuses it
OBJECTS: dict[str, Callable[[str], object]] = {
    "Budget": lambda name: memtools.Budget("1 MiB", name=name),
    "Budget.suballocate": suballocated,
    "ByteCache": lambda name: data.ByteCache("1 KiB", name=name),
    "CleanupPolicy.add": lambda name: memtools.CleanupPolicy(1).add(name, called(name)),
    "CleanupPolicy.phase": lambda name: memtools.CleanupPolicy({name: 1}).phase(name),
    "KVPool": lambda name: pooled(name=name),
    "KVPool dtype": lambda name: pooled(dtype=name),
    "LeakDetector": lambda name: memtools.LeakDetector().expect_growth(name, bytes=5),
    "MemoryMonitor": lambda name: memtools.MemoryMonitor(name=name),
    "MemoryMonitor.on_leak": lambda name: memtools.MemoryMonitor().on_leak(called(name)),
    "MemoryMonitor.on_pressure": lambda name: memtools.MemoryMonitor().on_pressure(1, called(name)),
    "MemoryMonitor.phase": phased,
    "TrajectoryStore": stored,
    "TrajectoryStore[]": lambda name: memtools.TrajectoryStore(2)[name],
    "parse_bytes": lambda name: memtools.Budget(name),
    "holder_of": made,
}  # fmt: skip
#: what takes the path of a file
PATHS: dict[str, Callable[[str], object]] = {
    "GateHistory.load": memtools.GateHistory.load,
    "GateHistory.save": lambda path: memtools.GateHistory().save(path),
    "H5Episodes": data.H5Episodes,
    "MemoryMonitor": lambda path: memtools.MemoryMonitor(log=path),
    "TrajectoryStore": lambda path: memtools.TrajectoryStore(2, file=path).close(),
    "TrajectoryStore.open": memtools.TrajectoryStore.open,
    "read_record": read_record,
}


def said(call: Callable[[str], object], given: str) -> str:
    """What is printed of what a call returns, or the one line of its refusal."""
    try:
        return f"{(made := call(given))!r} {made}"
    except (ValueError, TypeError, OSError, KeyError) as error:
        assert not isinstance(error, UnicodeError), error
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.slow
@settings(max_examples=100 if LONG else 6, deadline=None)
@given(name=NAMES)
def test_whatever_a_name_is_what_is_said_of_it_is_harmless(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for what, call in OBJECTS.items():
            assert is_harmless(text := said(call, name)), (what, text)
        for what, call in PATHS.items():
            assert is_harmless(text := said(call, name.replace("/", "")[:60])), (what, text)


def printed_by(words: list[str]) -> str:
    """By a command whose streams are those of a terminal in UTF-8."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors=how) for how in
               ("strict", "backslashreplace")]  # fmt: skip
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        cli.main(words)
    for stream in streams:
        stream.flush()
    return b"".join(stream.buffer.getvalue() for stream in streams).decode()  # type: ignore


@pytest.mark.slow
@settings(max_examples=40 if LONG else 4, deadline=None)
@given(name=NAMES)
def test_whatever_a_record_says_the_commands_and_the_page_are_harmless(name: str) -> None:
    text = name.replace("\0", "").encode("utf-8", "replace").decode()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = f"{text.replace('/', '').encode()[:60].decode('utf-8', 'ignore')}.mem"
        with _core.RecordWriter(path, ["rss"], command=["train.py", text]) as writer:
            writer.append(None, [1])
            writer.phase(text[:50] or "a", 1)
            writer.event("mark", text)
            writer.event(text[:9] or "a", text)
        assert is_harmless(f"{read_record(path)} {read_record(path)!r}")
        for words in (
            ["explain", path], ["explain", "--json", path], ["compare", path, path],
            ["watch", "--once", path], ["watch", "--json", "--once", path],
            ["export", path, "--to", "jsonl"], ["export", path, "--to", "trace"],
            ["report", path, "--title", name, "-o", "page.html"], ["report", "--json", path],
            ["explain", f"no{name}"], ["run", "-o", path, f"no{name}.py"], ["compare", name, path],
            ["watch", "--once", f"no{name}"], ["export", path, "--to", name],
        ):  # fmt: skip
            assert is_harmless(out := printed_by(words)), (words, out)
        for file in Path().glob("*.html"):
            page = file.read_text("utf-8")
            assert is_harmless(page.replace("\n", "")), file
            assert "<script>alert(1)" not in page
        for file in (*Path().glob("*.jsonl"), *Path().glob("*.json")):
            assert file.read_bytes().isascii()

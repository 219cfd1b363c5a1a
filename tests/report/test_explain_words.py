"""The words of `memtools explain`: harmless, short, with units; and what it advises."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import memtools
from memtools import _cli as cli
from memtools import _core
from memtools._base.size import format_bytes
from memtools._base.text import duration, percent, shown
from memtools._leak.finding import LeakFinding
from memtools._record.figures import Cleanups, figures_of, plain
from memtools._record.kinds import Cleanup, Event
from memtools.report._explain import explain
from tests.report.reportcases import HOSTILE, LEAK, MIB, START, event, write


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.mem")


def test_nothing_reaches_the_terminal_that_could_lead_it(path, capsys):
    events: list[Event | LeakFinding | tuple[str, str | bytes]] = []
    for text in HOSTILE:
        events += [replace(LEAK, holder=text, advice=text), Cleanup((text,), (1.0,))]
        events.append(("mark", text))
    write(path, steps=300, events=events, command=tuple(HOSTILE))
    assert cli.main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in out)
    assert r"\u202egnp.exe" in out


def test_shown_keeps_words_and_escapes_what_cannot_be_seen():
    assert shown("Größe 3 µs, 中文 é") == "Größe 3 µs, 中文 é"
    assert shown("a\tb\x85\u202e\U000e0001") == r"a\x09b\x85\u202e\U000e0001"


def test_durations_sizes_and_shares_are_short_and_have_units():
    cases = {0: "0 s", 2e-6: "2 us", 0.0042: "4.2 ms", 0.42: "0.42 s", 59.94: "59.9 s",
             59.96: "1 min 00 s", 200: "3 min 20 s", 3599.6: "1 h 00 min", 14700: "4 h 05 min",
             1e6: "11 d 14 h"}  # fmt: skip
    assert {seconds: duration(seconds) for seconds in cases} == cases
    sizes = {0: "0 B", 1023: "1023 B", 2**10 - 0.4: "1.0 KiB", 2**20 - 1: "1.0 MiB",
             1536 * MIB: "1.50 GiB", 12 << 30: "12.0 GiB", 2**40 - 1: "1.00 TiB"}  # fmt: skip
    assert {size: format_bytes(size) for size in sizes} == sizes
    assert [percent(n, 1000) for n in (0, 5, 500, 996, 1000, 2200)] == [
        "0 %", "0.5 %", "50 %", "99.6 %", "100 %", "220 %"]  # fmt: skip


def test_explain_needs_neither_torch_nor_numpy_nor_jinja2(path):
    write(path, grows=65536, steps=600)
    script = (
        "import sys; sys.modules.update(torch=None, numpy=None, jinja2=None)\n"
        "from memtools import _cli as cli; sys.exit(cli.main(['explain', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Memory\n" in done.stdout


def test_a_cleanup_event_with_a_duration_takes_that(path):
    with _core.RecordWriter(path, ["x"]) as writer:
        kind, fields = event(Cleanup(("gc",), (9.0,), (), MIB))
        writer.event(kind, fields, time_ns=START, duration_ns=5_000_000)
    assert figures_of(memtools.read_record(path)).cleanups == (Cleanups("gc", 1, 0.005, MIB),)


def test_a_forecast_without_an_end_is_null_in_json():
    assert plain((1.0, math.inf, (math.nan, "x"), 2**70)) == [1.0, None, [None, "x"], 2**70]


def test_a_leak_that_is_no_longer_one_is_not_blamed(path):
    held = replace(LEAK, rate_bytes=1024.0, holder="list Net.kept", advice="list Net.kept grows")
    write(path, steps=600, base=1000 * MIB, events=[held], close=False)
    assert "  fix: list Net.kept grows" in explain(figures_of(memtools.read_record(path)))
    Path(path).unlink()
    events = [held, replace(held, over=True)]
    write(path, steps=600, base=1000 * MIB, events=events, close=False)
    text = explain(figures_of(memtools.read_record(path)))
    assert "list Net.kept" not in text
    assert "its peak in phase train is too high" in text

"""memtools.read_record and _core.RecordWriter; test_reader.py has every broken byte."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from memtools import _core
from memtools._record.kinds import KINDS
from memtools._record.record import UNKNOWN

PROJECT = Path(__file__).resolve().parents[2]
SMALL = {"rows": 8, "buckets": 4, "events": 4, "phases": 3, "payloads": 4096}
COLUMNS = [("rss", "B"), "psi"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.mem")


def written(path: str, samples: int = 20, close: bool = True) -> memtools.Record:
    writer = _core.RecordWriter(path, COLUMNS, **SMALL, command=["train.py", "--lr", "ü"])
    for k in range(samples):
        writer.append(10 * k, [k * 2**20, None if k % 2 else k])
    writer.event("start", "hello, Wörld", step=3, time_ns=40)
    writer.event("phase", "train", time_ns=50, duration_ns=60)
    writer.phase("train", 1_500_000_000, 2**30)
    writer.phase("train", 500_000_000, 2**20)
    writer.phase("eval", 7)
    if close:
        writer.close()
    return memtools.read_record(path)


def test_a_complete_record_says_all(path):
    record = written(path)
    assert record.complete
    assert not record.written
    assert record.command == ("train.py", "--lr", "ü")
    assert (record.pid, record.nbytes) == (os.getpid(), os.path.getsize(path))
    assert [(c.name, c.unit) for c in record.columns] == [("rss", "B"), ("psi", "")]
    assert record.total == 20
    assert record.unreadable == 0
    assert record.samples.numbers.tolist() == list(range(12, 20))
    assert record.samples.values["psi"].tolist() == [12, UNKNOWN, 14, UNKNOWN] + [
        16, UNKNOWN, 18, UNKNOWN]  # fmt: skip
    assert record.buckets.width == 8
    assert record.buckets.counts.tolist() == [8, 8, 4]
    assert record.buckets.most["rss"].tolist() == [k * 2**20 for k in (7, 15, 19)]
    assert record.buckets.last["psi"].tolist() == [6, 14, 18]
    assert [(e.kind, e.text, e.step) for e in record.events] == [
        ("start", "hello, Wörld", 3),
        ("phase", "train", None),
    ]
    assert [(p.name, p.count, p.seconds, p.peak_bytes) for p in record.phases] == [
        ("train", 2, 2.0, 2**30),
        ("eval", 1, 7e-9, None),
    ]


def test_its_text_is_for_people(path):
    text = str(written(path))
    assert "complete" in text
    assert "rss: 0 B to 19.0 MiB, last 19.0 MiB" in text
    assert "phase train: 2 times, 2.000 s, peak 1.00 GiB" in text
    assert "2 events, the last: train" in text
    assert len(text.splitlines()) == 8


def test_a_record_is_read_while_it_is_written(path):
    writer = _core.RecordWriter(path, COLUMNS, **SMALL)
    for k in range(30):
        writer.append(None, [k, k])
        record = memtools.read_record(path)
        assert record.total == k + 1
        assert record.written
        assert "being written" in str(record)
    writer.close()
    assert memtools.read_record(path).complete


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=7),
        min_size=1,
        max_size=64,
        unique=True,
    ),
    data=st.data(),
)
def test_what_is_written_is_read(tmp_path_factory, names, data):
    path = str(tmp_path_factory.mktemp("record") / "x")
    reading = st.none() | st.integers(0, 2**64 - 2)
    values = st.lists(reading, min_size=len(names), max_size=len(names))
    row = st.tuples(st.integers(0, 2**64 - 2), values)
    rows = data.draw(st.lists(row, max_size=12))
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=250)
    events = data.draw(st.lists(st.tuples(text, text), max_size=6))
    with _core.RecordWriter(path, names, **SMALL) as writer:
        for time_ns, values in rows:
            writer.append(time_ns, values)
        for kind, message in events:
            writer.event(kind, message)
    record = memtools.read_record(path)
    assert record.samples.time_ns.tolist() == [time_ns for time_ns, _ in rows[-8:]]
    for c, name in enumerate(names):
        wanted = [UNKNOWN if values[c] is None else values[c] for _, values in rows]
        assert record.samples.values[name].tolist() == wanted[-8:]
        known = [v for v in wanted if v != UNKNOWN]
        seen = [v for v in record.buckets.most[name] if v != UNKNOWN]
        assert max(seen, default=-1) == max(known, default=-1)
        assert min(record.buckets.least[name], default=UNKNOWN) == min(known, default=UNKNOWN)
    cut = [m.encode()[:192].decode(errors="ignore") for _, m in events[-4:]]
    assert [event.text for event in record.events] == cut


REFUSED = [
    (lambda w: w.append(0, [1]), ValueError, "1 values, the record has 2 columns"),
    (lambda w: w.append(0, [1, -1]), ValueError, "0 to 2..64 - 2 or None, got -1"),
    (lambda w: w.append(0, [1, 2**64 - 1]), ValueError, "or None, got"),
    (lambda w: w.append(0, [1, 0.5]), TypeError, "int or None, not float"),
    (lambda w: w.append(0, 1), TypeError, "values is a sequence"),
    (lambda w: w.append("x", [1, 1]), TypeError, "time_ns must be an int or None"),
    (lambda w: w.event("a\0", "b"), ValueError, "zero byte"),
    (lambda w: w.event(1, "b"), TypeError, "kind must be a str"),
    (lambda w: w.event("a", "b", step=-1), ValueError, "step must be 0 to"),
    (lambda w: w.event("a", bytearray(3)), TypeError, "text must be a str, not bytearray"),
    (lambda w: w.event("a", bytes(4097)), ValueError, "payload of 4097 bytes.* at most 4096"),
    (lambda w: w.event("a", b"", step=-1), ValueError, "step must be 0 to"),
    (lambda w: w.phase("", 1), ValueError, "needs a name"),
    (lambda w: w.phase("x", -1), ValueError, "duration_ns must be 0 to"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), REFUSED)
def test_bad_input_is_refused_and_changes_nothing(path, call, error, sentence):
    with _core.RecordWriter(path, COLUMNS, **SMALL) as writer:
        before = Path(path).read_bytes()
        with pytest.raises(error, match=sentence):
            call(writer)
        assert Path(path).read_bytes() == before


WRONG = [
    ({"columns": []}, "1 to 64 columns, got 0"),
    ({"columns": [f"c{i}" for i in range(65)]}, "1 to 64 columns, got 65"),
    ({"columns": ["x", "x"]}, "two columns of one name"),
    ({"columns": ["x" * 32]}, "at most 31 bytes"),
    ({"columns": [("x", "u" * 16)]}, "at most 15 bytes"),
    ({"columns": [""]}, "without a name"),
    ({"columns": ["x"], "rows": 0}, "rows outside 1 to"),
    ({"columns": ["x"], "buckets": 3}, "buckets that is not even"),
    ({"columns": ["x"], "events": -1}, "events outside"),
    ({"columns": ["x"], "phases": 5000}, "phases outside"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_a_record_that_cannot_be_is_refused_before_a_file_is_made(path, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        _core.RecordWriter(path, **arguments)
    assert os.listdir(os.path.dirname(path)) == []


def test_what_is_no_record_or_is_in_use_is_not_replaced(path):
    Path(path).write_text("my thesis")
    with pytest.raises(FileExistsError, match="not a record; choose another name"):
        _core.RecordWriter(path, COLUMNS)
    assert Path(path).read_text() == "my thesis"
    os.unlink(path)
    writer = _core.RecordWriter(path, COLUMNS, **SMALL)
    with pytest.raises(OSError, match="another process writes the record there") as caught:
        _core.RecordWriter(path, COLUMNS)
    assert caught.value.errno == errno.EBUSY
    assert caught.value.filename == path
    writer.close()
    _core.RecordWriter(path, ["new"], **SMALL)
    assert memtools.read_record(path).columns[0].name == "new"


def test_after_close_a_call_says_so(path):
    writer = _core.RecordWriter(path, COLUMNS, **SMALL)
    writer.close()
    writer.close()
    assert writer.closed
    for call in (lambda: writer.append(0, [1, 1]), lambda: writer.event("a", "b")):
        with pytest.raises(ValueError, match="is closed"):
            call()


FORKED = """
import os, sys, gc
from memtools import _core, read_record
writer = _core.RecordWriter(sys.argv[1], ["a"], rows=8, buckets=4)
writer.append(1, [1])
if os.fork() == 0:
    writer.append(2, [2]); writer.event("a", "b"); writer.phase("p", 1)
    writer.close(); del writer; gc.collect()
    os._exit(0)
assert os.wait()[1] == 0
writer.append(3, [3])
record = read_record(sys.argv[1])
assert record.samples.time_ns.tolist() == [1, 3] and record.written and not record.complete
assert record.events == () and record.phases == ()
"""


def test_a_forked_child_writes_nothing(path):
    subprocess.run([sys.executable, "-c", FORKED, path], check=True)


def test_threads_write_one_record(path):
    def tell() -> None:
        for k in range(500):
            writer.event("k", "x" * (k % 50), step=k)
            writer.phase("p", 1)

    writer = _core.RecordWriter(path, ["a"], rows=64, buckets=16, events=4096)
    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for k in range(500):
        writer.append(k, [k])
    for thread in threads:
        thread.join()
    writer.close()
    record = memtools.read_record(path)
    assert (record.total, len(record.events), record.phases[0].count) == (500, 2000, 2000)
    assert record.unreadable == 0


def test_jsonl_has_a_line_for_everything(path):
    out = io.StringIO()
    written(path).to_jsonl(out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds == [
        "record", "figures", *["bucket"] * 3, *["sample"] * 8, *["event"] * 2, *["phase"] * 2
    ]  # fmt: skip
    assert lines[0]["complete"] is True
    assert lines[4]["most"] == {"rss": 19 * 2**20, "psi": 18}
    assert lines[6]["values"] == {"rss": 13 * 2**20, "psi": None}
    phase = {"name": "eval", "count": 1, "seconds": 7e-9, "peak_bytes": None}
    assert lines[-1] == {"type": "phase", **phase}


def test_a_chrome_trace_has_counters_and_spans(path):
    out = io.StringIO()
    record = written(path)
    record.to_chrome_trace(out)
    events = json.loads(out.getvalue())["traceEvents"]
    assert all({"ph", "name", "pid"} <= event.keys() for event in events)
    rss = [event for event in events if event["ph"] == "C" and event["name"] == "rss"]
    # A bucket of 8 ends before sample 12, then come the samples 12 to 19.
    assert [event["args"]["B"] >> 20 for event in rss] == [7, *range(12, 20)]
    assert all(a["ts"] < b["ts"] for a, b in pairwise(rss))
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["dur"], span["cat"]) == ("train", 0.06, "phase")
    assert len([event for event in events if event["ph"] == "i"]) == 1


# --- the events that docs/internals/record.md lists -----------------------------------------------


def kinds_of_python() -> Iterator[tuple[str, bool]]:
    """Of each call that writes an event: its kind, and whether it is a span. Log hands on the kind
    that it is called with, and MemoryMonitor that of an event of another part of memtools."""
    for path in sorted((PROJECT / "memtools").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr != "event":
                continue
            kind = call.args[0]
            if isinstance(kind, ast.Attribute) and kind.attr == "KIND":
                continue  # of a typed event: all of them are in KINDS
            if isinstance(kind, ast.Constant):
                yield kind.value, any(k.arg == "duration_ns" for k in call.keywords)
            else:
                hands_on = path.match("_monitor/log.py") or path.match("_monitor/monitor.py")
                assert hands_on, f"{path}:{call.lineno}: which kind?"


def kinds_of_c() -> Iterator[tuple[str, bool]]:
    for path in sorted((PROJECT / "csrc").rglob("*.c")):
        for event in re.findall(r"mt_record_event e = \{(.*?)\};", path.read_text(), re.DOTALL):
            found = re.search(r'\.kind = "(\w+)"', event)
            if found is not None:
                yield found[1], ".duration_ns" in event
            else:
                assert path.match("py/record/writer.c"), (
                    f"{path}: which kind?"
                )  # RecordWriter.event


@pytest.mark.slow
def test_every_kind_of_event_is_in_the_documents() -> None:
    text = (PROJECT / "docs/internals/record.md").read_text().partition("\n## Events\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
    written = {*kinds_of_python(), *kinds_of_c(), *((kind, False) for kind in KINDS)}
    assert {("pressure", False), ("end", False), ("phase", True)} <= written
    spans = {kind for kind, is_span in written if is_span}
    assert sorted(kind for kind, _ in rows) == sorted({kind for kind, _ in written})
    assert {kind for kind, row in rows if "a span" in row} == spans

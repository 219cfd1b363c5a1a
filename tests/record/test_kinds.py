"""Typed events: what is written is read back, whatever stands in a file."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memtools
from memtools import _core
from memtools._base.peak import (
    GRADIENTS,
    OPTIMIZERS,
    PARAMETERS,
    STATE,
    Held,
    Large,
    Layer,
    Lowered,
    Part,
    Remedy,
    Saver,
    Span,
    TracedPeak,
)
from memtools._census.holders import Holder as CensusHolder
from memtools._record import kinds
from memtools._record.kinds import (
    Cleanup,
    Counters,
    End,
    Event,
    Finding,
    Fork,
    GuardAct,
    GuardSet,
    Heap,
    Holder,
    Limit,
    OutOfMemory,
    Peak,
    Pressure,
    SharedRoom,
    Start,
    Trace,
)
from memtools._record.redact import redacted_record

numbers = st.integers(0, 2**62)
changes = st.integers(-(2**62), 2**62)
maybe = st.none() | numbers
rates = st.floats(0, 1e15)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
lefts = st.tuples(*[st.floats(0, 1e12) | st.just(math.inf)] * 3)
events = st.one_of(
    st.builds(Holder, words, words, st.none() | numbers, st.none() | numbers, numbers, numbers,
              numbers, words, st.integers(1, 2**40)),
    st.builds(Finding, words, words, words, rates, maybe, maybe, words, words, words, words, words,
              words, words, words,
              st.none() | st.tuples(*[st.floats(0, 1e12) | st.just(math.inf)] * 2),
              st.none() | st.tuples(rates, rates), words, st.booleans()),
    st.builds(Limit, words, st.none() | numbers, maybe),
    st.builds(Counters, words, words, numbers, numbers, words, maybe, st.booleans(), maybe, maybe,
              maybe, maybe, maybe),
    st.builds(SharedRoom, numbers, numbers),
    st.builds(Heap, numbers),
    st.builds(Trace, numbers, rates, st.tuples(words, words), words, numbers),
    st.builds(GuardSet, rates),
    st.builds(Peak, numbers, numbers, numbers, words, words, words, st.booleans(),
              st.tuples(st.builds(Part, words, numbers, numbers)),
              st.tuples(st.builds(Saver, words, numbers, numbers)),
              st.tuples(st.builds(Large, numbers, words, words, st.tuples(numbers, numbers), words,
                                  words, words)),
              numbers, numbers, numbers, numbers, rates,
              st.tuples(st.builds(Layer, words, st.lists(changes, max_size=3).map(tuple))),
              st.tuples(st.builds(Span, words, numbers)),
              st.none() | st.builds(TracedPeak, numbers, numbers, numbers,
                                    st.tuples(st.builds(Held, words, numbers, words)),
                                    st.tuples(st.builds(Remedy, words, words)),
                                    st.tuples(st.builds(Lowered, words, numbers, words)), words,
                                    st.tuples(words, words)), words),
    st.builds(Start, words, words, st.tuples(numbers, numbers), rates, words, maybe, maybe),
    st.builds(End, words, words, maybe, st.none() | words, words),
    st.builds(Fork, numbers),
    st.builds(Cleanup, st.tuples(words, words), st.tuples(rates, rates), st.tuples(words), maybe,
              numbers),
    st.builds(OutOfMemory, *[numbers] * 8, st.none() | words),
    st.builds(Pressure, words, rates, numbers, numbers, words, numbers, words, words, words,
              st.none() | lefts),
    st.builds(GuardAct, words, rates, numbers, numbers, words, st.none() | rates, maybe),
)  # fmt: skip


@given(event=events)
def test_fields_are_read_back_as_they_were(event):
    found, text = kinds.read(event.KIND, kinds.payload(event.KIND, event))
    assert found == event
    assert text == event.sentence()
    assert kinds.payload(event.KIND, dataclasses.asdict(event)) == kinds.payload(event.KIND, event)


def test_every_kind_is_tried():
    assert {type(kind) for kind in (HOLDER, *OTHERS, *SENTENCES)} == set(kinds.KINDS.values())


GIB = 2**30
MIB = 2**20
SENTENCES: dict[Event, str] = {
    Peak(3, 121 * MIB, 0, "optimizer", "aten::_foreach_sqrt", "train.py:31 in main",
         parts=(Part(STATE, 42 * MIB, 12), Part(OPTIMIZERS, 32 * MIB, 9),
                Part(PARAMETERS, 21 * MIB, 6), Part(GRADIENTS, 21 * MIB, 6),
                Part("inputs", MIB, 1))):
        "peak of step 3: 121.0 MiB of tensors, in the optimizer's step (aten::_foreach_sqrt, "
        "train.py:31): optimizer state 42.0 MiB, its temporaries 32.0 MiB, parameters 21.0 MiB, "
        "gradients 21.0 MiB",
    Peak(1000, MIB, phase="forward", lost=3):
        "peak of step 1,000: 1.0 MiB of tensors, in the forward pass; 3 blocks are missing: the "
        "recording was full",
    Peak(3, MIB, traced=TracedPeak(MIB, changes=(Lowered("fused=True", 1), Lowered("del x", 2)))):
        "peak of step 3: two steps after it were traced: 2 changes make it smaller",
    Peak(3, MIB, traced=TracedPeak(why="a profiler of torch is on")):
        "peak of step 3: the steps after it were not traced: a profiler of torch is on",
    Peak(why="there is no shim"):
        "the tensors at the peak are unknown: nothing was recorded, because there is no shim",
    Trace(3, 41.26, ("tracemalloc", "torch's reports"), "", 1): (
        "3 steps traced by tracemalloc and torch's reports in 41.3 ms: the line of 1 finding"
    ),
    Trace(1, 2.0, ("torch's reports",), "the program runs tracemalloc itself"): (
        "1 step traced by torch's reports in 2.0 ms (the program runs tracemalloc itself): "
        "no line explains the growth"
    ),
    Trace(9, 1.71, ("heap lines",), "", 1): (
        "9 steps traced by heap lines in 1.7 ms: the line of 1 finding"
    ),
    Trace(16, 23.1, ("tracemalloc",), "", 1, 4.23): (
        "4.2 s traced by tracemalloc in 23.1 ms: the line of 1 finding"
    ),
    Trace(why="it is turned off"): (
        "its line is unknown: nothing was traced, because it is turned off"
    ),
    Start("memtools run", "", (0, 1), 10.0, "limit given, 1.00 GiB", GIB):
        "memtools run: host, cuda0, cuda1 every 10 ms; limit given, 1.00 GiB",
    Start("", "sh", (), 12.5, "limit 23.5 GiB (machine)", None, 25276510208):
        "process tree of sh every 12.5 ms; limit 23.5 GiB (machine)",
    Finding("growing", "heap", rate_bytes=1536, holder="list A.b", steps_left=(300.0, math.inf)):
        "growing: list A.b +1.5 KiB/step, limit in 300 steps at the earliest",
    End("stop()"): "exit: stop()",
    End(code=0): "exit: code 0",
    End(text="bad rate", code=1): "exit: code 1: bad rate",
    End(signal="SIGTERM"): "exit: killed by SIGTERM",
    End(exception="KeyError", text="'x'"): "exit: exception KeyError: 'x'",
    End(exception="MemoryError"): "exit: exception MemoryError",
    End("not started", "No such file"): "exit: not started, No such file",
    Limit("RLIMIT_DATA", 1 << 20, 1 << 19): "RLIMIT_DATA 1048576 acted: 524288 in use",
    Counters("/job", "/sys/fs/cgroup/job", 2, 7, "boot", 8 * GIB, True, 1, 2, 0, 120, 3):
        "control group /job (limit 8.00 GiB): processes killed for memory: 1, limit met 120 times",
    Counters("/", "/sys/fs/cgroup", 1, 7, "boot"):
        "control group / (no limit): processes killed for memory: not known",
    SharedRoom(64 << 20, 1 << 20): "/dev/shm: 1.0 MiB of 64.0 MiB used",
    Fork(1): "a child process forked",
    Fork(1200): "1,200 child processes forked",
    Cleanup(("gc", "malloc_trim"), (3.14, 0.21), ("12 objects", "cadence"), 4 << 20):
        "gc (12 objects, cadence) 3.1 ms, malloc_trim 0.2 ms: freed 4.0 MiB on the host",
    Cleanup(("empty_cache",), (1.5,), (), 0, GIB):
        "empty_cache 1.5 ms: freed 0 B on the host, 1.00 GiB on the devices",
    OutOfMemory(0, 3 * GIB, 70 * GIB, 75 * GIB, GIB, 79 * GIB, 2 * GIB, 2, "forward"):
        "cuda:0: no 3.00 GiB: allocated 70.0 GiB, reserved 75.0 GiB, free 1.00 GiB of 79.0 GiB; "
        "largest free block 2.00 GiB; 2 more before; in phase forward",
    Holder("list Net.kept", "tensors", None, None, 1200, GIB, what="[4, 4] float32 tensors"):
        "1,200 [4, 4] float32 tensors, 1.00 GiB, most held by list Net.kept",
    Pressure("passed", 0.875, 1900 << 20, 2048 << 20, "cgroup"):
        "87.5 % of the limit passed: 1900 of 2048 MiB (cgroup)",
    Pressure("not heard", seconds=10):
        "no step() for 10 s since then: callbacks and guards act only in step(), so none has acted",
    Pressure("cannot act", handle="<guard raise at 90%>", why="no limit"):
        "<guard raise at 90%> cannot act: no limit",
    Pressure("forecast", signal="heap", steps_left=(900.0, 950.0, 1000.0)):
        "forecast: limit in 900 to 1,000 steps (heap grows)",
    GuardAct("raise", 0.9, 450 << 20, 500 << 20, "limit given, 500.0 MiB", 12.0):
        "raise: 450.0 MiB of 500.0 MiB used (90.0%; limit given, 500.0 MiB), watermark 90%, "
        "stalled 12% of the last 10 s",
    GuardAct("SIGTERM", 0.8, 450 << 20, 500 << 20, "given"):
        "450.0 MiB of 500.0 MiB (given) used, 90 % (guard: 80 %): sent SIGTERM",
}  # fmt: skip


@pytest.mark.parametrize("event", SENTENCES)
def test_what_is_shown_of_an_event(event):
    found, text = kinds.read(event.KIND, kinds.payload(event.KIND, event))
    assert (found, text) == (event, SENTENCES[event])


HOLDERS = [
    CensusHolder("list MoEBlock.gates", "list", 12, None, 100, 100 * 4096, 12, "tensors", 100),
    CensusHolder("deque(maxlen=9) x.d", "deque", 3, 9, 3, 3 * 2**20, what="float32 tensors"),
    CensusHolder("autograd graph in loss", "autograd graph", 300, None, 0, 0),
    CensusHolder("lru_cache f", "_lru_cache_wrapper", 3, None, 50, 0, steps=3),
]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda h: h.kind)
def test_a_holder_says_in_a_record_what_it_says_in_the_program(holder):
    event, text = kinds.read("holder", kinds.payload("holder", holder))
    assert text == str(holder)
    fields = dataclasses.asdict(holder)
    assert vars(event).items() <= fields.items()  # by growth it is in findings


HOLDER = Holder("list train.kept", "list", 3, None, 9, 0, steps=9)
OTHERS: list[Event] = [
    Limit("RLIMIT_AS", 2**30),
    Limit("RLIMIT_DATA", None),
    Heap(7),
    GuardSet(0.9),
]


# --- in a file ------------------------------------------------------------------------------------


def write(
    path: Path, bodies: list[tuple[str, str | bytes]], payloads: int = 2**18
) -> memtools.Record:
    with _core.RecordWriter(path, ["rss"], payloads=payloads) as writer:
        for step, (kind, body) in enumerate(bodies):
            writer.event(kind, body, step=step)
    return memtools.read_record(path)


def test_events_have_their_fields_and_their_sentences(tmp_path):
    given_ = [HOLDER, *OTHERS]
    record = write(tmp_path / "x.mem", [(one.KIND, kinds.payload(one.KIND, one)) for one in given_])
    assert [event.data for event in record.events] == given_
    assert [event.text for event in record.events] == [one.sentence() for one in given_]
    out = io.StringIO()
    record.to_jsonl(out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    data = [line["data"] for line in lines if line["type"] == "event"]
    assert data[0] == dataclasses.asdict(HOLDER)


def test_a_payload_that_nobody_understands_is_shown_as_it_is(tmp_path):
    bodies = [
        ("unknown", b'{"lines": 3}'),
        ("finding", b'{"grade": 3}'),
        ("finding", b"\xff\0"),
        ("heap", b""),
    ]
    record = write(tmp_path / "x.mem", bodies)
    assert [event.data for event in record.events] == [None] * 4
    assert [event.text for event in record.events] == [
         '{"lines": 3}', '{"grade": 3}', "\\xff\\0", ""
    ]  # fmt: skip


def test_the_oldest_payloads_go_and_are_counted(tmp_path):
    bodies: list[tuple[str, object]] = [("unknown", bytes([65 + k]) * 40_000) for k in range(9)]
    record = write(tmp_path / "x.mem", [*bodies, ("mark", "a text")], 2**17)
    assert (record.events_total, record.events_gone, record.unreadable) == (10, 6, 0)
    assert [event.number for event in record.events] == [6, 7, 8, 9]
    assert [event.text[0] for event in record.events] == ["G", "H", "I", "a"]


@pytest.mark.slow
@given(data=st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | words,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(
        st.sampled_from(["path", "kind", "steps", "new_bytes", "rate_bytes_per_step", "signal",
                         "steps_left", "new_objects", "parts", "largest", "saved",
                         "layers", "spans",
                         "length", "capacity", "since_step"]), parts),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_payload_leads_to_an_error(data):
    for kind in (*kinds.KINDS, "unknown"):
        event, text = kinds.read(kind, data)
        text.encode()
        assert event is None or text == event.sentence()


@pytest.mark.parametrize("data", [
    b"[" * 60_000, b"9" * 60_000, b'{"kept_bytes":1e400}', b'{"kept_bytes":Infinity}',
    b'{"kept_bytes":true}', b'{"kept_bytes":18446744073709551616}',
], ids=["deep", "long", "large", "infinite", "bool", "65 bits"])  # fmt: skip
def test_numbers_that_cannot_be_are_refused(data):
    assert kinds.read("heap", data)[0] is None


def test_half_a_character_and_no_steps_are_refused():
    assert kinds.read("limit", b'{"name":"\\ud800","limit_bytes":1}')[0] is None
    fields = dataclasses.asdict(HOLDER) | {"steps": 0}
    assert kinds.read("holder", json.dumps(fields).encode())[0] is None


def test_long_fields_are_cut_and_half_characters_escaped():
    long = dataclasses.replace(HOLDER, path="\U0001f600" * 40_000, what="\udfff")
    data = kinds.payload("holder", long)
    assert len(data) <= 65536
    event, _ = kinds.read("holder", data)
    assert isinstance(event, Holder)
    assert event.path == "\U0001f600" * kinds.LONGEST
    assert event.what == "\\udfff"


def test_secrets_are_masked_in_fields_too(tmp_path):
    secret = dataclasses.replace(HOLDER, path="list of hf_abcdefghijklmnopqrstuvwx")
    record = write(tmp_path / "x.mem", [("holder", kinds.payload("holder", secret))])
    (event,) = redacted_record(record).events
    assert "hf_" not in event.text + str(event.data)
    assert "hf_" in record.events[0].text


def test_a_time_of_an_action_is_a_number():
    """JSON's null stands for infinity in steps that are left, and nowhere else."""
    assert kinds.read("cleanup", b'{"actions":["gc"],"ms":[null]}')[0] is None
    found, _ = kinds.read("pressure", b'{"what":"forecast","steps_left":[9,null,null]}')
    assert found == Pressure("forecast", steps_left=(9.0, math.inf, math.inf))

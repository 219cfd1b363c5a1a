"""save and load: equal in every observable; a damaged file is refused."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtools import GateHistory
from memtools._base import file as base_file
from memtools._gate import file as gate_file
from tests.kit.interrupts import interrupted
from tests.kit.long import LONG

OPTIONS = [
    {},
    {"trim": "oldest", "max_entries": 5},
    {"dtype": "bfloat16", "top_k": 2},
    {"keep": "topk", "top_k": 3},
    {"statistics": False},
]


def filled(**options: object) -> GateHistory:
    history = GateHistory(**options)  # type: ignore[arg-type]
    for n in range(12):
        history.append(torch.softmax(torch.randn(n, 8), -1))
    return history


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("entries", ["none", "some"])
def test_what_is_loaded_is_what_was_saved(tmp_path, options, entries):
    history = filled(**options) if entries == "some" else GateHistory(**options)
    history.save(tmp_path / "gates.mtg")
    loaded = GateHistory.load(tmp_path / "gates.mtg")
    names = ["max_entries", "max_bytes", "trim", "keep", "dtype", "top_k", "statistics"]
    names += ["nbytes", "n_experts", "appended"]
    assert [getattr(loaded, n) for n in names] == [getattr(history, n) for n in names]
    assert [entry.tolist() for entry in loaded] == [entry.tolist() for entry in history]
    if history.statistics:
        assert loaded.stats() == history.stats()
        assert loaded.windows() == history.windows()
    loaded.append(torch.rand(3, 8))
    history.append(torch.rand(3, 8))
    assert len(loaded) == len(history)


def test_saving_is_atomic_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "gates.mtg"
    filled().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk on fire")))
    with pytest.raises(OSError, match="fire"):
        filled(max_entries=3).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["gates.mtg"]


@pytest.mark.filterwarnings(
    "ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_an_interrupt_anywhere_in_saving_is_an_interrupt_and_leaves_one_file(tmp_path):
    path, first, second = tmp_path / "gates.mtg", filled(), filled(max_entries=3)
    first.save(path)
    wanted = {path.read_bytes()}
    second.save(path)
    wanted.add(path.read_bytes())
    for module, least in ((gate_file, 5), (base_file, 6)):
        places = 0
        while interrupted(module, places, partial((first, second)[places % 2].save, path)):
            places += 1
            assert os.listdir(tmp_path) == ["gates.mtg"]
            assert path.read_bytes() in wanted
        assert places >= least


def test_loading_a_descriptor_is_refused_and_leaves_it_open(tmp_path):
    path = tmp_path / "gates.mtg"
    filled().save(path)
    with open(path, "rb") as file:
        with pytest.raises(TypeError, match="int"):
            GateHistory.load(file.fileno())
        assert file.read(7) == b"MTGATES"


def test_the_file_has_the_permissions_any_new_file_has(tmp_path):
    plain, saved = tmp_path / "plain", tmp_path / "gates.mtg"
    plain.write_bytes(b"")
    filled().save(saved)
    assert stat.S_IMODE(saved.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_every_truncation_and_every_flipped_byte_is_refused(tmp_path):
    path = tmp_path / "gates.mtg"
    small = GateHistory()
    small.append(torch.rand(2, 2))
    small.save(path)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="damaged|not a saved"):
            GateHistory.load(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged|not a saved|format"):
            GateHistory.load(path)


def test_a_newer_format_says_what_to_do(tmp_path):
    path = tmp_path / "gates.mtg"
    path.write_bytes(struct.pack("<8sQI", b"MTGATES\x02", 0, zlib.crc32(b"")))
    with pytest.raises(ValueError, match="upgrade memtools"):
        GateHistory.load(path)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "ends inside the header"),
        (struct.pack("<QQIIiIIIQQQ", 0, 9, 0, 0, -1, 1, 1, 0, 0, 0, 0), "limit of zero"),
        (struct.pack("<QQIIiIIIQQQ", 9, 9, 7, 0, -1, 1, 1, 0, 0, 0, 0), "unknown option"),
        (struct.pack("<QQIIiIIIQQQ", 9, 9, 0, 0, 99, 1, 1, 0, 0, 0, 0), "unknown dtype"),
        (struct.pack("<QQIIiIIIQQQ", 9, 9, 0, 0, -1, 65, 1, 0, 0, 0, 0), "top_k out of range"),
        (struct.pack("<QQIIiIIIQQQ", 9, 9, 0, 0, -1, 1, 0, 0, 8, 9, 9), "inside the index"),
        (struct.pack("<QQIIiIIIQQQ", 9, 9, 0, 0, -1, 1, 1, 0, 8, 9, 9), "inside the stat"),
    ],
)
def test_hostile_bytes_are_refused_before_memory_is_taken(body, sentence):
    with pytest.raises(ValueError, match=sentence):
        gate_file.parse(GateHistory, body)


def changed(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    for how, at, number in edits:
        at %= len(data) + 1
        if how == "flip":
            data = (
                data[:at] + bytes(b ^ 1 << number % 8 for b in data[at : at + 1]) + data[at + 1 :]
            )
        elif how == "word":
            at = at // 4 * 4
            data = data[:at] + number.to_bytes(8, "little")[: len(data) - at] + data[at + 8 :]
        elif how == "cut":
            data = data[:at] + data[at + 1 + number % 64 :]
        else:
            data = data[:at] + number.to_bytes(8, "little") * (1 + number % 9) + data[at:]
    return data


EDIT = st.tuples(
    st.sampled_from(["flip", "word", "word", "cut", "insert"]),
    st.integers(0, 3000),
    st.one_of(
        st.integers(0, 300),
        st.integers(0, 2**64 - 1),
        st.sampled_from([2**k + d for k in (16, 31, 32, 47, 61, 63) for d in (-1, 0, 1)]),
    ),
)


@pytest.mark.slow
@settings(max_examples=15_000 if LONG else 150, deadline=None)
@given(st.sampled_from(OPTIONS), st.lists(EDIT, min_size=1, max_size=4), st.booleans())
def test_a_changed_file_is_refused_or_a_sound_history(tmp_path_factory, options, edits, checked):
    """`checked`: the checksum is that of the changed bytes, as somebody may forge it."""
    path = tmp_path_factory.getbasetemp() / "changed.mtg"
    torch.manual_seed(0)
    filled(**options).save(path)
    whole = path.read_bytes()
    if checked:
        gate_file.write(path, changed(gate_file.read(path), edits))
    else:
        path.write_bytes(changed(whole, edits))
    try:
        loaded = GateHistory.load(path)
    except ValueError as error:
        assert str(error).isprintable()
        return
    except MemoryError as error:  # for the limits in it
        assert checked
        assert "bytes of address space" in str(error)
        return
    assert checked or path.read_bytes() == whole
    assert gate_file.dump(loaded) == gate_file.read(path)
    entries = list(loaded)
    assert len(entries) == len(loaded) <= min(loaded.appended, loaded.max_entries)
    assert all(entry.shape[1] == loaded.n_experts for entry in entries)
    assert loaded.nbytes <= loaded.max_bytes
    if loaded.statistics:
        assert loaded.stats(len(loaded)).tokens == sum(map(len, entries))
        assert "experts" in " ".join(map(str, [loaded.stats(), *loaded.windows()]))
    loaded.append(torch.rand(0, loaded.n_experts or 3))
    assert loaded[-1].shape == (0, loaded.n_experts)
    assert len(loaded) <= loaded.max_entries


def test_the_bytes_are_the_documented_ones():
    history = GateHistory(6, 200, trim="oldest", keep="topk", top_k=2)
    history.append(torch.tensor([[0.5, 0.0, 1.0]]))
    head = struct.pack("<QQIIiIIIQQQ", 6, 200, 1, 1, -1, 2, 1, 0, 3, 1, 1)
    counts = struct.pack("<QQQ", 1, 1, 1)
    sums = struct.pack("<QQdddQQQ", 1, 0, 0.5, 0, 1, 1, 0, 1)  # the totals, and a mark like them
    entry = struct.pack("<II", 1, 0) + struct.pack("<BBff", 2, 0, 1, 0.5)
    assert gate_file.dump(history) == head + counts + sums + sums + entry


HEAD = struct.calcsize("<QQIIiIIIQQQ")
INDEX = HEAD + 24 + (9 + 1) * (16 + 16 * 3)  # where the entries' rows and dtypes begin
NO_SENSE = {  # a field's place and format, and values that it cannot have
    "max_entries": (0, "<Q", [0, 5, 2**63]),  # none, and fewer than there are
    "max_bytes": (8, "<Q", [0, 1, 2**64 - 1]),
    "trim": (16, "<I", [2, 2**32 - 1]),
    "keep": (20, "<I", [2]),
    "dtype": (24, "<i", [3, 4, 99, -2, -(2**31)]),  # bfloat16 is not that of the entries
    "top_k": (28, "<I", [0, 4, 65]),  # 4 are more than there are experts
    "statistics": (32, "<I", [0, 2]),
    "zero": (36, "<I", [1]),
    "experts": (40, "<Q", [0, 2, 4, 2**32 - 1, 2**64 - 1]),
    "appended": (48, "<Q", [5, 8, 2**64 - 1]),  # 8 are fewer than were counted
    "entries": (56, "<Q", [5, 7, 2**61, 2**64 - 1]),
    "counted": (64, "<Q", [8, 2**64 - 1]),
    "span": (72, "<Q", [0, 3, 2**63]),
    "marks": (80, "<Q", [8, 129, 2**64 - 1]),
    "rows": (INDEX, "<I", [1000, 2**32 - 1]),
    "rows of the last": (INDEX + 5 * 8, "<I", [0x55555556]),  # times 12 is 8 and 2**32
    "dtype of an entry": (INDEX + 4, "<I", [8, 2**32 - 1]),
}


@pytest.mark.parametrize("field", NO_SENSE)
def test_fields_that_make_no_sense_are_refused(field):
    history = GateHistory(6, 200, trim="oldest", top_k=2)
    for n in range(9):
        history.append(torch.rand(n % 3, 3))
    body, (at, form, values) = gate_file.dump(history), NO_SENSE[field]
    assert gate_file.parse(GateHistory, body).windows() == history.windows()
    for value in values:
        changed = body[:at] + struct.pack(form, value) + body[at + struct.calcsize(form) :]
        with pytest.raises(ValueError, match=r"GateHistory.load\(\): not a gate history: "):
            gate_file.parse(GateHistory, changed)
    for end in (at, len(body) - 1):
        with pytest.raises(ValueError, match="not a gate history"):
            gate_file.parse(GateHistory, body[:end])
    with pytest.raises(ValueError, match="bytes after the last record"):
        gate_file.parse(GateHistory, body + b"x")


def test_limits_that_no_machine_has_are_a_memory_error():
    body = gate_file.dump(GateHistory())
    for at, limit in ((0, 2**45), (8, 2**50), (8, 2**63 - 1)):
        with pytest.raises(MemoryError):
            gate_file.parse(GateHistory, body[:at] + struct.pack("<Q", limit) + body[at + 8 :])


@pytest.mark.parametrize("field", [0, 1, 4, 5])  # tokens, nonfinite, load of either expert
def test_marks_that_shrink_are_refused(field):
    small = GateHistory()
    for _ in range(3):
        small.append(torch.rand(2, 2))
    body = gate_file.dump(small)
    at = HEAD + 8 * 3 + 8 * (2 + 2 + 2) + 8 * field  # in the first mark
    assert gate_file.parse(GateHistory, body).windows() == small.windows()
    more = struct.pack("<Q", struct.unpack_from("<Q", body, at)[0] + 9)
    with pytest.raises(ValueError, match="contradict"):
        gate_file.parse(GateHistory, body[:at] + more + body[at + 8 :])


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        GateHistory.load(tmp_path / "none.mtg")
    with pytest.raises(FileNotFoundError):
        filled().save(tmp_path / "no" / "gates.mtg")

"""What was written is read back, and every way in which the bytes of a record can be wrong.
Random damage is in test_random.py, a writer that is killed in test_kill.py."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from memtools import _core, read_record
from memtools._record import reader
from memtools._record.reader import parse
from memtools._record.record import Column, Record
from tests.record.recordmodel import append, write, writer_at, wrong, wrong_buckets, wrong_samples

SIZES = {"rows": 5, "buckets": 4, "events": 3, "phases": 4, "payloads": 1024}
PAYLOAD = 1 << 32  # in the form of an event
WORD = 2**64 - 1


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.mem")


def written(path: str, acts: int, **sizes: int) -> bytearray:
    writer = writer_at(path, **(SIZES | sizes))
    for k in range(acts):
        write(writer, k)
    data = bytearray(Path(path).read_bytes())
    writer.close()
    os.unlink(path)
    return data


def read(data: bytes) -> Record:
    return parse(bytes(data), "run.mem")


def words(data: bytearray) -> memoryview:
    return memoryview(data).cast("Q")


def places(data: bytes) -> tuple[int, int, int]:
    """Of the series, the events and the payloads, in words."""
    columns, rows, buckets, events, phases = struct.unpack_from("<5Q", data, 24)
    series = (2048 + 64 * columns) // 8
    used = -(-(8 + rows * (3 + columns) + 2 * buckets * (2 + 3 * columns)) // 8) * 8
    return series, series + used, series + used + 32 * events + 16 * phases


def check(of: memoryview) -> int:
    return sum(w * (((i + 1) * 0x9E3779B97F4A7C15) & WORD | 1) for i, w in enumerate(of)) & WORD


def make_fixed_part_right(data: bytearray) -> None:
    end = 2048 + 64 * 3
    crc = zlib.crc32(bytes(data[256:end]), zlib.crc32(bytes(data[:112])))
    struct.pack_into("<Q", data, 112, crc)


def forge_event(data: bytearray, place: int, **changes: int) -> None:
    """The event in a place of the ring with other words, and a check that is right."""
    at = places(data)[1] + 32 * place
    for name, value in changes.items():
        words(data)[at + int(name[1:])] = value
    words(data)[at + 31] = check(words(data)[at : at + 31])


# --- what was written -----------------------------------------------------------------------------


@pytest.mark.parametrize("acts", [0, 1, 2, 3, 4, 5, 31, 32, 33, 500])
@pytest.mark.parametrize("payloads", [1024, 8192])
def test_what_was_written_is_read_back(acts, payloads, path):
    data = written(path, acts, payloads=payloads)
    found = read(data)
    assert (found.total, found.events_total, found.closed_ns) == (acts, acts, None)
    assert wrong(found, rows=5) is None
    assert found.pid == os.getpid()
    assert found.columns == (Column("c0", ""), Column("c1", ""), Column("c2", ""))


@pytest.mark.parametrize(("rows", "buckets"), [(1, 2), (5, 4), (16, 10), (3, 64)])
def test_every_length_holds_the_whole_time_line(rows, buckets, path):
    with writer_at(path, rows=rows, buckets=buckets) as writer:
        for k in range(300):
            append(writer, k)
            if k < 40 or k % 16 in (0, 15):
                record = read_record(path)
                assert (record.total, len(record.samples)) == (k + 1, min(rows, k + 1))
                assert (wrong_samples(record), wrong_buckets(record)) == (None, None)


def test_rows_that_were_not_counted_are_added_also_across_a_fold(path):
    """As a writer leaves them that was killed, and a copy that was taken while it went on."""
    with writer_at(path, **SIZES) as writer:
        for k in range(100):
            before = Path(path).read_bytes()
            append(writer, k)
            after = Path(path).read_bytes()
            series = 8 * places(before)[0]
            rows = slice(series + 64, series + 64 + 8 * 5 * 6)
            torn = before[: rows.start] + after[rows] + before[rows.stop :]
            record = read(torn)
            assert record.total == k + 1
            assert wrong_buckets(record) is None


def test_texts_and_names_are_cut_between_characters(path):
    with _core.RecordWriter(path, ["x"], **SIZES) as writer:
        writer.event("\u20ac" * 100, "\u20ac" * 100)
        writer.event("x" + "\u20ac" * 100, "x" + "\u20ac" * 100)
        writer.phase("x" + "\u20ac" * 100, 1)
    record = read_record(path)
    assert [len(event.kind.encode()) for event in record.events] == [15, 16]
    assert [len(event.text.encode()) for event in record.events] == [192, 190]
    assert len(record.phases[0].name.encode()) == 40


@pytest.mark.parametrize("room", [0, 8, 192, 200, 4096, 65536, 3 * 65536])
def test_payloads_of_every_length_are_read_back(room, path):
    most = min(max(room, 192), 65536)
    lengths = {*range(0, min(most, 300), 7), *range(185, min(most, 210)), most - 1, most}
    body = bytes(33 + (i * 37 + i // 251) % 90 for i in range(65536))
    with _core.RecordWriter(path, ["x"], **(SIZES | {"payloads": room})) as writer:
        for length in sorted(lengths):
            writer.event("peak", body[:length])
            assert read_record(path).events[-1].text == body[:length].decode()


def test_phases_without_room_count_as_others(path):
    with _core.RecordWriter(path, ["x"], **(SIZES | {"phases": 3})) as writer:
        for i, name in enumerate("abcdbc"):
            writer.phase(name, 10, i)
    found = [(one.name, one.count, one.peak_bytes) for one in read_record(path).phases]
    assert found == [("a", 1, 0), ("b", 2, 4), ("(other phases)", 3, 5)]


def test_a_signal_counts_until_the_record_is_closed(path):
    data = written(path, 3)
    for number, closed, ends in [(0, 0, []), (15, 0, [77]), (65, 0, []), (15, 80, [])]:
        struct.pack_into("<2Q", data, 144, number, 77)
        struct.pack_into("<Q", data, 128, closed)
        found = read(data)
        assert [event.time_ns for event in found.events if event.kind == "end"] == ends
        assert (found.closed_ns, found.events_total) == (closed or None, 3 + len(ends))


# --- what nobody wrote ----------------------------------------------------------------------------


def test_every_flipped_bit_is_refused_or_left_out(path):
    """In the fixed part each flip is refused; elsewhere it may cost what it hits, and no more."""
    data, chance = written(path, 40), random.Random(1)
    series = 8 * places(data)[0]
    for at in [*range(120), *range(256, series), *range(series, len(data), 3)]:
        bit = 1 << chance.randrange(8)
        data[at] ^= bit
        try:
            record = read(data)
        except ValueError:
            assert at < series + 8 or 136 <= at < 144
        else:
            assert 120 <= at < 256 or series <= at
            assert wrong_samples(record) is None
            assert all(event.text in texts(event.step) for event in record.events)
        data[at] ^= bit


def texts(k: int | None) -> tuple[str, ...]:
    text = f"event {k} " + "-" * ((k or 0) % 100)
    return text, 5 * text


@pytest.mark.parametrize(("word", "value", "sentence"), [
    (0, 0, "it does not begin like one"), (1, 0, "version 0 of the format"),
    (1, 1, "version 1 of the format, not 2"),
    (1, 3, r"later version of the format \(3\), this memtools reads 2; upgrade memtools"),
    (2, 0, "a length that does not"), (2, 8, "a length that does not"),
    (3, 0, "columns outside"), (3, 2, "a length that"), (3, 65, "columns outside"),
    (4, 0, "rows outside"), (4, 6, "a length that"), (4, WORD, "rows outside"),
    (5, 3, "buckets that is not even"), (5, WORD, "buckets that is"),
    (6, 0, "events outside"), (6, WORD, "events outside"), (7, 0, "phases outside"),
    (7, WORD, "phases outside"), (12, 1793, "a command longer"), (12, WORD, "a command longer"),
    (13, 4, "not a multiple of 8"), (13, 8, "a length that"), (13, 1 << 25, "up to 16 MiB"),
    (13, WORD - 7, "up to 16 MiB"), (17, 5, "more phases"), (17, WORD, "more phases"),
])  # fmt: skip
def test_a_forged_header_is_refused_under_a_check_that_is_right(word, value, sentence, path):
    data = written(path, 9)
    words(data)[word] = value
    make_fixed_part_right(data)
    with pytest.raises(ValueError, match=sentence):
        read(data)


@pytest.mark.parametrize(("at", "field", "sentence"), [
    (0, bytes(8), "a column without a name"), (0, b"a\xff", "that is not UTF-8"),
    (0, b"x" * 32, "a column's name of more than 31"), (64, b"c0", "two columns of one name"),
    (32, b"x" * 16, "a column's unit of more than 15"), (56, b"\1", "with more than it may have"),
])  # fmt: skip
def test_a_forged_column_is_refused(at, field, sentence, path):
    data = written(path, 9)
    data[2048 + at : 2048 + at + len(field)] = field
    make_fixed_part_right(data)
    with pytest.raises(ValueError, match=sentence):
        read(data)


@pytest.mark.parametrize(("folds", "samples", "is_possible"), [
    (0, 0, True), (0, 4, True), (0, 5, False), (1, 3, False), (1, 4, True), (1, 8, True),
    (1, 9, False), (40, 1 << 42, True), (41, 1 << 43, False), (255, (1 << 56) - 1, False),
])  # fmt: skip
def test_states_that_no_append_leaves_are_refused(folds, samples, is_possible, path):
    data = written(path, 0)
    words(data)[places(data)[0]] = folds << 56 | samples
    if is_possible:
        assert read(data).total == samples
    else:
        with pytest.raises(ValueError, match="samples that does not fit its buckets"):
            read(data)


def test_the_last_fold_is_the_last(path):
    """A full series of the largest kind is not folded once more by a row that says so."""
    data = written(path, 0)
    series, k = places(data)[0], 1 << 42
    words(data)[series] = 40 << 56 | k
    at = series + 8 + 6 * (k % 5)
    words(data)[at] = k + 1
    words(data)[at + 5] = check(words(data)[at : at + 5])
    found = read(data)
    assert (found.buckets.width, found.total) == (1 << 40, k + 1)


@pytest.mark.parametrize(("form", "place"), [
    (PAYLOAD | 65537, 0), (PAYLOAD | 0xFFFFFFFF, 0), (WORD, 0), (PAYLOAD << 1, 0), (193, 0),
    (0xFFFFFFFF, 0), (PAYLOAD | 1024, 1), (PAYLOAD | 1025, 0), (PAYLOAD | 193, WORD),
    (PAYLOAD | 193, WORD // 8), (PAYLOAD | 193, 128), (PAYLOAD | 193, 1),
])  # fmt: skip
def test_a_forged_payload_is_left_out(form, place, path):
    data = written(path, 3)
    forge_event(data, 1, w6=form, w7=place)
    assert [event.number for event in read(data).events] == [0, 2]


def test_payloads_that_overlap_are_given_out_once(path):
    data = written(path, 64, events=64)
    payloads = places(data)[2]
    forged = {"w6": PAYLOAD | 512, "w7": 0, "w8": check(words(data)[payloads : payloads + 64])}
    for place in range(64):
        forge_event(data, place, **forged)
    found = read(data)
    assert (found.events_gone, len(found.events)) == (62, 2)


def test_a_forged_event_is_left_out(path):
    data = written(path, 3)
    forge_event(data, 1, w4=WORD)  # a kind that is not UTF-8
    assert [event.number for event in read(data).events] == [0, 2]
    forge_event(data, 1, w0=1)  # that is the number of the place before
    assert [event.number for event in read(data).events] == [0, 2]
    forge_event(data, 1, w0=WORD - 1, w4=0)  # the newest by far
    assert read(data).events_total == WORD - 1


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 7, 8, 127, 128, 2048, -1, 9])
def test_another_length_is_refused(size, path):
    data = written(path, 40)
    other = bytes(data) + bytes(9) if size == 9 else bytes(data[:size])
    for refused in (lambda: read(other), lambda: read_record(path)):
        Path(path).write_bytes(other)
        with pytest.raises(ValueError, match="record") as caught:
            refused()
        assert "run.mem" in str(caught.value)
        if len(other) >= 128:
            assert f"{len(other)} of {len(data)} bytes" in str(caught.value)


def test_other_files_are_told_apart(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.mem") as caught:
        read_record(path)
    assert caught.value.filename == path
    with pytest.raises(ValueError, match="not a regular file"):
        read_record(tmp_path)
    with open(path, "w") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="does not begin like one"):
        read_record(path)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_record(path)


def test_who_writes_it_is_known_by_a_lock(path):
    writer = writer_at(path)
    assert read_record(path).written
    with open(path, "rb") as other:  # another reader is not taken for the writer
        writer.close()
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not read_record(path).written


def reading(path: str, monkeypatch: pytest.MonkeyPatch, pread: Callable[..., bytes]) -> Record:
    writer_at(path, **SIZES).close()
    monkeypatch.setattr(reader.os, "pread", pread)
    return read_record(path)


def test_what_cannot_be_read_is_an_error_with_its_name(path, monkeypatch):
    def fails(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error") as caught:
        reading(path, monkeypatch, fails)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)


def test_what_shrinks_meanwhile_is_refused(path, monkeypatch):
    parts = iter([128])
    whole = os.pread
    with pytest.raises(ValueError, match="it became shorter while it was read"):
        reading(path, monkeypatch, lambda *args: whole(*args)[: next(parts, 0)])


def test_what_comes_in_parts_is_put_together(path, monkeypatch):
    whole = os.pread
    record = reading(path, monkeypatch, lambda file, n, at: whole(file, min(n, 300), at))
    assert (record.total, record.complete) == (0, True)


@pytest.mark.parametrize("pauses", [True, False])
def test_what_is_folded_meanwhile_is_read_again_or_refused(pauses, path, monkeypatch):
    """Who looks at the state alone finds another bank than who copied all."""
    whole, calls = os.pread, iter(range(10**6))

    def pread(file: int, size: int, at: int) -> bytes:
        data = whole(file, size, at)
        return data[:7] + b"\1" if size == 8 and (not pauses or next(calls) < 9) else data

    if pauses:
        assert reading(path, monkeypatch, pread).total == 0
    else:
        with pytest.raises(ValueError, match="it changes faster than it can be read"):
            reading(path, monkeypatch, pread)

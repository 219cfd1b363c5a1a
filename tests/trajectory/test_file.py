"""Stores in a file: opened again, refused when damaged, and intact when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from memtools import TrajectoryStore
from memtools._trajectory import mapped
from tests.kit.children import in_child
from tests.trajectory.stores import SAMPLES, T, contents, filled, walked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollout.traj"


def test_a_file_is_its_owners_and_has_everything(path):
    store = filled(file=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (store.nbytes, store.file_nbytes) == (0, 4 * (7 * 12 + 24 + 4))
    assert "in a file" in repr(store)
    store.flush()
    store.close()
    again = TrajectoryStore.open(path)
    assert (again.num_steps, again.num_samples, again.is_complete) == (T, SAMPLES, True)
    assert contents(again) == contents(filled())
    assert walked(again.epochs(2, time_steps=2, shuffle=True)) == walked(
        filled().epochs(2, time_steps=2, shuffle=True)
    )


def test_a_limit_is_for_memory_and_not_for_a_file(path):
    assert filled(file=path, limit=1).is_complete


def test_casts_and_states_go_on_after_it_was_opened(path):
    store = TrajectoryStore(2, states=("x",), dtype={"x": "bf16"}, file=path)
    store.append(x=torch.ones(2))
    store.close()
    again = TrajectoryStore.open(path)
    again.append(x=torch.ones(2, dtype=torch.float64))
    assert again["x"].dtype == torch.bfloat16
    again.append(x=torch.ones(2))
    assert again.is_complete
    again.reset()
    again.close()
    third = TrajectoryStore.open(path)
    assert len(third["x"]) == 0
    third.append(x=torch.ones(2) * 3)
    third.close()
    assert TrajectoryStore.open(path)["x"].tolist() == [[3, 3]]
    third = TrajectoryStore.open(path)
    with pytest.raises(KeyError, match="not a field"):
        third.append(y=torch.ones(2))


def test_a_field_that_comes_after_it_was_opened_leaves_the_others_where_they_are(path):
    filled(file=path).close()
    for name in ("more", "last"):
        with TrajectoryStore.open(path) as again:
            again.put({name: torch.ones(SAMPLES, 2)})
    ones = [[1, 1]] * SAMPLES
    store = TrajectoryStore.open(path)
    assert contents(store) == {**contents(filled()), "more": ones, "last": ones}


def test_a_store_that_was_opened_under_inference_mode_trains(path):
    store = filled(file=path)
    store.put(empty=torch.ones(SAMPLES, 0))
    store.close()
    with torch.inference_mode(), torch.device("meta"):
        store = TrajectoryStore.open(path)
    assert store["empty"].device.type == "cpu"
    weight = torch.ones(3, requires_grad=True)
    (store["latents"] * weight).sum().backward()
    assert weight.grad is not None
    store.put(advantages=torch.ones(SAMPLES))
    assert store["advantages"].sum() == SAMPLES


def test_a_forked_child_reads_its_parents_file_and_does_not_write_to_it(path, tmp_path):
    def write() -> None:
        for store in stores:
            assert len(store) == 1
            for call in (
                lambda: store.append(x=torch.zeros(2)),  # noqa: B023 - called at once
                lambda: store.put(y=torch.zeros(2)),  # noqa: B023
                store.reset,
            ):
                with pytest.raises(RuntimeError, match="in a forked child .* make a store in the"):
                    call()
            store.close()
        with pytest.raises(BlockingIOError, match="close it there first"):
            TrajectoryStore.open(path)

    stores = TrajectoryStore(2, file=path), TrajectoryStore(2, limit=8, overflow=tmp_path)
    for store in stores:
        store.append(x=torch.ones(2))
    assert in_child(write) == 0
    for store in stores:
        assert store["x"].tolist() == [[1, 1]]
        store.append(x=torch.ones(2) * 2)
        store.close()
    assert TrajectoryStore.open(path)["x"].tolist() == [[1, 1], [2, 2]]


def test_a_file_that_is_there_is_not_written_over(path):
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"remove it, or open it with TrajectoryStore"):
        TrajectoryStore(2, file=path)
    assert path.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        TrajectoryStore(2, file=path.parent / "no" / "folder")


def changed(*places: int, data: bytes) -> object:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for at in places:
            content[at : at + len(data)] = data
        path.write_bytes(content)

    return change


def in_both(at: int, data: bytes) -> object:
    """A change of both headers."""
    return changed(at, mapped.ROOM + at, data=data)


def described_by(text: bytes) -> object:
    """Whole headers that have this in place of their JSON."""

    def change(path: Path) -> None:
        checked = struct.pack("<IQQ", len(text), 9, path.stat().st_size) + text
        in_both(0, mapped.MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked)(path)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (in_both(7, b"\x01"), "has format 1, this memtools reads 2"),
        (in_both(0, b"X"), "was not written by a TrajectoryStore"),
        (in_both(40, b"X"), "is damaged: its header was changed"),
        (described_by(b"\xff"), "rollout.traj' is damaged: its header cannot be read"),
        (described_by(b""), "rollout.traj' is damaged: its header cannot be read"),
        (described_by(b"[" * 20_000), "rollout.traj' is damaged: its header cannot be read"),
        (described_by(b"[]"), "rollout.traj' is damaged: its header is not an object"),
        (lambda path: path.write_bytes(b""), "was not written by a TrajectoryStore"),
        (lambda path: path.write_bytes(b"MTT"), "was not written by a TrajectoryStore"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is cut short: .* are there"),
        (lambda path: os.truncate(path, 1000), "is cut short: 1000 B of"),
        (changed(mapped.COUNTS, data=struct.pack("<Q", 99)), "says what cannot be .latents has 99"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(path, change, match):
    filled(file=path).close()
    change(path)
    with pytest.raises(ValueError, match=match):
        TrajectoryStore.open(path)


def header_of(path: Path) -> dict[str, object]:
    file, described, _ = mapped.MappedFile.open(path)
    file.close()
    return described


def test_a_header_that_lies_is_refused(path):
    filled(file=path).close()
    described = header_of(path)
    for key, value in (
        ("num_steps", -1),
        ("num_samples", None),
        ("fields", [{"name": "x"}]),
        ("fields", [{**described["fields"][0], "dtype": "load"}]),
        ("fields", [{**described["fields"][0], "shape": [1 << 40]}]),
        ("fields", [{**described["fields"][0], "shape": [0, 1 << 62, 1 << 62]}]),
        ("fields", [{**described["fields"][0], "shape": [0, 1 << 70]}]),
        ("fields", [described["fields"][0], described["fields"][0]]),
        ("fields", [{**described["fields"][0], "offset": 0}]),
        ("fields", [{**described["fields"][0], "offset": mapped.HEADER + 8}]),
        ("fields", [described["fields"][0], {**described["fields"][0], "name": "other"}]),
        ("fields", [{**described["fields"][0], "name": "\x1b[31m"}]),
        ("fields", [{**described["fields"][0], "name": {}}]),
        ("dtype", "int7"),
    ):
        described_by(json.dumps({**described, key: value}).encode())(path)
        with pytest.raises(ValueError, match="is damaged: its header says what cannot be"):
            TrajectoryStore.open(path)
    for key in described.keys() - {"fields"}:
        lacking = {name: value for name, value in described.items() if name != key}
        described_by(json.dumps(lacking).encode())(path)
        with pytest.raises(ValueError, match="is damaged"):
            TrajectoryStore.open(path)


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_kill_within_a_new_header_costs_that_field_alone(path, cut):
    """The header is written with one copy, of which a part may be there."""
    filled(file=path).close()
    store = TrajectoryStore.open(path)
    before = path.read_bytes()
    store.put(more=torch.ones(SAMPLES))
    store.close()
    torn = bytearray(path.read_bytes())
    differ = [i for i in range(mapped.COUNTS) if torn[i] != before[i]]
    begin = differ[0] // mapped.ROOM * mapped.ROOM
    torn[begin + cut : begin + mapped.ROOM] = before[begin + cut : begin + mapped.ROOM]
    path.write_bytes(torn)
    again = TrajectoryStore.open(path)
    assert contents(again) == contents(filled())
    again.put(more=torch.ones(SAMPLES))
    again.close()
    assert TrajectoryStore.open(path)["more"].sum() == SAMPLES


def test_two_writers_are_refused(path):
    store = filled(file=path)
    why = "has this trajectory open; close it there first"
    with pytest.raises(BlockingIOError, match=why):
        TrajectoryStore.open(path)
    program = f"import memtools\nmemtools.TrajectoryStore.open({str(path)!r})"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert why in child.stderr
    if (forked := os.fork()) == 0:  # it has the lock as well, and goes on
        signal.pause()
    store.close()
    assert contents(TrajectoryStore.open(path)) == contents(filled())
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)


# --- no room --------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_earlier_data_stays(path, monkeypatch):
    store = filled(file=path)
    size = path.stat().st_size

    def full(fd: int, offset: int, length: int) -> None:
        os.truncate(fd, offset + length // 2)  # what a file system may have taken by then
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"needs another 4.0 KiB, more than the disk gives \(.* are free\); free"
    ) as told:
        store.put(advantages=torch.ones(SAMPLES), more=torch.ones(SAMPLES, 4))
    assert told.value.errno == errno.ENOSPC
    assert path.stat().st_size == size
    assert contents(store) == contents(filled())
    monkeypatch.undo()
    store.put(more=torch.ones(SAMPLES, 4))
    assert store["more"].sum() == 16
    store.close()
    assert TrajectoryStore.open(path).names == (*filled().names, "more")


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_mapping_takes_its_space_back(path, monkeypatch, failing):
    store = filled(file=path)
    size, calls, real = path.stat().st_size, [], mapped.map_file

    def fails(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == failing:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(mapped, "map_file", fails)
    with pytest.raises(OSError, match="Cannot allocate"):
        store.put(more=torch.ones(SAMPLES), other=torch.ones(SAMPLES))
    assert path.stat().st_size == size
    monkeypatch.undo()
    assert contents(store) == contents(filled())
    store.close()
    assert contents(TrajectoryStore.open(path)) == contents(filled())


def test_a_call_that_is_interrupted_leaves_a_file_that_opens(path, monkeypatch):
    store, real = filled(file=path), mapped.MappedFile.describe

    def interrupted(file: mapped.MappedFile, described: dict[str, object]) -> None:
        real(file, described)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(mapped.MappedFile, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(more=torch.ones(SAMPLES))
    assert contents(store) == contents(filled())
    store.close()
    assert contents(TrajectoryStore.open(path)) == contents(filled())


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_an_error(path):
    program = f"""
import resource, torch
from memtools import TrajectoryStore
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
store = TrajectoryStore(2, file={str(path)!r})
store.append(x=torch.ones(4))
try:
    store.append(x=torch.ones(4), y=torch.ones(4, 1 << 20))
except OSError as error:
    print(error.strerror)
print(store["x"].tolist(), store.names)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (
        "needs another 32.0 MiB, more than the limit of a file's size; raise `ulimit -f`"
        in done.stdout
    )
    assert "[[1.0, 1.0, 1.0, 1.0]] ('x',)" in done.stdout


def test_a_file_that_cannot_be_begun_is_removed(path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="more than the"):
        TrajectoryStore(2, file=path)
    assert not path.exists()


def test_a_file_without_room_for_the_names_is_removed(path):
    with pytest.raises(ValueError, match="30.0 KiB of names and shapes, got 0 fields and 68.5 KiB"):
        TrajectoryStore(2, states=["x" * 70_000], file=path)
    assert not path.exists()


def test_a_file_that_cannot_be_mapped_is_closed_and_removed(path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(mapped, "map_file", fails)
    with pytest.raises(OSError, match="Cannot allocate"):
        TrajectoryStore(2, file=path)
    assert (path.exists(), os.listdir("/proc/self/fd")) == (False, before)


def test_too_many_fields_for_the_header_are_refused(path, monkeypatch):
    monkeypatch.setattr(mapped, "MOST_FIELDS", 3)
    store = filled(file=path)
    size = path.stat().st_size
    with pytest.raises(ValueError, match="room for 3 fields .* got 4 fields"):
        store.put(more=torch.ones(SAMPLES))
    assert (path.stat().st_size, contents(store)) == (size, contents(filled()))


def test_a_first_call_that_is_refused_says_nothing_of_the_samples(path, monkeypatch):
    monkeypatch.setattr(mapped, "MOST_FIELDS", 1)
    store = TrajectoryStore(2, file=path)
    with pytest.raises(ValueError, match="room for 1 fields"):
        store.append(x=torch.ones(2), y=torch.ones(2))
    assert (store.num_samples, store.names) == (None, ())
    store.append(x=torch.ones(3))
    assert store.num_samples == 3


# --- overflow -------------------------------------------------------------------------------------


def test_what_has_no_room_lies_in_a_file_without_a_name(tmp_path):
    store = filled(limit=400, overflow=tmp_path)
    assert store.nbytes == 4 * (7 * 12 + 4)  # latents and advantages
    assert store.file_nbytes == 4 * 24
    assert list(tmp_path.iterdir()) == []
    assert contents(store) == contents(filled())
    store.reset()
    filled(store)
    assert walked(store.epochs(1, samples=2)) == walked(filled().epochs(1, samples=2))


def test_a_full_disk_leaves_nothing_of_a_call_in_the_file_without_a_name(tmp_path, monkeypatch):
    store = TrajectoryStore(1, limit=8, overflow=tmp_path)
    store.append(x=torch.ones(2))
    real, calls = os.posix_fallocate, []

    def full_at_the_third(*args: int) -> None:
        calls.append(args)
        if len(calls) == 2:  # the first field has room
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_third)
    with pytest.raises(OSError, match="more than the disk gives"):
        store.put(a=torch.ones(2, 4), b=torch.ones(2, 4))
    assert (store.names, store.file_nbytes) == (("x",), 0)
    store.put(a=torch.ones(2, 4))
    assert store.file_nbytes > 0

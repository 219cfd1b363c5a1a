"""examples/hdf5_to_lmdb.py: what it writes equals the files, also if it was killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest

from tests.data.episodecases import FRAME, TOP, stored, write_episode, write_episodes
from tests.docs.test_examples import EXAMPLES, load
from tests.kit.children import in_child

script: Any = load("hdf5_to_lmdb")
KEYS = ("action", TOP, "observations/qpos", "observations/qvel")
LENGTHS = (10, 7, 12)


def convert(folder: Path, target: Path, **options: Any) -> int:
    return int(script.convert(folder, target, **{"commit_bytes": 1000, **options}))


def check(folder: Path, target: Path, keys: tuple[str, ...] = KEYS) -> None:
    """Every frame of the database equals the one of its file."""
    environment = lmdb.open(str(target), subdir=False, readonly=True, lock=False)
    with environment, environment.begin() as reading:
        for number, frames in enumerate(LENGTHS):
            episode = script.read_episode(reading, number)
            assert episode["file"] == f"episode_{number}.hdf5"
            assert episode["frames"] == dict.fromkeys(keys, frames)
            for key in keys:
                values = stored(folder / episode["file"], key)
                for frame in range(frames):
                    got = script.read_frame(reading, number, episode, key, frame)
                    assert got.dtype == values.dtype
                    assert np.array_equal(got, values[frame])
        with pytest.raises(KeyError, match="no episode 3"):
            script.read_episode(reading, 3)
        assert environment.stat()["entries"] == len(keys) * sum(LENGTHS) + len(LENGTHS) + 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_episodes(tmp_path / "episodes", LENGTHS, chunks=(4, *FRAME), compression="gzip")


def test_it_writes_all_frames_and_a_second_time_nothing(folder, tmp_path, capsys):
    target = tmp_path / "a.lmdb"
    assert convert(folder, target) == 4 * sum(LENGTHS)
    check(folder, target)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("verified: 0.0 of 0.0 MiB (100 %)")
    written = target.read_bytes()
    assert convert(folder, target) == 4 * sum(LENGTHS)
    check(folder, target)
    assert len(target.read_bytes()) == len(written)


def test_only_some_datasets(folder, tmp_path):
    assert convert(folder, tmp_path / "a.lmdb", keys=["action"]) == sum(LENGTHS)
    check(folder, tmp_path / "a.lmdb", ("action",))


def commits_until_killed(folder: Path, target: Path, kill_at: int) -> int:
    """Convert in a child that is killed by SIGKILL before or after its n-th commit."""
    commit = script.Conversion.commit
    commits = 0

    def commit_or_die(self: Any, writing: Any, following: Any) -> None:
        nonlocal commits
        commits += 1
        if 2 * commits - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, writing, following)
        if 2 * commits == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    script.Conversion.commit = commit_or_die
    try:
        return in_child(lambda: convert(folder, target))
    finally:
        script.Conversion.commit = commit


@pytest.mark.slow
def test_killed_at_any_commit_it_goes_on_and_is_whole(folder, tmp_path):
    for kill_at in range(1, 99):
        target = tmp_path / f"{kill_at}.lmdb"
        ended = commits_until_killed(folder, target, kill_at)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        if kill_at % 3 == 0:  # and once more, later
            commits_until_killed(folder, target, kill_at)
        assert convert(folder, target) == 4 * sum(LENGTHS)
        check(folder, target)
    assert kill_at > 12


def test_killed_once_it_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    target = tmp_path / "a.lmdb"
    assert commits_until_killed(folder, target, 6) == -signal.SIGKILL
    begun: list[Any] = []
    begin = script.Conversion.begin

    def note(self: Any, environment: Any) -> Any:
        begun.append((begin(self, environment), self.done))
        return begun[-1][0]

    monkeypatch.setattr(script.Conversion, "begin", note)
    assert convert(folder, target) == 4 * sum(LENGTHS)
    check(folder, target)
    ((place, done),) = begun
    assert place > script.Place(0, 0, 0)
    assert done >= 3000


def test_other_files_than_those_it_was_begun_from_are_refused(folder, tmp_path):
    convert(folder, tmp_path / "a.lmdb")
    write_episode(folder / "episode_1.hdf5", 7, seed=9)
    with pytest.raises(script.ConversionError, match="was begun from other files or datasets"):
        convert(folder, tmp_path / "a.lmdb")


def test_a_frame_that_differs_is_found(folder, tmp_path):
    target = tmp_path / "a.lmdb"
    convert(folder, target)
    environment = lmdb.open(str(target), subdir=False, map_size=1 << 24)
    with environment, environment.begin(write=True) as writing:
        writing.put(script.name_of(1, "action", 3), b"other")
    with pytest.raises(script.ConversionError, match="frame 3 of action of episode_1.hdf5 differs"):
        convert(folder, target)


def test_a_full_map_and_a_full_disk_are_said_and_what_is_there_counts(
    folder, tmp_path, monkeypatch
):
    target = tmp_path / "a.lmdb"
    with pytest.raises(
        script.ConversionError, match="is full at its map size; give a larger --map"
    ):
        convert(folder, target, map_size=32 * 1024)
    assert convert(folder, target) == 4 * sum(LENGTHS)
    check(folder, target)

    def full(*_: object) -> None:
        raise lmdb.DiskError("No space left on device")

    frame = int(np.prod(FRAME))
    monkeypatch.setattr(script, "MIB", 4 * frame)
    commits = iter((script.Conversion.commit, full))
    monkeypatch.setattr(script.Conversion, "commit", lambda *given: next(commits)(*given))
    with pytest.raises(
        script.ConversionError, match="No space left on device; 1.0 MiB are there: make room, or"
    ):
        convert(folder, tmp_path / "b.lmdb", keys=[TOP], commit_bytes=4 * frame)


def test_a_database_of_others_is_not_written_into(folder, tmp_path):
    target, text = tmp_path / "a.lmdb", tmp_path / "text"
    with (
        lmdb.open(str(target), subdir=False, map_size=1 << 20) as environment,
        environment.begin(write=True) as writing,
    ):
        writing.put(b"mine", b"1")
    written = target.read_bytes()
    with pytest.raises(script.ConversionError, match="has records that are not of this script"):
        convert(folder, target)
    with lmdb.open(str(target), subdir=False, readonly=True, lock=False) as environment:
        assert environment.stat()["entries"] == 1
    assert len(target.read_bytes()) == len(written)
    text.write_text("a file of somebody" * 1000)
    with pytest.raises(script.ConversionError, match="text is not a database of LMDB; give anoth"):
        convert(folder, text)


@pytest.mark.parametrize("lengths", [(2, 0, 3), (2, 0), (0, 0, 2), (0,)])
def test_an_episode_without_frames_is_described(lengths, tmp_path):
    folder = write_episodes(tmp_path / "episodes", lengths)
    target = tmp_path / "a.lmdb"
    for _ in range(2):
        assert convert(folder, target) == 4 * sum(lengths)
    with (
        lmdb.open(str(target), subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as reading,
    ):
        found = [script.read_episode(reading, i)["frames"] for i in range(len(lengths))]
    assert found == [dict.fromkeys(KEYS, frames) for frames in lengths]


def test_what_is_not_converted_is_named(tmp_path, capsys):
    path = tmp_path / "episode_0.h5"
    with h5py.File(path, "w") as file:
        file["text"], file["one"] = ["a", "b"], 3.0
    with pytest.raises(script.ConversionError, match="has no dataset of numbers with frames"):
        convert(tmp_path, tmp_path / "a.lmdb")
    with h5py.File(path, "a") as file:
        file["action"] = np.zeros((2, 3))
    assert convert(tmp_path, tmp_path / "a.lmdb") == 2
    assert capsys.readouterr().err == (
        "left out of episode_0.h5: text, which hold texts, objects, or rows of different lengths\n"
    )
    with pytest.raises(script.ConversionError, match="text in .* holds texts, objects, or rows"):
        convert(tmp_path, tmp_path / "a.lmdb", keys=["text"])


def test_bad_input_is_one_line_of_the_command(folder, tmp_path):
    command = [sys.executable, str(EXAMPLES / "hdf5_to_lmdb.py")]
    done = subprocess.run(
        [*command, str(folder), str(tmp_path / "a.lmdb"), "--keys", "actions"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "has no dataset 'actions'; it has action, observations/images/top" in done.stderr
    for option in ("--map-mib", "--commit-mib"):
        done = subprocess.run(
            [*command, str(folder), str(tmp_path / "a.lmdb"), option, "0"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.endswith(f"error: {option} must be at least 1\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "is not a folder of episodes"),
        (lambda folder: folder.parent, "has no file that ends in .hdf5 or .h5"),
        (lambda folder: (folder / "episode_9.h5").write_bytes(b"x") and folder, "as HDF5"),
    ],
)
def test_bad_folders_get_one_sentence(make, message, folder, tmp_path):
    with pytest.raises(script.ConversionError, match=message):
        convert(make(folder), tmp_path / "a.lmdb")

"""H5Episodes: the frames of the files, whoever reads them, and a sentence for each file that is not
as it should be."""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memtools import Budget
from memtools.data import H5Episodes
from tests.data.episodecases import FRAME, TOP, stored, write_episode, write_episodes
from tests.kit.children import in_child

KEYS = ("observations/images/top", "observations/qpos", "observations/qvel")


def open_files(path: Path) -> int:
    """How many descriptors of this process lead to a file."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}") == str(path)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "image",
    [{}, {"chunks": (4, *FRAME)}, {"chunks": (1, *FRAME), "compression": "gzip"}],
    ids=["contiguous", "four in a chunk", "compressed"],
)
@pytest.mark.parametrize("cache", ["1 MiB", 9000, None, "auto"])
def test_an_item_is_a_frame_and_the_next_actions_padded(image, cache, tmp_path):
    folder = write_episodes(tmp_path, **image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memtools.data._episodes.notice", lambda text: None)
        episodes = H5Episodes(folder, chunk=5, cache=cache)
    assert (episodes.lengths, len(episodes), episodes.num_episodes) == ((10, 7, 12), 29, 3)
    assert episodes.observations == KEYS
    for index in (0, 28, 9, 10, 16, 12, -1, 3):
        episode, start = episodes.locate(index)
        item, file = episodes[index], folder / f"episode_{episode}.hdf5"
        assert set(item) == {*KEYS, "action", "is_pad"}
        for key in KEYS:
            assert np.array_equal(item[key], stored(file, key)[start])
        actions = stored(file, "action")[start : start + 5]
        kept = len(actions)
        assert np.array_equal(item["action"][:kept], actions)
        assert item["action"].shape == (5, 14)
        assert (item["action"][kept:] == torch.from_numpy(actions[-1])).all()
        assert item["is_pad"].tolist() == [False] * kept + [True] * (5 - kept)
    assert episodes.locate(9) == (0, 9)
    assert episodes.locate(-1) == (2, 11)
    for bad in (29, -30):
        with pytest.raises(IndexError, match="index must be below 29"):
            episodes.locate(bad)
    for episode, start, said in (
        (3, 0, "episode must be below 3"),
        (0, 10, "start must be below 10"),
    ):
        with pytest.raises(IndexError, match=said):
            episodes.at(episode, start)


def test_who_changes_an_item_changes_no_other(tmp_path):
    episodes = H5Episodes(write_episodes(tmp_path), chunk=3, cache="1 MiB")
    first = {key: value.clone() for key, value in episodes[4].items()}
    for value in episodes[4].values():
        value.zero_()
    assert all(torch.equal(value, episodes[4][key]) for key, value in first.items())


def test_a_frame_is_read_once_and_the_cache_keeps_to_its_bytes(tmp_path):
    folder = write_episodes(tmp_path, (40,), chunks=(8, *FRAME))
    episodes = H5Episodes(folder, observations=[TOP], cache="64 KiB")
    assert episodes.cache is not None
    for index in range(40):
        assert episodes[index][TOP].shape == FRAME
    info = episodes.cache.cache_info()
    assert info.misses == 5 + 1  # blocks of images, and one of actions
    assert info.hits == 80 - 6
    assert info.currsize <= 64 * 1024
    assert H5Episodes(folder, cache=episodes.cache).cache is episodes.cache
    budget = Budget("1 MiB")
    counted = H5Episodes(folder, cache=budget)
    _ = counted[3]
    assert budget.used > 8 * 144
    assert H5Episodes(folder, cache=None).cache is None


def test_decode_makes_a_frame_of_what_is_stored(tmp_path):
    folder = write_episodes(tmp_path, (5,), chunks=(2, *FRAME))
    calls: list[tuple[int, ...]] = []

    def halved(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        calls.append(values.shape)
        return values[::2, ::2]

    episodes = H5Episodes(folder, observations=[TOP], actions=None, decode={TOP: halved})
    expected = stored(folder / "episode_0.hdf5", TOP)[3, ::2, ::2]
    for _ in range(2):
        assert np.array_equal(episodes[3][TOP], expected)
    assert calls == [FRAME]
    assert set(episodes[0]) == {TOP}
    with pytest.raises(ValueError, match="decode names 'x', which is not one of"):
        H5Episodes(folder, decode={"x": halved})


def test_layouts_say_what_reading_a_frame_reads(tmp_path):
    path = write_episode(tmp_path / "episode_0.hdf5", chunks=(5, *FRAME), compression="gzip")
    top, qpos = H5Episodes(path).layouts()[:2]
    assert str(top) == (
        "observations/images/top: a chunk holds 5 frames: reading one reads 5 (720 B); write files "
        "with chunks=(1, 6, 8, 3), or h5repack -l observations/images/top:CHUNK=1x6x8x3 "
        f"{path} new.hdf5"
    )
    assert (top.frames_per_chunk, top.frame_bytes, top.compression) == (5, 144, "gzip")
    assert str(qpos) == "observations/qpos: frames are read one by one (56 B)"


def test_it_warns_where_the_cache_cannot_hold_what_is_read_besides(tmp_path):
    images = np.zeros((48, 40, 40, 3), np.uint8)
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file.create_dataset("observations/images/top", data=images, chunks=(24, 40, 40, 3))
        file.create_dataset("action", data=np.zeros((48, 2)))
    with pytest.warns(
        RuntimeWarning, match="a chunk holds 24 frames: reading one reads 24"
    ) as told:
        H5Episodes(tmp_path, cache="100 KiB")
    assert str(told[0].message).endswith("all frames are 225.0 KiB")
    H5Episodes(tmp_path, cache="1 MiB")


def test_a_process_opens_a_file_when_it_reads_and_inherits_none(tmp_path):
    folder = write_episodes(tmp_path)
    first = folder / "episode_0.hdf5"
    episodes = H5Episodes(folder, cache=None)
    assert open_files(first) == 0
    item = episodes[2]
    assert open_files(first) == 1
    kept = episodes._files.open(first)
    assert kept.id.get_access_plist().get_cache()[2] == 0  # bytes of HDF5's own cache of chunks

    def read_in_child() -> None:
        assert torch.equal(episodes[2]["action"], item["action"])
        assert episodes._files.open(first) is not kept
        assert not kept.id.valid
        assert open_files(first) == 1

    assert in_child(read_in_child) == 0
    assert kept.id.valid
    assert torch.equal(episodes[2][TOP], item[TOP])
    copied = pickle.loads(pickle.dumps(episodes))
    assert copied._files._open == {}
    assert torch.equal(copied[2][TOP], item[TOP])
    episodes.close()
    copied.close()
    assert open_files(first) == 0


def test_what_a_child_does_takes_no_lock_off_the_parents_files(tmp_path):
    first = write_episodes(tmp_path) / "episode_0.hdf5"
    episodes = H5Episodes(tmp_path, cache=None)

    def is_locked() -> bool:
        with first.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    assert not is_locked()
    _ = episodes[2]
    assert is_locked()
    for work in (lambda: episodes[2], lambda: episodes[12], episodes.close):
        assert in_child(work) == 0
        assert is_locked()
    episodes.close()
    assert not is_locked()


def test_at_most_sixteen_files_are_open(tmp_path):
    episodes = H5Episodes(write_episodes(tmp_path, (2,) * 20), cache=None)
    for index in range(len(episodes)):
        _ = episodes[index]
    assert len(episodes._files._open) == 16
    assert open_files(tmp_path / "episode_0.hdf5") == 0
    assert open_files(tmp_path / "episode_19.hdf5") == 1
    assert episodes.files[2:4] == (f"{tmp_path}/episode_2.hdf5", f"{tmp_path}/episode_3.hdf5")


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same(context, tmp_path):
    episodes = H5Episodes(write_episodes(tmp_path), chunk=4, cache="1 MiB")
    _ = episodes[0]
    plain = list(DataLoader(episodes, batch_size=4))
    loader = DataLoader(episodes, batch_size=4, num_workers=2, multiprocessing_context=context)
    for one, other in zip(plain, loader, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


# --- files that are not as they should be -------------------------------------------------------


def test_a_file_that_is_cut_short_or_is_no_hdf5_is_named(tmp_path):
    folder = write_episodes(tmp_path)
    second = folder / "episode_1.hdf5"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"episode_1.hdf5 cannot be opened as HDF5 \(.*truncated"):
        H5Episodes(folder)
    second.write_bytes(b"no hdf5")
    with pytest.raises(OSError, match="it is damaged or cut short: copy or record it again"):
        H5Episodes(folder)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="episode_1.hdf5 does not exist"):
        H5Episodes([folder / "episode_0.hdf5", second])


def test_bytes_that_cannot_be_read_are_named_and_the_rest_goes_on(tmp_path):
    path = write_episode(tmp_path / "a.h5", chunks=(1, *FRAME), compression="gzip")
    with h5py.File(path) as file:
        where = file[TOP].id.get_chunk_info(3)
    with path.open("r+b") as raw:
        raw.seek(where.byte_offset)
        raw.write(b"\xff" * where.size)
    episodes = H5Episodes(tmp_path)
    with pytest.raises(OSError, match=f"a.h5: frames 3 to 3 of {TOP} cannot be read"):
        _ = episodes[3]
    assert episodes[4][TOP].shape == FRAME


def test_missing_and_uneven_datasets_are_named(tmp_path):
    write_episode(tmp_path / "episode_0.hdf5")
    path = write_episode(tmp_path / "episode_1.hdf5", drop=TOP)
    with pytest.raises(
        ValueError, match=f"episode_1.hdf5 has no dataset '{TOP}'; it has action, obs"
    ):
        H5Episodes(tmp_path)
    write_episode(path, 10, longer=2)
    with pytest.raises(ValueError, match=f"episode_1.hdf5 has 10 frames of {TOP} and 12 of action"):
        H5Episodes(tmp_path)
    write_episode(path, 0)
    with pytest.raises(ValueError, match="episode_1.hdf5 has no frames; leave it out"):
        H5Episodes(tmp_path)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write_episode(tmp_path / "episode_0.hdf5", 10)
    episodes = H5Episodes(path)
    write_episode(path, 8)
    with pytest.raises(ValueError, match="has 8 frames of observations.* and had 10 when"):
        _ = episodes[0]


def test_what_decode_raises_names_the_frame_and_the_file(tmp_path):
    path = write_episode(tmp_path / "a.h5")
    episodes = H5Episodes(path, decode={TOP: lambda stored: None})  # as cv2.imdecode returns
    with pytest.raises(RuntimeError, match="NoneType") as caught:
        _ = episodes[3]
    assert caught.value.__notes__ == [f"memtools: raised by decode, for frame 3 of {TOP} in {path}"]


def test_a_file_that_may_not_be_opened_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "[Errno 13] Unable to synchronously open file (errno = 13)")

    path = write_episode(tmp_path / "a.h5")
    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(PermissionError, match=r"\[Errno 13\] Permission denied: '.*a.h5'$"):
        H5Episodes(path)


def test_numbers_of_another_order_of_bytes_are_read(tmp_path):
    values = np.arange(6, dtype=">f4").reshape(3, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["observations/q"], file["action"] = values, values
    item = H5Episodes(tmp_path)[1]
    assert item["observations/q"].tolist() == [2, 3]
    assert item["action"].dtype == torch.float32


def test_each_file_is_read_by_its_own_chunks(tmp_path):
    write_episode(tmp_path / "episode_0.hdf5", 10)
    path = write_episode(tmp_path / "episode_1.hdf5", 10, chunks=(4, *FRAME))
    episodes = H5Episodes(tmp_path, observations=[TOP], actions=None, cache="1 MiB")
    assert episodes.cache is not None
    for start in range(10):
        assert np.array_equal(episodes.at(1, start)[TOP], stored(path, TOP)[start])
    assert episodes.cache.cache_info().misses == 3
    _ = episodes.at(0, 9)
    assert episodes.cache.cache_info().misses == 4


def test_episodes_are_in_the_order_of_their_numbers_and_names(tmp_path):
    names = ["left", "right", "episode_2_a", "episode_2_b", "episode_10"]
    for name in reversed(names):
        write_episode(tmp_path / f"{name}.h5", 2)
    assert [Path(file).stem for file in H5Episodes(tmp_path).files] == names


def test_values_that_are_no_numbers_need_a_function(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["observations/text"] = ["a", "b"]
        file["one"] = 3.0
    with pytest.raises(
        ValueError, match="observations/text in .*a.h5 is of object, which is not a num"
    ):
        _ = H5Episodes(path, actions=None)[0]
    with pytest.raises(ValueError, match="one in .*a.h5 is one value; a frame has an index"):
        H5Episodes(path, observations=["one"], actions=None)
    with pytest.raises(ValueError, match="has no dataset below observations/; pass observations="):
        H5Episodes(path, observations=[], actions=None)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "chunk must be at least 1, got 0", {"chunk": 0}),
        (TypeError, "chunk must be an int, got float", {"chunk": 1.5}),
        (TypeError, "observations must be a sequence of paths, got a str", {"observations": "a"}),
        (TypeError, "are paths in the file .* got int", {"actions": 7}),
        (TypeError, "are paths in the file .* got int", {"actions": 0}),
        (TypeError, "files must be a path or a sequence of paths, got int", {"files": 7}),
        (TypeError, "files must be a path or a sequence of paths, got bytes", {"files": b"a.h5"}),
        (TypeError, "decode must be a dict of functions by path, got int", {"decode": 7}),
        (TypeError, "and decode functions by path, got str", {"decode": {"action": "x"}}),
        (ValueError, "files is empty", {"files": []}),
        (ValueError, "has no file that ends in .hdf5 or .h5", {"files": "."}),
    ],
)
def test_bad_input_gets_one_sentence(error, message, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_episode(tmp_path / "a.hdf5_")
    with pytest.raises(error, match=message):
        H5Episodes(**{"files": path, **options})


def test_without_h5py_it_says_what_to_install(tmp_path, monkeypatch):
    path = write_episode(tmp_path / "a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"run python -m pip install h5py$"):
        H5Episodes(path)

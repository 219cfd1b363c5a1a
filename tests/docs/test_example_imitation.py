"""imitation.py: the same samples and losses whoever keeps the frames; and what aloha.py records."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.docs.test_examples import load

EPISODES, STEPS, HEIGHT, WIDTH = 2, 60, 480, 640
MIB = 2**20


@pytest.fixture(scope="module")
def imitation() -> Any:
    return load("imitation")


@pytest.fixture(scope="module")
def aloha() -> Any:
    return load("aloha")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Made-up episodes in the layout of aloha.py: a square that wanders, and joints that wave."""
    folder = tmp_path_factory.mktemp("episodes")
    for number in range(EPISODES):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            frames = np.zeros((STEPS, HEIGHT, WIDTH, 3), np.uint8)
            for step in range(STEPS):
                frames[step, 3 * step : 3 * step + 64, 9 * step : 9 * step + 64] = (
                    50 * number + step
                )
            chunk = (1, *frames.shape[1:])
            options = {"chunks": chunk, "compression": "gzip", "compression_opts": 1}
            file.create_dataset("observations/images/top", data=frames, **options)
            wave = np.sin(np.arange(STEPS * 14).reshape(STEPS, 14) / 9 + number)
            file["observations/qpos"] = file["observations/qvel"] = wave.astype(np.float32)
            file["action"] = (wave + 0.1).astype(np.float32)
    return sorted(folder.glob("*.hdf5"))


def options_of(data: str, updates: int) -> argparse.Namespace:
    return argparse.Namespace(data=data, updates=updates, lr=1e-3, seed=0, progress=False)


# --- the ways -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_ways_train_alike(
    imitation: Any, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imitation, "BATCH", 2)
    losses = {}
    for way in imitation.LOADERS:
        torch.manual_seed(0)
        meter = imitation.Meter(options_of(way, 3))
        imitation.train(files, meter.options, meter)
        losses[way] = meter.losses
    assert list(losses) == ["usual", "by-hand", "memtools"]
    assert len(set(losses["usual"])) == 3
    assert losses["by-hand"] == losses["memtools"] == losses["usual"]


def test_the_dataset_of_memtools_has_the_same_items(imitation: Any, files: list[Path]) -> None:
    from memtools.data import H5Episodes

    names = [imitation.IMAGE, imitation.JOINTS]
    by_hand = imitation.Frames(files, cached=1, floats=True)
    ours = H5Episodes(files, chunk=imitation.CHUNK, observations=names, cache="2 MiB")
    assert len(by_hand) == len(ours) == EPISODES * STEPS
    for index in (0, STEPS - 1, STEPS + 3):
        one, other = by_hand[index], ours[index]
        assert one.keys() == other.keys()
        image = other[imitation.IMAGE].permute(2, 0, 1).float() / 255
        assert torch.equal(one[imitation.IMAGE], image)
        for name in (imitation.JOINTS, imitation.ACTION, "is_pad"):
            np.testing.assert_array_equal(one[name], other[name])


def test_actions_past_the_end_do_not_count(imitation: Any, files: list[Path]) -> None:
    item = imitation.Frames(files, cached=1, floats=True)[STEPS - 2]
    assert item["is_pad"].tolist() == [False, False] + [True] * (imitation.CHUNK - 2)
    assert (item[imitation.ACTION][1:] == item[imitation.ACTION][1]).all()

    class Silent(torch.nn.Module):
        def forward(self, images: torch.Tensor, joints: torch.Tensor) -> torch.Tensor:
            assert images.shape == (1, 3, HEIGHT, WIDTH)
            return torch.zeros(1, imitation.CHUNK, 14)

    batch = {name: torch.as_tensor(value)[None] for name, value in item.items()}
    scale = imitation.Scale(files)
    loss = imitation.loss_of(Silent(), scale, batch)
    real = scale(imitation.ACTION, batch[imitation.ACTION])[:, :2]
    torch.testing.assert_close(loss, real.abs().mean())


# --- the recording --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["gym_aloha", "mujoco", "OpenGL", "h5py"])
def test_what_the_recording_needs_is_one_sentence(
    missing: str, aloha: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(
        aloha.importlib.util, "find_spec", lambda name: None if name == missing else there
    )
    with pytest.raises(SystemExit, match=r"pip install --no-deps gym-aloha==0.1.5"):
        aloha.prepare()


@pytest.mark.parametrize(
    ("libraries", "chosen"), [({"EGL"}, "egl"), ({"OSMesa"}, "osmesa"), (set(), None)]
)
def test_what_renders_is_chosen(
    libraries: set[str], chosen: str | None, aloha: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aloha.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(aloha, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.setattr(aloha.os, "environ", environment := dict[str, str]())
    if chosen is None:
        with pytest.raises(SystemExit, match="apt-get install libosmesa6"):
            aloha.prepare()
    else:
        aloha.prepare()
        assert environment["MUJOCO_GL"] == chosen


def test_episodes_that_are_there_are_not_recorded_again(
    aloha: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aloha, "write", lambda folder, episodes: pytest.fail("recorded"))
    monkeypatch.setattr(sys, "argv", ["aloha.py", str(tmp_path)])
    aloha.main()


def test_a_recording_that_fails_leaves_no_folder(
    aloha: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = iter([aloha.HANDED_OVER, 3])
    monkeypatch.setattr(aloha, "planned", lambda cube: None)
    monkeypatch.setattr(aloha, "record", lambda file, actions, cube: next(rewards))
    with pytest.raises(SystemExit, match="did not hand over the cube in episode 1"):
        aloha.write(tmp_path / "episodes", 2)
    assert list(tmp_path.iterdir()) == []
    rewards = iter([aloha.HANDED_OVER] * 2)
    aloha.write(tmp_path / "episodes", 2)
    assert len(list((tmp_path / "episodes").glob("episode_*.hdf5"))) == 2

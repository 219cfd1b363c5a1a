"""motion_grpo.py: motions are read as they are, and three ways to keep a rollout train alike."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtools

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOINTS = [
    ("root", "base", (0, 0, 0)),
    ("chest", "root", (0, 0.9, 0)),
    ("neck", "chest", (0, 0.9, 0)),
    *(
        joint
        for side, z in (("right", 0.3), ("left", -0.3))
        for joint in (
            (f"{side}_hip", "root", (0, 0, z)),
            (f"{side}_knee", f"{side}_hip", (0, -1.7, 0)),
            (f"{side}_ankle", f"{side}_knee", (0, -1.7, 0)),
            (f"{side}_shoulder", "chest", (0, 1, 2 * z)),
            (f"{side}_elbow", f"{side}_shoulder", (0, -1, 0)),
            (f"{side}_wrist", f"{side}_elbow", (0, -1, 0)),
        )
    ),
]
HEIGHT = 0.9  # of the root; the soles are at 0 then


def module(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as for a script: what it imports lies beside it
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def motions() -> Any:
    return module("motions")


@pytest.fixture(scope="module")
def skeleton(motions: Any) -> Any:
    return motions.Skeleton(urdf())


def urdf() -> bytes:
    joints = "".join(
        f'<joint name="{name}"><parent link="{parent}"/><child link="{name}"/>'
        f'<origin xyz="{x} {y} {z}"/></joint>'
        for name, parent, (x, y, z) in JOINTS
    )
    return f"<robot>{joints}</robot>\n\0".encode()


def clip_text(root: Any, yaw: Any) -> bytes:
    """A clip that stands straight, at 60 frames per second: roots [n, 3] and headings [n]."""
    still = [1.0, 0.0, 0.0, 0.0]
    frames = [
        [1 / 60, *place, np.cos(turn / 2), 0.0, np.sin(turn / 2), 0.0, *still, *still]
        + 2 * [*still, 0.0, *still, *still, 0.0]
        for place, turn in zip(np.asarray(root).tolist(), yaw, strict=True)
    ]
    return json.dumps({"Loop": "wrap", "Frames": frames}).encode()


def walking(frames: int, yaw: float = 0.0) -> bytes:
    """1.2 m/s, straight ahead, for a walker that looks `yaw` to the left of x."""
    way = 1.2 / 60 * np.arange(frames)
    root = np.stack([way * np.cos(yaw), np.full(frames, HEIGHT), -way * np.sin(yaw)], axis=1)
    return clip_text(root, np.full(frames, yaw))


def columns(motions: Any, frames: Any) -> dict[str, Any]:
    names = ("yaw", "velocity", "height", "positions", "rotations", "velocities", "contacts")
    parts = np.split(frames, np.cumsum([1, 2, 1, 63, 126, 66]), axis=1)
    return dict(zip(names, parts, strict=True))


# --- clips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("yaw", [0.0, 1.0, -2.5])
def test_features_do_not_depend_on_the_heading(motions: Any, skeleton: Any, yaw: float) -> None:
    frames = motions.features(skeleton, motions.Clip("walk", walking(300, yaw)), 0.5)
    assert frames.shape == (motions.FRAMES, motions.FEATURES) == (196, 263)
    found = columns(motions, frames)
    np.testing.assert_allclose(found["yaw"], 0, atol=1e-9)
    np.testing.assert_allclose(found["velocity"], [[1.2, 0.0]] * 196, atol=1e-9)
    np.testing.assert_allclose(found["height"], HEIGHT)
    np.testing.assert_allclose(
        found["velocities"].reshape(196, 22, 3),
        np.broadcast_to([1.2, 0, 0], (196, 22, 3)),
        atol=1e-9,
    )
    head = found["positions"].reshape(196, 21, 3)[0, motions.POINTS.index("head") - 1]
    np.testing.assert_allclose(head, [0, HEIGHT + 0.45 + 0.175, 0], atol=1e-9)
    straight = found["rotations"].reshape(196, 21, 3, 2)
    np.testing.assert_allclose(
        straight, np.broadcast_to(np.eye(3)[:, :2], straight.shape), atol=1e-9
    )
    assert not found["contacts"].any()  # The soles are on the ground and slide.


def test_a_clip_of_another_skeleton_is_refused(motions: Any) -> None:
    dog = json.dumps({"Loop": "wrap", "Frames": [[0.1] * 20] * 3}).encode()
    with pytest.raises(ValueError, match="dog has 20 numbers a frame, not 44"):
        motions.Clip("dog", dog)
    with pytest.raises(ValueError, match="the skeleton has other joints: root"):
        motions.Skeleton(b'<robot><joint><parent link="base"/><child link="root"/>'
                         b'<origin xyz="0 0 0"/></joint></robot>')  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, motions: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a wheel of two clips."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "memtools"
    folder.mkdir()
    with zipfile.ZipFile(folder / "pybullet-3.2.7-cp311-none-any.whl", "w") as wheel:
        wheel.writestr(motions.SKELETON, urdf())
        wheel.writestr(f"{motions.CLIPS[0]}walk.txt", walking(30))
        wheel.writestr(f"{motions.CLIPS[1]}0run.txt", walking(60))
        wheel.writestr("pybullet_data/data/motions/laikago_walk.txt", b"another body")
    return folder


def test_the_file_holds_all_clips_of_the_wheel(cache: Path, motions: Any, tmp_path: Path) -> None:
    motions.write(tmp_path / "motions.npz", windows=3)
    with np.load(tmp_path / "motions.npz") as data:
        assert data["motion"].shape == (6, 263, 1, 196)
        assert data["names"].tolist() == ["run", "walk"]
        assert data["clip"].tolist() == [0, 0, 0, 1, 1, 1]
        assert data["mean"][1] == pytest.approx(1.2)
        assert (data["std"] > 0).all()


def test_a_wheel_that_is_missing_is_named_with_the_command(
    tmp_path: Path, motions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "memtools"
    assert motions.cache_folder() == folder
    command = "python -m pip download --no-deps --python-version 3.11 -d "
    command += f"{folder} pybullet==3.2.7"
    with pytest.raises(SystemExit, match="which is not in .*") as said:
        motions.find_wheel()
    assert str(said.value).endswith(f"run {command}")


# --- the loop, with a small network and 10 steps --------------------------------------------------

STEPS, UPDATES = 10, 2


@pytest.fixture(scope="module")
def grpo() -> Any:
    """motion_grpo.py with a network so small that a rollout takes a tenth of a second."""
    policy, loop = module("motion_policy"), module("motion_grpo")
    kept = policy.STEPS, policy.WIDTH, policy.LAYERS, loop.STEPS
    policy.STEPS, policy.WIDTH, policy.LAYERS, loop.STEPS = STEPS, 16, 1, STEPS
    yield loop
    policy.STEPS, policy.WIDTH, policy.LAYERS, loop.STEPS = kept


def settings(**changed: Any) -> memtools.UpdateSettings:
    usual = {"batch_size": 1, "group_size": 4, "num_epochs": 3, "kl_threshold": 1e9}
    return memtools.UpdateSettings(**{**usual, **changed})


def learner(grpo: Any, **changed: Any) -> Any:
    torch.manual_seed(0)
    return grpo.Learner(grpo.MotionPolicy(), settings(**changed), 1e-3)


def trained(grpo: Any, way: str, **changed: Any) -> dict[str, Any]:
    options = argparse.Namespace(
        rollout=way, updates=UPDATES, lr=1e-3, seed=0, threads=1, limit="96 MiB", progress=False
    )
    torch.manual_seed(1)
    weights = grpo.MotionPolicy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "load", lambda: weights)
        return grpo.train(options, settings(**changed))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def three(grpo: Any) -> dict[str, Any]:
    return {way: trained(grpo, way) for way in ("published", "by-hand", "memtools")}


@pytest.mark.slow
def test_three_ways_train_alike(three: dict[str, Any]) -> None:
    for way in ("by-hand", "memtools"):
        assert three[way]["losses"] == three["published"]["losses"]
        assert three[way]["tokens"] == three["published"]["tokens"]
        assert three[way]["rewards"] == three["published"]["rewards"]
    assert len(set(three["memtools"]["losses"])) == UPDATES
    assert three["memtools"]["epochs"] == 3 * UPDATES


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by-hand", "memtools"])
def test_a_policy_that_went_too_far_ends_the_epochs(grpo: Any, way: str) -> None:
    assert trained(grpo, way, kl_threshold=1e-9)["epochs"] < 3 * UPDATES


def kept_lists(grpo: Any, way: str) -> list[list[torch.Tensor]]:
    """What a rollout keeps for its epochs: states, and log-probabilities."""
    kept: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "train_on_lists", lambda learner, *lists: kept.extend(lists[:2]))
        update = {"published": grpo.update_published, "by-hand": grpo.update_by_hand}[way]
        update(learner(grpo), torch.randn(4, 263, 1, 196), torch.zeros(4, dtype=torch.long))
    return kept


@pytest.mark.slow
def test_the_published_list_keeps_the_graph_of_all_steps(grpo: Any) -> None:
    published, _ = kept_lists(grpo, "published")
    assert len(published) == STEPS + 1
    assert [x.grad_fn is not None for x in published] == [False] + STEPS * [True]
    assert not any(x.requires_grad for kept in kept_lists(grpo, "by-hand") for x in kept)


@pytest.mark.slow
def test_the_store_keeps_states_without_a_graph(grpo: Any) -> None:
    update = grpo.MemtoolsUpdate(learner(grpo), "16 MiB")
    update(torch.randn(4, 263, 1, 196), torch.zeros(4, dtype=torch.long))
    latents = update.store["latents"]
    assert latents.shape == (STEPS + 1, 4, 263, 1, 196)
    assert not latents.requires_grad
    assert update.store.stats().with_graph > 0


@pytest.mark.slow
def test_an_update_makes_rewarded_motions_likelier(grpo: Any) -> None:
    one = learner(grpo)
    clip = torch.zeros(4, dtype=torch.long)

    @torch.no_grad()
    def log_probs() -> torch.Tensor:
        """Of all steps of the rollout."""
        steps = torch.arange(STEPS)[:, None].expand(STEPS, 4).flatten()
        mean = one.policy.next_mean(states[:-1].flatten(0, 1), steps, clip.repeat(STEPS))
        likely: torch.Tensor = one.policy.log_prob(states[1:].flatten(0, 1), mean, steps)
        return likely.view(STEPS, 4)

    latents, before = [torch.randn(4, 263, 1, 196)], []
    with torch.no_grad():
        for step in range(STEPS):
            x, log_prob = one.denoise(latents[-1], step, clip)
            latents.append(x)
            before.append(log_prob)
    states = torch.stack(latents)
    torch.testing.assert_close(log_probs(), torch.stack(before))
    grpo.train_on_lists(one, latents, before, clip)
    gain = (log_probs() - torch.stack(before)).sum(0)
    assert (gain * one.advantages(grpo.rewards_of(one.policy, states[-1]))).sum() > 0


@pytest.mark.slow
def test_pretrained_weights_are_made_once(
    cache: Path, grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = module("motion_policy")
    monkeypatch.setattr(policy, "PRETRAIN_STEPS", 2)
    policy.main()
    made = policy.kept_weights()
    assert made.parent == cache
    before = made.stat().st_mtime_ns
    policy.main()
    assert made.stat().st_mtime_ns == before
    weights = policy.load()
    assert weights.std.shape == (263, 1, 1)
    assert not torch.equal(weights.mean, torch.zeros_like(weights.mean))

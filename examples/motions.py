"""Real motion capture for motion_grpo.py: DeepMimic's humanoid, out of the package pybullet.

The wheel of pybullet (103 MB) holds 20 clips of people who walk, run, turn, jump, dance, kick, roll
and get up, as joint angles, and the skeleton they belong to. Nothing of it is installed: this
program reads those 21 files out of the zip and writes features of 263 numbers a frame.

A frame has 22 points: the skeleton's 15 joints, and head, belly, breast, toes and heels, which are
fixed on its bodies. The features are, in the frame of reference of a body that stands below the
root, on the ground, and looks where the root looks:

      1  turning of that body about the vertical, in radians per second
      2  its velocity forward and to the right, in m/s
      1  height of the root, in m
     63  positions of the 21 other points, in m
    126  rotations of the bodies that these are fixed on, the first two columns of each matrix
     66  velocities of all 22 points, in m/s
      4  whether toes and heels touch the ground, 0 or 1

So many numbers are usual for motions, but points, order and units are others here: these are not
HumanML3D's features, and models and files of the two cannot be exchanged.

    python -m pip download --no-deps --python-version 3.11 -d ~/.cache/memtools pybullet==3.2.7
    python examples/motions.py motions.npz
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FRAMES, RATE, FEATURES = 196, 60, 263  # of a window; per second; per frame
WINDOWS = 8  # of each clip, beginning at different times
SKELETON, SCALE = "pybullet_data/humanoid/humanoid.urdf", 0.25  # its lengths are four times metres
CLIPS = ("pybullet_data/data/motions/humanoid3d_", "pybullet_data/data/motions/walker/")
#: the joints that a frame of a clip has angles of, in its order, and of how many numbers: a
#: quaternion, or an angle about the joint's z axis
ANGLES = {
    "root": 4, "chest": 4, "neck": 4,
    "right_hip": 4, "right_knee": 1, "right_ankle": 4, "right_shoulder": 4, "right_elbow": 1,
    "left_hip": 4, "left_knee": 1, "left_ankle": 4, "left_shoulder": 4, "left_elbow": 1,
}  # fmt: skip
#: points beside the joints: the body each is fixed on, and where on it, in metres
FIXED = {
    "belly": ("root", (0.0, 0.07, 0.0)),
    "breast": ("chest", (0.0, 0.12, 0.0)),
    "head": ("neck", (0.0, 0.175, 0.0)),
    "right_toe": ("right_ankle", (0.1335, -0.05, 0.0)),
    "right_heel": ("right_ankle", (-0.0435, -0.05, 0.0)),
    "left_toe": ("left_ankle", (0.1335, -0.05, 0.0)),
    "left_heel": ("left_ankle", (-0.0435, -0.05, 0.0)),
}
#: the joints in the order of the skeleton's file, and what is fixed
POINTS = (
    "root", "chest", "neck",
    "right_hip", "right_knee", "right_ankle", "right_shoulder", "right_elbow", "right_wrist",
    "left_hip", "left_knee", "left_ankle", "left_shoulder", "left_elbow", "left_wrist",
    *FIXED,
)  # fmt: skip
FEET = ("right_toe", "right_heel", "left_toe", "left_heel")
POSITIONS, VELOCITIES = slice(4, 67), slice(193, 259)  # columns: of 21 points, and of all 22
TOUCHES, STANDS = 0.05, 0.5  # a foot touches the ground below so many m, slower than so many m/s
WHEEL = "pybullet-3.2.7-*.whl"
NEEDED = (
    "the motion rescue reads its clips out of the wheel of pybullet, which is not in {folder}: run "
    "python -m pip download --no-deps --python-version 3.11 -d {folder} pybullet==3.2.7"
)


def cache_folder() -> Path:
    """Where the wheel is looked for, and what was made of it is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "memtools")


def find_wheel() -> Path:
    """The wheel of pybullet. Ends the program with one sentence where it is missing."""
    wheel = next(cache_folder().glob(WHEEL), None)
    if wheel is None:
        sys.exit(NEEDED.format(folder=cache_folder()))
    return wheel


# --- rotations: quaternions are w, x, y, z, in the last axis --------------------------------------


def matrices(q: Array) -> Array:
    """Rotation matrices [..., 3, 3] of quaternions [..., 4]."""
    w, x, y, z = np.moveaxis(q / np.linalg.norm(q, axis=-1, keepdims=True), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def about(axis: int, angle: Array) -> Array:
    """Quaternions [..., 4] that turn by angles [...] about the x (1), y (2) or z (3) axis."""
    q = np.zeros((*np.shape(angle), 4))
    q[..., 0], q[..., axis] = np.cos(angle / 2), np.sin(angle / 2)
    return q


def blend(a: Array, b: Array, share: Array) -> Array:
    """Quaternions on the way from `a` to `b`, along the shorter arc."""
    b = np.where((a * b).sum(-1, keepdims=True) < 0, -b, b)
    q = a + share * (b - a)
    return np.asarray(q / np.linalg.norm(q, axis=-1, keepdims=True))


# --- clips ----------------------------------------------------------------------------------------


class Clip:
    """One recording: joint angles at some times, and on and on from its start if it loops."""

    def __init__(self, name: str, text: bytes) -> None:
        read = json.loads(text)
        self.name = name
        self.loops: bool = read["Loop"] == "wrap"
        frames = np.array(read["Frames"], dtype=np.float64)
        expected = 4 + sum(ANGLES.values())
        if frames.shape[1] != expected:
            raise ValueError(f"{name} has {frames.shape[1]} numbers a frame, not {expected}")
        self.times = np.append(0.0, np.cumsum(frames[:-1, 0]))
        self.root = frames[:, 1:4]
        self.turns: dict[str, Array] = {}  # [frames, 4] of each joint
        column = 4
        for joint, numbers in ANGLES.items():
            angle = frames[:, column : column + numbers]
            self.turns[joint] = angle if numbers == 4 else about(3, angle[:, 0])
            column += numbers

    def at(self, times: Array) -> tuple[Array, dict[str, Array]]:
        """Where the root is [n, 3], and how each joint is turned [n, 4], at these times.

        A clip that loops continues where and how it ended. Another one stands still.
        """
        end = self.times[-1]
        rounds = np.floor(times / end) if self.loops else np.zeros(len(times))
        within = np.clip(times - rounds * end, 0.0, end)
        after = np.clip(np.searchsorted(self.times, within), 1, len(self.times) - 1)
        share = (within - self.times[after - 1]) / (self.times[after] - self.times[after - 1])
        share = share[:, None]
        turns = {joint: blend(q[after - 1], q[after], share) for joint, q in self.turns.items()}
        root = self.root[after - 1] + share * (self.root[after] - self.root[after - 1])
        yaw = headings(self.turns["root"][[0, -1]])
        turned, step = matrices(about(2, yaw[1] - yaw[0])), self.root[-1] - self.root[0]
        step[1] = 0.0
        for number in range(1, int(rounds.max()) + 1):
            later = rounds >= number
            root[later] = (root[later] - self.root[0]) @ turned.T + self.root[0] + step
            turns["root"][later] = product(about(2, yaw[1] - yaw[0]), turns["root"][later])
        return root, turns


def product(a: Array, b: Array) -> Array:
    """The rotation by `b`, and then by `a`."""
    aw, av, bw, bv = a[..., :1], a[..., 1:], b[..., :1], b[..., 1:]
    w = aw * bw - (av * bv).sum(-1, keepdims=True)
    return np.concatenate([w, aw * bv + bw * av + np.cross(av, bv)], axis=-1)


def headings(root: Array) -> Array:
    """How far each rotation of the root [n, 4] turns it about the vertical, in radians."""
    return np.unwrap(2 * np.arctan2(root[:, 2], root[:, 0]))


class Skeleton:
    """Which body hangs on which, and where the points are."""

    def __init__(self, urdf: bytes) -> None:
        self.parents: dict[str, tuple[str, Array]] = {}
        for joint in ElementTree.fromstring(urdf.rstrip(b"\0 \r\n")).iter("joint"):
            parts = {part.tag: part.attrib for part in joint}
            offset = SCALE * np.array(parts["origin"]["xyz"].split(), dtype=np.float64)
            self.parents[parts["child"]["link"]] = parts["parent"]["link"], offset
        if (*self.parents, *FIXED) != POINTS:
            raise ValueError(f"the skeleton has other joints: {', '.join(self.parents)}")

    def place(self, root: Array, turns: dict[str, Array]) -> tuple[Array, Array]:
        """Positions [n, 22, 3] of all points and rotations [n, 22, 3, 3] of their bodies."""
        position, rotation = {"root": root}, {"root": matrices(turns["root"])}
        for body, (parent, offset) in self.parents.items():  # parents come before children
            if body == "root":
                continue
            position[body] = position[parent] + rotation[parent] @ offset
            rotation[body] = rotation[parent]
            if body in turns:  # wrists do not turn
                rotation[body] = rotation[parent] @ matrices(turns[body])
        for point, (body, place) in FIXED.items():
            position[point] = position[body] + rotation[body] @ np.array(place)
            rotation[point] = rotation[body]
        return (
            np.stack([position[point] for point in POINTS], axis=1),
            np.stack([rotation[point] for point in POINTS], axis=1),
        )


def features(skeleton: Skeleton, clip: Clip, start: float) -> Array:
    """A window of a clip [FRAMES, 263], from `start` seconds on."""
    times = start + np.arange(FRAMES + 1) / RATE
    root, turns = clip.at(times)
    position, rotation = skeleton.place(root, turns)
    heading = headings(turns["root"])
    back = np.swapaxes(matrices(about(2, heading)), -1, -2)[:-1]
    velocity = RATE * np.diff(position, axis=0)
    position, rotation = position[:-1], rotation[:-1]
    ground = position[:, :1] * [1.0, 0.0, 1.0]
    local = (position - ground) @ np.swapaxes(back, -1, -2)
    moves = velocity @ np.swapaxes(back, -1, -2)
    turned = (back[:, None] @ rotation)[:, 1:, :, :2]
    feet = [POINTS.index(point) for point in FEET]
    lowest = position[:, feet, 1] < TOUCHES
    touches = lowest & (np.linalg.norm(velocity[:, feet], axis=-1) < STANDS)
    columns = [
        RATE * np.diff(heading)[:, None],
        moves[:, 0, ::2],
        position[:, 0, 1:2],
        local[:, 1:].reshape(FRAMES, -1),
        turned.reshape(FRAMES, -1),
        moves.reshape(FRAMES, -1),
        touches,
    ]
    return np.concatenate(columns, axis=1)


def read_wheel(wheel: Path) -> tuple[Skeleton, list[Clip]]:
    with zipfile.ZipFile(wheel) as files:
        names = [n for n in files.namelist() if n.startswith(CLIPS) and n.endswith(".txt")]
        clips = [Clip(plain(Path(name).stem), files.read(name)) for name in names]
        return Skeleton(files.read(SKELETON)), sorted(clips, key=lambda clip: clip.name)


def plain(name: str) -> str:
    """ "walk" of "humanoid3d_walk", "walk_forward" of "0walk_forward"."""
    return name.removeprefix("humanoid3d_").lstrip("0")


def write(path: Path, windows: int = WINDOWS) -> None:
    """Write `windows` of each clip, with what each feature is on average and how it is spread."""
    skeleton, clips = read_wheel(find_wheel())
    all_windows, labels = [], []
    for label, clip in enumerate(clips):
        for number in range(windows):
            start = number * clip.times[-1] / windows if clip.loops else 0.0
            all_windows.append(features(skeleton, clip, start))
            labels.append(label)
    motion = np.stack(all_windows)
    arrays: dict[str, Any] = {
        "motion": motion.transpose(0, 2, 1)[:, :, None].astype(np.float32),  # [n, 263, 1, FRAMES]
        "clip": np.array(labels),
        "mean": motion.mean(axis=(0, 1)).astype(np.float32),
        "std": motion.std(axis=(0, 1)).clip(min=0.02).astype(np.float32),
        "names": np.array([clip.name for clip in clips]),
    }
    np.savez(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of each clip")
    options = parser.parse_args()
    write(options.path, options.windows)


if __name__ == "__main__":
    main()

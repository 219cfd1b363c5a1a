"""Records episodes of the ALOHA two-arm robot, in the HDF5 layout of ACT's authors.

The robot, its table and the red cube are the models of the package `gym-aloha`, of which only these
files are used: `mujoco-core` simulates them. In each episode the right arm takes the cube, which
is at another place each time, and hands it over to the left arm. As ACT's authors do, a scripted
policy first moves the grippers from one pose to the next; the joint angles of that run are then
replayed as actions of 14 joints, while the camera above the table records:

    observations/images/top   [400, 480, 640, 3] uint8, one frame in a chunk, compressed (gzip 1)
    observations/qpos, qvel   [400, 14] float32; grippers from 0 (closed) to 1 (open)
    action                    [400, 14] float32

It runs once, in its own process; its files are kept for other runs. Rendering needs EGL
(Debian's libegl1 and libgl1-mesa-dri) or OSMesa (libosmesa6). Shadows are left out, since rendering
with them takes several times as long.

    python examples/aloha.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from ctypes.util import find_library
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SUBSTEPS = 400, 10  # of an episode, at 50 Hz; of the physics in each
HEIGHT, WIDTH = 480, 640
CAMERA = "top"
HANDED_OVER = 4  # the reward of gym-aloha's task: the left gripper holds the cube in the air
REST = [0, -0.96, 1.16, 0, -0.3, 0, 0.02239, -0.02239]  # joints of an arm, and its two fingers
CLOSED, OPEN = 0.01844, 0.05800  # metres: how far a finger is from the middle
HOME = [-0.31718881, 0.5, 0.29525084], [0.31718881, 0.5, 0.29525084]  # of the two grippers
MEETING = np.array([0.0, 0.5, 0.25])
NEEDED = (
    "the imitation rescue needs the robot's models and what simulates and renders them: "
    "pip install mujoco-core==4.0.0 PyOpenGL==3.1.10 h5py==3.16.0, and then "
    "pip install --no-deps gym-aloha==0.1.5, because only files in it are used"
)
Way = list[tuple[int, Any, Any, float]]  # step, place, rotation as a quaternion, gripper


def turn(axis: int, degrees: float) -> Any:
    """The rotation about one axis."""
    quaternion = np.zeros(4)
    quaternion[0], quaternion[1 + axis] = np.cos(np.radians(degrees) / 2), 1
    quaternion[1 + axis] *= np.sin(np.radians(degrees) / 2)
    return quaternion


def ways(cube: Any) -> tuple[Way, Way]:
    """Where the left and the right gripper are at which step, and how far they are open."""
    level, sideways, down = turn(0, 0), turn(0, 90), turn(1, -60)
    left: Way = [
        (0, HOME[0], level, 0),
        (100, MEETING + [-0.1, 0, -0.02], sideways, 1),
        (260, MEETING + [0.02, 0, -0.02], sideways, 1),
        (310, MEETING + [0.02, 0, -0.02], sideways, 0),  # takes the cube
        (360, MEETING + [-0.1, 0, -0.02], level, 0),
        (STEPS, MEETING + [-0.1, 0, -0.02], level, 0),
    ]
    right: Way = [
        (0, HOME[1], level, 0),
        (90, cube + [0, 0, 0.08], down, 1),
        (130, cube + [0, 0, -0.015], down, 1),
        (170, cube + [0, 0, -0.015], down, 0),  # takes the cube
        (200, MEETING + [0.05, 0, 0], down, 0),
        (220, MEETING, down, 0),
        (310, MEETING, down, 1),  # lets go
        (360, MEETING + [0.1, 0, 0], down, 1),
        (STEPS, MEETING + [0.1, 0, 0], down, 1),
    ]
    return left, right


def along(way: Way) -> Iterator[tuple[Any, Any, float]]:
    """Place, rotation and gripper at each step, on straight lines between those of the way."""
    for (start, *first), (end, *last) in pairwise(way):
        for step in range(start, end):
            part = (step - start) / (end - start)
            place, rotation, gripper = (
                (1 - part) * np.asarray(a) + part * np.asarray(b)
                for a, b in zip(first, last, strict=True)
            )
            yield place, rotation, float(gripper)


class Robot:
    """Two arms of 6 joints and a gripper each, a table and a cube.

    Args:
        model: the name of the model in gym-aloha.
        cube: the place of the cube.
    """

    def __init__(self, model: str, cube: Any) -> None:
        import mujoco

        self.mujoco = mujoco
        package = importlib.util.find_spec("gym_aloha")
        assert package is not None
        assert package.origin is not None
        path = Path(package.origin).parent / "assets" / f"bimanual_viperx_{model}.xml"
        self.model = mujoco.MjModel.from_xml_path(str(path))
        self.model.vis.quality.shadowsize = self.model.vis.quality.offsamples = 0
        self.data = mujoco.MjData(self.model)
        self.data.qpos[:16] = REST * 2
        self.data.qpos[16:] = [*cube, 1, 0, 0, 0]
        mujoco.mj_forward(self.model, self.data)

    def step(self) -> None:
        self.mujoco.mj_step(self.model, self.data, nstep=SUBSTEPS)

    def move(self, left: tuple[Any, Any, float], right: tuple[Any, Any, float]) -> None:
        """Pull the grippers to these poses. Only for the model of end effectors."""
        for i, (place, rotation, gripper) in enumerate((left, right)):
            self.data.mocap_pos[i], self.data.mocap_quat[i] = place, rotation
            self.data.ctrl[2 * i : 2 * i + 2] = fingers(gripper)
        self.step()

    def act(self, action: Any) -> None:
        """Set the targets of 14 joints. Only for the model of joints."""
        for i, arm in enumerate((action[:7], action[7:])):
            self.data.ctrl[8 * i : 8 * i + 8] = [*arm[:6], *fingers(arm[6])]
        self.step()

    def qpos(self) -> Any:
        left, right = self.data.qpos[:8], self.data.qpos[8:16]
        opened = [(arm[6] - CLOSED) / (OPEN - CLOSED) for arm in (left, right)]
        return np.array([*left[:6], opened[0], *right[:6], opened[1]])

    def qvel(self) -> Any:
        left, right = self.data.qvel[:8], self.data.qvel[8:16]
        opened = [arm[6] / (OPEN - CLOSED) for arm in (left, right)]
        return np.array([*left[:6], opened[0], *right[:6], opened[1]])

    def reward(self) -> int:
        """As gym-aloha's task counts: 1 touched by the right gripper, 2 lifted, 3 touched by the
        left one, 4 handed over."""
        pairs = {
            (self.model.geom(contact.geom1).name, self.model.geom(contact.geom2).name)
            for contact in self.data.contact
        }
        lifted = ("red_box", "table") not in pairs
        if ("red_box", "vx300s_left/10_left_gripper_finger") in pairs:
            return 3 + lifted
        if ("red_box", "vx300s_right/10_right_gripper_finger") in pairs:
            return 1 + lifted
        return 0


def fingers(gripper: float) -> tuple[float, float]:
    width = CLOSED + gripper * (OPEN - CLOSED)
    return width, -width


def planned(cube: Any) -> Any:
    """The actions of an episode [STEPS, 14]: the joints of a robot whose grippers are pulled, and
    whose joints have no friction, so that they follow."""
    robot = Robot("end_effector_transfer_cube", cube)
    robot.model.dof_frictionloss[:16] = 0
    actions = np.empty((STEPS, 14), np.float32)
    left, right = ways(cube)
    for step, poses in enumerate(zip(along(left), along(right), strict=True)):
        robot.move(*poses)
        actions[step] = robot.qpos()
        actions[step, [6, 13]] = [gripper for *_, gripper in poses]
    return actions


def record(file: Any, actions: Any, cube: Any) -> int:
    """Replay the actions in front of the camera; returns the highest reward."""
    robot = Robot("transfer_cube", cube)
    arrays = {name: np.empty((STEPS, 14), np.float32) for name in ("qpos", "qvel")}
    observations = file.create_group("observations")
    frames = observations.create_dataset(
        f"images/{CAMERA}",
        (STEPS, HEIGHT, WIDTH, 3),
        np.uint8,
        chunks=(1, HEIGHT, WIDTH, 3),
        compression="gzip",
        compression_opts=1,
    )
    camera = robot.mujoco.Renderer(robot.model, HEIGHT, WIDTH)
    best = 0
    for step, action in enumerate(actions):
        camera.update_scene(robot.data, CAMERA)
        frames[step] = camera.render()
        arrays["qpos"][step], arrays["qvel"][step] = robot.qpos(), robot.qvel()
        robot.act(action)
        best = max(best, robot.reward())
    camera.close()  # before the interpreter ends: OSMesa prints errors otherwise
    for name, values in arrays.items():
        observations[name] = values
    file["action"] = actions
    file.attrs["sim"] = True
    return best


def write(folder: Path, episodes: int) -> None:
    """Record the episodes to a folder, which is there only once it is complete."""
    import h5py

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary, "part")
        part.mkdir()
        for number in range(episodes):
            cube = np.random.RandomState(number).uniform([0, 0.4, 0.05], [0.2, 0.6, 0.05])
            with h5py.File(part / f"episode_{number}.hdf5", "w") as file:
                reward = record(file, planned(cube), cube)
            if reward < HANDED_OVER:
                sys.exit(f"The robot did not hand over the cube in episode {number}")
            print(f"recorded episode {number + 1} of {episodes}", flush=True)
        part.rename(folder)


def kept_episodes() -> Path:
    """Where episodes are kept from one run to the next."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "memtools" / "aloha-transfer-cube-480x640"


def prepare() -> None:
    """End the program with one sentence where something is missing, and choose what renders."""
    packages = ("gym_aloha", "mujoco", "OpenGL", "h5py")
    if None in [importlib.util.find_spec(name) for name in packages]:
        sys.exit(NEEDED)
    if "MUJOCO_GL" not in os.environ:  # which mujoco reads when it is imported
        os.environ["MUJOCO_GL"] = "egl" if find_library("EGL") else "osmesa"
    if os.environ["MUJOCO_GL"] == "osmesa" and not find_library("OSMesa"):
        sys.exit(
            "the robot's camera needs EGL or OSMesa, and neither is installed; on Debian run "
            "apt-get install libegl1 libgl1-mesa-dri, or apt-get install libosmesa6"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Record episodes of the ALOHA two-arm robot.")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        default=kept_episodes(),
        help="%(default)s",
    )
    parser.add_argument("--episodes", type=int, default=3)
    options = parser.parse_args()
    if options.episodes < 1:
        parser.error("--episodes must be at least 1")
    if options.folder.is_dir():
        print(f"{options.folder} is there already; remove it to record it again")
    else:
        prepare()
        write(options.folder, options.episodes)


if __name__ == "__main__":
    main()

"""HDF5 episodes in the layout of ACT, small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

TOP = "observations/images/top"
FRAME = (6, 8, 3)


def write_episode(
    path: Path, frames: int = 10, *, seed: int = 0, drop: str = "", longer: int = 0, **image: Any
) -> Path:
    """An episode of 14 joints and one camera; `image` are arguments of its dataset."""
    rng = np.random.default_rng(seed)
    arrays = {
        "observations/qpos": rng.standard_normal((frames, 14)).astype(np.float32),
        "observations/qvel": rng.standard_normal((frames, 14)).astype(np.float32),
        TOP: rng.integers(0, 255, (frames, *FRAME), dtype=np.uint8),
        "action": rng.standard_normal((frames + longer, 14)).astype(np.float32),
    }
    with h5py.File(path, "w") as file:
        file.attrs["sim"] = True
        for name, values in arrays.items():
            if name != drop:
                file.create_dataset(name, data=values, **(image if name == TOP else {}))
    return path


def write_episodes(folder: Path, lengths: tuple[int, ...] = (10, 7, 12), **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for number, frames in enumerate(lengths):
        write_episode(folder / f"episode_{number}.hdf5", frames, seed=number, **options)
    return folder


def stored(path: Path, name: str) -> np.ndarray[Any, Any]:
    with h5py.File(path, "r") as file:
        return np.asarray(file[name])

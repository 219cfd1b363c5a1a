"""Imitation from camera images and joint angles: the ALOHA two-arm robot hands over a cube.

The episodes are those that `aloha.py` records: 400 steps each, 14 joints and a camera of 480x640.
The policy is like ACT: it sees one image and the angles of the joints, and outputs the next
50 actions. Images pass four strided convolutions; a small transformer does the rest.

A frame takes 24 kB in its file and 900 kB decoded. The variants differ in how many of them are
kept; the losses are the same to the last bit:

    --data usual      the last 1,024 decoded frames in an `lru_cache` of each worker, and as many
                      batches of floats ahead as a DataLoader prefetches by default
    --data by-hand    48 frames, and one batch of bytes for each worker, worked out by hand
    --data memtools   a cache with a limit in bytes, and batches of bytes with a limit in bytes

    python examples/imitation.py --data usual        # and again with: --data memtools
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from aloha import kept_episodes

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import numpy as np
import torch
from measure import MIB, Meter, job_memory, peak_rss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

try:
    import h5py
except ImportError as error:
    sys.exit(f"{error}\nNeeded: pip install h5py==3.16.0")

IMAGE, JOINTS, ACTION = "observations/images/top", "observations/qpos", "action"
CHUNK = 50  # actions that the policy says at once: a second
BATCH, WORKERS = 8, 2
Batch = dict[str, Tensor]


class Policy(nn.Module):
    """Image and joints to the next CHUNK actions, all of them standardised."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.camera = nn.Sequential(
            *(nn.Conv2d(3, 32, 8, stride=8), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(128, width, 3, stride=2, padding=1), nn.ReLU()),
        )
        self.joints = nn.Linear(14, width)
        self.places = nn.Parameter(0.02 * torch.randn(1 + 8 * 10, width))
        self.queries = nn.Parameter(0.02 * torch.randn(CHUNK, width))
        self.transformer = nn.Transformer(
            width, 4, 2, 2, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, 14)

    def forward(self, images: Tensor, joints: Tensor) -> Tensor:
        seen = self.camera(images).flatten(2).transpose(1, 2)  # [B, 80, width]
        tokens = torch.cat([self.joints(joints)[:, None], seen], dim=1) + self.places
        said = self.transformer(tokens, self.queries.expand(len(images), -1, -1))
        actions: Tensor = self.head(said)
        return actions


class Scale:
    """Standardises joints and actions by those of all episodes."""

    def __init__(self, files: list[Path]) -> None:
        self.of = {}
        for name in (JOINTS, ACTION):
            values = torch.from_numpy(np.concatenate([read(file, name) for file in files]))
            self.of[name] = values.mean(0), values.std(0).clamp(min=0.01)

    def __call__(self, name: str, values: Tensor) -> Tensor:
        mean, std = self.of[name]
        return (values - mean) / std


def read(file: Path, name: str) -> Any:
    with h5py.File(file) as episode:
        return episode[name][:]


def loss_of(policy: Policy, scale: Scale, batch: Batch) -> Tensor:
    """The mean distance from the actions that follow; those past the end do not count."""
    images = batch[IMAGE]
    if images.dtype == torch.uint8:  # [B, 480, 640, 3]
        images = images.permute(0, 3, 1, 2).contiguous().float().div_(255)
    said = policy(images, scale(JOINTS, batch[JOINTS]))
    wrong = (said - scale(ACTION, batch[ACTION])).abs().mean(dim=2)
    real = ~batch["is_pad"]
    loss: Tensor = (wrong * real).sum() / real.sum()
    return loss


# --- where the samples come from; all else is the same --------------------------------------------


class Frames(Dataset[dict[str, Any]]):
    """All frames of all episodes, each with the joints and the actions that follow."""

    def __init__(self, files: list[Path], cached: int, floats: bool) -> None:
        self.episodes = [(file, read(file, JOINTS), read(file, ACTION)) for file in files]
        self.steps = [(e, t) for e, (_, q, _) in enumerate(self.episodes) for t in range(len(q))]
        self.decoded, self.floats = lru_cache(maxsize=cached)(decode), floats

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, step = self.steps[index]
        file, joints, actions = self.episodes[episode]
        after = np.arange(step, step + CHUNK)
        image = torch.from_numpy(self.decoded(file, step))
        if self.floats:
            image = image.permute(2, 0, 1).float() / 255
        return {
            IMAGE: image,
            JOINTS: joints[step],
            ACTION: actions[np.minimum(after, len(actions) - 1)],
            "is_pad": after >= len(actions),
        }


def decode(file: Path, step: int) -> Any:
    with h5py.File(file) as episode:
        return episode[IMAGE][step]


def order(dataset: Any, options: argparse.Namespace) -> RandomSampler:
    generator = torch.Generator().manual_seed(options.seed)
    return RandomSampler(dataset, num_samples=options.updates * BATCH, generator=generator)


def usual(files: list[Path], options: argparse.Namespace) -> Iterable[Batch]:
    dataset = Frames(files, cached=1024, floats=True)
    return DataLoader(dataset, BATCH, sampler=order(dataset, options), num_workers=WORKERS)


def by_hand(files: list[Path], options: argparse.Namespace) -> Iterable[Batch]:
    dataset = Frames(files, cached=48, floats=False)
    return DataLoader(
        dataset, BATCH, sampler=order(dataset, options), num_workers=WORKERS, prefetch_factor=1
    )


def with_memtools(files: list[Path], options: argparse.Namespace) -> Iterable[Batch]:
    from memtools.data import H5Episodes, bounded

    dataset: Any = H5Episodes(files, chunk=CHUNK, observations=[IMAGE, JOINTS], cache="64 MiB")
    return bounded(
        DataLoader(dataset, BATCH, sampler=order(dataset, options), num_workers=WORKERS),
        in_flight="32 MiB",
    )


LOADERS: dict[str, Callable[[list[Path], argparse.Namespace], Iterable[Batch]]] = {
    "usual": usual,
    "by-hand": by_hand,
    "memtools": with_memtools,
}


# --- training -------------------------------------------------------------------------------------


def train(files: list[Path], options: argparse.Namespace, meter: Meter) -> None:
    policy, scale = Policy(), Scale(files)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, fused=True)
    for batch in LOADERS[options.data](files, options):
        loss = loss_of(policy, scale, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        meter.after_update(float(loss.detach()))


def episodes(options: argparse.Namespace) -> list[Path]:
    """The files of the episodes, which `aloha.py` records if they are not there yet."""
    folder = options.episodes
    if not folder.is_dir():
        script = str(Path(__file__).with_name("aloha.py"))
        if subprocess.run([sys.executable, script, str(folder)]).returncode != 0:
            sys.exit(1)
    return sorted(folder.glob("*.hdf5"))


def main() -> None:
    parser = argparse.ArgumentParser(description="A two-arm robot learns from camera images.")
    parser.add_argument("--data", choices=list(LOADERS), default="memtools")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--episodes", metavar="FOLDER", type=Path, default=kept_episodes())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="the workers need a processor too")
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.updates < 1:
        parser.error("--updates must be at least 1")
    files = episodes(options)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    meter = Meter(options, held=job_memory, every=4, trim=False)
    train(files, options, meter)
    options.episodes = str(options.episodes)
    result = meter.result()
    job = max(result["samples"]["held_bytes"])
    print(f"peak of the job {job / MIB:.1f} MiB, of this process {peak_rss() / MIB:.1f} MiB")
    print(f"{result['seconds']:.1f} s; final loss {result['final_loss']:.4f}")
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""The diffusion policy of motion_grpo.py: a transformer that takes noise out of motions.

It is pretrained on real clips (`motions.py`) in the usual way: noise is added to a motion, and the
network predicts the motion. This program does that once, in its own process, so that a measured run
does not hold the memory of pretraining, and keeps the weights in the cache folder.

    python examples/motion_policy.py
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import motions
import numpy as np
import torch
from motions import FEATURES, FRAMES
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

CLIPS, STEPS = 20, 50  # recordings; of denoising
PATCH = 4  # frames in a token
WIDTH, HEADS, LAYERS = 96, 4, 3
LEAST_NOISE = 0.1  # of a step, where features are spread by 1: the last ones must explore as well
PRETRAIN_STEPS, PRETRAIN_BATCH, PRETRAIN_LR = 200, 16, 2e-3


def schedule() -> tuple[Tensor, ...]:
    """Of each step, from the noisiest to the last: how much of the motion is in x, how much of the
    predicted motion and of x is in the mean of the next x, and how that is spread."""
    t = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    kept = (math.pi / 2 * (t + 0.008) / 1.008).cos().square().clamp(1e-4, 1 - 1e-4)
    now, then = kept[1:], kept[:-1]
    beta = 1 - now / then
    predicted = then.sqrt() * beta / (1 - now)
    same = (1 - beta).sqrt() * (1 - then) / (1 - now)
    spread = (beta * (1 - then) / (1 - now)).sqrt().clamp(min=LEAST_NOISE)
    return tuple(values.flip(0).float() for values in (now, predicted, same, spread))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, h: Tensor) -> Tensor:
        qkv = self.qkv(self.before(h)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(q, k, v)
        h = h + self.out(heard.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed(self.between(h))
        return h + fed


class MotionPolicy(nn.Module):
    """Tells the motion in x [n, 263, 1, 196], of which `step` [n] steps of denoising are done, and
    which is to be like the recording `clip` [n]."""

    kept: Tensor
    predicted: Tensor
    same: Tensor
    spread: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(PATCH * FEATURES, WIDTH), nn.Linear(WIDTH, PATCH * FEATURES)
        self.place = nn.Parameter(0.02 * torch.randn(FRAMES // PATCH, WIDTH))
        self.clip, self.step = nn.Embedding(CLIPS, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        for name, values in zip(("kept", "predicted", "same", "spread"), schedule(), strict=True):
            self.register_buffer(name, values.view(-1, 1, 1, 1))
        self.register_buffer("mean", torch.zeros(FEATURES, 1, 1))
        self.register_buffer("std", torch.ones(FEATURES, 1, 1))

    def forward(self, x: Tensor, step: Tensor, clip: Tensor) -> Tensor:
        tokens = x.squeeze(2).transpose(1, 2).reshape(len(x), -1, PATCH * FEATURES)
        h = self.into(tokens) + self.place + (self.step(step) + self.clip(clip))[:, None]
        predicted: Tensor = self.out(self.blocks(h))
        frames = predicted.reshape(len(x), FRAMES, FEATURES)
        return frames.transpose(1, 2).unsqueeze(2).contiguous()

    def next_mean(self, x: Tensor, step: Tensor, clip: Tensor) -> Tensor:
        """The mean of what x becomes in this step."""
        mean: Tensor = self.predicted[step] * self(x, step, clip) + self.same[step] * x
        return mean

    def log_prob(self, new: Tensor, mean: Tensor, step: Tensor) -> Tensor:
        """How likely it was that the step came to `new`, [n]: nats per frame, up to a constant."""
        off = ((new - mean) / self.spread[step]).square()
        likely: Tensor = -off.flatten(1).sum(1) / (2 * FRAMES)
        return likely

    def distance(self, mean: Tensor, other: Tensor, step: Tensor) -> Tensor:
        """KL divergence of steps with these means, [n], in nats per frame."""
        return -self.log_prob(other, mean, step)


# --- pretraining ----------------------------------------------------------------------------------


def pretrain(data: Any) -> MotionPolicy:
    policy = MotionPolicy()
    policy.mean.copy_(torch.from_numpy(data["mean"]).view(-1, 1, 1))
    policy.std.copy_(torch.from_numpy(data["std"]).view(-1, 1, 1))
    motion = (torch.from_numpy(data["motion"]) - policy.mean) / policy.std
    clips = torch.from_numpy(data["clip"])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PRETRAIN_LR, fused=True)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, PRETRAIN_LR, total_steps=PRETRAIN_STEPS)
    for done in range(1, PRETRAIN_STEPS + 1):
        rows = torch.randint(len(motion), (PRETRAIN_BATCH,))
        step = torch.randint(STEPS, (PRETRAIN_BATCH,))
        kept, noise = policy.kept[step], torch.randn_like(motion[rows])
        noisy = kept.sqrt() * motion[rows] + (1 - kept).sqrt() * noise
        loss = functional.mse_loss(policy(noisy, step, clips[rows]), motion[rows])
        backward(loss)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        if done % 50 == 0:
            state = f"{float(loss.detach()):.2f} of the variance is left"
            print(f"pretrained {done} of {PRETRAIN_STEPS} steps, {state}", flush=True)
    return policy


def kept_weights() -> Path:
    """The file of the pretrained policy. Its name changes with the code that makes it."""
    code = b"".join(Path(str(made_by)).read_bytes() for made_by in (motions.__file__, __file__))
    return motions.cache_folder() / f"motion-policy-{hashlib.sha256(code).hexdigest()[:12]}.pt"


def load() -> MotionPolicy:
    """The pretrained policy, which a process of its own makes if the cache has none."""
    if not kept_weights().exists():
        print("pretraining on real clips, once", flush=True)
        if subprocess.run([sys.executable, __file__]).returncode != 0:
            sys.exit(1)
    policy = MotionPolicy()
    policy.load_state_dict(torch.load(kept_weights()))
    return policy


def main() -> None:
    target = kept_weights()
    if target.exists():
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=motions.find_wheel().parent) as folder:
        data, weights = Path(folder, "motions.npz"), Path(folder, "policy.pt")
        motions.write(data)
        with np.load(data) as arrays:
            policy = pretrain(arrays)
        torch.save(policy.state_dict(), weights)
        weights.replace(target)


if __name__ == "__main__":
    main()

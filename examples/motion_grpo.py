"""GRPO of a diffusion policy on real motion capture: three epochs of updates over each rollout.

The policy makes motions of a humanoid, 196 frames of 263 numbers, out of noise in 50 steps. It has
seen 20 clips of people (`motions.py`, `motion_policy.py`), and makes 4 motions in the manner of
each of 2 clips. A program measures how fast the standing foot slides over the ground: the less, the
higher the reward. The latents of all steps, [50 + 1, 8, 263, 1, 196], are kept for three epochs of
updates, which end early where the policy has gone too far from the one that sampled (KL).

The variants differ in how the latents are kept. The losses are the same to the last bit:

    --rollout published    in a list, as they come out of the policy: each has the graph of all
                           steps before it, which is in memory until the last epoch is over
    --rollout by-hand      the same, with .detach() at the end of each step
    --rollout memtools     in a TrajectoryStore, and GradAccumulator goes backward chunk by chunk

    python examples/motion_grpo.py --rollout published     # and again with: --rollout memtools
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import MIB, Meter, fingerprint
from motion_policy import CLIPS, STEPS, MotionPolicy, load
from motions import FEATURES, FEET, FRAMES, POINTS, POSITIONS, VELOCITIES
from torch import Tensor
from torch.autograd import backward

import memtools

CHUNK = 5  # time steps in a micro-batch
CHUNKS = 2  # micro-batches in a step of the optimizer, unless a rollout has a single one
CLIP_RATIO, KL_WEIGHT = 0.2, 0.01  # as usual in GRPO; the weight is that of the reference


class Learner:
    """What all three ways share: the policy, the one it must stay near, and the loss."""

    def __init__(self, policy: MotionPolicy, settings: memtools.UpdateSettings, lr: float) -> None:
        self.policy, self.settings = policy, settings
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, fused=True)
        self.chunks = STEPS // CHUNK if settings.single_update else CHUNKS
        self.losses: list[float] = []

    def denoise(self, x: Tensor, step: int, clip: Tensor) -> tuple[Tensor, Tensor]:
        """One step of all samples: what x becomes, and how likely that was."""
        steps = torch.full((len(x),), step)
        mean = self.policy.next_mean(x, steps, clip)
        new = mean + self.policy.spread[step] * torch.randn_like(x)
        return new, self.policy.log_prob(new.detach(), mean, steps)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Rewards [samples], against the mean and spread of those of the same clip."""
        groups = rewards.view(-1, self.settings.group_size)
        apart = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return apart.flatten()

    def loss(
        self, latents: Tensor, log_probs: Tensor, advantages: Tensor, clip: Tensor, steps: range
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of some time steps, and how far the policy has gone in them (KL).

        Args:
            latents: [steps + 1, samples, 263, 1, 196].
            log_probs: [steps, samples], of the policy that sampled.
            advantages: [samples].
            clip: [samples].
            steps: which time steps they are.
        """
        step = torch.tensor(steps).repeat_interleave(len(clip))
        clip, advantages = clip.repeat(len(steps)), advantages.repeat(len(steps))
        x, new = latents[:-1].flatten(0, 1), latents[1:].flatten(0, 1)
        mean = self.policy.next_mean(x, step, clip)
        with torch.no_grad():
            usual = self.reference.next_mean(x, step, clip)
        change = self.policy.log_prob(new, mean, step) - log_probs.flatten()
        ratio = change.exp()
        clamped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
        gain = torch.minimum(ratio * advantages, clamped * advantages)
        loss = (KL_WEIGHT * self.policy.distance(mean, usual, step) - gain).mean()
        self.losses.append(float(loss.detach()))
        return loss, (ratio - 1 - change).detach().mean()


def rewards_of(policy: MotionPolicy, x: Tensor) -> Tensor:
    """Minus the speed, in m/s, at which the lowest point of the feet slides, on average."""
    frames = (x.detach() * policy.std + policy.mean).squeeze(2).transpose(1, 2)
    feet = [POINTS.index(name) for name in FEET]
    height = frames[..., POSITIONS].reshape(len(x), FRAMES, -1, 3)[:, :, [f - 1 for f in feet], 1]
    velocity = frames[..., VELOCITIES].reshape(len(x), FRAMES, -1, 3)[:, :, feet]
    speed = torch.linalg.vector_norm(velocity[..., ::2], dim=-1)
    rewards: Tensor = -speed.gather(-1, height.argmin(-1, keepdim=True)).mean(dim=(1, 2))
    return rewards


# --- the three ways to keep a rollout; each returns the motions -----------------------------------


def update_published(learner: Learner, x: Tensor, clip: Tensor) -> Tensor:
    latents, log_probs = [x], []
    for step in range(STEPS):
        x, log_prob = learner.denoise(x, step, clip)
        latents.append(x)
        log_probs.append(log_prob)
    train_on_lists(learner, latents, log_probs, clip)
    return x.detach()


def update_by_hand(learner: Learner, x: Tensor, clip: Tensor) -> Tensor:
    latents, log_probs = [x], []
    for step in range(STEPS):
        x, log_prob = learner.denoise(x, step, clip)
        x = x.detach()
        latents.append(x)
        log_probs.append(log_prob.detach())
    train_on_lists(learner, latents, log_probs, clip)
    return x


def train_on_lists(
    learner: Learner, latents: list[Tensor], log_probs: list[Tensor], clip: Tensor
) -> None:
    settings, optimizer = learner.settings, learner.optimizer
    advantages = learner.advantages(rewards_of(learner.policy, latents[-1]))
    for _ in range(settings.num_epochs):
        kl = 0.0
        for start in range(0, STEPS, CHUNK):
            end = start + CHUNK
            # Detached here, or backward() would go into the rollout.
            some = torch.stack(latents[start : end + 1]).detach()
            old = torch.stack(log_probs[start:end]).detach()
            loss, far = learner.loss(some, old, advantages, clip, range(start, end))
            backward(loss / learner.chunks)
            kl += float(far) * CHUNK / STEPS
            if end % (CHUNK * learner.chunks) == 0:
                optimizer.step()
                optimizer.zero_grad()
        if settings.kl_threshold is not None and kl > settings.kl_threshold:
            break


class MemtoolsUpdate:
    def __init__(self, learner: Learner, limit: str) -> None:
        self.learner = learner
        samples = learner.settings.num_samples
        self.store = memtools.TrajectoryStore(STEPS, samples, states=("latents",), limit=limit)
        self.acc = memtools.GradAccumulator(learner.policy, learner.optimizer, steps=learner.chunks)

    def __call__(self, x: Tensor, clip: Tensor) -> Tensor:
        learner, store = self.learner, self.store
        store.reset()
        store.append(latents=x)
        for step in range(STEPS):
            x, log_prob = learner.denoise(store["latents"][-1], step, clip)
            store.append(latents=x, log_probs=log_prob)
        motion = x.detach()
        advantages = learner.advantages(rewards_of(learner.policy, motion))
        threshold = learner.settings.kl_threshold
        epochs = store.epochs(learner.settings.num_epochs, time_steps=CHUNK, kl_threshold=threshold)
        for epoch in epochs:
            for chunk in epoch:
                with self.acc.micro_batch():
                    latents, old = chunk["latents"], chunk["log_probs"]
                    loss, kl = learner.loss(latents, old, advantages, clip, chunk.steps)
                    self.acc.backward(loss)
                epochs.report_kl(kl, chunk.weight)
        return motion


LISTS = {"published": update_published, "by-hand": update_by_hand}


# --- the command ----------------------------------------------------------------------------------


def train(options: argparse.Namespace, settings: memtools.UpdateSettings) -> dict[str, Any]:
    policy = load()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    learner = Learner(policy, settings, options.lr)
    update: Callable[[Tensor, Tensor], Tensor]
    if options.rollout == "memtools":
        update = MemtoolsUpdate(learner, options.limit)
    else:
        update = partial(LISTS[options.rollout], learner)
    meter, epochs = Meter(options), 0
    for _ in range(options.updates):
        clips = torch.randperm(CLIPS)[: settings.batch_size]
        noise = torch.randn(settings.num_samples, FEATURES, 1, FRAMES)
        motion = update(noise, clips.repeat_interleave(settings.group_size))
        losses, learner.losses = learner.losses, []
        epochs += len(losses) * CHUNK // STEPS
        rewards = rewards_of(policy, motion).tolist()
        meter.after_update(sum(losses) / len(losses), [fingerprint(motion)], rewards)
    return {**meter.result(), "epochs": epochs}


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of a diffusion policy on motion capture.")
    parser.add_argument("--rollout", choices=[*LISTS, "memtools"], default="memtools")
    memtools.UpdateSettings.add_arguments(
        parser, batch_size=2, group_size=4, num_epochs=3, kl_threshold=0.1
    )
    parser.add_argument("--updates", type=int, default=2, help="rollouts, each with all its epochs")
    parser.add_argument("--limit", default="96 MiB", help="of the store")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more are slower on small machines")
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.single_update:
        options.num_epochs, options.kl_threshold = 1, None
    settings = memtools.UpdateSettings.from_arguments(options)
    if options.updates < 1 or not 1 <= settings.batch_size <= CLIPS or settings.group_size < 2:
        parser.error(f"--updates and --batch-size (at most {CLIPS}) are at least 1, --group-size 2")
    result = train(options, settings)
    print(f"{settings}; {result['epochs']} epochs in all")
    print(f"peak RSS {result['peak_rss_bytes'] / MIB:.1f} MiB, ", end="")
    print(f"{result['seconds']:.1f} s, {result['cpu_seconds']:.1f} s of processor time")
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""A TD-MPC2-style world model with mixture-of-experts blocks, trained by reinforcement learning.

The task is *simulated*: gymnasium's Walker2d (MuJoCo physics), or any environment with continuous
actions (`--env Pendulum-v1` needs no MuJoCo). After every step the agent updates on sub-sequences
from its replay buffer: it encodes the first observation, rolls the latent forward, and learns to
predict the next latents, the rewards and the values along the way.

The dynamics send every row through the best 2 of 8 experts, and every block keeps its gates, to
notice a router that collapses. Kept in a Python list, as usual, that record grows until the machine
is out of memory; and every 100th update collects garbage. memtools changes four lines, marked
`memtools 1` to `4` below. With the same seed both variants train to the same losses, to the last
digit:

    python examples/moe_world_model.py --history list        # and again with: --history memtools
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import numpy as np
import torch
from measure import MIB, Meter
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

EXPERTS, TOP_K, MOE_BLOCKS = 8, 2, 3
LATENT, WIDTH, GROUP = 64, 128, 8  # the latent is 8 softmax groups of 8
HORIZON, DISCOUNT, DECAY = 4, 0.99, 0.5  # step t of a sub-sequence weighs DECAY**t
FIRST_STEPS, REPLAY = 500, 100_000  # random steps before the first update; transitions kept
PLANS, NOISE, TAU = 32, 0.3, 0.01  # plans tried per action; exploration; target network's EMA
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class HandWrittenAux(list[Tensor]):
    """The usual list of the load-balancing terms of one update."""

    add, reset = list.append, list.clear

    def total(self) -> Tensor:
        return sum(self, torch.zeros(()))


def new_history(options: argparse.Namespace) -> Any:
    if options.history == "list":
        return []
    import memtools

    limits = {"max_entries": options.max_entries, "max_bytes": options.max_bytes}
    return memtools.GateHistory(**limits, top_k=TOP_K)  # memtools 1: in place of []


def new_aux(options: argparse.Namespace) -> Any:
    if options.history == "list":
        return HandWrittenAux()
    import memtools

    return memtools.AuxLoss()  # memtools 2: in place of the list of terms


class MoEBlock(nn.Module):
    """x + the outputs of its two best experts, each expert seeing just the rows routed to it."""

    def __init__(self, width: int, options: argparse.Namespace, aux_loss: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(mlp(width, width // 2, width) for _ in range(EXPERTS))
        self.gate_history = new_history(options)
        self.aux_loss = aux_loss

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gates = self.router(h).softmax(dim=-1)
        weight, chosen = gates.topk(TOP_K, dim=-1)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        self.record(gates, counts)

        order = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, expert by expert
        row = order // TOP_K
        parts = h[row].split(counts.tolist())  # ragged: as many rows as were routed there
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x.index_add(0, row, out * weight.flatten()[order, None])

    def record(self, gates: Tensor, counts: Tensor) -> None:
        if isinstance(self.gate_history, list):
            self.gate_history.append(gates.detach().cpu())  # grows for ever
        else:
            self.gate_history.append(gates)  # memtools 3: copied into a fixed number of bytes
        if torch.is_grad_enabled():
            self.aux_loss.add(EXPERTS * (counts / counts.sum() * gates.mean(dim=0)).sum())


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


def simplices(z: Tensor) -> Tensor:
    """TD-MPC2's latent: groups that sum to one, so that a long rollout cannot blow up."""
    return z.reshape(*z.shape[:-1], -1, GROUP).softmax(dim=-1).reshape(z.shape)


class WorldModel(nn.Module):
    def __init__(self, obs_size: int, action_size: int, options: argparse.Namespace) -> None:
        super().__init__()
        pair = LATENT + action_size
        self.aux_loss = new_aux(options)
        self.blocks = [MoEBlock(WIDTH, options, self.aux_loss) for _ in range(MOE_BLOCKS)]
        into, out = nn.Linear(pair, WIDTH), nn.Linear(WIDTH, LATENT)
        self.dynamics = nn.Sequential(into, *self.blocks, nn.LayerNorm(WIDTH), out)
        self.encoder = mlp(obs_size, WIDTH, LATENT)
        self.reward = mlp(pair, WIDTH, 1)
        self.values = nn.ModuleList(mlp(pair, WIDTH, 1) for _ in range(2))
        self.policy = mlp(LATENT, WIDTH, action_size)

    def encode(self, obs: Tensor) -> Tensor:
        return simplices(self.encoder(obs))

    def step(self, z: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The next latent and the reward on the way there."""
        x = torch.cat([z, action], dim=-1)
        return simplices(self.dynamics(x)), self.reward(x).squeeze(-1)

    def act(self, z: Tensor, noise: float = 0.0) -> Tensor:
        mean = torch.tanh(self.policy(z))
        return (mean + noise * torch.randn_like(mean)).clamp(-1, 1) if noise else mean


def value(heads: nn.ModuleList, z: Tensor, action: Tensor) -> Tensor:  # [2, ...]: one per head
    x = torch.cat([z, action], dim=-1)
    return torch.stack([head(x).squeeze(-1) for head in heads])


class Replay:
    """A ring of transitions, sampled as sub-sequences that never cross an episode's end."""

    def __init__(self, obs_size: int, action_size: int, rng: np.random.Generator) -> None:
        self.widths = [obs_size, obs_size, action_size, 1, 1]
        # Written through at once, so that filling it later does not look like a leak.
        self.rows = np.full((REPLAY, sum(self.widths)), 0, np.float32)
        self.is_end = np.full(REPLAY, False)  # slots where a sub-sequence may end
        self.rng, self.head = rng, 0

    def add(self, row: tuple[Any, ...], episode_step: int) -> None:
        self.rows[self.head] = np.hstack(row)
        self.is_end[self.head] = episode_step >= HORIZON - 1
        self.is_end[(self.head + HORIZON - 1) % REPLAY] = False  # would begin in the new row
        self.head = (self.head + 1) % REPLAY

    def sample(self, batch: int) -> Batch:
        """Time first: observations [H+1, B, .], actions [H, B, .], rewards and going-on [H, B]."""
        ends = self.rng.choice(np.flatnonzero(self.is_end), batch)
        rows = torch.from_numpy(self.rows[(ends + np.arange(1 - HORIZON, 1)[:, None]) % REPLAY])
        obs, next_obs, action, reward, going_on = torch.split(rows, self.widths, dim=-1)
        return torch.cat([obs[:1], next_obs]), action, reward.squeeze(-1), going_on.squeeze(-1)


class Agent:
    def __init__(self, obs_size: int, action_size: int, options: argparse.Namespace) -> None:
        self.model = WorldModel(obs_size, action_size, options)
        self.target = copy.deepcopy(self.model.values).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    @torch.no_grad()
    def act(self, obs: Any) -> Any:
        """The first action of the best of a few noisy rollouts of the policy in the model."""
        z = self.model.encode(torch.as_tensor(obs, dtype=torch.float32).expand(PLANS, -1))
        first = action = self.model.act(z, NOISE)
        score = torch.zeros(PLANS)
        for t in range(HORIZON - 1):
            z, reward = self.model.step(z, action)
            score += DISCOUNT**t * reward
            action = self.model.act(z, NOISE)
        score += DISCOUNT ** (HORIZON - 1) * value(self.target, z, action).amin(dim=0)
        return first[score.argmax()].numpy()

    def update(self, batch: Batch) -> float:
        loss, latents = self.model_loss(batch)
        loss = loss + 0.01 * self.model.aux_loss.total()
        backward(loss)
        backward(self.policy_loss(latents), inputs=list(self.model.policy.parameters()))
        nn.utils.clip_grad_norm_(self.model.parameters(), 20.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        fresh = self.model.values.state_dict()
        for name, slow in self.target.state_dict().items():
            slow.lerp_(fresh[name], TAU)
        return float(loss.detach())

    def model_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Latent consistency, reward and TD loss along the rollout, and the latents it went by."""
        obs, action, reward, going_on = batch
        with torch.no_grad():
            seen = self.model.encode(obs[1:])
            later = value(self.target, seen, self.model.act(seen)).amin(dim=0)
            goal = reward + DISCOUNT * going_on * later
        z, loss, latents = self.model.encode(obs[0]), torch.zeros(()), []
        for t in range(HORIZON):
            latents.append(z.detach())
            values = value(self.model.values, z, action[t])
            z, predicted = self.model.step(z, action[t])
            consistency = 20 * functional.mse_loss(z, seen[t])
            reward_loss = functional.smooth_l1_loss(predicted, reward[t])
            value_loss = functional.smooth_l1_loss(values, goal[t].expand_as(values))
            loss = loss + DECAY**t * (consistency + reward_loss + value_loss)
        return loss, torch.cat(latents)

    def policy_loss(self, latents: Tensor) -> Tensor:
        """Minus the value of the policy's actions, in units of the value's own size."""
        worth = value(self.model.values, latents, self.model.act(latents))
        return -worth.mean() / worth.detach().abs().mean().clamp(min=1)


def hand_written(update: Any) -> Any:
    """The usual decorator: clears what one update leaves, and collects at every 100th."""

    @functools.wraps(update)
    def cleaned(agent: Agent, batch: Batch) -> float:
        try:
            return float(update(agent, batch))
        finally:
            agent.model.aux_loss.reset()
            cleaned.count += 1  # type: ignore[attr-defined]
            if cleaned.count % 100 == 0:  # type: ignore[attr-defined]
                gc.collect()
                torch.cuda.empty_cache()  # nothing, where there is no CUDA

    cleaned.count = 0  # type: ignore[attr-defined]
    return cleaned


def new_cleanup(options: argparse.Namespace) -> tuple[Any, Any]:
    """What to train within, and what to decorate update() with."""
    if options.history == "list":
        return nullcontext(), hand_written
    import memtools

    policy = memtools.CleanupPolicy()
    return policy, memtools.managed(policy, clear="model.aux_loss")  # memtools 4: when it pays


class Interaction:
    """The environment, where it stands, and what its episodes returned so far."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.returns, self.episode_step = env, [0.0], 0
        self.low, self.high = env.action_space.low, env.action_space.high
        self.obs, _ = env.reset(seed=seed)

    def step(self, action: Any, replay: Replay) -> None:
        """One step with an action in [-1, 1]."""
        torque = self.low + (action + 1) / 2 * (self.high - self.low)
        obs, reward, terminated, truncated, _ = self.env.step(torque)
        replay.add((self.obs, obs, action, reward, 1.0 - terminated), self.episode_step)
        self.returns[-1] += float(reward)
        self.obs, self.episode_step = obs, self.episode_step + 1
        if terminated or truncated:
            self.obs, self.episode_step = self.env.reset()[0], 0
            self.returns.append(0.0)


def make_env(name: str) -> Any:
    try:
        import gymnasium

        return gymnasium.make(name)
    except Exception as error:  # gymnasium reports a missing MuJoCo by a type of its own
        extra = "mujoco-core==4.0.0 imageio==2.38.1 glfw==2.11.0"
        sys.exit(f"{error}\nNeeded: pip install gymnasium==1.4.0; but for Pendulum-v1 also {extra}")


def held_bytes(history: Any) -> int:
    return sum(held.nbytes for held in (history if isinstance(history, list) else [history]))


def train(options: argparse.Namespace) -> tuple[dict[str, Any], list[Any], Any]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    world = Interaction(make_env(options.env), options.seed)
    sizes = len(world.obs), len(world.low)
    replay, agent = Replay(*sizes, rng), Agent(*sizes, options)
    for _ in range(FIRST_STEPS):
        world.step(rng.uniform(-1, 1, sizes[1]).astype(np.float32), replay)
    histories = [block.gate_history for block in agent.model.blocks]
    meter = Meter(
        options,
        held=lambda: sum(map(held_bytes, histories)),
        every=max(1, options.updates // 60),
        trim=False,
    )
    policy, managed = new_cleanup(options)
    update = managed(Agent.update)  # or above its definition: @memtools.managed(policy, ...)
    with policy:
        for _ in range(options.updates):
            world.step(agent.act(world.obs), replay)
            meter.after_update(update(agent, replay.sample(options.batch)))
    returned = (world.returns[:-1] or world.returns)[-10:]
    result = {**meter.result(), "mean_episode_return": float(np.mean(returned))}
    return result, histories, policy


def summarise(result: dict[str, Any], histories: list[Any]) -> None:
    print(f"peak RSS {result['peak_rss_bytes'] / MIB:.1f} MiB, ", end="")
    print(f"{result['seconds']:.1f} s, final loss {result['final_loss']:.6f}, ", end="")
    print(f"mean return of the last episodes {result['mean_episode_return']:.1f}")
    for i, history in enumerate(histories):
        print(f"block {i}: {len(history)} entries held, {held_bytes(history) / MIB:.2f} MiB")
        if not isinstance(history, list):
            seen = history.stats()  # over everything ever appended, evicted or not
            load = ", ".join(f"{share:.1%}" for share in seen.load_fraction)
            print(f"  ever appended: {seen}; load {load}")


def main() -> None:
    parser = argparse.ArgumentParser(description="MoE world model, trained by RL in simulation.")
    parser.add_argument("--history", choices=["list", "memtools"], default="memtools")
    parser.add_argument("--max-entries", type=int, default=1000, help="per block, memtools only")
    parser.add_argument("--max-bytes", default="4 MiB", help="per block, memtools only")
    parser.add_argument("--env", default="Walker2d-v5")
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more are slower on small machines")
    parser.add_argument("--progress", action="store_true", help="print every update, for the demo")
    parser.add_argument("--json", metavar="PATH", help="write losses, memory and time there")
    options = parser.parse_args()
    if options.updates < 4:
        parser.error("--updates must be at least 4")
    result, histories, policy = train(options)
    summarise(result, histories)
    if options.history == "memtools":
        print(policy.report())
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

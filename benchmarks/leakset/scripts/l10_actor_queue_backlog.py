"""Actor and learner: for each version of the weights the actor sends four rollouts, the learner takes two."""
import argparse
import multiprocessing as mp
import numpy as np
import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=450)
args = ap.parse_args()


def actor(queue, versions):
    rng = np.random.default_rng(1)
    while versions.get() is not None:
        for _ in range(4):
            queue.put({"obs": rng.random((64, 128), dtype=np.float32), "ret": rng.random(64, dtype=np.float32)})


if __name__ == "__main__":
    ctx = mp.get_context("fork")
    queue, versions = ctx.Queue(), ctx.Queue()
    worker = ctx.Process(target=actor, args=(queue, versions), daemon=True)
    worker.start()
    value = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(value.parameters(), 1e-4)
    for step in range(args.steps):
        versions.put(step)
        rollouts = [queue.get() for _ in range(2)]
        obs = torch.from_numpy(np.concatenate([r["obs"] for r in rollouts]))
        ret = torch.from_numpy(np.concatenate([r["ret"] for r in rollouts]))
        loss = (value(obs)[:, 0] - ret).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item(), flush=True)
    worker.terminate()
# mypy: ignore-errors

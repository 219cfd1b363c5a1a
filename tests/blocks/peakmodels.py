"""Models whose peak is known, trained for five steps; for tests/blocks/test_peak_runs.py.

python tests/blocks/peakmodels.py MODEL [RECORD | truth]
python tests/blocks/peakmodels.py all FOLDER      # each model in both ways, into files

Prints the loss of each step. With RECORD a monitor of the program's own writes it, and step() is
called at the end of each step. With `truth` torch's profiler tells, as the last line, what the peak
of step 3 was, and shapes tell how large parameters, gradients and state are.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, RECORDED = 5, 3
Step = Callable[[], Any]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (512, 1024, 1024, 512)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> Any:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, width))

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attend(self.first(x))
        h = self.up(self.second(x))
        return x + self.down(0.5 * h * (1 + torch.tanh(0.79 * (h + 0.044 * h**3))))


class Gpt(nn.Module):
    def __init__(self, words: int, *, layers: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, 128), nn.Embedding(128, 128)
        self.blocks = nn.ModuleList(Block(128, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, words, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(64, 192), nn.Linear(192, 8)

    def forward(self, series: torch.Tensor) -> Any:
        h = torch.zeros(series.shape[1], 192)
        for x in series:
            h = self.cell(x, h)
        return self.out(h)


def trained(
    model: nn.Module,
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    loss_of: nn.Module,
    **how: Any,
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **(how or {"fused": True}))

    def step() -> Any:
        optimizer.zero_grad()
        x, y = batch()
        loss = loss_of(model(x).flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mlp(**how: Any) -> Step:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(32, 512), torch.randn(32, 512)

    return trained(Mlp(), batch, nn.MSELoss(), **how)


def gpt(words: int, rows: int, **model: Any) -> Step:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, words, (rows, 128)), torch.randint(0, words, (rows * 128,))

    return trained(Gpt(words, **model), batch, nn.CrossEntropyLoss())


def gru() -> Step:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(50, 128, 64), torch.randn(128, 8)

    return trained(Gru(), batch, nn.MSELoss())


def sampler() -> Step:
    """Keeps 50 latents with their graph, of which it needs the values alone."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def sample() -> list[torch.Tensor]:
        x, kept = torch.randn(512, 64), []
        for _ in range(50):
            x = x - 0.1 * model(x)
            kept.append(x)
        return kept

    def step() -> Any:
        goal = torch.stack(sample()).mean(0)
        optimizer.zero_grad()
        loss = (model(torch.ones(512, 64)) - goal.detach()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def rollout() -> Step:
    """The same sampler without any training: its graphs come and go within a step."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    def step() -> Any:
        x, kept = torch.randn(512, 64), []
        for _ in range(50):
            x = x - 0.1 * model(x)
            kept.append(x)
        return torch.stack(kept).detach().mean()

    return step


MODELS: dict[str, Callable[[], Step]] = {
    "mlp loop": lambda: mlp(foreach=False),
    "mlp foreach": lambda: mlp(foreach=True),
    "mlp fused": lambda: mlp(fused=True),
    "gpt": lambda: gpt(64, 8, layers=6),
    "gpt words": lambda: gpt(8000, 4, layers=1),
    "gpt checkpointed": lambda: gpt(64, 8, layers=6, checkpointed=True),
    "gru": gru,
    "sampler": sampler,
    "rollout": rollout,
}


# --- the truth ------------------------------------------------------------------------------------


@contextlib.contextmanager
def profiled(found: dict[str, int]) -> Iterator[None]:
    """What torch's profiler tells of the bytes in use in step 3, of all made since the begin."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        yield
    events = profiler.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == "recorded step")
    begin, end = step.start_ns(), step.start_ns() + step.duration_ns()
    memory = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda one: one[0],
    )
    used = most = 0
    for at, nbytes in memory:
        used += nbytes
        if begin <= at <= end:
            most = max(most, used)
    found["peak"] = most


def storages(tensors: Iterable[torch.Tensor]) -> int:
    each = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(each.values())


def run(kind: str, how: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    truth: dict[str, int] = {}
    monitor = None
    with contextlib.ExitStack() as stack:
        if how == "truth":
            stack.enter_context(profiled(truth))
        elif how:
            import memtools

            monitor = stack.enter_context(memtools.MemoryMonitor(how, device="cpu"))
        step = MODELS[kind]()
        for n in range(1, STEPS + 1):
            named = contextlib.nullcontext()
            if how == "truth" and n == RECORDED:
                named = torch.profiler.record_function("recorded step")  # type: ignore[assignment]
            with named:
                loss = step()
            print(f"{loss.item():.17g}")
            if monitor is not None:
                monitor.step()
    if truth:
        weights = [one for one in gc.get_objects() if type(one) is nn.Parameter]
        optimizers = [one for one in gc.get_objects() if type(one) is torch.optim.AdamW]
        states = [one for o in optimizers for kept in o.state.values() for one in kept.values()]
        truth["parameters"] = storages(weights)
        truth["optimizer state"] = storages(states)
        print(json.dumps(truth))


def run_all(folder: str) -> None:
    """Run each model in both ways, each in a forked process, which has imported torch."""
    for kind in MODELS:
        for suffix, how in (("truth", "truth"), ("losses", f"{folder}/{kind}.mem")):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    path = f"{folder}/{kind}.{suffix}"
                    with open(path, "w") as out, contextlib.redirect_stdout(out):
                        run(kind, how)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0, (kind, how)


if __name__ == "__main__":
    if sys.argv[1] == "all":
        run_all(sys.argv[2])
    else:
        run(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")

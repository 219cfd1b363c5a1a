"""Training loops whose fourth step is looked at, each in one of three ways: `python -m
tests.blocks.peaktruth WAY` prints one line of JSON.

    plain       nothing is heard
    recorded    by memtools._core.Blocks
    profiled    by torch.profiler, with memtools out of the process: the truth

All three tell losses, weights and the random state, which are the same bit by bit."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Loop(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: list[torch.Tensor]
    loss: Callable[[], torch.Tensor]


def mlp(form: str) -> Loop:
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    x, y = torch.randn(128, 512), torch.randint(0, 10, (128,))
    optimizer = torch.optim.AdamW(model.parameters(), **FORMS[form])  # type: ignore[arg-type]
    return Loop(model, optimizer, [x, y], lambda: nn.functional.cross_entropy(model(x), y))


def gru() -> Loop:
    model = nn.GRU(64, 128, num_layers=2)
    x = torch.randn(50, 16, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return Loop(model, optimizer, [x], lambda: model(x)[0].square().mean())


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        fed: torch.Tensor = self.feed(self.second(x))
        return x + fed


class Language(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 128)
        self.layers = nn.ModuleList(Attention(128) for _ in range(3))
        self.head = nn.Linear(128, 2000)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def language(is_checkpointed: bool) -> Loop:
    model = Language(is_checkpointed)
    tokens = torch.randint(0, 2000, (8, 65))

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Loop(model, torch.optim.AdamW(model.parameters(), fused=True), [tokens], loss)


def sampler() -> Loop:
    """Keeps each latent of a chain with its graph."""
    model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
    start = torch.randn(64, 64)

    def loss() -> torch.Tensor:
        latents = [start]
        for _ in range(30):
            latents.append(latents[-1] + 0.1 * model(latents[-1]) + 0.01 * torch.randn(64, 64))
        return torch.stack(latents).square().mean()

    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), [start], loss)


LOOPS: dict[str, Callable[[], Loop]] = {
    "mlp_loop": lambda: mlp("loop"),
    "mlp_foreach": lambda: mlp("foreach"),
    "mlp_fused": lambda: mlp("fused"),
    "gru": gru,
    "language": lambda: language(False),
    "checkpointed": lambda: language(True),
    "sampler": sampler,
}


def one_step(loop: Loop) -> str:
    loop.optimizer.zero_grad()
    loss = loop.loss()
    loss.backward()  # type: ignore[no-untyped-call]
    loop.optimizer.step()
    return float(loss.item()).hex()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def storages(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]


def states(loop: Loop) -> list[torch.Tensor]:
    return [
        value
        for state in loop.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def gradients(loop: Loop) -> list[torch.Tensor]:
    return [p.grad for p in loop.model.parameters() if p.grad is not None]


def marked(loop: Loop) -> dict[int, list[torch.Tensor]]:
    return {
        1: list(loop.model.parameters()),
        2: gradients(loop),
        3: states(loop),
        4: loop.inputs,
    }


def libraries() -> tuple[str, str]:
    return (f"{Path(torch.__file__).parents[1]}/", f"{Path(os.__file__).parent}/")


def recorded(make: Callable[[], Loop]) -> dict[str, Any]:
    from memtools import _core

    blocks = _core.Blocks()
    blocks.start(libraries())
    loop = make()
    losses = [one_step(loop) for _ in range(3)]
    blocks.record(True)
    losses.append(one_step(loop))
    older = sum(blocks.mark(storages(group), kind) for kind, group in marked(loop).items())
    blocks.record(False)
    contents = blocks.contents()
    assert contents is not None
    losses.append(one_step(loop))
    sums: dict[str, int] = {}
    for size, category, birth, _, saved, *_ in contents.blocks:
        kind = f"{category} {birth} {saved}" if category == 0 else str(category)
        sums[kind] = sums.get(kind, 0) + size
    assert not contents.rest
    shapes = {
        str(kind): sum(t.numel() * t.element_size() for t in group)
        for kind, group in marked(loop).items()
    }
    facts = {
        "peak": contents.peak_bytes,
        "phase": contents.phase,
        "operator": contents.operator,
        "lost": contents.lost,
        "events": contents.events,
        "older": older,
        "line": blocks.frames(contents.site)[0][2],
        "sums": sums,
        "shapes": shapes,
    }
    return facts | results(loop, losses)


def profiled(make: Callable[[], Loop]) -> dict[str, Any]:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        loop = make()
        losses = [one_step(loop) for _ in range(3)]
        with torch.profiler.record_function("THE STEP"):
            losses.append(one_step(loop))
        losses.append(one_step(loop))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    step = next(event for event in events if event.get("name") == "THE STEP")
    changes = sorted(
        (float(event["ts"]), event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    in_use = peak = 0
    for at, change in changes:
        if at > step["ts"] + step["dur"]:
            break
        in_use += change
        peak = max(peak, in_use) if at >= step["ts"] else in_use
    return {"peak": peak} | results(loop, losses)


def plain(make: Callable[[], Loop]) -> dict[str, Any]:
    loop = make()
    return results(loop, [one_step(loop) for _ in range(5)])


def results(loop: Loop, losses: list[str]) -> dict[str, Any]:
    return {
        "losses": losses,
        "weights": digest(loop.model.parameters()),
        "random": digest([torch.get_rng_state()]),
    }


WAYS = {"plain": plain, "recorded": recorded, "profiled": profiled}


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, make in LOOPS.items():
        torch.manual_seed(7)
        found[name] = WAYS[sys.argv[1]](make)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

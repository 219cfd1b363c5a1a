"""A training loop with one way of cleaning up, in a process of its own.

python -m benchmarks.cleanup.loop WAY KIND: reads a number of updates from a line, trains them, and
answers with a line of JSON; so several loops take turns. After "pairs" it trains that many that way
and as many without it, in turn, on the same model: the addresses of a model change a step by 20 %,
and the speed of a shared machine changes within seconds, so only neighbours in one process can be
compared. KIND is "update", some 10 ms of training in a process with the usual imports, or "leak", a
small one that leaves a cycle with a tensor of 256 KiB behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Update = Callable[[Any], Any]
EVERY = 100  # updates from one cleanup to the next, as it is usually written
TITAN = 1_000  # torchtitan's gc_freq


class Trainer:
    """512 to 1024 to 512 features on 112 rows, by AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(112, 512)

    def update(self) -> Tensor:
        loss: Tensor = (self.model(self.batch) - self.batch).square().mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()


class Cycle:
    """An object that refers to itself, as a trainer and its callbacks refer to each other."""

    def __init__(self) -> None:
        self.kept = torch.ones(1 << 16)
        self.me = self


class Leaker:
    """A step of about a millisecond."""

    def __init__(self) -> None:
        self.weight = torch.zeros(256, 256)

    def update(self) -> Tensor:
        self.weight = (self.weight @ self.weight + 1).tanh()
        return self.weight.sum() + Cycle().kept[0]


def by_hand(method: Update) -> Update:
    """The decorator that people write."""

    @functools.wraps(method)
    def update(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        finally:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls % EVERY == 0:
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    return update


def titan(method: Update) -> Update:
    """torchtitan's GarbageCollection: off, and generation 1 at every so many steps."""
    gc.disable()
    gc.collect(1)
    return every(method, TITAN, 1)


def megatron(method: Update) -> Update:
    """Megatron-LM's --manual-gc with an interval: off, and all generations at each."""
    gc.disable()
    gc.collect()
    return every(method, EVERY, 2)


def every(method: Update, updates: int, generation: int) -> Update:
    count = 0

    @functools.wraps(method)
    def update(self: Any) -> Any:
        nonlocal count
        result = method(self)
        count += 1
        if count % updates == 0:
            gc.collect(generation)
        return result

    return update


class Collections:
    """Nanoseconds of processor time that gc took, whether automatic or called."""

    def __init__(self) -> None:
        self.ns = self.begun = 0
        gc.callbacks.append(self.seen)

    def seen(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.begun = time.thread_time_ns()
        else:
            self.ns += time.thread_time_ns() - self.begun


class Times:
    """Processor time of each update, less that of gc and of a policy's looks and decisions."""

    def __init__(self, told: Collections, policy: Any) -> None:
        self.told, self.policy = told, policy
        self.own: list[int] = []
        self.bare: list[int] = []

    def of(self, update: Update, trainer: Any, own: bool) -> Any:
        before, begin = self.known(), time.thread_time_ns()
        result = update(trainer)
        took = time.thread_time_ns() - begin
        (self.own if own else self.bare).append(took - (self.known() - before))
        return result

    def known(self) -> int:
        policy = self.policy
        own = 0 if policy is None else policy._core.look_ns + policy._engine.own_ns
        return int(self.told.ns + own)


def ways(way: str, method: Update) -> tuple[Update, Any, contextlib.AbstractContextManager[Any]]:
    """The method in that way, its policy if it has one, and the context that the loop runs in."""
    within: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    written = {"every 100": by_hand, "torchtitan": titan, "Megatron": megatron}
    if way == "bare":
        return method, None, within
    if way in written:
        return written[way](method), None, within
    import memtools

    policy = memtools.CleanupPolicy()
    managed = memtools.managed(policy)(method)
    return managed, policy, policy if way == "with policy" else within


def imports() -> None:
    """Import what a program that fine-tunes imports."""
    import transformers
    from transformers import BertConfig, BertModel, Trainer  # noqa: F401

    transformers.logging.set_verbosity_error()


def resident(key: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def main(way: str, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "update":
        imports()
    told = Collections()
    trainer: Any = Trainer() if kind == "update" else Leaker()
    begin = resident("VmRSS")
    bare = type(trainer).update
    managed, policy, within = ways(way, bare)
    managed = managed if managed is not bare else functools.partial(bare)  # another object
    digest, done = hashlib.sha256(), 0
    with within:
        for line in sys.stdin:
            *pairs, count = line.split()
            before, times = told.ns, Times(told, policy)
            cpu = time.process_time_ns()
            for i in range(int(count)):
                both = (managed, bare) if i % 2 else (bare, managed)
                for update in both if pairs else (managed,):
                    loss = times.of(update, trainer, update is managed)
                    digest.update(str(float(loss)).encode())
            answer: dict[str, Any] = {
                "own_ns": times.own,
                "bare_ns": times.bare,
                "cpu_ns": time.process_time_ns() - cpu,
                "gc_ns": told.ns - before,
            }
            done += int(count) * (2 if pairs else 1)
            answer |= {"peak": resident("VmHWM")}
            answer |= {"began": begin, "losses": digest.hexdigest()}
            answer |= {"objects": len(gc.get_objects())} if done == int(count) else {}
            if policy is not None:
                answer |= {"policy_ns": 1e6 * policy.report().own_ms}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(*sys.argv[1:])

"""The sampler's device columns on a real device, against torch's own figures."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import torch

from memtools import _core

MS, MIB = 10**6, 2**20
UNUSED = """
import os, time, torch
from memtools import _core
sampler = _core.Sampler(10**6, devices=torch.cuda.device_count())
sampler.start()
while sampler.samples < 50:
    time.sleep(0.001)
assert sampler.devices() == [(None,) * 6] * torch.cuda.device_count()
assert _core.device_memory(0) is None
assert not torch.cuda.is_initialized()
pid = os.fork()  # a process whose driver was started cannot use CUDA in its children
if pid == 0:
    os._exit(0 if float(torch.ones(3, device="cuda").sum()) == 3 else 1)
assert os.waitpid(pid, 0)[1] == 0
block = torch.empty(2**20, device="cuda:0")
for device in range(1, torch.cuda.device_count()):
    assert _core.device_memory(device)[2:4] == (None, None), "it made a context"
"""


def least_us(call: object, rounds: int = 2000) -> float:
    """The fastest of several rounds, in microseconds a call."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(rounds // 20):
            call()  # type: ignore[operator]
        times.append((time.perf_counter() - began) / (rounds // 20))
    return min(times) * 1e6


def test_the_three_tiers_are_torchs() -> None:
    kept = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 7, 64)]
    del kept[1]
    torch.cuda.synchronize()
    got = _core.device_memory(0)
    assert got is not None
    allocated, reserved, free, total, split, peak = got
    assert allocated == torch.cuda.memory_allocated()
    assert peak == torch.cuda.max_memory_allocated() >= allocated + 7 * MIB
    assert reserved == torch.cuda.memory_reserved()
    assert split == torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
    assert (free, total) == torch.cuda.mem_get_info()


def test_the_sampler_follows_the_allocator() -> None:
    sampler = _core.Sampler(MS, devices=1)
    sampler.start()
    block = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    seen = sampler.samples
    while sampler.samples < seen + 60:
        time.sleep(0.001)
    assert sampler.devices()[0][:2] == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    assert sampler.devices()[0][2:4] == torch.cuda.mem_get_info()
    del block
    sampler.stop()


def test_nothing_is_started_on_a_device_that_is_not_used() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_graph_is_captured_while_it_samples() -> None:
    sampler = _core.Sampler(MS // 10, devices=1)
    x = torch.zeros(1000, device="cuda")
    sampler.start()
    for _ in range(50):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            y = x
            for _ in range(200):
                y = y + 1
        graph.replay()
    torch.cuda.synchronize()
    sampler.stop()
    assert float(y[0]) == 200


def test_threads_allocate_while_it_samples() -> None:
    sampler = _core.Sampler(MS // 10, devices=1)
    sampler.start()

    def churn() -> None:
        for n in range(2000):
            torch.empty((n % 64 + 1) * MIB // 4, dtype=torch.uint8, device="cuda")

    others = [threading.Thread(target=churn) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    sampler.stop()
    assert sampler.samples > 10


def test_a_reading_costs_little_beside_torchs() -> None:
    torch.empty(1, device="cuda")
    ours = least_us(lambda: _core.device_memory(0))
    torchs = least_us(
        lambda: (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.mem_get_info(),
        ),
        rounds=200,
    )
    print(f"three tiers: memtools {ours:.2f} us, torch {torchs:.2f} us")
    assert ours <= 3

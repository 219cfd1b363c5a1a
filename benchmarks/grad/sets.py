"""Sets of gradients, and the ways to finish a window with them that benchmarks/grad/accumulate.py
times.

Each set is parameters of zeros with normal gradients: GPT-2-small's 148 tensors, 2,000 small ones,
and one of 64 Mi elements.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import Json, Runner, compiled, interleave, statement
from memtools._grad.gradients import Gradients

SETS = ("gpt2-148", "small-2000", "one-64M")
NEAR = 0.9999  # a factor and a coefficient that change every element, and hardly its size

# What there is to read, and nothing but reading: the least that a norm can take.
READ = """
#include <stdint.h>
float mt_read(const float *const *data, const int64_t *sizes, int64_t n, int64_t from, int64_t to)
{
    float lanes[64] = {0}, total = 0;
    int64_t start = 0;
    for (int64_t t = 0; t < n; start += sizes[t++]) {
        int64_t low = from > start ? from - start : 0;
        int64_t high = to < start + sizes[t] ? to - start : sizes[t];
        const float *x = data[t];
        int64_t i = low;
        for (; i + 64 <= high; i += 64) {
            for (int64_t k = 0; k < 64; k++) lanes[k] += x[i + k];
        }
        for (; i < high; i++) total += x[i];
    }
    for (int k = 0; k < 64; k++) total += lanes[k];
    return total;
}
"""


def shapes(name: str) -> list[tuple[int, ...]]:
    if name == "small-2000":
        return [(2_500,)] * 2_000
    if name == "one-64M":
        return [(64 << 20,)]
    layer = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    layer += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50_257, 768), (1_024, 768), *layer * 12, (768,), (768,)]


def parameters_of(name: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = []
    for shape in shapes(name):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        made.append(parameter)
    return made


def read_limit(parameters: list[torch.nn.Parameter], threads: int) -> Runner:
    """Reads all gradients in equal parts by so many threads. Prefetching would not help here."""
    library = compiled(READ)
    library.mt_read.restype = ctypes.c_float
    grads = [p.grad for p in parameters if p.grad is not None]
    data = (ctypes.c_void_p * len(grads))(*(grad.data_ptr() for grad in grads))
    sizes = (ctypes.c_int64 * len(grads))(*(grad.numel() for grad in grads))
    elements = sum(grad.numel() for grad in grads)
    count = ctypes.c_int64(len(grads))
    pool = ThreadPoolExecutor(threads)
    ends = [ctypes.c_int64(elements * i // threads) for i in range(threads + 1)]

    def part(i: int) -> float:
        return float(library.mt_read(data, sizes, count, ends[i], ends[i + 1]))

    if threads == 1:
        return statement("part(0)", part=part)
    return statement("list(pool.map(part, range(threads)))", pool=pool, part=part, threads=threads)


def torchs(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Runner:
    """unscale_, then clip_grad_norm_, as torch's documentation has it. The scale is 1: unscale_
    reads and writes all the same, and the values stay as they are."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))
    states = scaler._per_optimizer_states
    clip = torch.nn.utils.clip_grad_norm_
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def finish() -> None:
        states.clear()
        scaler.unscale_(optimizer)
        clip(parameters, norm * NEAR, foreach=True)

    return statement("finish()", finish=finish)


def finishing(name: str, threads: int, seconds: float) -> Json:
    """Turns of each way, for one set."""
    parameters = parameters_of(name)
    gradients = Gradients(parameters)
    gradients.measure()
    norm = float(memtools.grad_norm(parameters))

    def both() -> None:
        gradients.measure()
        gradients.multiply(NEAR)

    optimizer = torch.optim.SGD(parameters, lr=0.0)
    runners = {
        "torch unscale_ + clip": torchs(parameters, optimizer),
        "torch clip_grad_norm_": statement(
            "clip(p, most, foreach=True)", clip=torch.nn.utils.clip_grad_norm_, p=parameters,
            most=norm * NEAR,
        ),
        "read and multiply": statement("both()", both=both),
        "read only": statement("measure()", measure=gradients.measure),
        "memtools.clip_grad_norm_, not clipped": statement(
            "clip(p, most)", clip=memtools.clip_grad_norm_, p=parameters, most=1e9
        ),
        "read limit": read_limit(parameters, threads),
    }  # fmt: skip
    small = name == "small-2000"
    turns = interleave(runners, 3 if small else 1, seconds=seconds, warm=1 if small else 0, first=2)
    return dict(turns.turns)


def folding(seconds: float) -> Json:
    """The whole of a window's end with fused AdamW: as torch does it, and with the coefficient
    handed to the optimizer, which divides by it while it reads."""
    parameters = parameters_of("gpt2-148")
    optimizer: Any = torch.optim.AdamW(parameters, lr=1e-9, fused=True)
    gradients, scale = Gradients(parameters), torch.tensor(1 / NEAR)

    def folded() -> None:
        gradients.measure()
        optimizer.grad_scale = scale
        optimizer.step()
        del optimizer.grad_scale

    clipped = torchs(parameters, optimizer)
    step = statement("step()", step=optimizer.step)
    runners: dict[str, Runner] = {
        "torch unscale_ + clip + step": lambda n: clipped(n) + step(n),
        "read, folded into step": statement("folded()", folded=folded),
        "step alone": step,
    }
    return dict(interleave(runners, 1, seconds=seconds, first=2).turns)

"""What the end of a window costs, the error of its norm, and what a micro-batch adds.

    python -m benchmarks.grad.accumulate         # two minutes; writes results/accumulate.json
    python -m benchmarks.grad.accumulate --quick
    python -m benchmarks.grad.accumulate --only finish

`norm` is the relative error of gradient norms beside float64. `finish` reads and multiplies the
gradients of GPT-2-small (148 tensors) and of 2,000 small tensors, with one and two threads, beside
torch's unscale_ + clip_grad_norm_; "read only" is a window whose factor is 1 or goes into a fused
optimizer. `fold` is all of a window's end with fused AdamW. `microstep` is a micro-batch of a small
network that does not end a window.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import (
    Json,
    Runner,
    Samples,
    arguments,
    environment,
    interleave,
    pooled,
    repeated,
    statement,
    table,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import Limit, at_least, finish, number_limit
from memtools._grad.gradients import Gradients

#: The least times that ours is faster than torch: (two passes, read only) by set and threads.
FINISH = {
    ("gpt2-148", 1): (1.4, 2.8), ("gpt2-148", 2): (2.0, 4.5), ("small-2000", 1): (6.0, 14.0),
}  # fmt: skip
TORCH = "torch unscale_ + clip"
NEAR = 0.9999  # a factor that changes every element, and hardly its size
STEPS = 1 << 40  # micro-batches in a window: none of them ends it

# --- the error of a norm ---


def norm_errors(elements: int) -> list[Json]:
    """The relative errors of norms: torch's on the CPU, and ours."""
    rows: list[Json] = []
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        f"{elements:,} normal": lambda: torch.randn(elements),
        f"{elements:,} equal": lambda: torch.full((elements,), 0.1),
        f"{elements:,} normal, bf16": lambda: torch.randn(elements).bfloat16(),
        "GPT-2's embedding, normal": lambda: torch.randn(50_257, 768),
        "1e6 of 1e25": lambda: torch.full((1_000_000,), 1e25),
        "1e6 of 1e-25": lambda: torch.full((1_000_000,), 1e-25),
    }
    for name, make in kinds.items():
        torch.manual_seed(0)
        grad = make()
        parameter = torch.empty_like(grad)
        parameter.grad = grad
        pieces = grad.view(-1).split(1 << 20)  # type: ignore[no-untyped-call]
        exact = math.sqrt(math.fsum(float(piece.double().square().sum()) for piece in pieces))
        theirs = float(torch.nn.utils.get_total_norm([grad])) / exact - 1
        ours = float(memtools.grad_norm([parameter])) / exact - 1
        rows.append({"name": name, "exact": exact, "torch": theirs, "ours": ours})
    header = ("relative error of the norm", "torch", "memtools.grad_norm")
    lines = ((row["name"], f"{row['torch']:+.1e}", f"{row['ours']:+.1e}") for row in rows)
    print(f"{table(header, lines)}\n", flush=True)
    return rows


# --- the end of a window ---


def parameters_of(name: str) -> list[torch.nn.Parameter]:
    """Zeros with normal gradients."""
    layer = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    layer += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    shapes = [(50_257, 768), (1_024, 768), *layer * 12, (768,), (768,)]
    torch.manual_seed(0)
    made = []
    for shape in [(2_500,)] * 2_000 if name == "small-2000" else shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        made.append(parameter)
    return made


def torchs(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Runner:
    """unscale_, then clip_grad_norm_, as torch's documentation has it. The scale is 1: unscale_
    reads and writes all the same, and the values stay as they are."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))
    norm = float(memtools.grad_norm(parameters))

    def end() -> None:
        scaler._per_optimizer_states.clear()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, norm * NEAR, foreach=True)

    return statement("end()", end=end)


def finishing(name: str, seconds: float) -> Json:
    """Turns of each way, for one set."""
    parameters = parameters_of(name)
    gradients = Gradients(parameters)

    def both() -> None:
        gradients.measure()
        gradients.multiply(NEAR)

    runners = {
        TORCH: torchs(parameters, torch.optim.SGD(parameters, lr=0.0)),
        "read and multiply": statement("both()", both=both),
        "read only": statement("measure()", measure=gradients.measure),
    }
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


# --- a micro-batch that does not end a window ---


def microstep(seconds: float) -> Json:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    x = torch.randn(16, 32)
    models: list[Any] = []
    for _ in range(3):
        torch.manual_seed(0)
        layers = torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        models.append(torch.nn.Sequential(*layers))
    plain, ours, model = models
    acc = memtools.GradAccumulator(ours, torch.optim.SGD(ours.parameters(), 0.0, fused=True), STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
        model, optimizer = theirs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def bare() -> None:
        (plain(x).square().mean() / STEPS).backward()

    def mean() -> None:
        with acc.micro_batch():
            acc.backward(ours(x).square().mean())

    def accelerate() -> None:
        with theirs.accumulate(model):
            theirs.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    ways = {"bare": bare, "accelerate": accelerate, "ours": mean}
    runners = {name: statement("step()", step=step) for name, step in ways.items()}
    samples = interleave(runners, 50, seconds=seconds, warm=5, first=20)
    acc.reset()
    return dict(samples.turns)


# --- all of it ---

CHILD: dict[str, Callable[[float], Json]] = {
    "finish gpt2-148": partial(finishing, "gpt2-148"),
    "finish small-2000": partial(finishing, "small-2000"),
    "fold": folding,
    "microstep fp32": microstep,
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.child:
        torch.set_num_threads(options.threads)
        write_json(options.out, CHILD[options.child](options.seconds))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    info = environment(2)
    quick, wanted = options.quick, options.only or ""
    sections: Json = {}
    held: list[Limit] = []

    def measured(section: str, title: str, baseline: str, threads: int = 1) -> Samples:
        """The turns of two processes, whose addresses and pages differ."""
        given = ["--threads", str(threads), "--seconds", "3" if quick else "6"]
        samples = pooled(repeated(__file__, section, given, 1 if quick else 2))
        sections[title] = samples.summary(baseline)
        print(timing_table(title, sections[title]), flush=True)
        return samples

    if "norm".startswith(wanted):
        sections["norm"] = norm_errors(10_000_000 if quick else 100_000_000)
        worst = max(abs(row["ours"]) for row in sections["norm"])
        held.append(number_limit("error of the norm", 1e-7, "", worst, worst))
    for (name, threads), times in FINISH.items() if "finish".startswith(wanted) else ():
        title = f"finish {name}, threads: {threads}"
        samples = measured(f"finish {name}", title, TORCH, threads)
        where = f"{name}, {threads} thread{'s' * (threads > 1)}"
        for way, allowed in zip(("read and multiply", "read only"), times, strict=True):
            faster = [f(TORCH) / f(way) for f in (samples.least, samples.median)]
            held.append(at_least(f"{where}: {way}", allowed, *faster))
    if "fold".startswith(wanted):
        measured("fold", "fold", "torch unscale_ + clip + step")
    if "microstep".startswith(wanted):
        samples = measured("microstep fp32", "microstep fp32", "bare")
        added = [(f("ours") - f("bare")) / 1e3 for f in (samples.least, samples.median)]
        held.append(number_limit("a micro-batch adds, fp32, ours", 5, "us", *added))
    finish("accumulate", options, info, sections, held)


if __name__ == "__main__":
    main()

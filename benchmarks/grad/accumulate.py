"""What the end of a window costs, how right its norm is, and what a micro-batch adds.

    python -m benchmarks.grad.accumulate         # under four minutes; results/accumulate.json
    python -m benchmarks.grad.accumulate --quick      # one minute, to look at
    python -m benchmarks.grad.accumulate --only finish

`norm` is the relative error of gradient norms beside float64. `finish` reads and multiplies the
gradients of GPT-2-small, of 2,000 small tensors and of one of 64 Mi elements, with one and two
threads, beside torch's unscale_ + clip_grad_norm_; "read only" is what is left where the factor is
1 or goes into a fused optimizer; "read limit" is a C loop that adds them up and nothing else.
`add` is fp32 += bf16. `fold` is all of a window's end with fused AdamW. `microstep` is a
micro-batch of a small network that does not end a window.
"""

from __future__ import annotations

import os
from functools import partial

from benchmarks.grad import microstep, norm_error, sets
from benchmarks.kit.harness import (
    Json,
    Samples,
    arguments,
    environment,
    pooled,
    repeated,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import Limit, at_least, finish, number_limit

# The least times that ours is faster than torch: (two passes, read only) by set and threads.
FINISH = {
    ("gpt2-148", 1): (1.4, 2.8), ("gpt2-148", 2): (2.0, 4.5), ("small-2000", 1): (6.0, 14.0),
}  # fmt: skip
TORCH = "torch unscale_ + clip"
CHILD = {f"finish {name}": partial(sets.finishing, name) for name in sets.SETS}


def child(section: str, threads: int, seconds: float) -> Json:
    """One section, in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    if section == "fold":
        return sets.folding(seconds)
    if section.startswith("microstep"):
        return microstep.microstep(section.endswith("bf16"), seconds)
    return CHILD[section](threads, seconds)


def measured(section: str, threads: int, seconds: float, times: int = 2) -> Samples:
    """The turns of `times` processes, whose addresses and pages differ."""
    options = ["--threads", str(threads), "--seconds", str(seconds / times)]
    return pooled(repeated(__file__, section, options, times))


def faster(samples: Samples, what: str, ours: str, theirs: str, times: float) -> Limit:
    least = samples.least(theirs) / samples.least(ours)
    return at_least(what, times, least, samples.median(theirs) / samples.median(ours))


def finish_limits(samples: Samples, name: str, threads: int) -> list[Limit]:
    rows = []
    where = f"{name}, {threads} thread{'s' * (threads > 1)}"
    wanted = FINISH.get((name, threads), (0.0, 0.0))
    for way, times in zip(("read and multiply", "read only"), wanted, strict=True):
        if times:
            rows.append(faster(samples, f"{where}: {way}", way, TORCH, times))
    if name != "small-2000":  # those lie in the cache, where it is no memory limit
        over = [f("read only") / f("read limit") for f in (samples.least, samples.median)]
        rows.append(number_limit(f"{where}: read only / read limit", 1.15, "x", *over))
    return rows


def show(title: str, samples: Samples, baseline: str) -> list[Json]:
    rows = samples.summary(baseline)
    print(f"{title}\n{timing_table(rows, baseline)}\n", flush=True)
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.child:
        write_json(options.out, child(options.child, options.threads, options.seconds))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    info = environment(2)
    quick, wanted = options.quick, options.only or ""
    sections: Json = {}
    held: list[Limit] = []

    if "norm".startswith(wanted):
        rows = norm_error.norm_error(10_000_000 if quick else 100_000_000)
        norm_error.show_norm_error(rows)
        sections["norm"] = rows
        held += norm_error.norm_error_limits(rows)
    for name in sets.SETS if "finish".startswith(wanted) else ():
        for threads in (1, 2):
            samples = measured(f"finish {name}", threads, *((3.0, 1) if quick else (12.0, 2)))
            title = f"finish {name}, threads: {threads}"
            sections[title] = show(title, samples, TORCH)
            held += finish_limits(samples, name, threads)
    if "fold".startswith(wanted):
        samples = measured("fold", 1, 4 if quick else 10, 1)
        sections["fold"] = show(
            "fold: gpt2-148, one thread", samples, "torch unscale_ + clip + step"
        )
    for kind in ("fp32", "bf16") if "microstep".startswith(wanted) else ():
        samples = measured(f"microstep {kind}", 1, 3 if quick else 12, 1 if quick else 2)
        sections[f"microstep {kind}"] = show(f"microstep, {kind}", samples, "bare")
        for way in ("ours", "ours, weight=16"):
            added = [f(way) - f("bare") for f in (samples.least, samples.median)]
            added = [ns / 1e3 for ns in added]
            held.append(number_limit(f"a micro-batch adds, {kind}, {way}", 5, "us", *added))
    finish("accumulate", options, info, sections, held)


if __name__ == "__main__":
    main()

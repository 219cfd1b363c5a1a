"""What a TrajectoryStore costs beside a plain copy, torchrl's storages, and lists that are kept.

    python -m benchmarks.trajectory.trajectory         # three minutes; results/trajectory.json
    python -m benchmarks.trajectory.trajectory --quick
    python -m benchmarks.trajectory.trajectory --only append

`append` writes entries of motion, [8, 263, 1, 196] float32 or 1.6 MB, and their log-probabilities:
by `copy_` into preallocated blocks, by the store, and by torchrl's two lazy storages where torchrl
is installed. Each way has memory that was written to before. The addresses of its pages may make a
way 1.5 times as slow, so fresh processes are pooled. `update` samples 50 steps and goes
through them 3 times, in a fresh process for each run: with a list that keeps its graphs, as such
loops are published; with a list that is detached by hand; and with a store. All three compute the
same losses: the first detaches where it reads.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

import memtools
from benchmarks.kit.harness import (
    Json,
    Runner,
    arguments,
    environment,
    interleave,
    peak_resident_bytes,
    pooled,
    repeated,
    resident_bytes,
    table,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import Limit, finish, number_limit

T, SAMPLES, SHAPE = 50, 8, (263, 1, 196)
WAYS = ("graphs kept", "detached by hand", "store")
EPOCHS, CHUNK = 3, 5
MIB = 1 << 20


# --- append ---------------------------------------------------------------------------------------


def in_turns(write: Callable[[int], None], begin: Callable[[], None] = lambda: None) -> Runner:
    """Writes entries 0, 1, ... T - 1, and begins again; in nanoseconds."""
    at = 0

    def run(n: int) -> float:
        nonlocal at
        start = time.perf_counter_ns()
        for _ in range(n):
            if at == T:
                begin()
                at = 0
            write(at)
            at += 1
        return float(time.perf_counter_ns() - start)

    return run


def by_copy(x: torch.Tensor, log_probs: torch.Tensor, dtype: torch.dtype) -> Runner:
    blocks = torch.zeros(T, *x.shape, dtype=dtype), torch.zeros(T, SAMPLES, dtype=dtype)

    def write(t: int) -> None:
        with torch.no_grad():
            blocks[0][t].copy_(x)
            blocks[1][t].copy_(log_probs)

    return in_turns(write)


def by_store(x: torch.Tensor, log_probs: torch.Tensor, **options: Any) -> Runner:
    store = memtools.TrajectoryStore(T, **options)
    return in_turns(lambda _: store.append(latents=x, log_probs=log_probs), store.reset)


def by_torchrl(x: torch.Tensor, log_probs: torch.Tensor, folder: str | None) -> Runner:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage

    entry = TensorDict({"latents": x, "log_probs": log_probs}, [])
    storage = LazyTensorStorage(T) if folder is None else LazyMemmapStorage(T, scratch_dir=folder)
    return in_turns(lambda t: storage.set(t, entry))


def has_torchrl() -> bool:
    try:
        import torchrl.data  # noqa: F401
    except ImportError as error:
        print(f"without torchrl: {error}")
        return False
    return True


def appends(seconds: float) -> Json:
    """Turns by what is written: motion as it is, and motion as bf16."""
    torch.manual_seed(0)
    x, log_probs = torch.randn(SAMPLES, *SHAPE), torch.randn(SAMPLES)
    found: Json = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runners = {
            "copy_": by_copy(x, log_probs, torch.float32),
            "store": by_store(x, log_probs),
            "store in a file": by_store(x, log_probs, file=f"{folder}/motion.traj"),
        }
        if has_torchrl():
            runners["LazyTensorStorage"] = by_torchrl(x, log_probs, None)
            runners["LazyMemmapStorage"] = by_torchrl(x, log_probs, f"{folder}/torchrl")
        found["append"] = interleave(runners, 20, seconds=seconds, first=T).turns
    halves = {
        "copy_": by_copy(x, log_probs, torch.bfloat16),
        "store": by_store(x, log_probs, dtype="bf16"),
    }
    found["append_bf16"] = interleave(halves, 20, seconds=seconds / 3, first=T).turns
    return found


# --- update ---------------------------------------------------------------------------------------


class Denoiser(torch.nn.Module):
    """Predicts the mean of the next latent from this one, frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(SHAPE[0], 128), torch.nn.SiLU(), torch.nn.Linear(128, SHAPE[0])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = x.flatten(0, -4).squeeze(-2).transpose(-1, -2)
        mean: torch.Tensor = 0.95 * frames + 0.05 * self.layers(frames)
        return mean.transpose(-1, -2).unsqueeze(-2).view_as(x)


def log_prob(model: Denoiser, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = -(after - model(before)).square().flatten(-3).mean(-1)
    return found


def sampled(model: Denoiser) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The latents of a rollout and their log-probabilities, with their graphs."""
    x = torch.randn(SAMPLES, *SHAPE)
    yield x, torch.zeros(SAMPLES)
    for _ in range(T):
        mean = model(x)
        after = mean + 0.1 * torch.randn_like(x)
        yield after, -(after - mean).square().flatten(-3).mean(-1)
        x = after


Chunks = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def spans() -> Iterator[range]:
    yield from (range(start, min(start + CHUNK, T)) for start in range(0, T, CHUNK))


def from_list(model: Denoiser, detach: bool) -> Chunks:
    latents, log_probs = [], []
    rollout = sampled(model) if not detach else detached(model)
    for x, lp in rollout:
        latents.append(x)
        log_probs.append(lp)
    del log_probs[0]
    advantages = torch.randn(SAMPLES)

    def chunks() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for _ in range(EPOCHS):
            for span in spans():
                with torch.no_grad():
                    states = torch.stack(latents[span.start : span.stop + 1])
                    old = torch.stack(log_probs[span.start : span.stop])
                yield states, old, advantages

    return chunks


def detached(model: Denoiser) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same under no_grad()."""
    with torch.no_grad():
        yield from sampled(model)


def from_store(model: Denoiser) -> Chunks:
    store = memtools.TrajectoryStore(T, SAMPLES, states=("latents",), limit="96 MiB")
    rollout = detached(model)
    store.append(latents=next(rollout)[0])
    for x, lp in rollout:
        store.append(latents=x, log_probs=lp)
    store.put(advantages=torch.randn(SAMPLES))
    assert store.nbytes <= 96 * MIB

    def chunks() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for epoch in store.epochs(EPOCHS, time_steps=CHUNK):
            for chunk in epoch:
                yield chunk["latents"], chunk["log_probs"], chunk["advantages"]

    return chunks


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def update(way: str) -> Json:
    """One rollout and its update, in a process of its own."""
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(CHUNK + 1, SAMPLES, *SHAPE)
    backward(log_prob(model, x[:-1], x[1:]).sum())  # what is set up lazily
    optimizer.zero_grad()
    del x
    torch.manual_seed(1)
    before, start = resident_bytes(), time.perf_counter()
    cpu = time.process_time()
    chunks = from_store(model) if way == "store" else from_list(model, way == "detached by hand")
    losses = []
    for number, (states, old, advantages) in enumerate(chunks(), 1):
        ratio = (log_prob(model, states[:-1], states[1:]) - old).exp()
        loss = -torch.min(ratio, ratio.clamp(0.9, 1.1)).mul(advantages).sum() / (T * SAMPLES)
        backward(loss)
        losses.append(loss.item())
        if number % (T // CHUNK) == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "above_bytes": peak_resident_bytes() - before,
        "losses": losses,
    }


def updates(times: int) -> list[Json]:
    found: dict[str, list[Json]] = {way: [] for way in WAYS}
    for turn in range(times):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            found[way] += repeated(__file__, way, [], 1)
    rows = []
    for way, runs in found.items():
        same = all(run["losses"] == found["store"][0]["losses"] for run in runs)
        row: Json = {"name": way, "runs": times, "same_losses": same}
        for key in ("seconds", "cpu_seconds", "above_bytes"):
            values = [run[key] for run in runs]
            row |= {f"min_{key}": min(values), f"median_{key}": median(values)}
        rows.append(row)
    return rows


def update_table(rows: list[Json]) -> str:
    header = (
        "rollout of 50 steps, 3 epochs",
        "peak above MiB",
        "cpu s min",
        "median",
        "same losses",
    )
    return table(
        header,
        (
            (
                row["name"],
                f"{row['median_above_bytes'] / MIB:.0f}",
                f"{row['min_cpu_seconds']:.2f}",
                f"{row['median_cpu_seconds']:.2f}",
                "yes" if row["same_losses"] else "no",
            )
            for row in rows
        ),
    )


# --- all of it ------------------------------------------------------------------------------------


def limits(sections: dict[str, list[Json]]) -> Iterator[Limit]:
    for name, what in {"append": "an append of motion", "append_bf16": "the same as bf16"}.items():
        for row in sections.get(name, ()):
            if row["name"] == "store":
                ratios = row["ratio_of_mins"], row["median_ratio"]
                yield number_limit(f"{what}, beside copy_", 1.15, "x", *ratios)
    rows = {row["name"]: row for row in sections.get("update", ())}
    if rows:
        mine, hand = rows["store"], rows["detached by hand"]
        for key, what, allowed in (
            ("above_bytes", "peak of an update, beside detached by hand", 1.05),
            ("cpu_seconds", "time of an update, beside detached by hand", 1.02),
        ):
            least = mine[f"min_{key}"] / hand[f"min_{key}"]
            yield number_limit(
                what, allowed, "x", least, mine[f"median_{key}"] / hand[f"median_{key}"]
            )


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.child:
        is_append = options.child == "append"
        write_json(options.out, appends(options.seconds) if is_append else update(options.child))
        return
    facts = environment(options.threads)
    sections: dict[str, list[Json]] = {}
    if "append".startswith(options.only or ""):
        results = repeated(__file__, "append", ["--seconds", "4"], 2 if options.quick else 8)
        for name in results[0]:
            rows = sections[name] = pooled(one[name] for one in results).summary("copy_")
            print(f"\n{timing_table(name, rows)}")
    if "update".startswith(options.only or ""):
        sections["update"] = updates(1 if options.quick else 5)
        print(f"\n{update_table(sections['update'])}")
    finish("trajectory", options, facts, sections, list(limits(sections)))


if __name__ == "__main__":
    main()

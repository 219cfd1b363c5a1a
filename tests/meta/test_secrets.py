"""A token in the environment gets into no repr, no record, no page and no output of a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_PlantedSecretOfThisTest"
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "MEMTOOLS_OF_MINE")

EVERYTHING = """
import contextlib, io, json, sys, warnings
import torch
import memtools, memtools.types

warnings.simplefilter("ignore")
record = sys.argv[1]
policy, calls = memtools.CleanupPolicy(), []
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
aux, budget = memtools.AuxLoss(), memtools.Budget("1 MiB")
history = memtools.GateHistory(max_bytes=budget)
history.append(torch.rand(3, 4))
pool = memtools.KVPool(1, 2, 64, max_tokens=64, max_sequences=2, dtype="float32")
lease = pool.acquire(1)
before = memtools.census()
detector = memtools.LeakDetector()
with memtools.MemoryMonitor(log=record) as monitor, monitor.phase("train"):
    for step in range(3):
        window = acc.step(torch.rand(8, 4), lambda micro: (model(micro).sum(), len(micro)))
        detector.update(step, heap=1 << 20)
        policy.step()
        monitor.step()
store = memtools.TrajectoryStore(1, 2)
store.append(x=torch.rand(2, 3))
epochs = store.epochs(1)
epoch = next(iter(epochs))
settings, read = memtools.allocator_settings(), memtools.read_record(record)
found = [
    policy, policy.report(), acc, acc.report(), window, history, history.stats(), aux, budget,
    budget.report(), pool, pool.stats(), lease, before, memtools.census(), detector,
    detector.verdict(), monitor, memtools.host_memory(), memtools.device_memory(),
    memtools.holder_of(model),
    read, read.columns[0], read.samples, read.buckets, read.events[0], read.phases[0],
    memtools.checkpoint_layers(model), settings, settings.seen, settings.host, settings.cuda,
    settings.host.heap, settings.host.arena_max, settings.advice(), *budget.report().holdings,
    memtools.census().diff(before), before.groups[0], before.groups[0].kind,
    monitor.guard(0.9, "record"), monitor.phase("train"), *monitor.phases(),
    policy.report().actions[0], policy.report().cycles, policy.add("note", calls.append),
    *policy.cleanup("gc", "note"), *calls, *monitor.headroom(),
    store, store.stats(), epochs, epoch, next(iter(epoch)), memtools.UpdateSettings(),
]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    for one in found:
        print(repr(one), str(one))
    with contextlib.suppress(AttributeError):
        print(monitor.summary())
missing = {
    name for module in (memtools, memtools.types) for name in module.__all__
    if isinstance(getattr(module, name), type)
    and not issubclass(getattr(module, name), BaseException)
} - {type(one).__name__ for one in found}
print(json.dumps([printed.getvalue(), sorted(missing)]))
"""


def output_of(*command: str) -> str:
    environ = os.environ | dict.fromkeys(NAMES, SECRET)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=environ,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_no_repr_and_no_record_holds_the_environment(tmp_path: Path) -> None:
    record = tmp_path / "run.mem"
    printed, missing = json.loads(output_of("-c", EVERYTHING, str(record)).splitlines()[-1])
    assert len(printed) > 4000
    assert SECRET not in printed
    assert SECRET.encode() not in record.read_bytes()
    # types of the public names of which EVERYTHING has no object at hand
    assert missing == [
        "Adapter",
        "CudaDevice",
        "GroupGrowth",
        "Holder",
        "LeakFinding",
        "Lowered",
        "Part",
        "Plan",
        "PlanBest",
        "PlanFit",
        "PlanLimit",
        "PlanPhase",
        "PlanSetting",
        "Plans",
        "Pressure",
        "Retry",
        "StepsLeft",
        "TypeGrowth",
    ]
    page = tmp_path / "page.html"
    for command in (
        ["doctor"],
        ["doctor", "--json"],
        ["explain", str(record)],
        ["explain", "--json", str(record)],
        ["report", str(record), "-o", str(page)],
        ["watch", "--once", str(record)],
    ):
        assert SECRET not in output_of("-m", "memtools", *command)
    assert SECRET not in page.read_text("utf-8")


def test_what_the_advice_goes_by_are_allocators_variables_alone(monkeypatch) -> None:
    import memtools

    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    seen = memtools.allocator_settings().seen
    assert "HF_TOKEN" not in seen.now
    assert seen.now["MALLOC_ARENA_MAX"] == "3"
    assert seen.now["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PATH" not in seen.at_start

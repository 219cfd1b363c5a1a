"""step() in a process that really runs out of memory, and against a Budget that is used up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtools
from tests.grad.backoffcases import batch, loss_of, made

ROOT = Path(__file__).resolve().parents[2]

REAL = """
import json, resource, sys, torch
import memtools
from tests.grad.backoffcases import sizes_of

ROWS, WIDTH = 4096, 256
kind, undo = sys.argv[1:]
torch.set_num_threads(1)

def made():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*parts * 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = memtools.GradAccumulator(model, optimizer, undo=undo)
    return model, acc._get_back_off(), lambda micro: (model(micro).square().sum(), micro.numel())

def bits(model):
    return [p.detach().view(torch.int32).sum(dtype=torch.int64).item() for p in model.parameters()]

x = torch.randn(ROWS, WIDTH)
model, backoff, loss_fn = made()
loss_fn(x[:2])[0].backward()
which, column = {"DATA": (resource.RLIMIT_DATA, 5), "AS": (resource.RLIMIT_AS, 0)}[kind]
used = int(open("/proc/self/statm").read().split()[column]) * 4096
hard = resource.getrlimit(which)[1]
resource.setrlimit(which, (used + (24 << 20), hard))
reports = [backoff.step(x, loss_fn) for _ in range(2)]
resource.setrlimit(which, (hard, hard))

again, other, loss_fn = made()
loss_fn(x[:2])[0].backward()
size = ROWS
for report in reports:
    sizes, size = sizes_of(report.retries, ROWS, size)
    assert len(sizes) == report.micro_batches, (sizes, str(report))
    assert other.step(x, loss_fn, sizes=sizes).retries == ()
retries = [(r.rows, r.phase, r.error, r.asked) for report in reports for r in report.retries]
print(json.dumps([bits(model) == bits(again), retries]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "undo"), [("DATA", "scratch"), ("AS", "redo")])
def test_a_process_at_its_limit_goes_on_with_what_fits(limit, undo):
    """torch's own allocator refuses; then the updates are those of a run that was never short of
    memory and had the same micro-batches."""
    run = [sys.executable, "-c", REAL, limit, undo]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    same, retries = json.loads(done.stdout)
    assert retries[0][0] == 4096
    assert all("allocate memory" in error or "bad_alloc" in error for _, _, error, _ in retries)
    assert same


OPTIMIZER = """
import json, resource, torch
import memtools

torch.set_num_threads(1)

def made():
    torch.manual_seed(0)
    one = lambda: [torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.LayerNorm(1024)]
    model = torch.nn.Sequential(*one(), *one(), *one())
    return model, torch.optim.AdamW(model.parameters())

x = torch.randn(4096, 1024)
model, optimizer = made()
acc = memtools.GradAccumulator(model, optimizer, undo="redo")
loss_fn = lambda micro: (model(micro).square().sum(), len(micro))
loss_fn(x[:2])[0].backward()
optimizer.zero_grad()
used = int(open("/proc/self/statm").read().split()[5]) * 4096
resource.setrlimit(resource.RLIMIT_DATA, (used + (60 << 20), resource.RLIM_INFINITY))
losses = [acc.step(x, loss_fn).loss for _ in range(2)]
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)

free = []
other, optimizer = made()
for _ in range(2):
    optimizer.zero_grad()
    loss = sum(other(part).square().sum() for part in x.split(512)) / len(x)
    loss.backward()
    optimizer.step()
    free.append(loss.item())
print(json.dumps([losses, free, acc.report().ran_out, list(acc.report().notes)]))
"""


@pytest.mark.slow
def test_freed_heap_does_not_keep_an_optimizers_state_from_being_made():
    """12 MiB of parameters, 24 of AdamW's state and the gradients fit beside each other; what the
    passes had freed, and malloc kept, did not fit beside them."""
    run = [sys.executable, "-c", OPTIMIZER]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses, free, ran_out, notes = json.loads(done.stdout)
    assert ran_out > 0
    assert losses == pytest.approx(free, rel=1e-5)
    assert any("set glibc's mmap_threshold to 1.0 MiB" in note for note in notes)


@pytest.mark.slow
def test_a_budget_that_is_used_up_counts_as_out_of_memory():
    """What the failed micro-batch had reserved is given back before the next try."""
    budget = memtools.Budget("48 KiB")
    acc, model = made()

    def loss_fn(micro):
        history = memtools.GateHistory(max_bytes=budget)
        history.append(torch.rand(32 * len(micro["x"]), 64))
        return loss_of(model)(micro)

    report = acc.step(batch(), loss_fn)
    assert [retry.rows for retry in report.retries] == [16, 8]
    assert report.retries[0].error.startswith("BudgetError")
    assert report.retries[0].asked is not None
    assert budget.used == 0


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_accumulator_in_step_leaves_no_cycle(optimizer):
    import gc
    import weakref

    model = torch.nn.Linear(6, 1)
    acc = memtools.GradAccumulator(model, optimizer(model.parameters(), lr=0.1))
    acc.step(batch(), loss_of(model))
    gone = weakref.ref(acc)
    gc.disable()
    try:
        del acc
        assert gone() is None
    finally:
        gc.enable()

"""step() in a process that really runs out of memory, and against a Budget that is used up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtools
from memtools._grad import backoff
from tests.grad.backoffcases import batch, loss_of, made

ROOT = Path(__file__).resolve().parents[2]

REAL = """
import json, resource, sys, torch
import memtools
from tests.grad.backoffcases import sizes_of, undoing

ROWS, WIDTH = 4096, 256
kind, undo = sys.argv[1:]
torch.set_num_threads(1)

def made():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*parts * 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = undoing(memtools.GradAccumulator(model, optimizer), undo)
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
from tests.grad.backoffcases import undoing

torch.set_num_threads(1)

def made():
    torch.manual_seed(0)
    one = lambda: [torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.LayerNorm(1024)]
    model = torch.nn.Sequential(*one(), *one(), *one())
    return model, torch.optim.AdamW(model.parameters())

x = torch.randn(4096, 1024)
model, optimizer = made()
acc = memtools.GradAccumulator(model, optimizer)
loss_fn = lambda micro: (model(micro).square().sum(), len(micro))
loss_fn(x[:2])[0].backward()
optimizer.zero_grad()
used = int(open("/proc/self/statm").read().split()[5]) * 4096
resource.setrlimit(resource.RLIMIT_DATA, (used + (60 << 20), resource.RLIM_INFINITY))
undoing(acc, "redo")
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


STUCK = """
import ctypes, json, resource, torch
import memtools

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.001))
libc, tried = ctypes.CDLL(None), []

def loss_fn(x):
    tried.append(len(x))
    if len(tried) > 1:
        return model(x).square().sum(), len(x)
    for name, value in ((-3, 32 << 20), (-1, 1 << 30)):  # freed blocks stay with malloc
        assert libc.mallopt(name, ctypes.c_int(value)) == 1
    blocks = [ctypes.create_string_buffer(1 << 20) for _ in range(64)]
    blocks.clear()
    used = int(open("/proc/self/statm").read().split()[5]) * 4096
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (used, hard))
    try:
        return model(x).square().sum(), len(x)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

x = torch.randn(32, 4, 12, 12)
reports = [acc.step(x, loss_fn) for _ in range(2)]
enabled = torch.backends.mkldnn.enabled
model(torch.randn(6, 4, 15, 15))
refused = []
for width in (13, 14):
    with torch.backends.mkldnn.flags(enabled=True):
        try:
            model(torch.randn(6, 4, width, width))
        except RuntimeError as error:
            refused.append(str(error))
print(json.dumps([tried, [str(r) for report in reports for r in report.retries], refused, enabled]))
"""


@pytest.mark.slow
def test_a_thread_on_which_onednn_refuses_every_kernel_goes_on_without_it():
    """What malloc hands out is there, and one kernel's code, which is mapped, finds no memory. From
    then on each new kernel is refused on that thread, with any amount of memory."""
    run = [sys.executable, "-c", STUCK]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    tried, retries, refused, enabled = json.loads(done.stdout)
    assert tried == [32, 16, 16, 16, 16]
    (retry,) = retries
    assert "could not create a primitive" in retry
    assert f"; {backoff._ONEDNN_IS_OFF}; " in retry
    assert refused == ["could not create a primitive"] * 2
    assert not enabled


def test_onednn_stays_on_where_it_makes_kernels():
    before = torch.backends.mkldnn.enabled
    assert not backoff._turn_onednn_off()
    assert torch.backends.mkldnn.enabled == before

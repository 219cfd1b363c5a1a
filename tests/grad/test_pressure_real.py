"""step() with a real monitor: the peak that the kernel counted stays below the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REAL = """
import json, torch
import memtools

torch.set_num_threads(1)
x = torch.randn(24, 256, 256)  # 8 layers of 2 tensors of 256 KiB: 4 MiB a row, and as much backward

def made():
    torch.manual_seed(0)
    parts = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    model = torch.nn.Sequential(*parts)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

model, optimizer = made()
model(x[:4]).square().sum().backward()
own = memtools.MemoryMonitor(device="cpu", leaks=False).headroom()[0].own_bytes
limit = int(1.12 * own) + (56 << 20)
with memtools.MemoryMonitor(device="cpu", leaks=False, limit=limit) as monitor:
    model, optimizer = made()
    acc = memtools.GradAccumulator(model, optimizer, monitor=monitor)
    with monitor.phase("ours") as ours:
        losses = [acc.step(x, lambda x: (model(x).square().sum(), len(x))).loss for _ in range(4)]
    model, optimizer = made()
    free = []
    with monitor.phase("whole") as whole:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().sum() / len(x)
            loss.backward()
            optimizer.step()
            free.append(loss.item())
report = acc.report()
print(json.dumps([limit, ours.peak_bytes, whole.peak_bytes, losses, free,
                  report.micro_batch_size, report.ran_out]))
"""


@pytest.mark.slow
def test_the_peak_stays_below_a_limit_that_the_whole_batch_passes() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    limit, ours, whole, losses, free, rows, ran_out = json.loads(done.stdout)
    assert ours < limit < whole
    assert losses == pytest.approx(free, rel=1e-4)
    assert 2 <= rows < 24
    assert ran_out == 0

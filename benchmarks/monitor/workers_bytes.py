"""The bytes of workers as a run reports them, beside the kernel's own of the same moment.

    python -m benchmarks.monitor.workers_bytes    # three minutes
    python -m benchmarks.monitor.workers_bytes --only cache

Four loaders, forked and spawned, under `memtools run`, and a child of os.fork() that copies pages
of its parent as well. The program reads smaps_rollup of its workers after the last batch that makes
them grow, and prints the sum; the record of the run has memtools' figure, and the rate that was
reported first. What is kept in each step is known.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import memtools
from memtools._base.size import format_bytes
from memtools._record.figures import figures_of

PROGRAM = """
import gc, multiprocessing, os, sys
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

SIZE, COUNT = 96 * 1024, 800

class Cache(Dataset):
    def __init__(self): self.kept = {}
    def __len__(self): return COUNT
    def __getitem__(self, i):
        if i not in self.kept: self.kept[i] = torch.ones(SIZE // 4)
        return self.kept[i][:8].clone()

class Keeps(Dataset):
    def __init__(self): self.kept = []
    def __len__(self): return COUNT
    def __getitem__(self, i):
        self.kept.append(bytes([1]) * SIZE)
        return torch.zeros(8)

class Cycles(Dataset):
    def __len__(self): return COUNT
    def __getitem__(self, i):
        gc.disable()
        node = {"image": bytearray(b"x") * SIZE}
        node["self"] = node
        return torch.zeros(8)

class Buffer(IterableDataset):
    def __iter__(self):
        kept = []
        for i in range(COUNT):
            kept.append(torch.ones(SIZE // 4))
            yield torch.zeros(8)

def keep(rows, orders, answers):
    kept = []
    while os.read(orders, 1):
        kept.append(bytes([1]) * 2 * SIZE)
        for row in rows[2000 * len(kept):2000 * (len(kept) + 1)]:
            row["number"]  # counts a reference, and so copies the page
        os.write(answers, b"x")

def of_child():
    rows = [{"number": i, "text": str(i)} for i in range(300_000)]
    orders, answers = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(orders[1])
        keep(rows, orders[0], answers[1])
        os._exit(0)
    def batches():
        while True:
            os.write(orders[1], b"x")
            os.read(answers[0], 1)
            yield torch.zeros(8)
    return batches(), [pid]

def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup if ":" in line and "kB" in line)
    return min(int(fields[n].split()[0]) for n in ("Anonymous", "Private_Dirty", "Pss_Anon"))

if __name__ == "__main__":
    kinds = {"cache": Cache, "keeps": Keeps, "cycles": Cycles, "buffer": Buffer}
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sys.argv[1] == "child":
        batches, pids = of_child()
    else:
        batches = iter(DataLoader(kinds[sys.argv[1]](), 4, num_workers=2, persistent_workers=True,
                                  multiprocessing_context=sys.argv[2]))
        pids = [one.pid for one in multiprocessing.active_children()]
    for step in range(COUNT // 4):  # StopIteration would end the workers' buffers
        model(next(batches)).sum().backward()
        optimizer.step()
    print("private", 1024 * sum(map(private, pids)))
"""
LOADERS = ("cache", "keeps", "cycles", "buffer", "child")
KEPT = 2 * 96 * 1024  # Each of two workers has a batch of four samples at every second step.


def measure(loader: str, start: str, folder: str) -> tuple[int, int, float]:
    """(bytes by smaps_rollup, bytes by the record, the rate that was reported first)"""
    script, record = Path(folder, "program.py"), Path(folder, f"{loader}_{start}.mem")
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "memtools", "run", "--out", record, script, loader, start],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.search(r"private (\d+)", done.stdout)
    read = memtools.read_record(record)
    workers = figures_of(read).workers
    said = [getattr(one.data, "rate_bytes", 0.0) for one in read.events if one.kind == "finding"]
    assert found is not None
    assert workers is not None
    return int(found[1]), workers.peak_bytes, said[0] if said else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LOADERS, help="this loader alone")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        for loader in (only,) if only else LOADERS:
            for start in ("fork",) if loader == "child" else ("fork", "spawn"):
                kernel, ours, rate = measure(loader, start, folder)
                print(f"{loader:8} {start:6} smaps {format_bytes(kernel):>10}  "
                      f"memtools {format_bytes(ours):>10}  {100 * (ours / kernel - 1):+.1f} %  "
                      f"first rate {rate / KEPT:.2f} of the true one",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

"""The bytes of workers as a run reports them, beside the kernel's own of the same moment.

    python -m benchmarks.monitor.workers_bytes    # three minutes
    python -m benchmarks.monitor.workers_bytes --only cache

Four loaders, forked and spawned, under `memtools run`. The program reads smaps_rollup of its
workers after the last batch that makes them grow, and prints the sum; the record of the run has
memtools' figure.
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
import gc, multiprocessing, sys
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
        for i in range(COUNT // 2):
            kept.append(torch.ones(SIZE // 4))
            yield torch.zeros(8)

def private(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup if ":" in line and "kB" in line)
    return min(int(fields[n].split()[0]) for n in ("Anonymous", "Private_Dirty", "Pss_Anon"))

if __name__ == "__main__":
    data = {"cache": Cache, "keeps": Keeps, "cycles": Cycles, "buffer": Buffer}[sys.argv[1]]()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(data, 4, num_workers=2, multiprocessing_context=sys.argv[2],
                              persistent_workers=True))
    for step in range(COUNT // 4):  # StopIteration would end the workers' buffers
        model(next(batches)).sum().backward()
        optimizer.step()
    each = [private(one.pid) for one in multiprocessing.active_children()]
    print("private", 1024 * sum(each))
"""
LOADERS = ("cache", "keeps", "cycles", "buffer")


def measure(loader: str, start: str, folder: str) -> tuple[int, int]:
    """(bytes by smaps_rollup, bytes by the record)"""
    script, record = Path(folder, "program.py"), Path(folder, f"{loader}_{start}.mem")
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "memtools", "run", "--out", record, script, loader, start],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.search(r"private (\d+)", done.stdout)
    workers = figures_of(memtools.read_record(record)).workers
    assert found is not None
    assert workers is not None
    return int(found[1]), workers.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LOADERS, help="this loader alone")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        for loader in (only,) if only else LOADERS:
            for start in ("fork", "spawn"):
                kernel, ours = measure(loader, start, folder)
                print(f"{loader:8} {start:6} smaps {format_bytes(kernel):>10}  "
                      f"memtools {format_bytes(ours):>10}  {100 * (ours / kernel - 1):+.1f} %",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

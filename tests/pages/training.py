"""Real records to look at: a small training loop that writes a run.mem by RecordWriter and Probe.

python -m tests.pages.training leak.mem --leak --steps 6000
python -m tests.pages.training killed.mem --leak --limit-mib 700 --kill  # and is SIGKILLed
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import threading
import time

import torch

import memtools
from memtools import _core

COLUMNS = [("step", "count"), *((name, "bytes") for name in (
    "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available")),
    ("pressure", "1/100 percent"), ("heap_used", "bytes"), ("children", "count"),
    ("children_private", "bytes")]  # fmt: skip


class MoEBlock(torch.nn.Module):
    """Eight experts; its gate history is what leaks."""

    def __init__(self, leak: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))
        self.leak = leak
        self.gate_history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(self.gate(x), -1)
        if self.leak and self.training:
            self.gate_history.append(gates.detach().repeat(1, 2))
        outputs = [gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)]
        return torch.stack(outputs).sum(0)


class Recorder:
    """A thread that writes a sample every 10 ms, as the monitor does, only more slowly."""

    def __init__(self, path: str, limit: int | None, kill: bool) -> None:
        self.probe = _core.Probe()
        self.writer = _core.RecordWriter(path, COLUMNS)
        self.limit, self.kill, self.step = limit, kill, 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.said: dict[str, float] = {}
        source = f"limit given, {limit >> 20} MiB" if limit else "no limit"
        self.writer.event("start", f"host every 10 ms; {source}")

    def _run(self) -> None:
        while not self.stopped.wait(0.01):
            now = self.probe.read(127)
            values = [self.step, now.rss, now.private, now.swap, now.cgroup_used,
                      now.cgroup_limit, now.available, now.pressure, now.heap_used, now.children,
                      now.children_private]  # fmt: skip
            self.writer.append(None, [None if v is None or v < 0 else v for v in values])
            if self.kill and self.limit and (now.rss or 0) > self.limit:
                os.kill(os.getpid(), signal.SIGKILL)

    def event(self, kind: str, text: str, begun_ns: int | None = None) -> None:
        now = time.monotonic_ns()
        begun = now if begun_ns is None else begun_ns
        self.writer.event(kind, text, step=self.step, time_ns=begun, duration_ns=now - begun)


class Phase:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __enter__(self) -> None:
        self.begun = time.monotonic_ns()
        self.token = self.recorder.probe.enter(self.name)

    def __exit__(self, *_: object) -> None:
        peak = self.recorder.probe.leave(self.token)[0]
        took = time.monotonic_ns() - self.begun
        self.recorder.writer.phase(self.name, took, peak)
        if time.monotonic() - self.recorder.said.get(self.name, -1.0) > 1:
            self.recorder.said[self.name] = time.monotonic()
            self.recorder.event("phase", self.name, self.begun)


def train(recorder: Recorder, leak: bool, steps: int) -> None:
    torch.manual_seed(0)
    block = MoEBlock(leak)
    head = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW([*block.parameters(), *head.parameters()], 1e-3)
    detector = memtools.LeakDetector(recorder.limit)
    before, begun = None, 0
    kind = "quiet"
    for step in range(steps):
        with Phase(recorder, "train step"):
            with Phase(recorder, "forward"):
                x = torch.randn(1024, 64)
                loss = (head(block(x)) - x.roll(1, 1)).square().mean()
            with Phase(recorder, "backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.step = step + 1
        heap = recorder.probe.read(32).heap_used
        detector.update(step, heap=heap, rss=recorder.probe.rss())
        if detector.kind != kind and detector.kind in ("likely", "leak"):
            kind = detector.kind
            recorder.event("leak", str(detector.verdict()))
            if before is None:
                before, begun = memtools.census(), step
        if before is not None and step == begun + 200:
            for holder in memtools.census().diff(before).holders(steps=200)[:1]:
                recorder.event("holder", str(holder))
        if step % 1000 == 999:
            with Phase(recorder, "eval"):
                torch.randn(6_000_000).sort()
            clean(recorder)


def clean(recorder: Recorder) -> None:
    before, begun = recorder.probe.rss() or 0, time.monotonic_ns()
    gc.collect()
    freed = before - (recorder.probe.rss() or 0)
    took = (time.monotonic_ns() - begun) / 1e6
    recorder.event("cleanup", f"gc: {took:.1f} ms, freed {max(0, freed) / 2**20:.1f} MiB", begun)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--limit-mib", type=int)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorder = Recorder(args.path, args.limit_mib and args.limit_mib * 2**20, args.kill)
    recorder.thread.start()
    train(recorder, args.leak, args.steps)
    recorder.stopped.set()
    recorder.thread.join()
    recorder.event("end", "exit 0")
    recorder.writer.close()


if __name__ == "__main__":
    main()

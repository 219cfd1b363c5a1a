"""Measurements of the examples, so that their loops contain only the training.

The demo compares two runs of an example by the lines that these print: each loss as an exact float,
and a hash of all samples.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

MIB = 2**20
F = TypeVar("F", bound=Callable[..., Any])


def peak_rss() -> int:
    """The most bytes of RAM that this process ever held, as the kernel knows it."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def rss() -> int:
    """The bytes of RAM that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def return_free_heap() -> None:
    """Give what malloc keeps of freed memory back to the system, in every variant: RSS then does
    not depend on when malloc does so by itself."""
    ctypes.CDLL(None).malloc_trim(0)


def fingerprint(tensor: Any) -> list[int]:
    """A hash of every bit of a tensor, as a meter takes samples."""
    return list(hashlib.sha256(tensor.numpy().tobytes()).digest())


def job_memory() -> int:
    """The bytes that this process and its workers hold now: pages that they share count once."""
    task = Path("/proc/self/task")
    children = [
        pid for thread in task.iterdir() for pid in (thread / "children").read_text().split()
    ]
    total = 0
    for pid in ["self", *children]:
        with suppress(OSError):  # a worker may end meanwhile
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += 1024 * int(rollup.split("\nPss:")[1].split()[0])
    return total


# --- a limit that is in force ---------------------------------------------------------------------


def size(text: str) -> int | None:
    """Bytes of "128 MiB"; None for "none"."""
    match = re.fullmatch(r"(\d+) ([MG])iB", text)
    if match is None and text != "none":
        raise argparse.ArgumentTypeError(f'like "128 MiB" or "1 GiB", or none, got {text!r}')
    return None if match is None else int(match[1]) * {"M": MIB, "G": 1024 * MIB}[match[2]]


def limit_data(size: int | None) -> None:
    """Limit what this process allocates from now on: beyond `size` bytes the kernel gives it
    nothing. Processes that it forks have the same limit, each for itself."""
    if size is None:
        return
    held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])  # in kB
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * held + size, hard))


class Meter:
    """Collects the losses, rewards and samples of a run, and what they cost.

    Args:
        options: the example's; `updates` says how many there are, `progress` whether to print more.
        held: returns the bytes that are held by what the example is about. None: nothing is asked.
        every: read the memory at each so many updates.
        trim: whether to call `return_free_heap` before it is read.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        held: Callable[[], int] | None = None,
        every: int = 1,
        trim: bool = True,
    ) -> None:
        self.options, self.held, self.every, self.trim = options, held, every, trim
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self.readings: list[tuple[int, int, int]] = []  # updates, RSS, held
        self.lengths: list[int] = []  # of all samples, in tokens
        self.samples = hashlib.sha256()
        self.sampling_cpu_seconds = 0.0
        self.began = time.perf_counter(), time.process_time()

    def sampling(self, function: F) -> F:
        """`function`, with the processor time of its calls added up."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.sampling_cpu_seconds += time.process_time() - began

        return timed  # type: ignore[return-value]

    def after_update(
        self, loss: float, answers: Sequence[list[int]] = (), rewards: Sequence[float] = ()
    ) -> None:
        """Record one update: its loss, the tokens of every sample, and their rewards."""
        self.losses.append(loss)
        if rewards:
            self.rewards.append(sum(rewards) / len(rewards))
        self.lengths += map(len, answers)
        self.samples.update(json.dumps(answers).encode())
        done, of = len(self.losses), self.options.updates
        if done % self.every == 0 or done >= of:
            if self.trim:
                return_free_heap()
            self.readings.append((done, rss(), 0 if self.held is None else self.held()))
        if self.options.progress or done % max(1, of // 6) == 0:
            state = f"RSS {rss() / MIB:.1f} MiB, "
            state += f"mean reward {self.rewards[-1]:.3f}, " if rewards else ""
            state += f"samples {self.samples.hexdigest()[:8]}, " if answers else ""
            print(f"update {done} of {of}, {state}loss {loss}", flush=True)

    def result(self) -> dict[str, Any]:
        """Everything as plain types, for a file of JSON.

        RSS counts a page as often as forks of a prompt map it: for a pool, it is an upper bound.
        """
        done, sizes, held = map(list, zip(*self.readings, strict=True))
        return {
            **vars(self.options),
            "losses": [loss.hex() for loss in self.losses],
            "final_loss": self.losses[-1],
            "rewards": self.rewards,
            "tokens": self.samples.hexdigest() if self.lengths else None,
            "lengths": [min(self.lengths, default=0), max(self.lengths, default=0)],
            "peak_rss_bytes": peak_rss(),
            "samples": {"update": done, "rss_bytes": sizes, "held_bytes": held},
            "sampling_cpu_seconds": self.sampling_cpu_seconds or None,
            "seconds": time.perf_counter() - self.began[0],
            "cpu_seconds": time.process_time() - self.began[1],
        }


class BatchMeter:
    """What a run costs, and what each of its updates consisted of.

    Args:
        options: the example's; `progress` says whether to print more.
        updates: how many there are.
        full: how many batches a full update has.
    """

    def __init__(self, options: argparse.Namespace, updates: int, full: int) -> None:
        self.options, self.of, self.full = options, updates, full
        self.losses: list[float] = []  # per atom, of each update
        self.updates: list[dict[str, Any]] = []
        self.remarks: list[str] = []  # one sentence each
        self.batches: list[tuple[str, float, int]] = []  # first molecule, mean loss, atoms
        self.molecules = 0  # of all updates
        self.rss: list[int] = []
        self.peaks: list[int] = []  # so far
        self.began = time.perf_counter()

    def after_batch(self, first: str, loss: float, atoms: int) -> None:
        """A mean loss. What begins at the same molecule was in vain, and what came after it."""
        before = [name for name, _, _ in self.batches]
        if first in before:
            del self.batches[before.index(first) :]
        self.batches.append((first, loss, atoms))

    def after_update(self, molecules: int) -> None:
        """An update of means: each batch counts as much as any other, and the full number."""
        atoms = [count for _, _, count in self.batches]
        scale = len(atoms) / self.full
        self.record(sum(atoms), molecules, scale, spread=max(atoms) / min(atoms))

    def after_window(self, report: Any, molecules: int) -> None:
        """An update by memtools: each atom counts once."""
        sizes = [retry.next_rows for retry in report.retries if retry.next_rows is not None]
        if sizes:
            self.remarks.append(
                f"Update {len(self.losses) + 1} ran out of memory as well, and went on with at "
                f"most {min(sizes):,} atoms at a time."
            )
        self.record(int(report.weight), molecules)

    def record(self, atoms: int, molecules: int, scale: float = 1.0, spread: float = 1.0) -> None:
        """`scale`: what the weights of its atoms add up to, 1 being right. `spread`: how many
        times as much one atom counts as another."""
        assert atoms == sum(count for _, _, count in self.batches)
        loss = sum(mean * count for _, mean, count in self.batches) / atoms
        self.batches.clear()
        self.losses.append(loss)
        self.molecules += molecules
        made_of = {"atoms": atoms, "molecules": molecules, "scale": scale, "spread": spread}
        self.updates.append(made_of)
        self.rss.append(rss())
        self.peaks.append(peak_rss())
        done = len(self.losses)
        if self.options.progress or done % max(1, self.of // 6) == 0:
            state = f"RSS {self.rss[-1] / MIB:.1f} MiB, loss {loss:.4f}"
            print(f"update {done} of {self.of}, {state}", flush=True)

    def result(self, ended: str, valid_loss: float | None, report: str) -> dict[str, Any]:
        return {
            **vars(self.options),
            "ended": ended,
            "remark": " ".join(self.remarks),
            "report": report,
            "losses": [loss.hex() for loss in self.losses],
            "valid_loss": valid_loss,
            "made_of": self.updates,
            "peak_rss_bytes": peak_rss(),
            "samples": {"rss_bytes": self.rss, "peak_bytes": self.peaks},
            "seconds": time.perf_counter() - self.began,
        }

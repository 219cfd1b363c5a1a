"""Jobs of several ranks, each a process of its own, over gloo."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, case: str, world: int, folder: Path) -> list[Any]:
    """What each rank of the worker module wrote down for this case."""
    outs = [folder / f"{case}.{rank}" for rank in range(world)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, case, str(folder / "rendezvous"), *outs],
        cwd=PROJECT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * world), done.stderr
    return [json.loads(out.read_text()) if out.exists() else None for out in outs]


class Meeting:
    """A place in the program that all ranks come to: none goes on before every other has come
    there or ended, whatever the machine runs first. Made before the ranks are forked: the pipe
    ends once nobody can write to it any more, and an end cannot be missed."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def leave(self) -> None:
        """For a process that does not come."""
        os.close(self._write)

    def come(self) -> None:
        self.leave()
        os.read(self._read, 1)


#: those that the ranks of a job still have before them: two of their own, and one for the case
_MEETINGS: list[Meeting] = []


def meet() -> None:
    """Waits until every rank that has not ended has called this as often. A rank that is to end
    early calls it first: gloo cannot connect to one that has ended, nor end a collective with it,
    so that the others could fail before the place at which they are to find out."""
    _MEETINGS.pop(0).come()


def fork_ranks(
    cases: dict[str, Callable[[int], Any]],
    *,
    ready: Callable[[], None] = lambda: None,
    backends: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """What a worker module does as a program: torch is imported once, and each rank is a child of
    this process. Prints how each ended. A case's backend is gloo unless `backends` has another."""
    case, rendezvous, *outs = sys.argv[1:]
    _MEETINGS[:] = [Meeting() for _ in range(3)]
    ranks = []
    for rank, out in enumerate(outs):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            code = 1
            try:
                ready()
                _work(cases[case], backends.get(case, "gloo"), rank, len(outs), rendezvous, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    for meeting in _MEETINGS:
        meeting.leave()
    print(*(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))


def _work(
    case: Callable[[int], Any], backend: str, rank: int, world: int, rendezvous: str, out: str
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    meet()  # none begins, and maybe ends, while another still connects to it
    result = case(rank)
    with open(out, "w") as file:
        json.dump(result, file)
    # torch cannot take a broken group apart
    if case.__name__ != "dead" and dist.is_initialized():
        meet()
        dist.destroy_process_group()

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

PROJECT = Path(__file__).resolve().parent.parent


def run_ranks(module: str, case: str, world: int, folder: Path) -> list[Any]:
    """What each rank of the worker module wrote down for this case."""
    outs = [folder / f"{case}.{rank}" for rank in range(world)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, case, str(folder / "rendezvous"), *outs],
        cwd=PROJECT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * world), done.stderr
    return [json.loads(out.read_text()) if out.exists() else None for out in outs]


def fork_ranks(
    cases: dict[str, Callable[[int], Any]],
    *,
    ready: Callable[[], None] = lambda: None,
    backends: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """What a worker module does as a program: torch is imported once, and each rank is a child of
    this process. Prints how each ended. A case's backend is gloo unless `backends` has another."""
    case, rendezvous, *outs = sys.argv[1:]
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
    result = case(rank)
    with open(out, "w") as file:
        json.dump(result, file)
    # torch cannot take a broken group apart
    if case.__name__ != "dead" and dist.is_initialized():
        dist.destroy_process_group()

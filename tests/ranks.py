"""Jobs of several ranks, each a process of its own, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent


def run_ranks(module: str, case: str, world: int, folder: Path) -> list[Any]:
    """What each rank of the worker module wrote down for this case."""
    outs = [folder / f"{case}.{rank}" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", module, case, str(rank), str(world),
             str(folder / "rendezvous"), str(out)],
            cwd=PROJECT, stderr=subprocess.PIPE, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, errors
    return [json.loads(out.read_text()) if out.exists() else None for out in outs]

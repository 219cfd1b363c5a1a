"""One rank of a small job on gloo: runs a case of this file and writes down what it got.

python -m tests.monitor.rankworker CASE RANK WORLD RENDEZVOUS OUT
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from memtools.distributed import RankMetrics, monitor_ranks
from tests.kit.ranks import fork_ranks


def plain(result: RankMetrics) -> dict[str, Any]:
    return {key: dataclasses.astuple(stat) for key, stat in result.items()}


def figures(rank: int) -> Any:
    """Rank 1 holds more, has a second device, and lacks a reading; NaN is none."""
    values = {"rss": 1e9 * (1 + 2 * rank), "same": 7.0, "nan": math.nan if rank else 4.0,
              "never": math.nan, "left": math.inf if rank else 10.0}  # fmt: skip
    return plain(monitor_ranks(values | ({"cuda1": 5.0} if rank else {"pressure": 1.0})))


def subset(rank: int) -> Any:
    """Of three ranks the last two: results have the ranks of the job."""
    group = dist.new_group([1, 2])
    try:
        return plain(monitor_ranks({"rss": float(rank)}, group))
    except ValueError as error:
        return str(error)


def too_much(rank: int) -> Any:
    """Both are told; and the next call works, so nobody was left behind."""
    values = {f"key {i}": 1.0 for i in range(100 if rank else 2)}
    try:
        return plain(monitor_ranks(values, max_bytes=64))
    except ValueError as error:
        return [str(error), plain(monitor_ranks({"a": float(rank)}))]


def one_collective(rank: int) -> Any:
    """How many collectives a call is: one, and it is an all_gather of 4 KiB and the length."""
    calls: list[list[Any]] = []
    gather = dist.all_gather

    def counted(tensors: Any, tensor: Any, group: Any = None) -> Any:
        calls.append([len(tensors), tensor.numel(), tensor.device.type])
        return gather(tensors, tensor, group=group)

    dist.all_gather = counted
    monitor_ranks({"a": 1.0})
    return calls


def together(rank: int) -> Any:
    """One after the other in one job."""
    return [figures(rank), too_much(rank), one_collective(rank)]


def dead(rank: int) -> Any:
    """Rank 1 ends without a word; rank 0 gets torch's error."""
    if rank == 1:
        os._exit(0)
    try:
        return plain(monitor_ranks({"a": 1.0}))
    except RuntimeError as error:
        return type(error).__name__


CASES: dict[str, Callable[[int], Any]] = {case.__name__: case for case in (together, subset, dead)}


if __name__ == "__main__":
    fork_ranks(CASES)

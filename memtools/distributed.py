"""The figures of all ranks: smallest, mean and largest reading of each, and which rank has it.

rank 0  {"memory/host_rss_bytes": 3.1e9, ...} --.  one all_gather of 4 KiB a rank
rank 1  {"memory/host_rss_bytes": 9.8e9, ...} --+--> RankMetrics, the same on every rank
rank 2  {"memory/host_rss_bytes": 3.0e9, ...} --'
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.metrics import MetricsSource, check_source
from memtools._base.number import as_float, whole_number
from memtools._base.ranks import device_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RankMetrics", "RankStat", "monitor_ranks"]

_LENGTH = 4  # bytes that hold the length of the text behind them


@dataclass(frozen=True, slots=True)
class RankStat:
    """A figure over the ranks that have it, in its own unit."""

    #: the smallest
    min: float
    #: the mean
    mean: float
    #: the largest
    max: float
    #: the (lowest) rank with the smallest
    min_rank: int
    #: that with the largest
    max_rank: int
    #: their number
    ranks: int


class RankMetrics(dict[str, RankStat]):
    """A RankStat for each figure. It has `metrics()`, for exporters."""

    def metrics(self, expert: bool = False) -> dict[str, float]:
        """Return the statistics with keys such as `memory/host_rss_bytes/max`.

        Args:
            expert: return `/min`, `/mean`, `/max`, `/min_rank`, `/max_rank` and `/ranks`, not only
                `/mean`, `/max` and `/max_rank`.
        """
        usual = ("mean", "max", "max_rank")
        parts = ("min", "mean", "max", "min_rank", "max_rank", "ranks") if expert else usual
        return {f"{key}/{part}": getattr(s, part) for key, s in self.items() for part in parts}

    def __str__(self) -> str:
        return "\n".join(
            f"{key}: {s.min:,.6g} (rank {s.min_rank}) to {s.max:,.6g} (rank {s.max_rank}), "
            f"mean {s.mean:,.6g} of {s.ranks}"
            for key, s in self.items()
        )


def monitor_ranks(
    source: MetricsSource | Mapping[str, float],
    group: ProcessGroup | None = None,
    *,
    max_bytes: int = 4096,
) -> RankMetrics:
    """Gather the figures of all ranks of a group; every rank gets the same result.

    All ranks must call it at the same point: it is one all_gather of `max_bytes` per rank, in host
    memory (gloo) or on the current device, which is waited for (nccl). Ranks may have different
    keys. Without a process group this process is rank 0.

    **If a rank has died, the others wait until the group's timeout and then get torch's error.**
    For a shorter one pass `dist.new_group(backend="gloo", timeout=timedelta(seconds=30))`.

    Args:
        source: an object with `metrics()`, or a mapping of figures.
        group: the process group. None: all ranks.
        max_bytes: room for the figures of a rank as text, at least 64, equal on all ranks.

    Raises ValueError on every rank, if one rank's figures exceed `max_bytes`, or on this rank, if
    it is not in the group.
    """
    max_bytes = whole_number("max_bytes", max_bytes, 64)
    if not isinstance(source, Mapping):
        check_source(source, "monitor_ranks()")
    figures = source if isinstance(source, Mapping) else source.metrics()
    values = {key: as_float(value) for key, value in figures.items()}
    dist = bridge.process_group()
    if dist is None:
        return _merged([(0, values)])
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group; call monitor_ranks() on its members only")
    rows = _gathered(dist, group, _packed(values, max_bytes))
    ranks = [dist.get_global_rank(group, i) for i in range(len(rows))]
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    over = [f"rank {r} has {n:,}" for r, n in zip(ranks, lengths, strict=True) if n > max_bytes]
    if over:
        raise ValueError(
            f"the figures take more than max_bytes={max_bytes:,} bytes: {', '.join(over)}; "
            "pass more on every rank, or fewer figures"
        )
    texts = [row[_LENGTH : _LENGTH + n] for row, n in zip(rows, lengths, strict=True)]
    return _merged([(rank, json.loads(text)) for rank, text in zip(ranks, texts, strict=True)])


def _packed(values: dict[str, float], most: int) -> bytearray:
    """A row to send: the length of the text, then the text, which is JSON. Of a text that is too
    long only the length is sent: to raise here would leave the other ranks waiting."""
    text = json.dumps(values).encode()
    row = bytearray(_LENGTH + most)
    row[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")
    if len(text) <= most:
        row[_LENGTH : _LENGTH + len(text)] = text
    return row


def _gathered(dist: Any, group: Any, row: bytearray) -> list[bytes]:
    """The rows of all ranks, in the group's order, by one collective."""
    torch = bridge.connect().torch
    device = device_of(group)
    count = dist.get_world_size(group)
    data = bytearray(count * len(row))
    host = torch.frombuffer(data, dtype=torch.uint8)
    every = host if device == "cpu" else torch.empty_like(host, device=device)
    mine = torch.frombuffer(row, dtype=torch.uint8).to(device)
    dist.all_gather(list(every.split(len(row))), mine, group=group)
    if every is not host:
        host.copy_(every)
    return [bytes(data[i * len(row) : (i + 1) * len(row)]) for i in range(count)]


def _merged(rows: list[tuple[int, dict[str, float]]]) -> RankMetrics:
    readings: dict[str, list[tuple[float, int]]] = {}
    for rank, values in rows:
        for key, value in values.items():
            if not math.isnan(value):
                readings.setdefault(key, []).append((value, rank))
    return RankMetrics({key: _stat(found) for key, found in readings.items()})


def _stat(found: list[tuple[float, int]]) -> RankStat:
    least = min(found)
    most = max(found, key=lambda reading: (reading[0], -reading[1]))
    mean = sum(value for value, _ in found) / len(found)
    return RankStat(least[0], mean, most[0], least[1], most[1], len(found))

"""A made-up torch.cuda for MemoryMonitor's tests: counters like the caching allocator's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memtools._base import torch as bridge

TOTAL = 24 << 30


class FakeCuda:
    """Devices whose allocations a test makes; refuses what would make a context.

    now ├── allocated ──┤ cached ├─ others ─┤           free            ├── total
        └────────── reserved ────┘
    """

    def __init__(self, count: int = 2) -> None:
        self.count, self.ready, self.calls = count, True, 0
        self.now, self.high = [0] * count, [0] * count
        #: bytes of each device that torch's allocator keeps beside what is allocated
        self.cached = [0] * count
        #: bytes of each device that others have: other programs, and this one's CUDA context
        self.others = [0] * count
        #: bytes that each device has
        self.total = [TOTAL] * count
        #: bytes that torch has pinned on the host
        self.pinned = 0
        self.capturing = False
        #: what was asked of it that is to come in order
        self.order: list[str] = []

    def allocate(self, device: int, size: int) -> None:
        self.now[device] += size
        self.high[device] = max(self.high[device], self.now[device])

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.ready

    def _check(self) -> None:
        assert self.ready, "this would have made a CUDA context"
        self.calls += 1

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        self._check()
        now, high = self.now[device], self.high[device]
        held = {"current": now + self.cached[device], "peak": high}
        return {
            "allocated_bytes": {"all": {"current": now, "peak": high}},
            "reserved_bytes": {"all": held},
            "inactive_split_bytes": {"all": {"current": 5, "peak": 5}},
        }

    def host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        self._check()
        return {"allocated_bytes": {"current": self.pinned, "peak": self.pinned}}

    def reset_peak_memory_stats(self, device: int) -> None:
        self._check()
        self.high[device] = self.now[device]

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self._check()
        taken = self.now[device] + self.cached[device] + self.others[device]
        return max(0, self.total[device] - taken), self.total[device]

    def current_device(self) -> int:
        self._check()
        return 0

    def empty_cache(self) -> None:
        self._check()
        assert not self.capturing, "this would have spoiled a graph"
        self.order.append("empty_cache")
        self.cached = [0] * self.count

    def synchronize(self, device: int) -> None:
        self._check()
        assert not self.capturing, "this would have spoiled a graph"
        self.order.append(f"synchronize {device}")

    def is_current_stream_capturing(self) -> bool:
        self._check()
        return self.capturing


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Where memtools finds torch, there is this and nothing else."""
    bridge.connect()  # the native side is connected to the real one, which has no devices
    fake = FakeCuda()
    torch = SimpleNamespace(cuda=fake, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setattr(bridge, "loaded", lambda: torch)
    monkeypatch.setattr(bridge, "connect", lambda: SimpleNamespace(torch=torch))
    return fake

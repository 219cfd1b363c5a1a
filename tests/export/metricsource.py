"""Sources of figures for the tests of what takes them."""

from __future__ import annotations

import math


class Figures:
    """What `metrics()` says is what the test put here; it counts how often it was asked."""

    def __init__(self, **values: float) -> None:
        self.values = {f"memory/{key}": value for key, value in values.items()}
        self.asked: list[bool] = []

    def metrics(self, expert: bool = False) -> dict[str, float]:
        self.asked.append(expert)
        extra = {"memory/samples_total": 42.0} if expert else {}
        return {**self.values, **extra}


def usual() -> Figures:
    """Of a machine with two devices, and with no end in sight."""
    return Figures(
        host_rss_bytes=3.0 * 2**30,
        host_percent=37.5,
        pressure_percent=math.nan,
        steps_left=math.inf,
        cuda0_allocated_bytes=1e9,
        cuda1_allocated_bytes=2e9,
    )

"""Calls of memtools._core's Sampler, good and bad, for test_leaks.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]


FOLDER = tempfile.TemporaryDirectory()
SMALL = {"rows": 4, "buckets": 2, "events": 2, "phases": 2}
COLUMNS = [
    *[("step", "count"), ("rss", "B"), ("private", "B"), ("swap", "B"), ("cgroup_used", "B")],
    *[("cgroup_limit", "B"), ("available", "B"), ("pressure", "1/100 %"), ("heap_used", "B")],
    *[("children", "count"), ("children_private", "B"), ("process", "B"), ("job", "B")],
    ("shm", "B"),
]


def columns(devices: int = 0) -> list[tuple[str, str]]:
    """What a sampler writes, in its order."""
    parts = ("allocated", "reserved", "free", "total")
    return COLUMNS + [(f"cuda{i}_{part}", "B") for i in range(devices) for part in parts]


def recorded() -> None:
    path = os.path.join(FOLDER.name, "case.mem")
    with _core.RecordWriter(path, columns(2), **SMALL) as writer:
        sampler = _core.Sampler(10**7, writer, devices=2, limit=1)
        sampler.watch(1)
        sampler.start()
        sampler.stop()


def forgotten() -> None:
    sampler = _core.Sampler(10**7)
    sampler.start()
    refused(RuntimeError, sampler.start)


def full() -> None:
    sampler = _core.Sampler(10**7)
    for _ in range(32):
        sampler.watch(0.5)
    refused(RuntimeError, lambda: sampler.watch(0.5))


def with_devices() -> None:
    sampler = _core.Sampler(10**7, devices=1)
    sampler.start()
    sampler.stop()
    assert sampler.devices() == [(None,) * 6]


SAMPLER = _core.Sampler(10**7)  # without devices: which CUDA runtime they use is a fixture's choice
SAMPLER.start()
SAMPLER.stop()

CASES: dict[str, list[Case]] = {
    "device_memory": [
        lambda: _core.device_memory(0),
        lambda: refused(ValueError, lambda: _core.device_memory(-1)),
        lambda: refused(TypeError, lambda: _core.device_memory("x")),  # type: ignore[arg-type]
    ],
    "Sampler": [
        recorded,
        forgotten,
        lambda: _core.Sampler(10**7, None, "/nowhere", 8, 2**40),
        lambda: refused(ValueError, lambda: _core.Sampler(0)),
        lambda: refused(TypeError, lambda: _core.Sampler("x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Sampler(10**7, 1)),  # type: ignore[arg-type]
        lambda: refused(ValueError, lambda: _core.Sampler(10**7, None, "/" + "x" * 5000)),
        lambda: refused(ValueError, lambda: _core.Sampler(10**7, devices=9)),
        lambda: refused(ValueError, lambda: _core.Sampler(10**7, limit=0)),
        lambda: refused(ValueError, lambda: _core.Sampler(10**7, limit=2**64)),
        lambda: refused(TypeError, lambda: _core.Sampler(10**7, limit="x")),  # type: ignore[arg-type]
    ],
    "Sampler.__new__": [lambda: _core.Sampler(10**7)],
    "Sampler.start": [forgotten],
    "Sampler.stop": [lambda: (SAMPLER.start(), SAMPLER.stop(), SAMPLER.stop())],
    "Sampler.step": [
        SAMPLER.step,
        lambda: SAMPLER.step(3),
        lambda: refused(ValueError, lambda: SAMPLER.step(-1)),
        lambda: refused(TypeError, lambda: SAMPLER.step("x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SAMPLER.step(1, 2)),  # type: ignore[call-arg]
    ],
    "Sampler.watch": [
        lambda: SAMPLER.unwatch(SAMPLER.watch(0.5)),
        full,
        lambda: refused(ValueError, lambda: SAMPLER.watch(0)),
        lambda: refused(TypeError, lambda: SAMPLER.watch("x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SAMPLER.watch()),  # type: ignore[call-arg]
        lambda: refused(TypeError, lambda: SAMPLER.watch(0.5, "x")),  # type: ignore[arg-type]
        lambda: refused(ValueError, lambda: SAMPLER.watch(0.5, 0)),
        lambda: refused(ValueError, lambda: SAMPLER.watch(0.5, -1)),
    ],
    "Sampler.unwatch": [
        lambda: refused(ValueError, lambda: SAMPLER.unwatch(31)),
        lambda: refused(TypeError, lambda: SAMPLER.unwatch("x")),  # type: ignore[arg-type]
    ],
    "Sampler.passed_at": [
        lambda: SAMPLER.passed_at(31),
        lambda: refused(ValueError, lambda: SAMPLER.passed_at(32)),
        lambda: refused(TypeError, lambda: SAMPLER.passed_at("x")),  # type: ignore[arg-type]
    ],
    "Sampler.latest": [SAMPLER.latest, lambda: _core.Sampler(10**7).latest()],
    "Sampler.devices": [with_devices, SAMPLER.devices, lambda: _core.Sampler(10**7).devices()],
    "Sampler.swap_rise": [SAMPLER.swap_rise, lambda: _core.Sampler(10**7).swap_rise()],
    "Sampler.limit": [SAMPLER.limit, lambda: _core.Sampler(10**7, root="/nowhere").limit()],
    "Sampler.used": [SAMPLER.used],
    "Sampler.peak": [SAMPLER.peak],
}
for _name in ["running", "step_count", "samples", "cpu_ns", "interval_ns"]:
    CASES[f"Sampler.{_name}"] = [lambda name=_name: getattr(SAMPLER, name)]  # type: ignore[misc]

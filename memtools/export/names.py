"""What a figure is called in Prometheus, by its rules: base units, the unit in the name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PHASE = re.compile(r"phase/(?P<phase>.+)/(?P<after>\w+)", re.S)  # a name may have line breaks
_DEVICE = re.compile(r"(?P<before>.*?)cuda(?P<index>\d+)_(?P<after>.+)")
# The base unit for a unit at the end of a key, and what to divide by.
_UNITS = {"percent": ("ratio", 100.0), "ms": ("seconds", 1e3), "us": ("seconds", 1e6),
          "ns": ("seconds", 1e9)}  # fmt: skip

_HELP = {
    "host_rss_bytes": "Resident memory of the process.",
    "host_limit_bytes": "The lowest limit over the process's control groups, else the machine.",
    "host_ratio": "Share of that limit which is in use.",
    "host_peak_bytes": "The most that was ever resident.",
    "host_available_bytes": "What the machine can give without swapping.",
    "children_bytes": "Private memory of all child processes.",
    "job_bytes": "Memory of the process, its descendants and their shared memory, each page once.",
    "job_swap_bytes": "Memory of the process and its descendants that is swapped out.",
    "shm_bytes": "Shared memory of the process and its descendants.",
    "pinned_bytes": "Host memory of the process that is pinned in blocks of torch's allocator.",
    "pressure_ratio": "Share of the last 10 s in which something waited for memory.",
    "leak_bytes_per_step": "How fast memory grows, where the leak test calls it a leak.",
    "steps_left": "Training steps until the limit, by the forecast.",
    "cuda_allocated_bytes": "Device memory in live tensors.",
    "cuda_reserved_bytes": "Device memory that torch's allocator holds.",
    "cuda_free_bytes": "Device memory that nobody holds.",
    "cuda_total_bytes": "Memory of the device.",
    "phase_peak_bytes": "The most that was resident during a passage of the phase.",
    "phase_seconds": "Time in all passages of the phase.",
}


class Sample(NamedTuple):
    """One value, with the name and labels that Prometheus sees."""

    name: str
    help: str
    labels: dict[str, str]
    value: float
    is_counter: bool


def samples_of(metrics: Mapping[str, float]) -> Iterator[Sample]:
    """Each figure once: of two that come to the same name and labels, the first."""
    seen: dict[str, tuple[str, ...]] = {}  # a name has the same labels every time
    taken: set[tuple[str, ...]] = set()
    for key, value in metrics.items():
        sample = sample_of(key, float(value))
        identity = (sample.name, *sample.labels.values())
        if seen.setdefault(sample.name, tuple(sample.labels)) != tuple(sample.labels):
            continue
        if identity not in taken:
            taken.add(identity)
            yield sample


def sample_of(key: str, value: float) -> Sample:
    stem, labels = key.removeprefix("memory/"), {}
    if phase := _PHASE.fullmatch(stem):
        stem, labels = f"phase_{phase['after']}", {"phase": phase["phase"]}
    elif device := _DEVICE.fullmatch(stem):
        stem, labels = f"{device['before']}cuda_{device['after']}", {"device": device["index"]}
    body, _, unit = stem.rpartition("_")
    if unit in _UNITS:
        word, divisor = _UNITS[unit]
        stem, value = f"{body}_{word}" if body else word, value / divisor
    stem = re.sub(r"[^a-zA-Z0-9_]+", "_", stem).strip("_") or "value"
    text = _HELP.get(stem, f"{key} as MemoryMonitor.metrics() has it.")
    return Sample(f"memtools_{stem}", text, labels, value, stem.endswith("_total"))


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """ValueError for a name that Prometheus does not take, or that is used here."""
    if not isinstance(labels, Mapping):
        raise TypeError(f'labels is a dict like {{"rank": "0"}}, got {type(labels).__name__}')
    for name in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in ("device", "phase"):
            raise ValueError(
                f"{name!r} is no name for a label: letters, digits and _, not first a digit or __, "
                "and neither device nor phase, which are taken"
            )
    return {name: str(value) for name, value in labels.items()}

"""memtools' own exceptions. Built-in ones (TypeError, ValueError, IndexError) are raised where they
say it all."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DeviceError",
    "DeviceMemoryPressure",
    "HostMemoryPressure",
    "MemoryPressure",
    "MemtoolsError",
]


class MemtoolsError(Exception):
    """The base class of memtools' own exceptions."""


class BudgetError(MemtoolsError, MemoryError):
    """Raised where a configured limit would be exceeded. The message says how much was asked for,
    what is in use by whom, the limit, and what would help."""


class DeviceError(MemtoolsError, RuntimeError):
    """Raised where a call of the device failed, or there is no device or no driver for it."""


class MemoryPressure(MemtoolsError):  # noqa: N818 - the public name
    """Raised by MemoryMonitor.guard(): memory is about to run out, on the host
    (HostMemoryPressure) or on a device (DeviceMemoryPressure).

    It comes out of `monitor.step()`, between two steps, so that the program can save a checkpoint
    before an allocation fails or the system kills the process.
    """


class HostMemoryPressure(MemoryPressure):
    """Raised by MemoryMonitor.guard(): host memory is about to run out, as MemoryPressure says."""


class DeviceMemoryPressure(MemoryPressure):
    """Raised by MemoryMonitor.guard(device=...): the memory of a CUDA device is about to run out,
    as MemoryPressure says."""

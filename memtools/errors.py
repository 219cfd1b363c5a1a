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
    """Raised if a configured limit would be exceeded. The message has the bytes asked for and in
    use, the holders, the limit and the remedy."""


class DeviceError(MemtoolsError, RuntimeError):
    """Raised if a device call fails, or if there is no device or driver."""


class MemoryPressure(MemtoolsError):  # noqa: N818 - the public name
    """Raised by MemoryMonitor.guard() before memory runs out, on the host (HostMemoryPressure) or a
    device (DeviceMemoryPressure).

    It comes out of `monitor.step()`, between steps, so that the program can save a checkpoint.
    """


class HostMemoryPressure(MemoryPressure):
    """Raised by MemoryMonitor.guard() before host memory runs out."""


class DeviceMemoryPressure(MemoryPressure):
    """Raised by MemoryMonitor.guard(device=...) before the memory of a CUDA device runs out."""

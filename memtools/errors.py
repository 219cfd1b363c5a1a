"""memtools' own exceptions. Built-in ones (TypeError, ValueError, IndexError) are raised where they
say it all."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DeviceError",
    "HostMemoryPressure",
    "MemtoolsError",
    "ShimUnavailable",
]


class MemtoolsError(Exception):
    """The base class of memtools' own exceptions."""


class BudgetError(MemtoolsError, MemoryError):
    """Raised where a configured limit would be exceeded. The message says how much was asked for,
    what is in use by whom, the limit, and what would help."""


class DeviceError(MemtoolsError, RuntimeError):
    """Raised where a call of the device failed, or there is no device or no driver for it."""


class HostMemoryPressure(MemtoolsError):  # noqa: N818 - the public name
    """Raised by MemoryMonitor.guard(): host memory is about to run out.

    It comes out of `monitor.step()` on the main thread, between two steps, so that the program can
    save a checkpoint before the system kills the process.
    """


class ShimUnavailable(MemtoolsError, RuntimeError):  # noqa: N818 - the public name
    """Raised where only memtools._torch can do what was asked, and it is not installed or was built
    for another torch."""

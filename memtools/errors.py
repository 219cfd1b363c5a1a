"""memtools' own exceptions. Where a built-in type says it all (TypeError, ValueError, IndexError),
that is what is raised."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DeviceError",
    "HostMemoryPressure",
    "MemtoolsError",
    "ShimUnavailable",
]


class MemtoolsError(Exception):
    """Base of every exception that is memtools' own."""


class BudgetError(MemtoolsError, MemoryError):
    """A configured limit would be exceeded. The message says asked, used and limit, in bytes."""


class DeviceError(MemtoolsError, RuntimeError):
    """A device call failed, or there is no device runtime."""


class HostMemoryPressure(MemtoolsError):  # noqa: N818 - the public name
    """A guard of a MemoryMonitor: host memory is about to run out.

    Raised out of `monitor.step()` on the main thread, between two steps, so that a checkpoint can
    be saved before the system kills the process.
    """


class ShimUnavailable(MemtoolsError, RuntimeError):  # noqa: N818 - the public name
    """Only memtools._torch can do this, and it is not there or was built for another torch."""

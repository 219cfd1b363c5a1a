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
    """Raised by a guard of a MemoryMonitor in `step()`, before memory runs out, so that the program
    can save a checkpoint."""


class HostMemoryPressure(MemoryPressure):
    """Raised before host memory runs out."""


class DeviceMemoryPressure(MemoryPressure):
    """Raised before the memory of a CUDA device runs out."""

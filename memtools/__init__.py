"""memtools keeps a PyTorch training loop inside its memory, and shows that it does.

`import memtools` needs neither torch nor numpy; torch is connected when the first tensor comes.
"""

import sys as _sys
from importlib import import_module as _import_module

if "t" in _sys.abiflags:
    raise ImportError(
        "memtools does not run on free-threaded Python: its C code relies on the global "
        "interpreter lock; use the standard build of Python"
    )
# The modules that define the public names. A module is loaded when one of its names is first used:
# `memtools doctor` must run where memtools._core does not load. __init__.pyi says the same to type
# checkers, and a test compares the two.
_NAMES = {
    "_base.devices": "DeviceMemory device_memory",
    "_base.handle": "Handle",
    "_census.census": "Census census",
    "_census.holders": "Holder holder_of",
    "_version": "__version__",
    "_allocators.settings": "allocator_settings",
    "_budget": "Budget",
    "_cleanup.generation": "generation",
    "_cleanup.managed": "managed",
    "_cleanup.policy": "CleanupPolicy",
    "_cleanup.report": "PolicyReport",
    "errors": (
        "BudgetError DeviceError DeviceMemoryPressure HostMemoryPressure MemoryPressure "
        "MemtoolsError"
    ),
    "_gate.aux_loss": "AuxLoss",
    "_gate.history": "GateHistory",
    "_gate.stats": "GateStats",
    "_grad.accumulator": "GradAccumulator",
    "_grad.checkpoint": "checkpoint_layers",
    "_grad.norm": "clip_grad_norm_ grad_norm",
    "_grad.report": "WindowReport",
    "_kv.pool": "KVLease KVPool KVStats",
    "_leak.detector": "LeakDetector",
    "_leak.finding": "LeakFinding",
    "_monitor.guards": "Pressure",
    "_monitor.host": "HostMemory host_memory",
    "_monitor.monitor": "MemoryMonitor",
    "_monitor.phases": "Phase",
    "_monitor.readings": "Headroom",
    "_plan.run": "plan",
    "_record.reader": "read_record",
    "_record.record": "Record",
    "_trajectory.settings": "UpdateSettings",
    "_trajectory.store": "TrajectoryStore",
    "integrations.use": "use",
}
# Subpackages that are loaded when they are first named, as after `import memtools`.
_MODULES = ("data", "distributed", "export", "grad", "integrations", "report", "testing", "types")
_HOMES = {name: f"memtools.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _import_module(f"memtools.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'memtools' has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})

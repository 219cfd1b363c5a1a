"""memtools keeps a PyTorch training loop inside its memory, and shows that it does.

`import memtools` needs neither torch nor numpy; torch is connected when the first tensor comes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from memtools._version import __version__
from memtools.errors import (
    BudgetError,
    DeviceError,
    HostMemoryPressure,
    MemtoolsError,
    ShimUnavailable,
)

if TYPE_CHECKING:
    from memtools._accreport import AccumulatorReport, WindowReport
    from memtools._accumulate import GradAccumulator
    from memtools._allocator import AllocatorSettings, allocator_settings
    from memtools._aux_loss import AuxLoss
    from memtools._budget import Budget, BudgetReport
    from memtools._census import Census, Growth, census
    from memtools._checkpointing import CheckpointedLayers, checkpoint_layers
    from memtools._generation import generation
    from memtools._gradnorm import clip_grad_norm_, grad_norm
    from memtools._history import GateHistory
    from memtools._holders import Holder, holder_of
    from memtools._hostmem import HostMemory, host_memory
    from memtools._kvpool import KVLease, KVPool, KVStats
    from memtools._leaks import LeakDetector, LeakVerdict, StepsLeft
    from memtools._managed import managed
    from memtools._monitor import MemoryMonitor
    from memtools._policy import CleanupPolicy
    from memtools._policy_report import PolicyReport
    from memtools._record import Record, read_record
    from memtools._stats import GateStats

__all__ = [
    "AccumulatorReport",
    "AllocatorSettings",
    "AuxLoss",
    "Budget",
    "BudgetError",
    "BudgetReport",
    "Census",
    "CheckpointedLayers",
    "CleanupPolicy",
    "DeviceError",
    "GateHistory",
    "GateStats",
    "GradAccumulator",
    "Growth",
    "Holder",
    "HostMemory",
    "HostMemoryPressure",
    "KVLease",
    "KVPool",
    "KVStats",
    "LeakDetector",
    "LeakVerdict",
    "MemoryMonitor",
    "MemtoolsError",
    "PolicyReport",
    "Record",
    "ShimUnavailable",
    "StepsLeft",
    "WindowReport",
    "__version__",
    "allocator_settings",
    "census",
    "checkpoint_layers",
    "clip_grad_norm_",
    "generation",
    "grad_norm",
    "holder_of",
    "host_memory",
    "managed",
    "read_record",
]

# Loaded at first use: where memtools._core does not load, `memtools doctor` must still say so.
_LATER = {
    "AccumulatorReport": "_accreport",
    "AllocatorSettings": "_allocator",
    "AuxLoss": "_aux_loss",
    "Budget": "_budget",
    "BudgetReport": "_budget",
    "Census": "_census",
    "CheckpointedLayers": "_checkpointing",
    "CleanupPolicy": "_policy",
    "GateHistory": "_history",
    "GateStats": "_stats",
    "GradAccumulator": "_accumulate",
    "Growth": "_census",
    "Holder": "_holders",
    "HostMemory": "_hostmem",
    "KVLease": "_kvpool",
    "KVPool": "_kvpool",
    "KVStats": "_kvpool",
    "LeakDetector": "_leaks",
    "LeakVerdict": "_leaks",
    "MemoryMonitor": "_monitor",
    "PolicyReport": "_policy_report",
    "Record": "_record",
    "StepsLeft": "_leaks",
    "WindowReport": "_accreport",
    "allocator_settings": "_allocator",
    "census": "_census",
    "checkpoint_layers": "_checkpointing",
    "clip_grad_norm_": "_gradnorm",
    "generation": "_generation",
    "grad_norm": "_gradnorm",
    "holder_of": "_holders",
    "host_memory": "_hostmem",
    "managed": "_managed",
    "read_record": "_record",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'memtools' has no attribute {name!r}")
    value = getattr(import_module(f"memtools.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})

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
    from memtools._census.census import (
        Census,
        GroupGrowth,
        Growth,
        TensorGroup,
        TypeGrowth,
        census,
    )
    from memtools._census.holders import Holder, holder_of
    from memtools._census.objects import TensorKind
    from memtools.allocators.settings import AllocatorSettings, allocator_settings
    from memtools.budget import Budget, BudgetReport
    from memtools.cleanup.generation import generation
    from memtools.cleanup.managed import managed
    from memtools.cleanup.policy import CleanupPolicy
    from memtools.cleanup.report import PolicyReport
    from memtools.gate.aux_loss import AuxLoss
    from memtools.gate.history import GateHistory
    from memtools.gate.stats import GateStats
    from memtools.grad.accumulator import GradAccumulator
    from memtools.grad.checkpoint import CheckpointedLayers, checkpoint_layers
    from memtools.grad.norm import clip_grad_norm_, grad_norm
    from memtools.grad.report import AccumulatorReport, WindowReport
    from memtools.kv.pool import KVLease, KVPool, KVStats
    from memtools.leak.detector import LeakDetector, LeakVerdict, StepsLeft
    from memtools.monitor.guards import Handle, Pressure
    from memtools.monitor.host import HostMemory, host_memory
    from memtools.monitor.leakwatch import FillVerdict
    from memtools.monitor.monitor import MemoryMonitor
    from memtools.monitor.phases import Phase, PhaseTotals
    from memtools.record.record import Record, read_record

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
    "FillVerdict",
    "GateHistory",
    "GateStats",
    "GradAccumulator",
    "GroupGrowth",
    "Growth",
    "Handle",
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
    "Phase",
    "PhaseTotals",
    "PolicyReport",
    "Pressure",
    "Record",
    "ShimUnavailable",
    "StepsLeft",
    "TensorGroup",
    "TensorKind",
    "TypeGrowth",
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
    "AccumulatorReport": "grad.report",
    "AllocatorSettings": "allocators.settings",
    "AuxLoss": "gate.aux_loss",
    "Budget": "budget",
    "BudgetReport": "budget",
    "Census": "_census.census",
    "CheckpointedLayers": "grad.checkpoint",
    "CleanupPolicy": "cleanup.policy",
    "FillVerdict": "monitor.leakwatch",
    "GateHistory": "gate.history",
    "GateStats": "gate.stats",
    "GradAccumulator": "grad.accumulator",
    "GroupGrowth": "_census.census",
    "Growth": "_census.census",
    "Handle": "monitor.guards",
    "Holder": "_census.holders",
    "HostMemory": "monitor.host",
    "KVLease": "kv.pool",
    "KVPool": "kv.pool",
    "KVStats": "kv.pool",
    "LeakDetector": "leak.detector",
    "LeakVerdict": "leak.detector",
    "MemoryMonitor": "monitor.monitor",
    "Phase": "monitor.phases",
    "PhaseTotals": "monitor.phases",
    "PolicyReport": "cleanup.report",
    "Pressure": "monitor.guards",
    "Record": "record.record",
    "StepsLeft": "leak.detector",
    "TensorGroup": "_census.census",
    "TensorKind": "_census.objects",
    "TypeGrowth": "_census.census",
    "WindowReport": "grad.report",
    "allocator_settings": "allocators.settings",
    "census": "_census.census",
    "checkpoint_layers": "grad.checkpoint",
    "clip_grad_norm_": "grad.norm",
    "generation": "cleanup.generation",
    "grad_norm": "grad.norm",
    "holder_of": "_census.holders",
    "host_memory": "monitor.host",
    "managed": "cleanup.managed",
    "read_record": "record.record",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'memtools' has no attribute {name!r}")
    value = getattr(import_module(f"memtools.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})

"""The types of what calls of memtools return, for annotations and isinstance().

Programs construct none of them. `import memtools` does not import this module.
"""

from memtools._base.malloc import Heap as Heap
from memtools._census.census import GroupGrowth as GroupGrowth
from memtools._census.census import Growth as Growth
from memtools._census.census import TensorGroup as TensorGroup
from memtools._census.census import TypeGrowth as TypeGrowth
from memtools._census.holders import TensorKind as TensorKind
from memtools.allocators.settings import AllocatorSettings as AllocatorSettings
from memtools.allocators.settings import CudaAllocator as CudaAllocator
from memtools.allocators.settings import CudaDevice as CudaDevice
from memtools.allocators.settings import HostAllocator as HostAllocator
from memtools.allocators.settings import Setting as Setting
from memtools.budget import BudgetReport as BudgetReport
from memtools.budget import Holding as Holding
from memtools.cleanup.engine import Cleaned as Cleaned
from memtools.cleanup.engine import CleanupCall as CleanupCall
from memtools.cleanup.report import ActionReport as ActionReport
from memtools.cleanup.report import CycleReport as CycleReport
from memtools.grad.checkpoint import CheckpointedLayers as CheckpointedLayers
from memtools.grad.report import AccumulatorReport as AccumulatorReport
from memtools.grad.report import Retry as Retry
from memtools.leak.detector import LeakVerdict as LeakVerdict
from memtools.leak.detector import StepsLeft as StepsLeft
from memtools.monitor.phases import PhaseTotals as PhaseTotals
from memtools.record.record import Buckets as Buckets
from memtools.record.record import Column as Column
from memtools.record.record import RecordEvent as RecordEvent
from memtools.record.record import RecordPhase as RecordPhase
from memtools.record.record import Samples as Samples
from memtools.trajectory.epochs import TrajectoryChunk as TrajectoryChunk
from memtools.trajectory.epochs import TrajectoryEpoch as TrajectoryEpoch
from memtools.trajectory.epochs import TrajectoryEpochs as TrajectoryEpochs
from memtools.trajectory.store import TrajectoryStats as TrajectoryStats

__all__ = [
    "AccumulatorReport",
    "ActionReport",
    "AllocatorSettings",
    "Buckets",
    "BudgetReport",
    "CheckpointedLayers",
    "Cleaned",
    "CleanupCall",
    "Column",
    "CudaAllocator",
    "CudaDevice",
    "CycleReport",
    "GroupGrowth",
    "Growth",
    "Heap",
    "Holding",
    "HostAllocator",
    "LeakVerdict",
    "PhaseTotals",
    "RecordEvent",
    "RecordPhase",
    "Retry",
    "Samples",
    "Setting",
    "StepsLeft",
    "TensorGroup",
    "TensorKind",
    "TrajectoryChunk",
    "TrajectoryEpoch",
    "TrajectoryEpochs",
    "TrajectoryStats",
    "TypeGrowth",
]

"""The types of what calls of memtools return, for annotations and isinstance().

Programs construct none of them. `import memtools` does not import this module.
"""

from memtools._allocators.settings import AllocatorSettings as AllocatorSettings
from memtools._allocators.settings import CudaAllocator as CudaAllocator
from memtools._allocators.settings import CudaDevice as CudaDevice
from memtools._allocators.settings import HostAllocator as HostAllocator
from memtools._allocators.settings import Setting as Setting
from memtools._base.malloc import Heap as Heap
from memtools._base.peak import Lowered as Lowered
from memtools._base.peak import Part as Part
from memtools._budget import BudgetReport as BudgetReport
from memtools._budget import Holding as Holding
from memtools._census.census import GroupGrowth as GroupGrowth
from memtools._census.census import Growth as Growth
from memtools._census.census import TensorGroup as TensorGroup
from memtools._census.census import TypeGrowth as TypeGrowth
from memtools._census.holders import TensorKind as TensorKind
from memtools._cleanup.engine import Cleaned as Cleaned
from memtools._cleanup.engine import CleanupCall as CleanupCall
from memtools._cleanup.report import ActionReport as ActionReport
from memtools._cleanup.report import CycleReport as CycleReport
from memtools._grad.checkpoint import CheckpointedLayers as CheckpointedLayers
from memtools._grad.report import AccumulatorReport as AccumulatorReport
from memtools._grad.report import Retry as Retry
from memtools._leak.detector import LeakVerdict as LeakVerdict
from memtools._leak.detector import StepsLeft as StepsLeft
from memtools._monitor.phases import PhaseTotals as PhaseTotals
from memtools._plan.plan import Plan as Plan
from memtools._plan.plan import PlanFit as PlanFit
from memtools._plan.plan import PlanLimit as PlanLimit
from memtools._plan.plan import PlanPhase as PlanPhase
from memtools._plan.settings import PlanBest as PlanBest
from memtools._plan.settings import Plans as Plans
from memtools._plan.settings import PlanSetting as PlanSetting
from memtools._record.record import Buckets as Buckets
from memtools._record.record import Column as Column
from memtools._record.record import RecordEvent as RecordEvent
from memtools._record.record import RecordPhase as RecordPhase
from memtools._record.record import Samples as Samples
from memtools._trajectory.epochs import TrajectoryChunk as TrajectoryChunk
from memtools._trajectory.epochs import TrajectoryEpoch as TrajectoryEpoch
from memtools._trajectory.epochs import TrajectoryEpochs as TrajectoryEpochs
from memtools._trajectory.store import TrajectoryStats as TrajectoryStats
from memtools.integrations.use import Adapter as Adapter

__all__ = [
    "AccumulatorReport",
    "ActionReport",
    "Adapter",
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
    "Lowered",
    "Part",
    "PhaseTotals",
    "Plan",
    "PlanBest",
    "PlanFit",
    "PlanLimit",
    "PlanPhase",
    "PlanSetting",
    "Plans",
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

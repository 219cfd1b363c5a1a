"""Hostile arguments for every callable of memtools: objects that run code of the user's when they
are asked for their value, and use the very object that asks, or empty the container that they came
from. And hostile surroundings for good arguments: a garbage collection at each allocation, which
uses the object, and functions of the standard library that a program has replaced.

What is called is taken from the stub of `memtools._core` and from the package's signatures, so a
new callable or parameter is found here without being named; one that no value fits is a failure.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import inspect
import io
import json
import os
import random
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memtools
import memtools.types
from memtools import _core, data, distributed
from memtools._kv import tensors
from memtools._monitor.guards import Watermarks
from memtools._monitor.reporter import Listeners
from tests.data.episodecases import write_episode

STUB = Path(_core.__file__).parent / "_core.pyi"
GIB = 1 << 30
COLUMNS = ["step", "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available", "pressure",
           "heap_used", "children", "children_private", "process", "job", "shm"]  # fmt: skip

# --- what there is to call ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of a callable: `kind` is inspect's, by name."""

    name: str
    annotation: str
    keyword: bool  # only by its name


@dataclasses.dataclass(frozen=True)
class Target:
    """A callable: "_core.KVPool._trim", "KVPool.acquire", "grad_norm"."""

    module: str
    owner: str  # "" for a function
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def label(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


def _stub_parameters(node: ast.FunctionDef, method: bool) -> Iterator[Parameter]:
    plain = [*node.args.posonlyargs, *node.args.args][1 if method else 0 :]
    for argument, keyword in [
        *((a, False) for a in plain),
        *((a, True) for a in node.args.kwonlyargs),
    ]:
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        yield Parameter(argument.arg, kind, keyword)


def _stub_functions(nodes: list[ast.stmt], owner: str) -> Iterator[Target]:
    seen = set()
    for node in nodes:
        if not isinstance(node, ast.FunctionDef) or node.name in seen:
            continue
        if "property" in [ast.unparse(mark) for mark in node.decorator_list]:
            continue
        seen.add(node.name)  # of overloads the first
        yield Target("_core", owner, node.name, tuple(_stub_parameters(node, bool(owner))))


def targets_of_stub() -> Iterator[Target]:
    tree = ast.parse(STUB.read_text("utf-8"))
    yield from _stub_functions(tree.body, "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _stub_functions(node.body, node.name)


def _signature(call: Any, method: bool) -> tuple[Parameter, ...]:
    found = []
    for n, one in enumerate(inspect.signature(call).parameters.values()):
        if (method and n == 0) or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        found.append(Parameter(one.name, str(one.annotation), one.kind is one.KEYWORD_ONLY))
    return tuple(found)


SPECIAL = (
    "__new__",
    "__init__",
    "__getitem__",
    "__enter__",
    "__exit__",
    "__contains__",
    "__call__",
)


#: the modules whose names in __all__ are called; "" is memtools itself
MODULES = ("", "data", "distributed", "export", "report", "testing")


def _module(name: str) -> Any:
    return importlib.import_module(f"memtools.{name}") if name else memtools


def targets_of_package() -> Iterator[Target]:
    for module in MODULES:
        yield from _targets_of(module)


def _targets_of(module: str) -> Iterator[Target]:
    for name in _module(module).__all__:
        value = getattr(_module(module), name)
        if inspect.isfunction(value):
            yield Target(module, "", name, _signature(value, False))
        elif getattr(value, "_is_protocol", False):
            continue
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            record = dataclasses.is_dataclass(value) or issubclass(value, tuple)
            for key, raw in vars(value).items():
                call = getattr(raw, "__func__", raw)
                if not inspect.isfunction(call) or (key.startswith("_") and key not in SPECIAL):
                    continue
                made = record and value is not memtools.UpdateSettings  # programs make these
                if not (made and key in ("__init__", "__new__")):  # which dataclass defines
                    bound = key == "__new__" or not isinstance(raw, staticmethod)
                    yield Target(module, name, key, _signature(call, bound))


def targets() -> dict[str, Target]:
    return {target.label: target for target in (*targets_of_stub(), *targets_of_package())}


# --- good values ----------------------------------------------------------------------------------


def history() -> memtools.GateHistory:
    made = memtools.GateHistory(max_entries=10)
    made.extend(torch.rand(4, 8) for _ in range(5))
    return made


def pool() -> memtools.KVPool:
    return memtools.KVPool(2, 2, 4, max_tokens=64, max_sequences=4, dtype="float32", limit="1 MiB")


def lease() -> memtools.KVLease:
    made = pool().acquire(2)
    for layer in (0, 1):
        made.update(layer, torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4))
    return made


def writer() -> _core.RecordWriter:
    return _core.RecordWriter(f"{os.urandom(4).hex()}.mem", COLUMNS, rows=64, buckets=16, events=8,
                              phases=4)  # fmt: skip


def record() -> memtools.Record:
    with writer() as made:
        for step in range(300):
            made.append(None, [step, *[step * 1000] * (len(COLUMNS) - 1)])
    return memtools.read_record(made.path)


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    for parameter in made:
        parameter.grad = torch.ones(3, 3)
    return made


def accumulator() -> memtools.GradAccumulator:
    model = torch.nn.Linear(8, 4)
    return memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1), 2)


def monitor() -> memtools.MemoryMonitor:
    made = memtools.MemoryMonitor(f"{os.urandom(4).hex()}.mem")
    made.start()
    return made


def policy() -> memtools.CleanupPolicy:
    made = memtools.CleanupPolicy(1)
    made.start()
    return made


def core_policy() -> _core.Policy:
    made = _core.Policy(lambda *_: None, 0.85, 0.003, False, 0, 0, 0, "/")
    for action in range(3):
        made.set_rule(action, (1,), 15, True)
    return made


def blocks() -> _core.Blocks:
    made = _core.Blocks()
    made.start(("/usr/",))
    made.record(True)
    torch.nn.Linear(8, 4)(torch.ones(3, 8)).sum().backward()
    made.record(False)
    return made


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(range(9))  # type: ignore[arg-type]


def episode() -> str:
    return str(write_episode(Path(f"{os.urandom(4).hex()}.h5"), 3))


def growth() -> memtools.types.Growth:
    return memtools.types.Growth(memtools.census(), memtools.census())


def trajectory() -> memtools.TrajectoryStore:
    made = memtools.TrajectoryStore(2)
    made.extend(x=torch.ones(2, 4, 8))
    made.put(y=torch.ones(4))
    return made


def trajectory_file() -> str:
    path = f"{os.urandom(4).hex()}.traj"
    memtools.TrajectoryStore(2, file=path).close()
    return path


def epochs() -> memtools.types.TrajectoryEpochs:
    made = trajectory().epochs(2, time_steps=1)
    next(next(made))
    return made


class Figures:
    """What exporters take."""

    def metrics(self, expert: bool = False) -> dict[str, float]:
        return {"memory/host_rss_bytes": 1.0}


def _window_report() -> Any:
    made = accumulator()
    for _ in range(2):
        with made.micro_batch():
            made.backward(made.model(torch.rand(3, 8)).sum(), 3)  # type: ignore[attr-defined]
    return made.step(torch.rand(4, 8), lambda batch: (made.model(batch).sum(), len(batch)))  # type: ignore[attr-defined]


def ending_step() -> Callable[[], None]:
    """A step for a test of any length."""
    left = iter(range(30))

    def step() -> None:
        if next(left, None) is None:
            raise RefusalError("these were all steps")

    return step


def _layers() -> torch.nn.ModuleList:
    return torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])


MAKERS: dict[str, Callable[[], Any]] = {
    "AuxLoss": memtools.AuxLoss,
    "AllocatorSettings": memtools.allocator_settings,
    "AccumulatorReport": lambda: accumulator().report(),
    "Budget": lambda: memtools.Budget("1 MiB"),
    "BoundedLoader": lambda: data.bounded(loader()),
    "BudgetSampler": lambda: data.BudgetSampler([1, 2, 3], 4),
    "ByteCache": lambda: data.ByteCache("1 MiB"),
    "CachedFunction": lambda: data.ByteCache("1 MiB")(lambda *_, **__: None),
    "BudgetReport": lambda: memtools.Budget("1 MiB").report(),
    "BudgetPart": lambda: _core.BudgetPart(memtools.Budget("1 MiB"), "part"),
    "Census": memtools.census,
    "CheckpointedLayers": lambda: memtools.checkpoint_layers(_layers()),
    "Blocks": blocks,
    "ActionReport": lambda: policy().report().actions[0],
    "CleanupPolicy": policy,
    "GateHistory": history,
    "GradAccumulator": accumulator,
    "GradSet": lambda: _core.GradSet(parameters()),
    "Growth": growth,
    "KVLease": lease,
    "KVPool": pool,
    "H5Episodes": lambda: data.H5Episodes(episode()),
    "ChunkLayout": lambda: data.H5Episodes(episode()).layouts()[0],
    "LoaderReport": lambda: data.loader_report(loader()),
    "Handle": lambda: monitor().guard(0.9, "record"),
    "GrowthTable": _core.GrowthTable,
    "LeakFinding": lambda: memtools.LeakFinding("growing", holder="list Trainer.losses"),
    "LeakDetector": lambda: memtools.LeakDetector("1 GiB"),
    "Managed": lambda: memtools.managed(policy())(lambda *_, **__: None),
    "MemoryMonitor": monitor,
    "Phase": lambda: monitor().phase("a"),
    "Policy": core_policy,
    "PolicyReport": lambda: policy().report(),
    "Probe": _core.Probe,
    "RankMetrics": lambda: distributed.monitor_ranks(Figures()),
    "Record": record,
    "RecordWriter": writer,
    "TrajectoryChunk": lambda: next(next(trajectory().epochs(2))),
    "TrajectoryEpoch": lambda: next(trajectory().epochs(2)),
    "TrajectoryEpochs": epochs,
    "TrajectoryStats": lambda: trajectory().stats(),
    "TrajectoryStore": trajectory,
    "UpdateSettings": memtools.UpdateSettings,
    "WindowReport": lambda: _window_report(),
    "Sampler": lambda: _core.Sampler(5_000_000, writer()),
}


def k4() -> torch.Tensor:
    return torch.ones(2, 2, 3, 4)


def scored() -> torch.Tensor:
    return torch.ones(3, requires_grad=True).sum()


#: a good value of each kind; a function makes one
KINDS: dict[str, Any] = {
    "SupportsIndex": 1,
    "int": 1,
    "bool": True,
    "float": 0.5,
    "str": "a",
    "bytes": b"a",
    "object": lambda: object(),
    "Any": lambda: object(),
    "None": 1,
    "type": int,
    "torch.Tensor": lambda: torch.ones(4, 8),
    "Cadence": 2,
    "Budget": lambda: memtools.Budget("1 MiB"),
    "ByteCache": lambda: data.ByteCache("1 MiB"),
    "Census": memtools.census,
    "KVPool": pool,
    "torch.utils.data.DataLoader": loader,
    "CleanupPolicy": policy,
    "Policy": core_policy,
    "RecordWriter": writer,
    "Record": record,
    "Parameters": parameters,
    "IO[str]": io.StringIO,
    "torch.nn.Module": _layers,
    "torch.optim.Optimizer": lambda: torch.optim.SGD(parameters(), 0.1),
    "torch.dtype": torch.float32,
    "torch.device": torch.device("cpu"),
    "type[_Lease]": memtools.KVLease,
    "type[BaseException]": ValueError,
    "BaseException": lambda: ValueError("x"),
    "_POLICY": policy,
    "_Function": lambda: lambda *_: scored(),
    "Callback": lambda: lambda *_: None,
    "LeakCallback": lambda: lambda *_: None,
    "Listeners": Listeners,
    "Clear": "local",
    "TypeGrowth": 1,
    "GroupGrowth": 1,
    "ProcessGroup": False,
    "MetricsSource": Figures,
    "MemoryMonitor": memtools.MemoryMonitor,
    "Watermarks": Watermarks,
}


def small_trainer() -> Any:
    """A Trainer of transformers, which takes its second to import."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to=[])
    return Trainer(torch.nn.Linear(2, 1), arguments)


#: by "callable.parameter", "class.parameter" or the parameter's own name, before its kind
NAMED: dict[str, Any] = {
    "KVPool.estimate.config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
    "use.trainer": lambda: small_trainer(),
    "use.monitor": None,
    "plan.step": lambda: lambda a=1: lambda: torch.ones(2) * a,
    "plan.vary": lambda: {"a": [1]},
    "BudgetReport.__init__.holdings": (),
    "BoundedLoader.__init__.monitor": None,
    "data.bounded.monitor": None,
    "data.loader_report.timeout": 9.0,
    "H5Episodes.__init__.files": lambda: episode(),
    "H5Episodes.__init__.observations": None,
    "H5Episodes.__init__.actions": "action",
    "H5Episodes.__init__.decode": None,
    "H5Episodes.locate.index": 1,
    "H5Episodes.__getitem__.index": 1,
    "H5Episodes.at.start": 0,
    "H5Episodes.at.episode": 0,
    "BudgetSampler.load_state_dict.state": lambda: data.BudgetSampler([1, 2, 3], 4).state_dict(),
    "BudgetSampler.__init__.num_replicas": None,
    "BudgetSampler.__init__.rank": None,
    "AllocatorSettings.set.mmap_threshold": "1 MiB",
    "AllocatorSettings.set.trim_threshold": "1 MiB",
    "CleanupPolicy.add.callback": lambda: lambda: None,
    "CleanupPolicy.cleanup.only": "gc",
    "testing.assert_flat.device": "cpu",
    "testing.assert_flat.step": lambda: ending_step(),
    "testing.assert_flat.steps": 20,
    "testing.assert_flat.warmup": 4,
    "export.write_scalars.target": lambda: types.SimpleNamespace(add_scalar=lambda *_: None),
    "Growth.of": None,
    "Phase.__call__.function": lambda: lambda *_, **__: None,
    "GateHistory.extend.tensors": lambda: [torch.rand(4, 8) for _ in range(3)],
    "GateHistory.__new__.trim": "half",
    "GateHistory.__new__.max_bytes": 1 << 20,
    "KVLease.update.k": k4,
    "KVLease.update.v": k4,
    "KVLease.update.layer": 0,
    "KVLease.update.counts": lambda: [1, 2],
    "KVLease.layer.layout": "BHTD",
    "KVPool.__new__.helpers": tensors,
    "KVPool.__new__.head_dim": 64,
    "KVPool.__new__.max_tokens": 64,
    "KVPool.__new__.itemsize": 4,
    "KVPool.__new__.cuda_device": -1,
    "KVPool.__new__.page_bytes": 4096,
    "KVPool.__new__.dtype": torch.float32,
    "KVPool.layout": "head",
    "Blocks.libraries": ("/usr/",),
    "GrowthTable.deque": collections.deque,
    "GrowthTable.cache": type(functools.lru_cache(lambda: None)),
    "GrowthTable.ndarray": None,
    "GrowthTable.tensor": torch.Tensor,
    "GrowthTable.libraries": ("/usr/",),
    "GrowthTable.package": "/nowhere/",
    "GrowthTable.own": (),
    "LeakDetector.expect_growth.bytes": "1 MiB",
    "MemoryMonitor.expect_growth.bytes": "1 MiB",
    "MemoryMonitor.expect_growth.signal": "heap",
    "LeakDetector.signal": "heap",
    "RecordWriter.append.values": lambda: list(range(len(COLUMNS))),
    "RecordWriter.__new__.path": "made.mem",
    "RecordWriter.__new__.rows": 64,
    "RecordWriter.__new__.buckets": 16,
    "RecordWriter.__new__.payloads": 4096,
    "Record.time_ns": 5,
    "Sampler.__new__.interval_ns": 5_000_000,
    "Policy.__new__.act": lambda: lambda *_: None,
    "MemoryMonitor.__init__.log": "log.mem",
    "MemoryMonitor.guard.action": lambda: lambda *_: None,
    "distributed.monitor_ranks.max_bytes": 4096,
    "GradAccumulator.step.batch": lambda: torch.rand(4, 8),
    "GradAccumulator.step.loss_fn": lambda: lambda batch: (scored(), len(batch)),
    "GradAccumulator.backward.loss_sum": scored,
    "GradAccumulator.backward.weight": 3,
    "GradAccumulator.load_state_dict.state": lambda: accumulator().state_dict(),
    "GradAccumulator.__init__.clip": None,
    "GradAccumulator.__init__.overlap": False,
    "GradAccumulator.__init__.monitor": None,
    "AuxLoss.loss": scored,
    "BudgetPart.bytes": 1,
    "TrajectoryStore.entries": lambda: {"x": torch.ones(4, 8)},
    "TrajectoryStore.extend.entries": lambda: {"x": torch.ones(2, 4, 8)},
    "TrajectoryStore.put.entries": lambda: {"y": torch.ones(4)},
    "TrajectoryStore.__init__.states": ("x",),
    "TrajectoryStore.__init__.file": lambda: f"{os.urandom(4).hex()}.traj",
    "TrajectoryStore.__init__.overflow": None,
    "TrajectoryStore.open.file": lambda: trajectory_file(),
    "TrajectoryStore.epochs.samples": None,
    "TrajectoryStore.epochs.max_tokens": 4,
    "TrajectoryStore.epochs.lengths": lambda: [1, 2, 3, 4],
    "TrajectoryStore.__getitem__.name": "x",
    "TrajectoryChunk.name": "x",
    "TrajectoryEpochs.load_state_dict.state": lambda: epochs().state_dict(),
    "UpdateSettings.__init__.single_update": False,
    "UpdateSettings.add_arguments.parser": argparse.ArgumentParser,
    "UpdateSettings.from_arguments.arguments": lambda: argparse.Namespace(
        **dataclasses.asdict(memtools.UpdateSettings())
    ),
    "Managed.__new__.function": lambda: lambda *_, **__: None,
    "Managed.__new__.clear": lambda: lambda *_: None,
    "Managed._end.number": 0,
    "_core._connect.dlpack": torch.Tensor.__dlpack_c_exchange_api__,
    "_core._connect.graph_task_id": torch._C._current_graph_task_id,
    "_core._connect.is_neg": torch.Tensor.is_neg,
    "_core._fresh.type": list,
    "_core._fresh.seen": bytes(1024),
    "_core._place.container": lambda: {1: 2},
    "_core._place.value": 2,
    "_core._referrers.targets": lambda: [history()],
    "_core._census.tensor": torch.Tensor,
    "_core.device_memory.device": 0,
    "bar_bytes": "1 MiB",
    "bytes": 10.0,
    "clock": 0,
    "columns": lambda: list(COLUMNS),
    "command": lambda: ["x", "y"],
    "device": "cpu",
    "dtype": "float32",
    "every": (1,),
    "index": lambda: [1, 0],
    "into": lambda: [torch.zeros(3, 3) for _ in range(3)],
    "interval_ms": 5.0,
    "keep": "all",
    "limit": "1 MiB",
    "limit_bytes": GIB,
    "max_bytes": "1 MiB",
    "model": lambda: torch.nn.Linear(8, 4),
    "names": lambda: ["0"],
    "objects": lambda: [history()],
    "parameters": parameters,
    "path": "file",
    "plain": lambda: torch.Tensor.detach,
    "pools": lambda: [pool()],
    "precision": None,
    "ranks": None,
    "root": "/",
    "rows": lambda: [1],
    "rules": lambda: [((1,), 15, True)],
    "scheduler": None,
    "split": None,
    "trim": "half",
}
# Only these say more than a number of bytes.
NAMED |= {f"{owner}.limit": GIB for owner in ("Growth", "GradSet", "Sampler")}
NAMED |= {"_core._fresh.limit": 3, "KVPool.limit": "1 MiB"}
NAMED |= {
    "checkpoint_layers.every": 1,
    "CleanupPolicy.add.every": 2,
    "checkpoint_layers.model": KINDS["torch.nn.Module"],
}


def good(target: Target, parameter: Parameter) -> Any:
    """A value that the parameter takes. LookupError names one that no table fits."""
    short = f"{target.owner}.{target.name}" if target.owner else target.label
    names = [f"{short}.{parameter.name}", f"{target.owner}.{parameter.name}", parameter.name]
    for name in names:
        if name in NAMED:
            value = NAMED[name]
            return value() if inspect.isfunction(value) else value
    for kind in (part.strip() for part in parameter.annotation.split("|")):
        plain = kind.partition("[")[0]
        for key in (kind, plain):
            if key in KINDS:
                value = KINDS[key]
                made = inspect.isfunction(value) or value in (memtools.census, io.StringIO, Figures)
                return value() if made else value
        if plain in ("Sequence", "Iterable", "list", "tuple"):
            return [1, 1]
        if plain in ("Mapping", "dict"):
            return {"a": 1}
        if plain == "Callable":
            return lambda *_, **__: None
        if plain == "Literal":
            return ast.literal_eval(kind[len("Literal[") : -1].split(",")[0].rstrip("]"))
    raise LookupError(f"{target.label}: no value for {parameter.name}: {parameter.annotation}")


# --- hostile values -------------------------------------------------------------------------------


class Meddler:
    """What hostile values do when they are asked for anything: the action, a few times."""

    def __init__(self) -> None:
        self.action: Callable[[], object] = lambda: None
        self.skip = 0  # so many questions are answered first
        self.left = 0
        self.given: list[Any] = []  # the arguments of the call
        self._kept: list[bytearray] = []

    def start(self, action: Callable[[], object], given: list[Any], skip: int) -> None:
        self.action, self.given, self.skip, self.left = action, given, skip, 4

    def end(self) -> None:
        self.skip = self.left = 0
        self._kept.clear()

    def __call__(self) -> None:
        if self.left <= 0:
            return
        if self.skip > 0:
            self.skip -= 1
            return
        self.left -= 1
        try:
            self.action()
        finally:
            self._overwrite()

    def _overwrite(self) -> None:
        """Takes what the action has freed of Python's memory, so that no use of it goes unseen."""
        gc.collect()  # empties the lists of freed tuples
        self._kept += [bytearray(b"\xdd" * size) for size in range(15, 512, 16) for _ in range(4)]


MEDDLE = Meddler()


class HostileType(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__name__", "__qualname__"):
            MEDDLE()
        return super().__getattribute__(name)


class Hostile(metaclass=HostileType):
    """Has a good value, and meddles before it gives it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _asked(self) -> Any:
        MEDDLE()
        return self.value

    def __index__(self) -> int:
        value = self._asked()
        return value if isinstance(value, int) else 1

    def __float__(self) -> float:
        value = self._asked()
        return float(value) if isinstance(value, (int, float)) else 1.0

    def __eq__(self, other: object) -> bool:
        self._asked()
        return True

    def __hash__(self) -> int:
        self._asked()
        return 1

    def __len__(self) -> int:
        self._asked()
        return 2

    def __bool__(self) -> bool:
        self._asked()
        return True

    def __lt__(self, other: object) -> bool:
        self._asked()
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __getitem__(self, index: Any) -> Any:
        value = self._asked()
        if isinstance(index, int) and index > 1:
            raise IndexError
        return value

    def __iter__(self) -> Iterator[Any]:
        value = self._asked()
        return iter(value if isinstance(value, (list, tuple)) else [value, value])

    def __fspath__(self) -> str:
        self._asked()
        return "hostile.mem"

    def __str__(self) -> str:
        self._asked()
        return "x"

    __repr__ = __str__

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._asked()

    def __buffer__(self, flags: int) -> memoryview:  # asked from Python 3.12 on
        self._asked()
        return memoryview(b"12345678")

    def __mul__(self, other: Any) -> float:
        self._asked()
        return 1.0

    __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __mul__

    def keys(self) -> list[str]:
        self._asked()
        return ["a"]

    def __del__(self) -> None:
        with contextlib.suppress(BaseException):
            MEDDLE()


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        MEDDLE()
        return super().__torch_function__(func, types, args, kwargs or {})


class HostileList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        MEDDLE()
        return super().__iter__()

    def __len__(self) -> int:
        MEDDLE()
        return super().__len__()


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        MEDDLE()
        return super().items()

    def __getitem__(self, key: str) -> Any:
        MEDDLE()
        return super().__getitem__(key)


class _Compared:
    """Meddles where it is compared, hashed, and shown because it is refused."""

    def __eq__(self, other: object) -> bool:
        MEDDLE()
        return super().__eq__(other)

    def __hash__(self) -> int:
        MEDDLE()
        return super().__hash__()

    def __repr__(self) -> str:
        MEDDLE()
        return super().__repr__()


class HostileStr(_Compared, str):
    """One that passes for a str."""


class HostileInt(_Compared, int):
    """One that passes for an int."""


def _subclass(value: Any) -> Any:
    if isinstance(value, str):
        return HostileStr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return HostileInt(-value)
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(HostileTensor)
    return Hostile(value)


def _yielding(values: Any) -> Iterator[Any]:
    for value in values:
        MEDDLE()
        yield value


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **keywords: Any) -> Any:
        MEDDLE()
        return function(*args, **keywords)

    return called


def _with_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers, with other leaves that only these keep alive."""
    if type(value) in (list, tuple):
        return type(value)([_with_leaves(item, leaf) for item in value])
    if type(value) is dict:
        return {key: _with_leaves(item, leaf) for key, item in value.items()}
    return leaf(value)


def hostile(value: Any) -> dict[str, Any]:
    """Versions of a good value, by name."""
    found: dict[str, Any] = {"object": Hostile(value)}
    if isinstance(value, int) and not isinstance(value, bool):
        found |= {
            "negative": Hostile(-1),
            "huge": Hostile(2**40),
            "int": HostileInt(-1),
            "slice": slice(Hostile(0), Hostile(2)),
        }
    if isinstance(value, (list, tuple)):
        items = [Hostile(item) for item in value]
        found |= {
            "items": type(value)(items),
            "leaves": list(_with_leaves(value, Hostile)),
            "subclasses": list(_with_leaves(value, _subclass)),
            "generator": _yielding(value),
            "list": HostileList(value),
        }
    if isinstance(value, str):
        found["str"] = HostileStr(value)
    if isinstance(value, dict):
        found |= {"dict": HostileDict(value), "leaves": _with_leaves(value, Hostile)}
    if isinstance(value, torch.Tensor):
        found["tensor"] = value.detach().as_subclass(HostileTensor)
    if callable(value) and not isinstance(value, type):
        found["function"] = _calling(value)
    return found


# --- one case -------------------------------------------------------------------------------------


class RefusalError(Exception):
    pass


def end_of(owner: Any) -> None:
    for name in ("close", "release", "stop", "remove"):
        if hasattr(owner, name) and not isinstance(owner, type):
            getattr(owner, name)()


def _clear(owner: Any) -> None:
    for name in ("clear", "reset", "forget", "reset_stats", "crop"):
        if callable(getattr(owner, name, None)):
            getattr(owner, name)(*((0,) if name == "crop" else ()))


def _append(owner: Any) -> None:
    if isinstance(owner, _core.GateHistory):
        for _ in range(30):
            owner.append(torch.rand(4, 8))
    elif isinstance(owner, _core.KVLease):
        owner.update(0, k4(), k4())
    elif isinstance(owner, memtools.LeakDetector):
        owner.update(100, heap=1, rss=1)
    elif isinstance(owner, memtools.AuxLoss):
        owner.add(scored())
    elif isinstance(owner, _core.Blocks):
        owner.record(False)
        owner.record(True)  # anew


def _fork(owner: Any) -> None:
    MEDDLE.left = 0  # a finalizer that forks while Python itself forks waits for Python's own locks
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            _append(owner)
            _clear(owner)
        finally:
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        raise AssertionError("the child that it forks hangs or crashes")


def _empty(value: Any) -> None:
    """A container loses what is in it, and so do those."""
    inner: list[Any] = []
    if isinstance(value, Hostile):
        inner = [value.value]
    elif isinstance(value, dict):
        inner = list(dict.values(value))
        dict.clear(value)
    elif isinstance(value, list):
        inner = list(list.__iter__(value))
        list.clear(value)
    elif isinstance(value, tuple):
        inner = list(tuple.__iter__(value))
    while inner:
        _empty(inner.pop())


def _drop(given: list[Any]) -> None:
    """Lists and dicts keep their length, and nothing that was in them."""
    for value in given:
        if isinstance(value, list):
            for at in range(list.__len__(value)):
                list.__setitem__(value, at, None)
        elif isinstance(value, dict):
            for key in list(dict.keys(value)):
                dict.__setitem__(value, key, None)


def _raise(error: BaseException) -> None:
    raise error


ACTIONS: dict[str, Callable[[Any, Callable[[], object]], object]] = {
    "close": lambda owner, again: end_of(owner),
    "clear": lambda owner, again: _clear(owner),
    "append": lambda owner, again: _append(owner),
    "again": lambda owner, again: again(),
    "fork": lambda owner, again: _fork(owner),
    "raise": lambda owner, again: _raise(RefusalError("x")),
    "interrupt": lambda owner, again: _raise(KeyboardInterrupt()),
    "collect": lambda owner, again: gc.collect(),
    "empty": lambda owner, again: _empty(list(MEDDLE.given)),
    "drop": lambda owner, again: _drop(MEDDLE.given),
}
#: what no code of ours may raise, whatever it is given
NEVER = (SystemError, AssertionError, UnboundLocalError, NameError, UnicodeDecodeError)


def owner_of(target: Target) -> Any:
    if target.name in ("__new__", "__init__"):
        return getattr(_module(target.module), target.owner)
    if target.owner:
        return MAKERS[target.owner]()
    return _module(target.module)


def call_target(target: Target, owner: Any, values: dict[str, Any]) -> Any:
    plain = [values[p.name] for p in target.parameters if not p.keyword]
    named = {p.name: values[p.name] for p in target.parameters if p.keyword}
    if target.owner == "LeakDetector" and target.name.startswith("update"):
        step, value = plain[0], plain[-1]
        many = target.name == "update_many"
        first = (ctypes.c_int64 * 4)(1, 2, 3, 4) if many else value
        return getattr(owner, target.name)(step, heap=first, rss=first)
    if target.label == "GradAccumulator.backward":
        with owner.micro_batch():
            return owner.backward(*plain, **named)
    call = owner if target.name in ("__new__", "__init__") else getattr(owner, target.name)
    result = call(*plain, **named)
    if hasattr(result, "__enter__") and target.name in ("phase", "step", "micro_batch", "acquire"):
        with result:
            MEDDLE()
    return result


def values_of(target: Target) -> dict[str, Any]:
    values = {parameter.name: good(target, parameter) for parameter in target.parameters}
    if {"model", "optimizer"} <= values.keys():
        values["optimizer"] = torch.optim.SGD(values["model"].parameters(), 0.1)
    return values


def run_case(target: Target, at: str, kind: str, action: str, skip: int) -> None:
    """Calls it with one hostile argument, or where `at` names surroundings with good ones in these,
    then uses its object on; `skip` questions are answered before any meddling. AssertionError names
    an exception that is never right."""
    owner, values, usual = owner_of(target), values_of(target), values_of(target)
    around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if at in SURROUNDINGS:
        around = SURROUNDINGS[at](kind)
    else:
        values[at] = hostile(values[at])[kind]

    def first() -> None:
        with around:
            repr(call_target(target, owner, values))

    act = ACTIONS[action]
    MEDDLE.start(
        lambda: act(owner, lambda: call_target(target, owner, usual)), list(values.values()), skip
    )
    attempts: list[Callable[[], object]] = [
        first,
        lambda: repr(owner),
        lambda: call_target(target, owner, values_of(target)),
        lambda: end_of(owner),
    ]
    for attempt in attempts:
        try:
            attempt()
        except NEVER as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            pass
        MEDDLE.end()


# --- surroundings ---------------------------------------------------------------------------------


#: functions of torch that allocate under a lock of its own, which they would wait for
LOCKED = ("get_rng_state", "set_rng_state")


@contextlib.contextmanager
def _collections(_: str) -> Iterator[None]:
    """A collection at each allocation of a container, which meddles. From Python 3.12 on it runs
    when the code that allocates is back in Python's."""

    def collected(phase: str, info: object) -> None:
        if phase == "start":
            if sys._getframe(1).f_code.co_name not in LOCKED:
                MEDDLE()
        elif MEDDLE.left > 0:
            kept.extend([] for _ in range(9))  # the threshold is passed already
        else:
            gc.set_threshold(*threshold)  # a module that is imported allocates for minutes

    kept: list[list[object]] = []
    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.collect()  # empties Python's own lists of freed tuples, which are taken without a collection
    gc.set_threshold(1, 0, 0)  # and so do every third
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)


#: functions that C or Python code of memtools asks, by "module.name"
STANDARD = (
    "gc.get_objects", "gc.get_freeze_count", "gc.get_referents", "gc.get_referrers", "gc.collect",
    "gc.get_stats", "sys.getsizeof", "sys._current_frames", "threading.enumerate", "os.getpid",
    "_tracemalloc._get_traces", "_tracemalloc._get_object_traceback",
)  # fmt: skip
#: what they return in place of what they should; a list is the same one at each call, and shrinks
ANSWERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "negative": lambda: -1,
    "text": lambda: "x",
    "tuple": lambda: (1, 2),
    "list": lambda: [object() for _ in range(9)],
    "object": lambda: Hostile(1),
    "sizes": lambda: [(0, Hostile(8), (("x", 1),))],
    "stacks": lambda: [(0, 8, (Hostile(n),)) for n in range(3)],
}


@contextlib.contextmanager
def _replaced(kind: str) -> Iterator[None]:
    """`kind` is "module.name answer"."""
    place, answer = kind.split(" ")
    module, name = place.rsplit(".", 1)
    owner, given = importlib.import_module(module), ANSWERS[answer]()
    before = getattr(owner, name)

    def other(*args: Any, **keywords: Any) -> Any:
        MEDDLE()
        return given

    MEDDLE.given.append(given)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)


#: what good arguments are passed in, by name
SURROUNDINGS: dict[str, Callable[[str], contextlib.AbstractContextManager[object]]] = {
    "collections": _collections,
    "standard functions": _replaced,
}


#: a case: the name of a parameter or of surroundings, their kind, the action, and what is skipped
CaseOf = tuple[str, str, str, int]


def _drawn(target: Target, seed: int, found: list[CaseOf], most: int) -> list[CaseOf]:
    random.Random(f"{seed} {target.label}").shuffle(found)
    return found[:most]


def cases(target: Target, seed: int, most: int) -> list[CaseOf]:
    """With a hostile argument: so many at most."""
    skips = random.Random(seed)
    found = [
        (parameter.name, kind, action, skips.choice((0, 0, 1, 3)))
        for parameter in target.parameters
        for kind in hostile(good(target, parameter))
        for action in ACTIONS
    ]
    MEDDLE.end()
    return _drawn(target, seed, found, most)


def collections_of(target: Target, seed: int, most: int) -> list[CaseOf]:
    """At each of the first allocations: so many at most."""
    deep = 48 if target.module == "_core" else 96  # the package's own code allocates as well
    # Python 3.11 itself crashes in tuple(items) where a collection empties the list `items`.
    actions = [action for action in ACTIONS if action != "empty"]
    found = [("collections", "", action, skip) for action in actions for skip in range(deep)]
    return _drawn(target, seed, found, most)


def replaced_of(target: Target, seed: int, most: int) -> list[CaseOf]:
    """With each of the standard functions replaced: so many at most."""
    found = [
        ("standard functions", f"{name} {answer}", action, skip)
        for name in STANDARD
        for answer in ANSWERS
        for action in ("append", "empty")
        for skip in (0, 1, 2)
    ]
    return _drawn(target, seed, found, most)


# --- arguments of another type --------------------------------------------------------------------


class Foreign:
    """Has nothing that anybody asks for."""

    __slots__ = ()


#: what programs pass by mistake
MISFITS: dict[str, Callable[[], Any]] = {
    "object": Foreign,
    "class": lambda: Foreign,
    "None": lambda: None,
    "int": lambda: 7,
    "float": lambda: 1.5,
    "str": lambda: "x",
    "bytes": lambda: b"x",
    "list": lambda: [Foreign()],
    "list of str": lambda: ["x"],
    "dict": lambda: {"x": Foreign()},
    "tensor": lambda: torch.ones(2, 3),
}


def _blames_itself(target: Target, error: Exception) -> bool:
    """Whether an exception speaks of memtools' inside rather than of the argument. A subscript may
    say that there is no such entry."""
    if isinstance(error, LookupError):
        return target.name != "__getitem__"
    return isinstance(error, (AttributeError, *NEVER))


def misfit_faults(target: Target, most: int) -> list[str]:
    """Where an argument of another type than the good one is answered by an exception that says
    nothing of it: so many types at most."""
    found = []
    for parameter in target.parameters:
        for kind, make in list(MISFITS.items())[:most]:
            owner, values = owner_of(target), values_of(target)
            if isinstance(make(), type(values[parameter.name])):
                continue  # right by its type, if not by its value
            values[parameter.name] = make()
            try:
                call_target(target, owner, values)
            except Exception as error:
                if _blames_itself(target, error):
                    what = f"{type(error).__name__}: {error}"
                    found.append(f"{target.label}({parameter.name}={kind}): {what}")
            with contextlib.suppress(Exception):
                end_of(owner)
    return found


def misfit_failures(target: Target, most: int, seconds: int = 120) -> list[str]:
    """The faults, found in a forked child."""

    def look(tell: int) -> None:
        signal.alarm(seconds)
        os.write(tell, json.dumps(misfit_faults(target, most)).encode())

    said, status = forked(look)
    return json.loads(said) if status == 0 and said else [f"{target.label}: status {status}"]


# --- in a child -----------------------------------------------------------------------------------

#: of malloc.h: what is freed is filled
M_PERTURB = -6


def forked(work: Callable[[int], None]) -> tuple[str, int]:
    """What a child that is silent and has a folder of its own writes to a pipe, and its status."""
    listen, tell = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.close(listen)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.chdir(tempfile.mkdtemp())
            torch.set_num_threads(1)
            ctypes.CDLL(None).mallopt(M_PERTURB, 0xDD)
            gc.freeze()  # and so a collection is quick
            warnings.simplefilter("ignore")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            work(tell)
            status = 0
        finally:
            os._exit(status)
    os.close(tell)
    with os.fdopen(listen) as lines:
        said = lines.read()
    return said, os.waitpid(child, 0)[1]


def _run_cases(target: Target, some: list[CaseOf], tell: int, seconds: int) -> None:
    for case in some:
        os.write(tell, (json.dumps(case) + "\n").encode())
        signal.alarm(seconds)  # a case that waits for ever ends the process
        try:
            run_case(target, *case)
        except BaseException as error:
            os.write(tell, (json.dumps(f"{type(error).__name__}: {error}") + "\n").encode())
            os._exit(1)


def failures(target: Target, some: list[CaseOf], seconds: int = 20) -> list[str]:
    """What went wrong, in a forked child: a crash is a failure with its name. Empty: nothing."""
    text, status = forked(lambda tell: _run_cases(target, some, tell, seconds))
    if status == 0:
        return []
    said = [json.loads(line) for line in text.splitlines()]
    case = next(
        (line for line in reversed(said) if isinstance(line, list)), "before the first case"
    )
    how = [line for line in said if isinstance(line, str)] or [
        f"signal {signal.Signals(os.WTERMSIG(status)).name}"
        if os.WIFSIGNALED(status)
        else f"exit {os.waitstatus_to_exitcode(status)}"
    ]
    return [f"{target.label} {case}: {how[0]}"]

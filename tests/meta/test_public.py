"""What the package offers by `from memtools import ...`: all that its public calls give back."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memtools
import memtools.integrations
import memtools.types

# What these objects work with themselves: the classes may change.
PARTS = {"CheckpointedLayers.wrappers"}


@functools.cache
def imported_for_types(module: str) -> dict[str, str]:
    """Names that a module imports of memtools under `if TYPE_CHECKING:`, and their modules."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for line in ast.walk(node):
                if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("memtools"):
                    found |= {alias.name: str(line.module) for alias in line.names}
    return found


def classes_of(annotation: object, module: str) -> Iterator[type]:
    """The classes of memtools' Python that an annotation names, in the module where it stands."""
    if isinstance(annotation, str):
        for node in ast.walk(ast.parse(annotation, mode="eval")):
            if isinstance(node, ast.Name):
                value: Any = getattr(sys.modules[module], node.id, None)
                if value is None and node.id in imported_for_types(module):
                    home = importlib.import_module(imported_for_types(module)[node.id])
                    value = getattr(home, node.id)
                yield from classes_of(value, module)
        return
    for part in getattr(annotation, "__args__", ()):
        yield from classes_of(part, module)
    if inspect.isclass(annotation) and not isinstance(annotation, types.GenericAlias):
        home_of = annotation.__module__
        if home_of.startswith("memtools.") and home_of != "memtools._core":
            yield annotation


def given_by(public: object) -> Iterator[tuple[str, type]]:
    """What the members of a public class, or the call of a public function, give back."""
    if inspect.isfunction(public):
        returned = public.__annotations__.get("return")
        yield from (("()", kind) for kind in classes_of(returned, public.__module__))
    if not inspect.isclass(public):
        return
    for base in public.__mro__:
        if not base.__module__.startswith("memtools.") or base.__module__ == "memtools._core":
            continue
        for name, kind in inspect.get_annotations(base).items():
            if not name.startswith("_"):
                yield from ((name, found) for found in classes_of(kind, base.__module__))
        for name, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if (name.startswith("_") and name != "__iter__") or not inspect.isfunction(function):
                continue
            returned = function.__annotations__.get("return")
            yield from ((name, found) for found in classes_of(returned, base.__module__))


def public(name: str) -> Any:
    return getattr(memtools if name in memtools.__all__ else memtools.types, name)


def missing(names: list[str]) -> list[str]:
    """What a program cannot name although a public call gives it. What is only there for a `with`
    statement needs no name."""
    offered = {id(public(name)) for name in names}
    return sorted(
        f"{name}.{member}: {kind.__module__}.{kind.__name__}"
        for name in names
        for member, kind in given_by(public(name))
        if id(kind) not in offered
        and not hasattr(kind, "__enter__")
        and f"{name}.{member}" not in PARTS
    )


def test_the_stub_names_what_can_be_imported() -> None:
    stub = ast.parse(Path(memtools.__file__).with_suffix(".pyi").read_text())
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {line.names[0].asname for line in lines if line.module is None}
    assert modules == set(memtools._MODULES)
    names = {line.names[0].asname: line.module for line in lines if line.module is not None}
    assert names == memtools._HOMES


def test_subpackages_are_loaded_when_they_are_named() -> None:
    code = (
        "import sys, memtools\n"
        "assert not {n for n in sys.modules if n.startswith('memtools.')} & {'memtools.data'}\n"
        "memtools.testing.assert_flat, memtools.data.ByteCache, memtools.report.write_report\n"
        "memtools.grad.log_probs, memtools.export, memtools.types.Adapter, memtools.distributed\n"
        "memtools.integrations.transformers.generate_group, memtools.integrations.lightning\n"
        "memtools.integrations.accelerate.accumulator\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in (memtools, memtools.integrations):
        with pytest.raises(AttributeError, match="has no attribute 'torch_geometric'"):
            getattr(module, "torch_geometric")  # noqa: B009


def test_the_package_is_imported_where_stubs_are_stripped(tmp_path: Path) -> None:
    shutil.copy(memtools.__file__, tmp_path / "__init__.py")
    module = importlib.util.spec_from_file_location("stripped", tmp_path / "__init__.py")
    assert module is not None
    assert module.loader is not None
    stripped = importlib.util.module_from_spec(module)
    module.loader.exec_module(stripped)
    assert stripped.__all__ == memtools.__all__


def test_what_public_calls_give_can_be_imported() -> None:
    assert missing([*memtools.__all__, *memtools.types.__all__]) == []
    assert set(memtools.__all__) & set(memtools.types.__all__) == set()


def test_a_type_that_is_not_offered_is_found() -> None:
    told = missing(["GateHistory", "Budget", "census", "LeakVerdict"])
    assert "GateHistory.stats: memtools._gate.stats.GateStats" in told
    assert "GateHistory.windows: memtools._gate.stats.GateStats" in told  # in a list
    assert "LeakVerdict.steps_left: memtools._leak.detector.StepsLeft" in told  # a field, or None
    assert "census.(): memtools._census.census.Census" in told
    assert "Budget.report: memtools._budget.BudgetReport" in told


def test_the_parts_of_results_are_of_the_public_types(tmp_path: Path) -> None:
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem")
    with monitor, monitor.phase("forward"):
        monitor.step()
    record = memtools.read_record(tmp_path / "run.mem")
    assert type(record.samples) is memtools.types.Samples
    assert type(record.buckets) is memtools.types.Buckets
    assert {type(column) for column in record.columns} == {memtools.types.Column}
    assert {type(event) for event in record.events} == {memtools.types.RecordEvent}
    assert {type(phase) for phase in record.phases} == {memtools.types.RecordPhase}
    now = memtools.allocator_settings()
    assert type(now.cuda) is memtools.types.CudaAllocator
    assert type(now.host) is memtools.types.HostAllocator
    assert type(now.host.arena_max) is memtools.types.Setting
    assert isinstance(now.host.heap, memtools.types.Heap | None)
    assert all(isinstance(device, memtools.types.CudaDevice) for device in now.cuda.devices)
    budget = memtools.Budget("1 MiB")
    gates = budget.suballocate("gates")
    assert (gates.used, {type(line) for line in budget.report()}) == (0, {memtools.types.Holding})

"""Nothing leaks: every callable and attribute of memtools._core is called many times, with good and
with bad arguments. A name without a case here fails the suite."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from memtools import Budget, BudgetError, GateHistory, _core
from memtools._base import torch as base_torch
from tests.blocks import blockcases
from tests.census import growthcases
from tests.cleanup import managedcases, policyleaks
from tests.grad import gradcases
from tests.kit.growth import least_growth, python_blocks
from tests.kit.refusals import refused
from tests.meta import leakcases
from tests.monitor import leakprobe, samplercases
from tests.record import recordcases

ROUNDS = 400
#: a call of these takes as long as there are objects in the process
OF_ALL_OBJECTS, FEWER = ("_census", "_fresh", "_held", "_instances", "_referrers"), 16
GATES = torch.softmax(torch.randn(64, 8), -1)
SCORED = (torch.randn(4, 8, requires_grad=True) * 2.0).sum()
DUMP = GateHistory()
DUMP.append(GATES)
STATE = DUMP._state()


def filled() -> GateHistory:
    history = GateHistory(max_entries=4)
    history.append(GATES)
    return history


SHARED = filled()
BUDGET = Budget("1 MiB")
PART, CLOSED_PART = _core.BudgetPart(BUDGET, "part"), _core.BudgetPart(BUDGET, "closed")
CLOSED_PART.close()
COUNTED = GateHistory(max_bytes=BUDGET.suballocate("gates"))
COUNTED.append(GATES)
TOO_LARGE = torch.rand(2**15, 8)


def use_budget() -> None:
    """What needs no room, what gets it, and what does not."""
    history = GateHistory(max_bytes=BUDGET)
    history.append(GATES)
    history.clear()
    _ = COUNTED[:]
    with pytest.raises(BudgetError, match="gates"):
        history.append(TOO_LARGE)


def reconnect(*changed: object) -> None:
    bridge = base_torch.connect()
    parts = [*base_torch.parts(torch), bridge.shim.ops if bridge.shim else None]
    parts[: len(changed)] = changed
    _core._connect(*parts)


CASES: dict[str, list[Callable[[], object]]] = {
    "_connect": [
        reconnect,
        lambda: refused(ValueError, lambda: reconnect(object())),
        lambda: refused(TypeError, lambda: _core._connect()),  # type: ignore[call-arg]
    ],
    "cuda_info": [_core.cuda_info, lambda: refused(TypeError, lambda: _core.cuda_info(1))],  # type: ignore[call-arg]
    "_census": [
        lambda: _core._census(torch.Tensor, True),
        lambda: _core._census(torch.Tensor, False),
        lambda: _core._census(None, False),
        lambda: refused(TypeError, lambda: _core._census(1, False)),  # type: ignore[arg-type]
    ],
    "_fresh": [
        lambda: _core._fresh(list, bytes(1024), 9),
        lambda: refused(ValueError, lambda: _core._fresh(list, b"", 9)),
        lambda: refused(TypeError, lambda: _core._fresh(1, bytes(1024), 9)),  # type: ignore[arg-type]
    ],
    "_instances": [
        lambda: _core._instances((dict, GateHistory)),
        lambda: refused(TypeError, lambda: _core._instances((1,))),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core._instances([dict])),  # type: ignore[arg-type]
    ],
    "_held": [
        lambda: _core._held((bytearray, GateHistory)),
        lambda: refused(TypeError, lambda: _core._held((1,))),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core._held([dict])),  # type: ignore[arg-type]
    ],
    "_referrers": [
        lambda: _core._referrers([GATES, SHARED, CASES]),
        lambda: refused(ValueError, lambda: _core._referrers([None] * 5000)),
        lambda: refused(TypeError, lambda: _core._referrers(())),  # type: ignore[arg-type]
    ],
    "_place": [
        lambda: _core._place({"a": GATES}, GATES),
        lambda: _core._place([1, GATES], GATES),
        lambda: _core._place(GATES, GATES),
        lambda: refused(TypeError, lambda: _core._place(1)),  # type: ignore[call-arg]
    ],
    "_frame_variables": [
        lambda: _core._frame_variables(sys._getframe()),
        lambda: refused(TypeError, lambda: _core._frame_variables(1)),
    ],
    "_python_bytes": [_core._python_bytes],
    "_heap_bytes": [_core._heap_bytes],
    "_traced": [_core._traced],
    "_traced_at": [lambda: _core._traced_at(GATES), lambda: _core._traced_at(1)],
    "_module_of": [lambda: _core._module_of(vars(sys)), lambda: _core._module_of(sys)],
    "_instance_dict": [lambda: _core._instance_dict(sys), lambda: _core._instance_dict(1)],
    "GateHistory": [
        filled,
        lambda: GateHistory(max_entries=3, trim="oldest", dtype="float16", keep="topk"),
        lambda: refused(ValueError, lambda: GateHistory(max_entries=0)),
        lambda: refused(ValueError, lambda: GateHistory(trim="x")),  # type: ignore[arg-type]
        lambda: refused(MemoryError, lambda: GateHistory(max_bytes=2**62)),
        lambda: refused(TypeError, lambda: _core.GateHistory()),  # type: ignore[call-arg]
        use_budget,
        lambda: refused(ValueError, lambda: GateHistory(max_bytes=Budget(None))),
        lambda: refused(TypeError, lambda: _core.GateHistory(1, 1, budget=1)),  # type: ignore[arg-type]
    ],
    "Budget": [
        lambda: Budget("1 MiB", device="cpu", name="x").suballocate("y"),
        lambda: refused(ValueError, lambda: Budget(0)),
        lambda: refused(ValueError, lambda: Budget("x")),
        lambda: refused(TypeError, lambda: _core.Budget(None, "x", 1)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Budget(None, "x", None, 1)),  # type: ignore[arg-type]
        lambda: refused(ValueError, lambda: _core.Budget(None, "\0")),
    ],
    "Budget.__new__": [lambda: Budget(None)],
    "Budget._report": [
        BUDGET._report,
        BUDGET.report,
        lambda: str(BUDGET.report()),
        lambda: repr(BUDGET),
    ],
    "BudgetPart": [
        lambda: _core.BudgetPart(BUDGET, "part"),
        lambda: refused(TypeError, lambda: _core.BudgetPart(1, "part")),  # type: ignore[arg-type]
    ],
    "BudgetPart.__new__": [lambda: _core.BudgetPart(BUDGET, "part")],
    "BudgetPart.reserve": [
        lambda: _core.BudgetPart(BUDGET, "part").reserve(4096, "x", "y"),
        lambda: refused(BudgetError, lambda: PART.reserve(2**40, "x", "y")),
        lambda: refused(ValueError, lambda: PART.reserve(-1, "x", "y")),
        lambda: refused(TypeError, lambda: PART.reserve("x", "x", "y")),  # type: ignore[arg-type]
    ],
    "BudgetPart.release": [
        lambda: (PART.reserve(10, "x", "y"), PART.release(10)),
        lambda: refused(ValueError, lambda: PART.release(1)),
        lambda: refused(TypeError, lambda: PART.release("x")),  # type: ignore[arg-type]
    ],
    "BudgetPart.close": [
        lambda: _core.BudgetPart(BUDGET, "part").close(),
        lambda: refused(ValueError, lambda: CLOSED_PART.reserve(1, "x", "y")),
    ],
    "BudgetPart.reserved": [lambda: PART.reserved],
    "GateHistory.append": [
        lambda: SHARED.append(GATES),
        lambda: SHARED.append(GATES.t().contiguous().t()),
        lambda: refused(ValueError, lambda: SHARED.append(GATES[0])),
        lambda: refused(TypeError, lambda: SHARED.append(None)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: SHARED.append(torch.empty(1, 8, device="meta"))),
        lambda: refused(ValueError, lambda: SHARED.append(torch.rand(2, 9))),
    ],
    "GateHistory.clear": [lambda: filled().clear()],
    "GateHistory.reset_stats": [lambda: filled().reset_stats()],
    "GateHistory.close": [lambda: filled().close()],
    "GateHistory._sums": [
        lambda: SHARED._sums(None),
        lambda: SHARED._sums(1),
        lambda: refused(ValueError, lambda: SHARED._sums(99)),
        lambda: refused(TypeError, lambda: SHARED._sums("x")),  # type: ignore[arg-type]
    ],
    "GateHistory._windows": [SHARED._windows],
    "GateHistory._cat": [SHARED._cat, lambda: GateHistory()._cat()],
    "GateHistory._copy": [SHARED._copy, COUNTED._copy],
    "GateHistory._state": [SHARED._state, lambda: GateHistory()._state()],
    "GateHistory._restore": [
        lambda: GateHistory()._restore(*STATE),
        lambda: refused(ValueError, lambda: SHARED._restore(*STATE)),
        lambda: refused(ValueError, lambda: GateHistory()._restore(*STATE[:-1], b"")),
        lambda: refused(TypeError, lambda: GateHistory()._restore(*STATE[:-1], None)),  # type: ignore[arg-type]
    ],
    "GateHistory.__new__": [filled],
    "GateHistory.__len__": [lambda: len(SHARED)],
    "GateHistory.__iter__": [lambda: list(SHARED), lambda: iter(SHARED)],
    "GateHistory.__getitem__": [
        lambda: SHARED[0],
        lambda: SHARED[-1:],
        lambda: list(SHARED),
        lambda: refused(IndexError, lambda: SHARED[99]),
        lambda: refused(TypeError, lambda: SHARED["x"]),
    ],
}
for _name in [
    *["nbytes", "arena_bytes", "n_experts", "appended", "max_entries", "max_bytes", "top_k"],
    *["recomputed", "device_waits", "pending", "closed", "statistics", "trim", "keep", "dtype"],
]:
    CASES[f"GateHistory.{_name}"] = [lambda name=_name: getattr(SHARED, name)]  # type: ignore[misc]
for _name in ["limit", "used", "peak", "available", "name", "device"]:
    CASES[f"Budget.{_name}"] = [lambda name=_name: getattr(BUDGET, name)]  # type: ignore[misc]
CASES |= leakcases.CASES | leakprobe.CASES
CASES |= recordcases.CASES | samplercases.CASES | policyleaks.CASES
CASES |= managedcases.CASES | gradcases.CASES | growthcases.CASES | blockcases.CASES


def names_of_core() -> set[str]:
    """Everything that can be called or read: functions, types and their own attributes."""
    plain = {name for name, value in vars(_core).items() if isinstance(value, int)}
    found = {name for name in vars(_core) if not name.startswith("__")} - plain
    for name, value in list(vars(_core).items()):
        if isinstance(value, type):
            own = set(vars(value)) - {"__doc__", "__module__"}
            found |= {f"{name}.{attribute}" for attribute in own}
    return found


def test_every_name_of_core_has_a_leak_test():
    assert names_of_core() == set(CASES)


@pytest.mark.usefixtures("_fake_library")
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_runs(name):
    """Once each: what the sanitizers see, whose own memory says nothing of leaks."""
    for case in CASES[name]:
        case()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.usefixtures("frozen")
def test_does_not_leak(name, rss):
    most = FEWER if name in OF_ALL_OBJECTS else ROUNDS

    def run(rounds: int) -> None:
        for _ in range(rounds):
            for case in CASES[name]:
                case()

    run(most // 20 + 1)  # caches of interpreter and torch fill
    gc.collect()
    tracemalloc.start()
    try:
        blocks, before = python_blocks(), tracemalloc.get_traced_memory()[0]
        resident = least_growth(run, most, rss)
        gc.collect()
        grown_blocks = python_blocks() - blocks
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown_blocks < most / 2, f"{grown_blocks} more Python blocks after {most} rounds"
    assert growth < 64 * most, f"{growth} more bytes after {most} rounds"
    assert resident < 4 << 20, f"{resident} more resident bytes after {most} rounds"


@pytest.mark.slow
def test_a_planted_leak_is_found(monkeypatch, rss):
    kept: list[object] = []
    monkeypatch.setitem(CASES, "GateHistory.clear", [lambda: kept.append(bytearray(100))])
    with pytest.raises(AssertionError, match="more Python blocks"):
        test_does_not_leak("GateHistory.clear", rss)

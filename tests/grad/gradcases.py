"""Calls of memtools._core's GradSet, good and bad, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]


def with_gradient(dtype: torch.dtype = torch.float32, n: int = 64) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
    parameter.grad = torch.ones(n, dtype=dtype)
    return parameter


PARAMETERS = [with_gradient(), with_gradient(torch.bfloat16), torch.nn.Parameter(torch.zeros(3))]
PARAMETERS += [with_gradient(torch.complex64)]
SET = _core.GradSet(PARAMETERS)
SHARED = [with_gradient(), with_gradient()]
SHARED[1].grad = SHARED[0].grad


def moving() -> None:
    PARAMETERS[0].grad = torch.ones(64)
    SET.measure()


def remembering() -> None:
    PARAMETERS[0].grad = torch.ones(64)
    assert SET.remember()
    PARAMETERS[0].grad = torch.zeros(64)
    assert SET.changed() == 2
    fresh = _core.GradSet(PARAMETERS)
    fresh.remember()
    PARAMETERS[0].grad.zero_()
    assert fresh.changed() == 1


def cyclic() -> None:
    parameter = with_gradient()
    parameter.set = _core.GradSet([parameter])  # type: ignore[attr-defined]


CASES: dict[str, list[Case]] = {
    "GradSet": [
        lambda: _core.GradSet(PARAMETERS),
        lambda: _core.GradSet(iter(())),
        cyclic,
        lambda: refused(ValueError, lambda: _core.GradSet([*PARAMETERS, PARAMETERS[0]])),
        lambda: refused(TypeError, lambda: _core.GradSet([1])),  # type: ignore[list-item]
        lambda: refused(TypeError, lambda: _core.GradSet(1)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.GradSet()),  # type: ignore[call-arg]
    ],
    "GradSet.__new__": [lambda: _core.GradSet(PARAMETERS).measure()],
    "GradSet.measure": [
        SET.measure,
        moving,
        lambda: refused(TypeError, lambda: SET.measure("x")),  # type: ignore[call-arg]
    ],
    "GradSet.multiply": [
        lambda: SET.multiply(0.5),
        lambda: SET.multiply(1),
        lambda: _core.GradSet(SHARED).multiply(2),
        lambda: refused(TypeError, lambda: SET.multiply("x")),  # type: ignore[arg-type]
    ],
    "GradSet.remember": [SET.remember, remembering],
    "GradSet.changed": [SET.changed, lambda: _core.GradSet(PARAMETERS).changed()],
    "GradMeasure": [
        SET.measure,
        lambda: refused(TypeError, lambda: _core.GradMeasure([1])),
    ],
}
for _name in ["parameters", "tensors"]:
    CASES[f"GradSet.{_name}"] = [lambda name=_name: getattr(SET, name)]  # type: ignore[misc]
MEASURE = SET.measure()
for _name in set(vars(_core.GradMeasure)) - {"__doc__", "__module__"}:
    CASES[f"GradMeasure.{_name}"] = [lambda name=_name: getattr(MEASURE, name)]  # type: ignore[misc]

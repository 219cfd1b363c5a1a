"""plan: what a step will need, from two steps that are traced without memory.

    make(batch=64) ──► traced (tracing.py) ──► Trace ──► Plan
    make(batch=8), make(batch=16) ──► traced for real ──► fitted (fitted.py) ──► Trace ──► Plan

With values to vary there is one Plan for each setting, and for each limit the best one
(settings.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, overload

from memtools._base import torch as bridge
from memtools._base.number import whole_number
from memtools._base.peak import Part
from memtools._base.place import Place, name_of
from memtools._base.size import parse_bytes
from memtools._base.text import brief
from memtools._blocks.changes import Changed, changed
from memtools._blocks.lifetimes import Trace
from memtools._plan.allocator import reserved
from memtools._plan.device import CPU, CUDA, DEVICES
from memtools._plan.fitted import SEEDS, fitted
from memtools._plan.plan import Plan, PlanFit, PlanLimit, PlanPhase
from memtools._plan.settings import (
    PlanBest,
    Plans,
    PlanSetting,
    least_changed,
    setting_text,
    settings_of,
)
from memtools._plan.tracing import operators, traced

MAKES = "a function that needs no arguments and returns the step"
PRECISION, PRECISIONS = "precision", ("float32", "bfloat16", "float16")
MOST_SETTINGS = 64
_Runs = list[tuple[Trace, tuple[str, ...]]]  # a setting with each seed: the trace, what was assumed


@overload
def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: None = None,
    device: str = CUDA,
    measure: Mapping[str, Sequence[int]] | None = None,
) -> Plan: ...


@overload
def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: Mapping[str, Sequence[Any]],
    device: str = CUDA,
    measure: Mapping[str, Sequence[int]] | None = None,
) -> Plans: ...


def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    device: str = CUDA,
    measure: Mapping[str, Sequence[int]] | None = None,
) -> Plan | Plans:
    """Plan a training step: its peak memory, by category and over time, before it runs.

        def make(batch=64):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            inputs, targets = torch.randn(batch, 512), torch.randint(10, (batch,))

            def step():
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()

            return step

        print(memtools.plan(make, limits=["8 GiB"]).table())
        print(memtools.plan(make, limits=["8 GiB"], vary={"batch": [32, 64, 128]}).table())

    Args:
        step: a function that makes the model, the optimizer and the data, and returns the step, a
            callable without arguments. Both run under torch's fake tensors; the second step is
            planned. Values that it reads, such as `loss.item()`, are assumed (see `Plan.assumed`);
            its shapes must not depend on them.
        limits: sizes in bytes or like "24 GiB", to check whether the step fits.
        vary: values for keyword arguments of `step`; all combinations are planned, 64 at most.
            "precision" with "float32", "bfloat16" and "float16" needs no argument: the step runs
            under `torch.autocast`.
        device: "cuda" compares limits with what torch's caching allocator reserves, "cpu" with the
            peak. It need not be present.
        measure: for a step whose shapes depend on values: a keyword argument with 2 or more small
            numbers, such as {"batch": [8, 16]}. These steps run for real on the CPU, four times
            each, and the plan is fitted to them.

    The plan is exact for the CPU. Fused attention on a GPU needs less than planned with dropout or
    a mask.

    Raises TypeError if `step` returns no callable; ValueError if the step raises, has shapes that
    depend on values, names another device, or runs no operator; ImportError without torch.

    Takes 0.05 to 0.3 ms per operator for any batch, and with `measure` the time and memory of the
    small steps.
    """
    return planned(step, limits, vary, device, measure)


def planned(
    step: Callable[..., Any],
    limits: Sequence[int | str],
    vary: Mapping[str, Sequence[Any]] | None,
    device: str,
    measure: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[int, Sequence[Mapping[str, Any]]], object] = lambda at, settings: None,
) -> Plan | Plans:
    """`plan`, which calls `progress` before each setting with its number and all of them."""
    if not callable(step):
        raise TypeError(f"plan() takes {MAKES}, got {type(step).__name__}")
    sizes = [parse_bytes(limit, "each of limits", "24 GiB") for limit in limits]
    if device not in DEVICES:
        raise ValueError(f'device must be "cuda" or "cpu", got {brief(str(device))}')
    settings = [{}] if vary is None else _checked(step, vary)
    if measure is not None:
        _check_measured(step, measure, settings)
    runs, found, best = dict[str, _Runs](), list[PlanSetting](), dict[int, PlanBest]()
    for number, values in enumerate(settings):
        progress(number, settings)
        fit = None
        if measure is None:
            trace, assumed = traced(_with_values(step, values), device)
        else:
            trace, assumed, fit = _fitted(step, values, measure, device, runs)
        one = _plan_of(trace, sizes, device, assumed, fit)
        if vary is None:
            return one
        found.append(PlanSetting(values, one))
        for limit in sizes:
            margin = _margin(fit, one.peak_bytes)
            if limit not in best and (least := least_changed(trace, device, limit - margin)):
                changes, peak, most = least
                best[limit] = PlanBest(limit, values, changes, peak, most + margin)
    fitting = tuple(best.get(limit, PlanBest(limit, {})) for limit in sizes)
    return Plans(tuple(found), fitting, device)


def _checked(step: Callable[..., Any], vary: Any) -> list[dict[str, Any]]:
    """The settings of `vary`. Raises as `plan` does."""
    if not isinstance(vary, Mapping):
        raise TypeError(f"vary must be a dict of lists of values, got {type(vary).__name__}")
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"vary must have a list of values for {brief(str(name))}")
        if not values:
            raise ValueError(f"vary must have 1 or more values for {brief(str(name))}")
        if name == PRECISION and name not in inspect.signature(step).parameters:
            if not set(map(str, values)) <= set(PRECISIONS):
                raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}")
        else:
            _check_name(step, name)
    settings = settings_of(vary)
    if not vary or len(settings) > MOST_SETTINGS:
        raise ValueError(
            f"vary must make 1 to {MOST_SETTINGS} settings, all combinations of its values, got "
            f"{len(settings) if vary else 0:,}"
        )
    return settings


def _check_name(step: Callable[..., Any], name: object) -> None:
    takes = inspect.signature(step).parameters
    if name not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        known = ", ".join(takes) or "no arguments"
        raise ValueError(f"the function has no argument {brief(str(name))}: it has {known}")


def _check_measured(
    step: Callable[..., Any], measure: Any, settings: Sequence[Mapping[str, Any]]
) -> None:
    """Raises as `plan` does."""
    if not isinstance(measure, Mapping):
        raise TypeError(
            f"measure must be a dict of a list of numbers, got {type(measure).__name__}"
        )
    if len(measure) != 1:
        raise ValueError(f"measure must have one argument of the function, got {len(measure)}")
    ((name, sizes),) = measure.items()
    _check_name(step, name)
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"measure must have a list of values for {brief(str(name))}")
    if len({whole_number(f"each {name} that is measured", size) for size in sizes}) < 2:
        raise ValueError(f"measure must have 2 or more different values for {brief(str(name))}")
    for values in settings:
        whole_number(f"the {name} to plan for", _value_of(step, name, values))


def _value_of(step: Callable[..., Any], name: str, values: Mapping[str, Any]) -> Any:
    """The value of an argument in a setting, where it may be the default one."""
    one = inspect.signature(step).parameters.get(name)
    default = inspect.Parameter.empty if one is None else one.default
    found = values.get(name, default)
    if found is inspect.Parameter.empty:
        raise ValueError(f"the function has no default for {name}: vary it too")
    return found


def _with_values(step: Callable[..., Any], values: Mapping[str, Any]) -> Callable[[], Any]:
    """The function that makes the step in a setting."""
    given = dict(values)
    precision = None
    if PRECISION in given and PRECISION not in inspect.signature(step).parameters:
        precision = given.pop(PRECISION)
    if precision in (None, PRECISIONS[0]):
        return lambda: step(**given)

    def make() -> Any:
        torch, run = bridge.connect().torch, step(**given)
        if not callable(run):
            return run

        def cast() -> None:
            with torch.autocast(CPU, dtype=getattr(torch, precision)):
                run()

        return cast

    return make


def _fitted(
    step: Callable[..., Any],
    values: Mapping[str, Any],
    measure: Mapping[str, Sequence[int]],
    device: str,
    runs: dict[str, _Runs],
) -> tuple[Trace, tuple[str, ...], PlanFit]:
    """The trace of a setting, fitted to real steps, with what was assumed. `runs` has those that
    ran already; others are added."""
    ((name, sizes),) = measure.items()
    some, assumed = dict[int, list[Trace]](), tuple[str, ...]()
    for size in sorted(set(sizes)):
        setting = {**values, name: size}
        key = setting_text(setting)
        if key not in runs:
            make = _with_values(step, setting)
            runs[key] = [traced(make, device, seed) for seed in range(SEEDS)]
        some[size], assumed = [trace for trace, _ in runs[key]], runs[key][0][1]
    wanted = _value_of(step, name, values)
    try:
        trace, low, high = fitted(some, wanted)
    except ValueError as error:
        raise ValueError(f"the steps that were measured with {name} {error}") from None
    return trace, assumed, PlanFit(name, tuple(some), low, high)


def _plan_of(
    trace: Trace, limits: Sequence[int], device: str, assumed: tuple[str, ...], fit: PlanFit | None
) -> Plan:
    """The plan of the last step of a trace. A limit must hold the end of the interval of a fit."""
    ops, curve, changes = trace.ops, trace.curve(), changed(trace, is_exact=True)
    positions = operators(trace)
    position = max(positions, key=curve.__getitem__)
    parts: dict[str, tuple[int, int]] = {}
    for life in trace.at(position):
        nbytes, count = parts.get(life.category, (0, 0))
        parts[life.category] = nbytes + life.bytes, count + 1
    phases = [(phase, list(run)) for phase, run in groupby(positions, lambda at: ops[at].phase)]
    op, margin = ops[position], _margin(fit, curve[position])
    return Plan(
        curve[position],
        op.phase,
        op.name,
        name_of(Place(*op.frames[0])) if op.frames else "",
        tuple(
            Part(what, nbytes, count)
            for what, (nbytes, count) in sorted(parts.items(), key=lambda one: -one[1][0])
        ),
        tuple(curve[at] for at in positions),
        tuple(PlanPhase(phase, len(run), max(curve[at] for at in run)) for phase, run in phases),
        reserved(trace, device).reserved_bytes + margin,
        tuple(_limit_of(trace, changes, limit, device, margin) for limit in limits),
        tuple(one.lowered for one in changes),
        device,
        assumed,
        fit,
    )


def _margin(fit: PlanFit | None, peak: int) -> int:
    """The bytes from a peak to the end of its interval; 0 if it is not fitted."""
    return 0 if fit is None else max(0, fit.high_bytes - peak)


def _limit_of(
    trace: Trace, changes: Sequence[Changed], limit: int, device: str, margin: int
) -> PlanLimit:
    """Whether a trace fits into a limit, with a margin. What does not is lacking at least what its
    peak is above the limit, though the allocator may have failed earlier; it may fit after a
    change, of which the one is named that changes the peak least."""
    fits, most = reserved(trace, device, limit - margin)
    if fits:
        return PlanLimit(limit, fits, most + margin)
    most = max(most, trace.peak()[1]) + margin
    for one in reversed(changes):
        if reserved(one.trace, device, limit - margin).fits:
            return PlanLimit(limit, fits, most, one.lowered.change)
    return PlanLimit(limit, fits, most)

"""plan: runs a training step under torch's fake tensors, which have shapes and no memory.

    make() ──► step          under FakeTensorMode, with the tracer of lives
    step()                   the optimizer makes its state
    step()                   this one is planned ──► Plan, or one of Plans for each setting

Nothing of the model's size is allocated, so a step of 80 GiB is planned on a laptop. The tensors
are fake ones of the CPU, which stand for those of a device (device.py). Their operators save what
those of a device save, but for fused ones: scaled_dot_product_attention with dropout or a mask
saves the attention weights, which kernels of a GPU compute again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from types import TracebackType
from typing import Any, overload

from memtools._base import torch as bridge
from memtools._base.libraries import library_paths
from memtools._base.peak import Part
from memtools._base.size import parse_bytes
from memtools._base.text import brief
from memtools._blocks.changes import Changed, changed
from memtools._blocks.dispatch import is_of_a_library
from memtools._blocks.lifetimes import Trace, Tracer
from memtools._plan.allocator import reserved
from memtools._plan.device import (
    CPU,
    CUDA,
    DEVICES,
    OtherDeviceError,
    also_in_backward,
    replaced,
    standing_in_for,
)
from memtools._plan.kernels import MEASURED, UNKNOWN, Kernels
from memtools._plan.plan import Plan, PlanLimit, PlanPhase
from memtools._plan.settings import PlanBest, Plans, PlanSetting, least_changed, settings_of
from memtools._plan.values import Assumptions, ShapeOfValueError

MAKES = "a function that needs no arguments and returns the step"
PRECISION, PRECISIONS = "precision", ("float32", "bfloat16", "float16")
MOST_SETTINGS = 64
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # no code of the user's
MEASURE = "`memtools run` measures the real step"


@overload
def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: None = None,
    device: str = CUDA,
) -> Plan: ...


@overload
def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: Mapping[str, Sequence[Any]],
    device: str = CUDA,
) -> Plans: ...


def plan(
    step: Callable[..., Any],
    *,
    limits: Sequence[int | str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    device: str = CUDA,
) -> Plan | Plans:
    """Plan a training step: what it will need at its peak, by category and over time, before
    anything runs.

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
        step: a function that needs no arguments, makes model, optimizer and data, and returns the
            step: a callable without arguments, which makes one training step. It is called once
            under torch's fake tensors, the step twice; the second one is planned. It may name the
            device, which need not be present. Values that it reads, such as `loss.item()`, are
            assumed, and `Plan.assumed` says so; its shapes must not depend on them (`nonzero`).
        limits: sizes in bytes or as "24 GiB", from 1 byte to 2**63 - 1; for each, whether the step
            fits. Default: none.
        vary: for each lever, a keyword argument of `step`, the values to plan it with, 1 or more;
            all combinations are planned, 64 at most. "precision" with values of "float32",
            "bfloat16" and "float16" is a lever of every step that does not have such an argument:
            with the latter two, the whole step runs under `torch.autocast`. None, the default:
            `step` is called without arguments.
        device: for which the step is planned. "cuda", the default: optimizers take `foreach=True`
            by themselves and autocast runs in float32 what it does on CUDA; limits are compared
            with what torch's caching allocator reserves. "cpu": limits are compared with the peak.
            All tensors count as of this device, wherever the step makes them.

    Returns:
        The plan, or with `vary` the plans of all settings, with the best one for each limit. Exact
        for the CPU, also with what convolutions need for themselves: each different one runs there
        for real, with a part of the batch. Fused attention on a GPU needs less than what is planned
        for it where there is dropout or a mask.

    Raises TypeError if `step` is not callable or returns no callable, or a limit or `vary` has
    another type; ValueError if a limit, the device or `vary` is out of range, if `step` or what it
    returns raises, makes a shape of values, names another device, or runs no operator; ImportError
    without torch.

    It takes 0.05 to 0.3 ms an operator, whatever the batch is. The state of torch's random number
    generator stays as it was.
    """
    return planned(step, limits, vary, device)


def planned(
    step: Callable[..., Any],
    limits: Sequence[int | str],
    vary: Mapping[str, Sequence[Any]] | None,
    device: str,
    progress: Callable[[int, Sequence[Mapping[str, Any]]], object] = lambda at, settings: None,
) -> Plan | Plans:
    """`plan`, which calls `progress` before each setting with its number and all of them."""
    if not callable(step):
        raise TypeError(f"plan() takes {MAKES}, got {type(step).__name__}")
    sizes = [parse_bytes(limit, "each of limits", "24 GiB") for limit in limits]
    if device not in DEVICES:
        raise ValueError(f'device must be "cuda" or "cpu", got {brief(str(device))}')
    if vary is None:
        trace, assumed = _traced(step, device)
        return _plan_of(trace, sizes, device, assumed)
    settings, found, best = _checked(step, vary), list[PlanSetting](), dict[int, PlanBest]()
    for number, values in enumerate(settings):
        progress(number, settings)
        trace, assumed = _traced(_with_values(step, values), device)
        found.append(PlanSetting(values, _plan_of(trace, sizes, device, assumed)))
        for limit in sizes:
            if limit not in best and (least := least_changed(trace, device, limit)):
                best[limit] = PlanBest(limit, values, *least)
    fitting = tuple(best.get(limit, PlanBest(limit, {})) for limit in sizes)
    return Plans(tuple(found), fitting, device)


def _checked(step: Callable[..., Any], vary: Any) -> list[dict[str, Any]]:
    """The settings of `vary`. Raises as `plan` does."""
    if not isinstance(vary, Mapping):
        raise TypeError(f"vary must be a dict of lists of values, got {type(vary).__name__}")
    takes = inspect.signature(step).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"vary must have a list of values for {brief(str(name))}")
        if not values:
            raise ValueError(f"vary must have 1 or more values for {brief(str(name))}")
        if name == PRECISION and name not in takes:
            if not set(map(str, values)) <= set(PRECISIONS):
                raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}")
        elif name not in takes and not takes_all:
            known = ", ".join(takes) or "no arguments"
            raise ValueError(f"the function has no argument {brief(str(name))}: it has {known}")
    settings = settings_of(vary)
    if not vary or len(settings) > MOST_SETTINGS:
        raise ValueError(
            f"vary must make 1 to {MOST_SETTINGS} settings, all combinations of its values, got "
            f"{len(settings) if vary else 0:,}"
        )
    return settings


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


def _traced(make: Callable[[], Any], device: str) -> tuple[Trace, tuple[str, ...]]:
    """Build and run two steps under fake tensors; with the trace, what was assumed of values.
    Raises as `plan` does."""
    torch, fakes = bridge.connect().torch, bridge.fake_tensors()
    mode = fakes.FakeTensorMode()
    tracer, assumptions = Tracer((OURS,)), Assumptions(torch, fakes, _libraries())
    kernels = Kernels()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(standing_in_for(device, torch, fakes))
        stack.enter_context(_converting_modules(torch, fakes))
        stack.enter_context(_copying_tensors(torch, fakes))
        stack.enter_context(also_in_backward(torch, assumptions.mode()))
        stack.enter_context(mode)
        stack.enter_context(kernels)
        stack.enter_context(tracer)
        with _in_a_sentence("the function", torch, fakes):
            step = make()
        if not callable(step):
            raise TypeError(
                f"the function must return the step, a callable without arguments, got "
                f"{type(step).__name__}"
            )
        for _ in range(2):
            tracer.step_ended()
            with _in_a_sentence("the step", torch, fakes):
                step()
    trace = tracer.trace()
    if not _operators(trace):
        raise ValueError("the step ran no operator of torch: there is nothing to plan")
    if not any("convolution" in op.name for op in trace.ops):
        return trace, assumptions.notes
    if device == CPU:
        trace, is_known = kernels.measured(trace)
    return trace, (*assumptions.notes, MEASURED if device == CPU and is_known else UNKNOWN)


def _plan_of(trace: Trace, limits: Sequence[int], device: str, assumed: tuple[str, ...]) -> Plan:
    """The plan of the last step of a trace."""
    ops, curve, changes = trace.ops, trace.curve(), changed(trace)
    positions = _operators(trace)
    position = max(positions, key=curve.__getitem__)
    parts: dict[str, tuple[int, int]] = {}
    for life in trace.at(position):
        nbytes, count = parts.get(life.category, (0, 0))
        parts[life.category] = nbytes + life.bytes, count + 1
    phases = [(phase, list(run)) for phase, run in groupby(positions, lambda at: ops[at].phase)]
    op = ops[position]
    file, line, function = op.frames[0] if op.frames else ("", 0, "")
    function = function.rpartition("<locals>.")[2]
    return Plan(
        curve[position],
        op.phase,
        op.name,
        f"{os.path.basename(file)}:{line} in {function}" if file else "",
        tuple(
            Part(what, nbytes, count)
            for what, (nbytes, count) in sorted(parts.items(), key=lambda one: -one[1][0])
        ),
        tuple(curve[at] for at in positions),
        tuple(PlanPhase(phase, len(run), max(curve[at] for at in run)) for phase, run in phases),
        reserved(trace, device).reserved_bytes,
        tuple(_limit_of(trace, changes, limit, device) for limit in limits),
        tuple(one.lowered for one in changes),
        device,
        assumed,
    )


def _limit_of(trace: Trace, changes: Sequence[Changed], limit: int, device: str) -> PlanLimit:
    """Whether a trace fits into a limit. What does not is lacking at least what its peak is above
    the limit, though the allocator may have failed earlier; it may fit after a change, of which the
    one is named that changes the peak least."""
    fits, most = reserved(trace, device, limit)
    if fits:
        return PlanLimit(limit, fits, most)
    most = max(most, trace.peak()[1])
    for one in reversed(changes):
        if reserved(one.trace, device, limit).fits:
            return PlanLimit(limit, fits, most, one.lowered.change)
    return PlanLimit(limit, fits, most)


def _operators(trace: Trace) -> list[int]:
    """The positions of the operators of the last step, without those that only ask a fake tensor
    for its device or name a part of the step for a profiler."""
    begin = trace.steps[-1] if len(trace.steps) == 3 else len(trace.ops)
    return [
        at
        for at in range(begin, len(trace.ops))
        if not trace.ops[at].name.startswith(("prim.device", "profiler."))
    ]


@contextmanager
def _converting_modules(torch: Any, fakes: Any) -> Iterator[None]:
    """Let `model.to("cpu")` and `model.bfloat16()` convert fake parameters: torch would swap the
    contents of the old and the new one, and cannot, as the fake mode has weak references to them.
    Each parameter is replaced by a new one, or stays as it is where nothing changes."""
    original, converted, depth = torch.nn.Module._apply, dict[int, tuple[Any, Any]](), 0

    def new(tensor: Any, convert: Callable[[Any], Any]) -> Any:
        """The converted tensor, the same for all modules that share it."""
        if id(tensor) not in converted:
            with torch.no_grad():
                found = convert(tensor)
            if found is tensor or (found.dtype == tensor.dtype and found.device == tensor.device):
                return tensor
            if isinstance(tensor, torch.nn.Parameter):
                found = torch.nn.Parameter(found, tensor.requires_grad)
            converted[id(tensor)] = tensor, found  # It is kept, so that its id is not used again.
        return converted[id(tensor)][1]

    def apply(module: Any, convert: Callable[[Any], Any], recurse: bool = True) -> Any:
        nonlocal depth
        held = [one for one in module._parameters.values() if one is not None]
        if not all(isinstance(one, fakes.FakeTensor) for one in held):
            return original(module, convert, recurse)
        depth += 1
        try:
            for child in module.children() if recurse else ():
                child._apply(convert)
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = None if tensor is None else new(tensor, convert)
        finally:
            depth -= 1
            if depth == 0:
                converted.clear()
        return module

    with replaced(torch.nn.Module, "_apply", apply):
        yield


@contextmanager
def _copying_tensors(torch: Any, fakes: Any) -> Iterator[None]:
    """Let `copy.deepcopy(layer)` copy fake tensors, as torch's own Transformer does for each layer:
    torch would copy the fake mode with them."""

    def copy(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            return torch.Tensor.__deepcopy__(tensor, memo)  # which says why it cannot
        with torch.no_grad():
            new = tensor.clone()
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, tensor.requires_grad)
        new.requires_grad_(tensor.requires_grad)
        new.grad = None if tensor.grad is None else copy(tensor.grad, memo)
        memo[id(tensor)] = new
        return new

    with replaced(fakes.FakeTensor, "__deepcopy__", copy):
        yield


@contextmanager
def _in_a_sentence(what: str, torch: Any, fakes: Any) -> Iterator[None]:
    """Turn what is raised into a ValueError of one sentence."""
    try:
        yield
    except Exception as error:
        where = _line_of(error.__traceback__)
        data_dependent = (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
        if isinstance(error, OtherDeviceError):
            reason = f"{what} names the device {error}{where}"
        elif "CUDA is not available" in str(error):
            reason = f"{what} uses the device cuda, and is planned for cpu{where}"
        elif isinstance(error, (*data_dependent, ShapeOfValueError)):
            of = "" if isinstance(error, ShapeOfValueError) else f" ({error.func})"
            makes = "needs" if of else "makes a shape of"
            reason = (
                f"{what} {makes} the values of a tensor{of}{where}, and under fake "
                f"tensors there are none: leave that out of the planned step, or {MEASURE}"
            )
        elif "Please convert all Tensors to FakeTensors" in str(error):
            reason = (
                f"{what} uses a tensor that was made before{where}: make model, optimizer and data "
                "inside the function"
            )
        else:
            text = " ".join(str(error).split())[:300]
            said = f"{type(error).__name__}: {text}" if text else type(error).__name__
            reason = f"{what} raised {said}{where}; {MEASURE}"
        raise ValueError(reason) from error


def _line_of(traceback: TracebackType | None) -> str:
    """` (train.py:12)`, the innermost line of the user's code; "" if there is none."""
    libraries, found = _libraries(), ""
    for frame in inspect.getinnerframes(traceback) if traceback else ():
        if not is_of_a_library(frame.filename, libraries):
            found = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    return found


def _libraries() -> tuple[str, ...]:
    """Prefixes of paths whose files are not the user's code."""
    return (*library_paths(), OURS, "<")

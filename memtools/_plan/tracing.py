"""traced: two steps of the user's under torch's fake tensors, or for real, as a trace.

    make() ──► step          with the tracer of lives, under FakeTensorMode
    step()                   the optimizer makes its state
    step()                   the one that is planned

Nothing of the model's size is allocated, so a step of 80 GiB is planned on a laptop. The tensors
are fake ones of the CPU, which stand for those of a device (device.py). Their operators save what
those of a device save, but for fused ones: scaled_dot_product_attention with dropout or a mask
saves the attention weights, which kernels of a GPU compute again.

For real, the tensors are those of the CPU, and stand for those of a device in the same way.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from memtools._base import torch as bridge
from memtools._base.libraries import library_paths
from memtools._base.place import Place, name_of
from memtools._blocks.dispatch import is_of_a_library
from memtools._blocks.lifetimes import Trace, Tracer
from memtools._plan.device import (
    CPU,
    OtherDeviceError,
    also_in_backward,
    replaced,
    standing_in_for,
)
from memtools._plan.kernels import MEASURED, UNKNOWN, Kernels
from memtools._plan.values import Assumptions, ShapeOfValueError

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # no code of the user's
MEASURE = "`memtools run` measures the real step"


def traced(
    make: Callable[[], Any], device: str, seed: int | None = None
) -> tuple[Trace, tuple[str, ...]]:
    """Build and run two steps; with the trace, what was assumed. Raises as `plan` does.

    Args:
        make: makes the step.
        device: for which it is.
        seed: of torch's random numbers, with which it runs for real; None, the default: under fake
            tensors.
    """
    torch, fakes = bridge.connect().torch, bridge.fake_tensors()
    tracer, assumptions = Tracer((OURS,)), Assumptions(torch, fakes, _libraries())
    kernels = Kernels()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(standing_in_for(device, torch, fakes))
        if seed is None:
            stack.enter_context(_converting_modules(torch, fakes))
            stack.enter_context(_copying_tensors(torch, fakes))
            stack.enter_context(also_in_backward(torch, assumptions.mode()))
            stack.enter_context(fakes.FakeTensorMode())
        else:
            torch.manual_seed(seed)
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
    if not operators(trace):
        raise ValueError("the step ran no operator of torch: there is nothing to plan")
    if not any("convolution" in op.name for op in trace.ops):
        return trace, assumptions.notes
    if device == CPU:
        trace, is_known = kernels.measured(trace)
    return trace, (*assumptions.notes, MEASURED if device == CPU and is_known else UNKNOWN)


def operators(trace: Trace) -> list[int]:
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
            reason = f"{what} uses the device cuda, but the plan is for cpu{where}"
        elif isinstance(error, (*data_dependent, ShapeOfValueError)):
            of = "" if isinstance(error, ShapeOfValueError) else f" ({error.func})"
            makes = "needs" if of else "makes a shape of"
            reason = (
                f"{what} {makes} the values of a tensor{of}{where}, and under fake "
                "tensors there are none: `--measure batch=8,16` fits the plan to real steps with "
                f"small values of an argument, and {MEASURE}"
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
            found = f" ({name_of(Place(frame.filename, frame.lineno, ''))})"
    return found


def _libraries() -> tuple[str, ...]:
    """Prefixes of paths whose files are not the user's code."""
    return (*library_paths(), OURS, "<")

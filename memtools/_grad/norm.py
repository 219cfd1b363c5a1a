"""clip_grad_norm_ and grad_norm: like torch's, with a norm that is exact for large tensors."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from memtools._base import torch as bridge
from memtools._base.number import as_float
from memtools._grad.gradients import Gradients, Measure

if TYPE_CHECKING:
    import torch

    Parameters: TypeAlias = torch.Tensor | Iterable[torch.Tensor]


def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients of `parameters` as one vector. Reads each gradient once.

    Args:
        parameters: a tensor or tensors; duplicates count once.
        norm_type: the p of the p-norm, inf for the largest element.
        error_if_nonfinite: raise RuntimeError if the norm is inf or nan.
        foreach: for norms that torch computes: one call for all gradients of a device. None: torch
            chooses.

    Returns a 0-d tensor on the device of the first gradient, fp32 or float64. The 2-norm is exact
    to 1e-7 for any number of elements and any dtype, and has the same bits for any number of
    threads. Other norms, and those of DTensors, are torch's.

    Raises TypeError if a gradient is sparse.
    """
    torch = bridge.connect().torch
    gradients = _gradients(parameters)
    if _is_torchs(norm_type, gradients):
        grads = gradients.tensors()
        options = as_float(norm_type), error_if_nonfinite, foreach
        return torch.nn.utils.get_total_norm(grads, *options)  # type: ignore[no-any-return]
    found = gradients.measure()
    _check(found, error_if_nonfinite)
    return _as_tensor(torch, gradients, found)


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of `parameters` in place so that their norm is at most `max_norm`.

    A drop-in for `torch.nn.utils.clip_grad_norm_`, with the same coefficient. Returns the norm
    before clipping. Reads the gradients once, and on the CPU writes them only if they are too
    large. Waits for a CUDA device only with `error_if_nonfinite`.

    Args:
        parameters, norm_type, error_if_nonfinite, foreach: as for `grad_norm()`.
        max_norm: the largest norm that is left unchanged; ValueError if negative or nan.

    Raises what `grad_norm()` raises. An error changes nothing.
    """
    torch = bridge.connect().torch
    max_norm = as_float(max_norm)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    gradients = _gradients(parameters)
    if _is_torchs(norm_type, gradients):
        options = as_float(norm_type), error_if_nonfinite, foreach
        return torch.nn.utils.clip_grad_norm_(gradients.parameters, max_norm, *options)  # type: ignore[no-any-return]
    found = gradients.measure()
    _check(found, error_if_nonfinite)
    total = _as_tensor(torch, gradients, found)  # It may raise, so it comes before any change.
    norm = found.norm
    if not isinstance(norm, float):
        gradients.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))
    elif not (coefficient := max_norm / (norm + 1e-6)) >= 1.0:
        gradients.multiply(coefficient)
    return total


def _gradients(parameters: Parameters) -> Gradients:
    torch = bridge.connect().torch
    if isinstance(parameters, torch.Tensor):
        return Gradients([parameters])
    listed = list(parameters)
    if not listed and isinstance(parameters, types.GeneratorType):
        warnings.warn("parameters is an empty generator: nothing has a norm", stacklevel=3)
    if len(set(map(id, listed))) < len(listed):
        listed = list({id(parameter): parameter for parameter in listed}.values())
    return Gradients(listed)


def _is_torchs(norm_type: float, gradients: Gradients) -> bool:
    return as_float(norm_type) != 2.0 or bool(gradients.sharded())


def _check(found: Measure, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not bool(found.finite):
        infs, nans, first_bad = found.bad
        raise RuntimeError(
            f"the norm of the gradients is not finite: {infs} inf and {nans} nan "
            f"elements, the first of {first_bad}; to clip by it nevertheless, pass "
            "error_if_nonfinite=False"
        )


def _as_tensor(torch: Any, gradients: Gradients, found: Measure) -> torch.Tensor:
    first = next((p.grad for p in gradients.parameters if p.grad is not None), None)
    if first is None:
        return torch.tensor(0.0)  # type: ignore[no-any-return]
    dtypes = map(attrgetter("dtype"), gradients.parameters)
    wide = not {torch.float64, torch.complex128}.isdisjoint(dtypes)
    dtype = torch.float64 if wide else torch.float32
    return torch.as_tensor(found.norm, dtype=dtype, device=first.device)  # type: ignore[no-any-return]

"""The connection to torch: the only file that imports it.

`connect()` runs once, when the first tensor comes. It hands `memtools._core` the exchange API by
which C reads tensors, and the optional shim `memtools._torch`, which is built for one exact torch:
versions are compared before it is loaded; on a mismatch memtools warns once and goes on without.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools import _core
from memtools.errors import ShimUnavailable

if TYPE_CHECKING:
    import torch

OLDEST_TORCH = (2, 11)


class Bridge(NamedTuple):
    """What is connected: the torch module, and the shim or the reason why it is not there."""

    torch: Any
    shim: Any
    reason: str


@functools.cache
def connect() -> Bridge:
    """Connect `memtools._core` to torch, at the first call.

    Raises ImportError where torch is missing or older than 2.11.
    """
    torch = _import_torch()
    shim, reason = _load_shim(torch.__version__, torch.version.git_version)
    _core._connect(*parts(torch), shim.ops if shim else None)
    return Bridge(torch, shim, reason)


def loaded() -> Any:
    """torch, when the program has imported it; None otherwise, and nothing is imported."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # without one: still being imported


def parts(torch: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """What `memtools._core` takes of torch, beside the shim."""
    return (
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.nn.Parameter,
        torch._C._current_graph_task_id,
        torch.Tensor.is_neg,
        plain,
    )


def shim_status() -> tuple[bool, str]:
    """Whether the shim is in use, and if not, why not in one sentence. Connects."""
    bridge = connect()
    return bridge.shim is not None, bridge.reason


def require_shim() -> Any:
    """The shim module, for what only it can do; ShimUnavailable says what to run."""
    bridge = connect()
    if bridge.shim is None:
        from memtools._base.install import rebuild_command

        raise ShimUnavailable(f"{bridge.reason}; run {rebuild_command()}")
    return bridge.shim


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"memtools needs torch >= 2.11 to read tensors: {error}") from error
    if getattr(torch.__spec__, "_initializing", False):  # by this thread, further up
        raise ImportError(
            "memtools was called by a signal handler or a finalizer while torch is being imported; "
            "import torch first"
        )
    release = torch.__version__.split("+")[0].split(".")
    if (int(release[0]), int(release[1])) < OLDEST_TORCH:
        raise ImportError(f"memtools needs torch >= 2.11, found {torch.__version__}; upgrade torch")
    return torch


def _load_shim(version: str, git_version: str) -> tuple[Any, str]:
    """(module, "") or (None, reason). Compares before loading: c10's structures change between
    releases, and a shim of another torch may load and then read garbage."""
    from memtools import _build_info as built

    if built.TORCH_VERSION is None:
        return None, "memtools._torch was not built: there was no torch when memtools was installed"
    if (version, git_version) != (built.TORCH_VERSION, built.TORCH_GIT_VERSION):
        reason = f"memtools._torch was built for torch {built.TORCH_VERSION}, this is {version}"
        _warn(f"{reason}; memtools goes on without it, a little slower")
        return None, reason
    try:
        return importlib.import_module("memtools._torch"), ""
    except ImportError as error:
        reason = f"memtools._torch does not load: {error}"
        _warn(reason)
        return None, reason


def _warn(message: str) -> None:
    from memtools._base.install import rebuild_command

    message = f"{message}; to rebuild, run {rebuild_command()}"
    warnings.warn(message, RuntimeWarning, stacklevel=5)


def process_group() -> Any:
    """The module torch.distributed where the program has a process group, else None. Imports
    nothing."""
    dist = getattr(loaded(), "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread: a forward that runs now is a
    recomputation under activation checkpointing."""
    return bool(connect().torch._C._current_graph_task_id() != -1)


def written(tensors: list[Any]) -> None:
    """Tell autograd that these are written to, as an operation in place does; `memtools._core`
    calls it where the shim is not there to do so."""
    connect().torch.autograd.graph.increment_version(tensors)


def plain(tensor: Any) -> torch.Tensor:
    """`tensor` as a plain strided tensor on the CPU or a packed one on a CUDA device, values
    unchanged.

    `memtools._core` calls it for every tensor that it cannot read at once. Raises TypeError for
    what has no values to read, or values that are no gates.
    """
    torch = connect().torch
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"append() takes a torch.Tensor of gates [n, n_experts], got {type(tensor).__name__}"
        )
    fault = _why_no_values(torch, tensor)
    if fault is not None:
        raise TypeError(f"append() cannot read gates that are {fault}")
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(torch.Tensor).resolve_neg()
        if values.device.type == "cpu":
            return values  # type: ignore[no-any-return]
        if values.device.type == "cuda":
            return values.contiguous()  # type: ignore[no-any-return]
        return values.cpu()  # type: ignore[no-any-return]


def _why_no_values(torch: Any, tensor: Any) -> str | None:
    """What is wrong with it and what to do, to follow "gates that are", or None."""
    if tensor.is_meta:
        return "on the meta device: they have no values; run the model on a real device"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        name = type(tensor).__name__
        return f"a wrapper without memory of its own ({name}); pass the tensor it wraps"
    if tensor.is_nested:
        return "a nested tensor; append its parts, or torch.cat them"
    if tensor.is_quantized:
        return "quantised; pass gates.dequantize()"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout}); pass gates.to_dense()"
    if tensor.is_complex():
        return "complex; pass gates.abs() or gates.real"
    if not tensor.is_floating_point():
        return f"{tensor.dtype}; pass the router's floating-point output"
    return None

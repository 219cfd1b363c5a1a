"""The connection to torch: the only file that imports it.

`connect()` runs once, when the first tensor comes. It gives `memtools._core` the exchange API with
which C reads tensors, and the optional shim `memtools._torch`. The shim is built for one exact
torch. If the versions differ, memtools does not load it, warns once and goes on without it.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools import _core
from memtools._base import shim as shims

if TYPE_CHECKING:
    import torch

OLDEST_TORCH = (2, 11)


class Bridge(NamedTuple):
    """What is connected."""

    torch: Any  #: the module torch
    shim: Any  #: the module memtools._torch, or None
    reason: str  #: why there is no shim, in one sentence; "" where there is one


# Empty, or what connect() made. Not functools.cache: torch.compile warns of it wherever it traces a
# call of connect().
_connected: list[Bridge] = []


def connect() -> Bridge:
    """Connect `memtools._core` to torch, at the first call.

    Raises ImportError if torch is missing or older than 2.11.
    """
    if not _connected:
        torch = _import_torch()
        shim, reason = _load_shim(torch.__version__, torch.version.git_version)
        _core._connect(*parts(torch), shim.ops if shim else None)
        _connected.append(Bridge(torch, shim, reason))
    return _connected[0]


def loaded() -> Any:
    """The module torch where the program has imported it, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None  # without Tensor it is still being imported


def fake_tensors() -> Any:
    """The module of torch with FakeTensorMode: tensors that have shapes and no memory.

    Raises ImportError if this torch has none.
    """
    connect()
    from torch._subclasses import fake_tensor

    return fake_tensor


def profiler_runs() -> bool:
    """Whether a profiler of torch collects events now."""
    asks = getattr(getattr(loaded(), "autograd", None), "_profiler_enabled", None)
    return bool(asks()) if callable(asks) else False


def parts(torch: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The parts of torch that `memtools._core` is connected to, besides the shim."""
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
    """Load the shim; returns (module, "") or (None, reason).

    Versions are compared before it is loaded: c10's structures change between releases, and a shim
    that was built for another torch may load and then read garbage.
    """
    from memtools import _build_info

    built, reason = list(shims.built(_build_info)), ""
    for shim in built:
        if shim.fits(version, git_version):
            try:
                if shim.refused:
                    reason = shim.refused
                else:
                    return shims.load(shim), ""
            except ImportError as error:
                reason = f"memtools._torch does not load: {error}"
    if not shims.may_be_loaded(built, version, git_version):  # The user has not requested a shim.
        return None, f"memtools._torch has not been built for torch {version}"
    if not reason:
        there = " and for ".join(
            dict.fromkeys(shim.torch_version for shim in built if not shim.refused)
        )
        same = " of another commit" if version == there else ""
        reason = f"memtools._torch was built for torch {there}, this is {version}{same}"
    message = f"{reason}; memtools works without it, a little slower; run {shims.BUILD_COMMAND}"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
    return None, reason


def process_group() -> Any:
    """The module torch.distributed where the program has a process group, else None. Imports
    nothing."""
    dist = getattr(loaded(), "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread. A forward pass that runs meanwhile is a
    recomputation under activation checkpointing."""
    return bool(connect().torch._C._current_graph_task_id() != -1)


def written(tensors: list[Any]) -> None:
    """Report to autograd that these tensors are written to, as an operation in place does.
    `memtools._core` calls it if there is no shim."""
    connect().torch.autograd.graph.increment_version(tensors)


def plain(tensor: Any) -> torch.Tensor:
    """Make a tensor of gates plain: strided on the CPU, or packed on a CUDA device, with the same
    values. `memtools._core` calls it for every tensor that it cannot read at once.

    Raises TypeError if `tensor` is not a tensor, has no values to read, or none of floating point.
    """
    torch = connect().torch
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"append() takes a torch.Tensor of gates [n, n_experts], got {type(tensor).__name__}"
        )
    fault = why_unreadable(tensor, "gates")
    if fault is None and tensor.is_complex():
        fault = "complex; pass gates.abs() or gates.real"
    if fault is None and not tensor.is_floating_point():
        fault = f"{tensor.dtype}; pass the router's floating-point output"
    if fault is not None:
        raise TypeError(f"append() cannot read gates that are {fault}")
    values = values_of(tensor)
    if values.device.type == "cpu":
        return values
    return values.contiguous() if values.device.type == "cuda" else values.cpu()


def why_unreadable(tensor: Any, name: str) -> str | None:
    """Why the memory of a tensor does not hold its values, and what to pass instead: a clause that
    follows "gates that are". None where it does.

    Args:
        tensor: a torch.Tensor.
        name: how the caller's parameter is called.
    """
    torch = connect().torch
    if tensor.is_meta:
        return "on the meta device, where tensors have no values; run the model on a real device"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        return f"a wrapper without its own memory ({kind}); pass the tensor it wraps"
    if tensor.is_nested:
        return f"nested; pass the parts of {name}, or torch.cat of them"
    if tensor.is_quantized:
        return f"quantised; pass {name}.dequantize()"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout}); pass {name}.to_dense()"
    if is_freed(tensor):
        return "without its memory: its storage was freed (resize_(0), as FSDP does); pass a copy"
    return None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage is too small for it, so that reading its values would end
    the process. Takes 1 us."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    bytes_read = (tensor.storage_offset() + last + 1) * tensor.itemsize
    try:
        return tensor.numel() > 0 and bytes_read > tensor.untyped_storage().nbytes()
    except NotImplementedError:  # of a functorch tensor, which others refuse
        return False


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """A readable tensor without its graph, its subclass and a negation that is still to be done."""
    torch = connect().torch
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor).resolve_neg()  # type: ignore[no-any-return]

"""What the KV-cache pool does by public torch calls. `memtools._core` calls these functions.

dtype_of, device_of     turn KVPool's arguments into torch's own objects
plain, whole_numbers    check the tensors of a call
base, views, ...        do by public calls what the shim does faster
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memtools._base.text import brief
from memtools._base.torch import connect, values_of, why_unreadable

if TYPE_CHECKING:
    import torch

    from memtools._core import KVPool

_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
}


def dtype_of(dtype: Any) -> torch.dtype:
    """The torch.dtype of K and V, from itself or from its name.

    Raises TypeError for another type, ValueError if the pool cannot hold elements of that dtype.
    """
    torch = connect().torch
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"dtype must be a torch.dtype or its name, got {type(dtype).__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES or not hasattr(torch, name):
        raise ValueError(
            f"dtype must be a real number type of 1, 2, 4 or 8 bytes, got {brief(name)}"
        )
    return getattr(torch, name)  # type: ignore[no-any-return]


def device_of(device: Any) -> tuple[torch.device, int]:
    """The torch.device of a pool, and its index: -1 for the host.

    Plain "cuda" is torch's current device. Where torch has none it is the first, and opening that
    one raises the error which says what is missing. Raises ValueError for any other kind of device.
    """
    torch = connect().torch
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu"), -1
    if found.type != "cuda":
        raise ValueError(f'device must be "cpu" or "cuda", got "{found.type}"')
    index = found.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index), index


# --- tensors in -----------------------------------------------------------------------------------


def plain(pool: KVPool, name: str, tensor: Any, rows: int) -> torch.Tensor:
    """Check k or v of update(), and make it plain: strided, with a packed last dimension, and the
    same values. The caller looks into its memory afterwards, and checks the shape again.

    Args:
        pool: the pool that it is written to.
        name: "k" or "v", for errors.
        tensor: what the program passed.
        rows: rows of the lease.

    Raises TypeError or ValueError, with what to pass instead, if the pool does not take it.
    """
    torch = connect().torch
    if _is_fine(torch, pool, tensor, rows):
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"update() takes {name} as a torch.Tensor, got {type(tensor).__name__}")
    fault = why_unreadable(tensor, name)
    if fault is not None:
        raise TypeError(f"update() cannot read {name}: it is {fault}")
    _check_kind(torch, pool, name, tensor)
    _check_shape(pool, name, tensor, rows)
    values = values_of(tensor)
    return values.contiguous() if pool.head_dim > 1 and values.stride(3) != 1 else values


def _is_fine(torch: Any, pool: KVPool, tensor: Any, rows: int) -> bool:
    """Whether the tensor can be taken as it is. Most can: this is the quick way."""
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.dtype is not pool.dtype:
        return False
    if tensor.layout is not torch.strided or tensor.device != pool.device or tensor.is_neg():
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    shape = tensor.shape
    if len(shape) != 4 or shape[0] != rows or shape[1] != pool.num_kv_heads:
        return False
    return bool(shape[3] == pool.head_dim and tensor.stride(3) == 1)


def _check_kind(torch: Any, pool: KVPool, name: str, tensor: Any) -> None:
    if tensor.dtype is not pool.dtype:
        raise TypeError(
            f"update() takes {name} of {pool.dtype}, as the pool holds, got {tensor.dtype}; "
            f"pass {name}.to({pool.dtype})"
        )
    if tensor.device != pool.device:
        raise ValueError(
            f"update() takes {name} on {pool.device}, where the pool is, got {tensor.device}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"update() got {name} that requires grad, and the pool keeps no graph: call it under "
            "torch.no_grad()"
        )


def _check_shape(pool: KVPool, name: str, tensor: Any, rows: int) -> None:
    heads, width = pool.num_kv_heads, pool.head_dim
    shape = tuple(tensor.shape)
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (rows, heads, width):
        raise ValueError(
            f"update() takes {name} of shape [{rows} rows, {heads} heads, tokens, {width}], "
            f"got {list(shape)}"
        )


def whole_numbers(tensor: Any, what: str) -> int | list[int]:
    """A tensor of row numbers, lengths or counts as Python numbers.

    Args:
        tensor: of integers, with at most one dimension.
        what: what the numbers are, for errors: "lengths".

    Raises TypeError for another dtype, ValueError for more dimensions.
    """
    torch = connect().torch
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        hint = "; convert a mask with mask.nonzero().flatten()"
        raise TypeError(
            f"{what} must be whole numbers, got a tensor of {tensor.dtype}"
            f"{hint if tensor.dtype is torch.bool else ''}"
        )
    if tensor.dim() > 1:
        raise ValueError(f"{what} must be a 1-D tensor, got {tensor.dim()} dimensions")
    return tensor.tolist()  # type: ignore[no-any-return]


# --- what the shim does faster --------------------------------------------------------------------


def base(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The bytes that make() returns, as a tensor of dtype that is normal in inference mode too."""
    with connect().torch.inference_mode(False):
        return make().view(dtype)


def views(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], k: int, v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors over `base`, from its elements k and v on, which share its version counter."""
    return base.as_strided(shape, strides, k), base.as_strided(shape, strides, v)


def overwritten(base: torch.Tensor) -> None:
    """Report to autograd that the views of `base` show other values, as after an operation in
    place."""
    connect().torch.autograd.graph.increment_version(base)


def write(
    views: tuple[torch.Tensor, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[tuple[int, int]],
) -> None:
    """Append k and v to the rows of a layer.

    Writes through `.data`, which has a version counter of its own: appending does not change what
    autograd may have saved.

    Args:
        views: K and V of the layer, `[B, H, T, D]`.
        k, v: the new tokens, `[B, H, t, D]`.
        rows: for each row how many tokens it has, and how many of the new ones it takes.
    """
    with connect().torch.no_grad():
        for view, source in zip(views, (k, v), strict=True):
            to = view.data
            if len(set(rows)) == 1:
                start, count = rows[0]
                to[:, :, start : start + count].copy_(source[:, :, :count])
                continue
            for row, (start, count) in enumerate(rows):
                to[row, :, start : start + count].copy_(source[row, :, :count])


def free_device_memory() -> None:
    """Make torch's allocator give its unused memory back to the driver, which has run out of it."""
    gc.collect()
    connect().torch.cuda.empty_cache()

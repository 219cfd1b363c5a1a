"""What the KV-cache pool does by public torch calls: sentences about tensors that do not fit, and
everything that the shim does faster where it is there. `memtools._core` calls these functions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memtools._base.torch import connect

if TYPE_CHECKING:
    import torch

    from memtools._core import KVPool

_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
}


def dtype_of(dtype: Any) -> torch.dtype:
    """A torch.dtype from itself or from its name."""
    torch = connect().torch
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"dtype is a torch.dtype or its name, got {type(dtype).__name__}")
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES or not hasattr(torch, name):
        raise ValueError(f"dtype is a real number type of 1, 2, 4 or 8 bytes, got {name}")
    return getattr(torch, name)  # type: ignore[no-any-return]


def device_of(device: Any) -> tuple[torch.device, int]:
    """The torch.device, and its number on CUDA or -1 for the host.

    A plain "cuda" is torch's current device, or the first where torch has none: whoever opens it
    then says what is missing.
    """
    torch = connect().torch
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu"), -1
    if found.type != "cuda":
        raise ValueError(f'device is "cpu" or "cuda", got "{found.type}"')
    index = found.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", index), index


# --- tensors in -------------------------------------------------------------------------------


def plain(pool: KVPool, name: str, tensor: Any, rows: int) -> torch.Tensor:
    """k or v of update() as a plain tensor whose last dimension is packed; values are unchanged.

    Raises TypeError or ValueError, in one sentence, for what the pool does not take. Its caller
    looks into the tensor's memory afterwards, and checks its shape again.
    """
    torch = connect().torch
    if _is_fine(torch, pool, tensor, rows):
        return tensor  # type: ignore[no-any-return]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"update() takes {name} as a torch.Tensor, got {type(tensor).__name__}")
    fault = _why_not_plain(torch, tensor)
    if fault is not None:
        raise TypeError(f"update() cannot read {name}: it is {fault}")
    _check_kind(torch, pool, name, tensor)
    _check_shape(pool, name, tensor, rows)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(torch.Tensor).resolve_neg()
        if pool.head_dim > 1 and values.stride(3) != 1:
            values = values.contiguous()
        return values  # type: ignore[no-any-return]


def _is_fine(torch: Any, pool: KVPool, tensor: Any, rows: int) -> bool:
    """Whether nothing has to be said or done about it; the quick way for most tensors."""
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


def _why_not_plain(torch: Any, tensor: Any) -> str | None:
    if tensor.is_meta:
        return "on the meta device and has no values; run the model on a real device"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        name = type(tensor).__name__
        return f"a wrapper without memory of its own ({name}); pass the tensor it wraps"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"{'nested' if tensor.is_nested else 'sparse'}; pass a dense tensor"
    if tensor.is_quantized:
        return "quantised; pass a plain tensor of the pool's dtype"
    return None


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
    """A tensor of row numbers, lengths or counts as Python numbers."""
    torch = connect().torch
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        hint = "; a mask is turned into numbers by mask.nonzero().flatten()"
        raise TypeError(
            f"{what} are whole numbers, got a tensor of {tensor.dtype}"
            f"{hint if tensor.dtype is torch.bool else ''}"
        )
    if tensor.dim() > 1:
        raise ValueError(f"{what} are a 1-D tensor, got {tensor.dim()} dimensions")
    return tensor.tolist()  # type: ignore[no-any-return]


# --- what the shim does faster ----------------------------------------------------------------


def base(make: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The bytes that make() returns, as a normal tensor of dtype, whatever mode is on."""
    with connect().torch.inference_mode(False):
        return make().view(dtype)


def views(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], k: int, v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors over base, from elements k and v on, which count versions together with it."""
    return base.as_strided(shape, strides, k), base.as_strided(shape, strides, v)


def overwritten(base: torch.Tensor) -> None:
    """Tells autograd that what views of base show has changed, as an operation in place does."""
    connect().torch.autograd.graph.increment_version(base)


# --- devices ----------------------------------------------------------------------------------


def write(
    views: tuple[torch.Tensor, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[tuple[int, int]],
) -> None:
    """Copies k and v to the ends of the rows; rows: (length, how many tokens) of each.

    Appending is no change of what autograd may have saved: `.data` counts versions by itself.
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
    """Makes torch's allocator give back what it holds and nobody uses: it has the memory that the
    driver is out of."""
    gc.collect()
    connect().torch.cuda.empty_cache()

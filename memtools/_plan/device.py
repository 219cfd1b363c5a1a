"""standing_in_for: fake tensors of the CPU stand for those of a device that need not be present.

    x.to("cuda")                    stays a fake tensor of the CPU
    torch.autocast("cuda")          CPU autocast of CUDA's dtype, with CUDA's float32 functions
    AdamW(model.parameters())       takes foreach=True, as it does for parameters on CUDA

Why: without CUDA in torch, a fake tensor that claims to be on a CUDA device may end the process
when it requires a gradient. What is planned for a device is what operators make there; what differs
between devices is which operators a program runs, and this file sees to that.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)
#: Functions that CUDA's autocast runs in float32, where the CPU's leaves the dtype as it is
#: ("Autocast Op Reference" of torch).
_NAMES = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh "
    "cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 "
    "group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm normalize "
    "pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss "
    "softmax softmin softplus sum tan triplet_margin_loss"
)
_IN_FLOAT32 = frozenset(_NAMES.split())


class OtherDeviceError(Exception):
    """The step names a device that it is not planned for; the text goes on from "names the
    device"."""


@contextmanager
def standing_in_for(device: str, torch: Any, fakes: Any) -> Iterator[None]:
    """Let tensors of the CPU stand for those of a device.

    Args:
        device: one of DEVICES. The first call that names another one raises OtherDeviceError.
        torch, fakes: the modules of torch and of its fake tensors.
    """
    named = _Named(device)
    with ExitStack() as stack:
        # Without CUDA, autocast("cuda") would do nothing, and the plan would be of another step.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", ".*CUDA is not available.*", UserWarning)
        stack.enter_context(_foreach_as_on(device, torch, fakes))
        if device == CUDA:
            stack.enter_context(_autocast_of_cuda(torch, named))
        stack.enter_context(also_in_backward(torch, _naming_devices(torch, named)))
        yield


@contextmanager
def also_in_backward(torch: Any, mode: Any) -> Iterator[None]:
    """Enter a mode of torch functions, which is on in backward passes, too. torch turns modes off
    while it runs `tensor.backward()`, and forward passes of checkpoints run again in there."""
    run = torch.autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    with replaced(torch.autograd, "_engine_run_backward", run_in_mode), mode:
        yield


class _Named:
    """Checks the devices that a program names.

    Args:
        device: the one that is planned for.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._indices = set[int]()

    def check(self, kind: str, index: int | None = None) -> None:
        """Raises OtherDeviceError if a device is not the one that is planned for."""
        if kind in ("", CPU, "meta"):
            return
        if kind != self._device:
            remedy = "" if kind not in DEVICES else f': plan it with device="{kind}"'
            raise OtherDeviceError(f"{kind}, but the plan is for {self._device}{remedy}")
        if index is not None:
            self._indices.add(index)
        if len(self._indices) > 1:
            raise OtherDeviceError(f"{kind}:{index} and another device: a plan covers one device")


def _naming_devices(torch: Any, named: _Named) -> Any:
    """A mode of torch that leaves tensors on the CPU where a program moves or makes them elsewhere,
    and runs functions in float32 that CUDA's autocast runs so."""

    def device_of(value: Any) -> Any:
        """The CPU in place of a device; other values as they are."""
        found = _device(torch, value)
        if found is None:
            return value
        named.check(found.type, found.index)
        return found if found.type in (CPU, "meta") else CPU

    class Naming(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name, given = getattr(func, "__name__", ""), dict(kwargs or {})
            if name in ("cuda", "xpu"):
                at = _device(torch, given.get("device", args[1] if len(args) > 1 else None))
                named.check(name, None if at is None else at.index)
                return args[0]
            if name == "to" and len(args) > 1:
                args = (args[0], device_of(args[1]), *args[2:])
            if given.get("device") is not None:
                given["device"] = device_of(given["device"])
            if name in _IN_FLOAT32 and named._device == CUDA and torch.is_autocast_enabled(CPU):
                args, given = _floats(torch, args), _floats(torch, given)
            return func(*args, **given)

    return Naming()


def _device(torch: Any, value: Any) -> Any:
    """The torch.device that an argument names; None for one that names none."""
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        return None
    if isinstance(value, int):
        return torch.device(CUDA, value)  # torch takes a number for that of an accelerator.
    return torch.device(value)


def _floats(torch: Any, values: Any) -> Any:
    """Arguments, with tensors of half precision converted to float32."""
    if isinstance(values, dict):
        return {key: _floats(torch, value) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_floats(torch, value) for value in values)
    is_half = isinstance(values, torch.Tensor) and values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if is_half else values


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class, which it may have inherited."""
    own = vars(owner)
    is_own, original = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def _autocast_of_cuda(torch: Any, named: _Named) -> Iterator[None]:
    """Let `torch.autocast("cuda")` be that of the CPU, and GradScaler scale for CUDA."""
    kind = torch.amp.autocast_mode.autocast
    original: Callable[..., None] = kind.__init__

    def begin(self: Any, device_type: str, dtype: Any = None, *rest: Any, **more: Any) -> None:
        if device_type == CUDA:
            named.check(CUDA)
            device_type, dtype = CPU, dtype or torch.get_autocast_dtype(CUDA)
        original(self, device_type, dtype, *rest, **more)

    common = torch.cuda.amp.common
    with (
        replaced(kind, "__init__", begin),
        replaced(common, "amp_definitely_not_available", lambda: False),
    ):
        yield


@contextmanager
def _foreach_as_on(device: str, torch: Any, fakes: Any) -> Iterator[None]:
    """Let optimizers choose foreach for fake parameters as for real ones on a device."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    others = torch.utils._foreach_utils
    lists: list[Any] = [module._foreach_supported_types, others._foreach_supported_types]
    devices: list[str] = module._get_foreach_kernels_supported_devices()
    for types in lists:
        types.append(fakes.FakeTensor)
    try:
        more = [CPU] if device == CUDA else []
        with replaced(module, "_get_foreach_kernels_supported_devices", lambda: devices + more):
            yield
    finally:
        for types in lists:
            types.remove(fakes.FakeTensor)

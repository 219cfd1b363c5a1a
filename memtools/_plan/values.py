"""Assumptions: values that a step asks for, which fake tensors do not have.

    loss.item(), float(loss), f"{loss:.3f}"     1.0
    correct.item() of whole numbers             1; what makes a shape of it is refused
    if torch.isfinite(loss).all():              true, as is what else follows from finite values
    if tensor: in other conditions              false
    scaler.step(optimizer)                      found no infinite gradient

Why: loops read values to log them and to skip bad steps, and memory does not depend on that. So the
most ordinary value is taken, and each line where one was is named in the result: whoever knows that
memory does depend on it there sees what the plan is of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from memtools._base.place import Place, name_of
from memtools._blocks.dispatch import flat, is_of_a_library

_KNOWN = "_memtools_value"  # the attribute of a fake tensor whose value follows from assumptions
_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
#: Functions of truths of which all are the same, whose result is that as well, and its opposite.
_SAME_NAMES = (
    "all any and or logical_and logical_or bitwise_and bitwise_or stack cat detach clone to cpu "
    "cuda squeeze unsqueeze flatten reshape view"
)
_SAME = frozenset(_SAME_NAMES.split())
_OPPOSITE = frozenset({"logical_not", "bitwise_not", "invert"})
#: Functions in which a whole number is a value, and no size or index.
_OF_NUMBERS_NAMES = (
    "add radd iadd sub rsub isub mul rmul imul div rdiv idiv truediv rtruediv itruediv true_divide "
    "floordiv rfloordiv floor_divide mod remainder fmod pow rpow eq ne lt le gt ge clamp clip "
    "tensor as_tensor scalar_tensor fill masked_fill item format"
)
_OF_NUMBERS = frozenset(_OF_NUMBERS_NAMES.split())
_FINDS_INFINITE = "_amp_foreach_non_finite_check_and_unscale_"


class ShapeOfValueError(Exception):
    """The step makes a shape of a value that was assumed."""


class AssumedInt(int):
    """A whole number that was assumed, as are those that are computed of it."""


def _computing(name: str) -> Callable[[int, Any], Any]:
    plain = getattr(int, name)

    def compute(number: int, *others: Any) -> Any:
        found = plain(number, *others)
        return AssumedInt(found) if type(found) is int else found

    return compute


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"):
    setattr(AssumedInt, f"__{_name}__", _computing(f"__{_name}__"))
AssumedInt.__neg__ = _computing("__neg__")  # type: ignore[method-assign,assignment]


class Assumptions:
    """A mode of torch takes values for those that fake tensors do not have.

    Args:
        torch, fakes: the modules of torch and of its fake tensors.
        libraries: prefixes of paths whose files are not the user's code.
    """

    def __init__(self, torch: Any, fakes: Any, libraries: tuple[str, ...]) -> None:
        self._torch = torch
        self._unknown = fakes.DataDependentOutputException
        self._libraries = libraries
        self._notes = dict[str, None]()  # in their order, each once

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed: `train.py:12: .item() is taken as 1.0`."""
        return tuple(self._notes)

    def mode(self) -> Any:
        """The mode, a context manager."""
        torch, call = self._torch, self._call

        class Assuming(torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                return call(func, args, kwargs or {}, sys._getframe(1))

        return Assuming()

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        given = flat((args, kwargs))
        if name not in _OF_NUMBERS and any(type(value) is AssumedInt for value in given):
            raise ShapeOfValueError
        tensor = args[0] if args and isinstance(args[0], self._torch.Tensor) else None
        if name == "format" and tensor is not None and tensor.dim() == 0 and args[1]:
            return format(self._call(self._torch.Tensor.item, args[:1], {}, frame), args[1])
        try:
            result = func(*args, **kwargs)
        except self._unknown:
            if name not in ("item", "float", "bool") or tensor is None:
                raise
            return self._assumed(name, tensor, frame)
        self._follow(name, given, result)
        return result

    def _assumed(self, name: str, tensor: Any, frame: FrameType | None) -> Any:
        """The value that is taken for a tensor, which is noted."""
        value, what = getattr(tensor, _KNOWN, None), ".item()" if name == "item" else "a value"
        if name == "bool" or tensor.dtype == self._torch.bool:
            value, what = bool(value), "a condition" if name == "bool" else what
        elif name == "item" and not (tensor.is_floating_point() or tensor.is_complex()):
            value = AssumedInt(1)
        else:
            value = 1.0 if value is None else float(value)
        note = f"{what} is taken as {str(value).lower()}"
        self._notes[f"{self._line(frame)}{note}"] = None
        return value

    def _follow(self, name: str, given: Iterable[Any], result: Any) -> None:
        """Note the truth of a result, where it follows from that of the arguments."""
        tensors = [value for value in given if isinstance(value, self._torch.Tensor)]
        if f"_{name}_" == _FINDS_INFINITE:
            setattr(tensors[-2], _KNOWN, 0.0)  # (*gradients, found_inf, inv_scale)
        elif isinstance(result, self._torch.Tensor) and result.dtype == self._torch.bool:
            known = {getattr(tensor, _KNOWN, None) for tensor in tensors}
            if name in _FINITE:
                setattr(result, _KNOWN, _FINITE[name])
            elif len(known) == 1 and None not in known and (name in _SAME or name in _OPPOSITE):
                value = bool(known.pop())
                setattr(result, _KNOWN, value if name in _SAME else not value)

    def _line(self, frame: FrameType | None) -> str:
        """`train.py:12: `, the innermost line of the user's code; "" if there is none."""
        while frame is not None and is_of_a_library(frame.f_code.co_filename, self._libraries):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{name_of(Place(frame.f_code.co_filename, frame.f_lineno, ''))}: "

"""A field of a trajectory: its name, shape and dtype, its block of memory, and how much is in it.

steps    [T, samples, ...]      one entry for each time step: log-probabilities, actions, rewards
states   [T + 1, samples, ...]  one before each step and one after the last: latents, observations
samples  [samples, ...]         one value for each sample, without time: advantages, conditions
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

Kind = Literal["steps", "states", "samples"]

#: The dtypes that floating-point fields can be cast to, by their usual names.
CASTS: Final = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
}
#: The dtypes of fields, by their names in a file.
DTYPES: Final = (
    *("float64", "float32", "bfloat16", "float16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


@dataclass(slots=True, eq=False)
class Field:
    """A field and its block."""

    name: str
    kind: Kind
    length: int  #: entries that it has when it is complete: T, T + 1, or 1 of a field of samples
    samples: int
    shape: tuple[int, ...]  #: of one sample in one entry
    dtype: torch.dtype
    itemsize: int
    casts: bool  #: whether other floating-point dtypes are taken
    block: torch.Tensor | None = None  #: [length, samples, *shape]; a field of samples has length 1
    count: int = 0  #: entries that were appended
    with_graph: int = 0  #: entries of this rollout that carried a graph
    in_file: bool = False
    offset: int = 0  #: where the block begins in the file
    index: int = 0  #: among the fields
    before: int = field(init=False)  #: entries before the end of the first time step
    entry_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.before = 1 if self.kind == "states" else 0
        self.entry_shape = (self.samples, *self.shape)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of all samples."""
        return self.samples * math.prod(self.shape) * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.length * self.entry_bytes

    @property
    def steps_done(self) -> int:
        """Time steps whose entry is there. The first entry of a state begins step 0 and ends
        none."""
        return self.count - self.before

    @property
    def memory(self) -> torch.Tensor:
        """The block. Raises ValueError if the store was closed."""
        if self.block is None:
            raise ValueError(f"the memory of {self.name} is gone: the store was closed meanwhile")
        return self.block

    @property
    def values(self) -> torch.Tensor:
        """What was appended so far, as a view."""
        return self.memory[0] if self.kind == "samples" else self.memory[: self.count]


class Casts:
    """Which dtype each floating-point field is kept in."""

    __slots__ = ("default", "named")

    def __init__(self, dtype: Any) -> None:
        named = dtype if isinstance(dtype, Mapping) else {}
        self.named = {str(name): cast_name(value, str(name)) for name, value in named.items()}
        self.default = None if dtype is None or named is dtype else cast_name(dtype, "")

    def of(self, name: str) -> str | None:
        """The name of the dtype that a field is cast to; None: it stays as it comes."""
        return self.named.get(name, self.default)

    def as_json(self) -> Any:
        """What makes the same casts again."""
        return self.named or self.default


def cast_name(dtype: object, field: str) -> str:
    """The name of a dtype to cast to. Raises TypeError and ValueError."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and not str(dtype).startswith("torch."):
        raise TypeError(f'dtype must be like "bf16" or a torch.dtype, got {type(dtype).__name__}')
    if name not in CASTS:
        of = f" of {field!r}" if field else ""
        raise ValueError(
            f'dtype{of} must be one of "fp32", "bf16" and "fp16" (floating-point fields are cast '
            f"to it, others stay as they are), got {name!r}"
        )
    return CASTS[name]


def dtype_of(name: str) -> torch.dtype:
    """The torch.dtype of a name of `DTYPES`."""
    found: torch.dtype = getattr(bridge.connect().torch, name)
    return found

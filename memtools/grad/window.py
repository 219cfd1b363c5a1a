"""The numbers of one accumulation window: how many micro-batches, how many units, which constant.

    window      |--- micro-batch 0 ---|--- micro-batch 1 ---| ... |--- K-1 ---|  end
    backward       loss_sum * constant   loss_sum * constant
    weight         n0                  + n1                   ...             = N
    at the end     one factor, 1 / (constant * N), gives the gradient of sum(loss) / N

The constant is the loss scale (1 without fp16) times a guess of 1 / N: it keeps what is
accumulated of the size that the gradient will have. Both are powers of two, so that they change
no bit of the result, and both stay as they are until the window ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from memtools.grad.sums import Sum

_LEAST, _MOST = -96, 96  # exponents of the guess: with a scale of 2**24 still a float32


Mark = tuple[Any, ...]  # a window's numbers at one moment, as Window.mark() gives them


class Window:
    """One window. Holds numbers only, and a 0-d tensor where weights came on a device.

    Attributes:
        count: micro-batches ended.
        weight: units so far, without those of `on_device`; without weights, micro-batches whose
            loss is in the gradients.
        on_device: float64 sum of the weights that came as tensors of a device, or None.
        weighted: whether this window's losses come with weights; None before the first.
        scale: the loss scale that this window uses.
        guess: what a loss is multiplied with besides; 0.0 before the first backward pass.
        open: inside of a micro-batch.
        last: whether the window ends with the one that is open.
        chunks: backward passes of the micro-batch that is open.
        loss: sum of the losses that are in the gradients.
        extras: sums, by name, of what a loss function counts besides.
        torn: why the gradients are not those of whole micro-batches, "" where they are.
    """

    __slots__ = (
        "chunks",
        "count",
        "extras",
        "guess",
        "last",
        "loss",
        "on_device",
        "open",
        "scale",
        "torn",
        "weight",
        "weighted",
    )

    def __init__(self, scale: float = 1.0) -> None:
        self.count = 0
        self.weight = 0.0
        self.on_device: Any = None
        self.weighted: bool | None = None
        self.scale = scale
        self.guess = 0.0
        self.open = False
        self.last = False
        self.chunks = 0
        self.loss = Sum()
        self.extras: Mapping[str, Sum] = {}
        self.torn = ""

    def mark(self) -> Mark:
        """These numbers, to come back to by `rewind`. Takes no copy of a tensor: none is
        changed in place."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def rewind(self, mark: Mark) -> None:
        """As it was at `mark()`."""
        for name, value in zip(self.__slots__, mark, strict=True):
            setattr(self, name, value)

    @property
    def empty(self) -> bool:
        """Whether no loss is in it."""
        return self.guess == 0.0

    @property
    def constant(self) -> float:
        """What every loss of this window is multiplied with; a power of two."""
        return self.scale * self.guess

    def begin(self, steps: int, weight: Any, usual: float) -> None:
        """Choose the guess, at the first backward pass: that `steps` micro-batches come, each
        like this one. A weight on a device is not waited for: it counts as the `usual` one."""
        units = usual
        if weight is None or isinstance(weight, float):
            units = weight or 1.0
        exponent = -round(math.log2(steps) + math.log2(units))  # a product might be inf
        self.guess = math.ldexp(1.0, min(max(exponent, _LEAST), _MOST))
        self.weighted = weight is not None

    def add(self, weight: Any) -> None:
        """A loss of so many units is in the gradients; None: of a mean, and a micro-batch counts
        one however many losses it has."""
        if weight is None:
            if not self.chunks:
                self.weight += 1.0
        elif isinstance(weight, float):
            self.weight += weight
        elif self.on_device is None:
            self.on_device = weight
        else:
            self.on_device = self.on_device + weight
        self.chunks += 1

    def count_extras(self, values: Mapping[str, Any]) -> None:
        """Add what a loss function counted besides its loss."""
        added = {name: self.extras.get(name, Sum()).plus(value) for name, value in values.items()}
        self.extras = {**self.extras, **added}

    def total(self) -> float:
        """Units of the whole window. Waits for the device where weights came on one."""
        if self.on_device is not None:
            self.weight += float(self.on_device)
            self.on_device = None
        return self.weight

"""Contents of peaks, made up, and what tests put in the place of torch's reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from memtools._blocks.peak import Block, Interval, OfKind, Rest

MIB = 1 << 20
BEFORE, FORWARD, BACKWARD, OPTIMIZER = range(4)
LIVES = 0
FREED, OUTLIVED = 1, 2


def forget_compiled() -> None:
    """Other tests of this process use torch.compile, whose steps are not traced."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@dataclass
class Contents:
    """What Blocks.contents() returns."""

    blocks: Sequence[Block] = ()
    phase: int = FORWARD
    operator: str = ""
    backward: bool = True
    site: int = 1
    rest: Sequence[Rest] = ()
    peak_bytes: int = 0
    base_bytes: int = 0
    lost: int = 0
    events: int = 2
    intervals: Sequence[Interval] = ()
    layers: Sequence[OfKind] = ()
    addresses: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.addresses = self.addresses or [0] * len(self.blocks)
        if not self.peak_bytes:
            self.peak_bytes = sum(block[0] for block in (*self.blocks, *self.rest))


def block(
    size: int,
    category: int = 0,
    birth: int = FORWARD,
    death: int = FORWARD,
    *,
    backward: int = 0,
    operator: str = "aten::mul",
    module: str = "",
    site: int = 1,
    dtype: str = "float32",
    shape: tuple[int, ...] | None = (4,),
) -> Block:
    return (size, category, birth, death, backward, operator, module, site, dtype, shape)


@dataclass
class Blocks:
    """What a recorder uses of memtools._core.Blocks."""

    found: Contents | None = field(default_factory=lambda: Contents([block(4 * MIB)]))
    is_on: bool = True
    peak: int = 4 * MIB
    told: list[str] = field(default_factory=list)
    marked: list[tuple[int, int, int]] = field(default_factory=list)
    fails: str = ""

    def record(self, on: bool) -> None:
        if self.fails == "record":
            raise RuntimeError("no journal")
        self.told.append("on" if on else "off")

    def mark(self, blocks: Sequence[tuple[int, int]], category: int) -> int:
        if self.fails == "mark":
            raise MemoryError("no room")
        self.marked += [(*one, category) for one in blocks]
        return 0

    def highest(self) -> tuple[int, int]:
        return 0, 0

    def contents(self) -> Contents | None:
        return self.found

    def frames(self, site: int) -> tuple[tuple[str, int, str], ...]:
        return (("/x/train.py", 10 + site, "Net.forward"),)

    def site_of(self, address: int) -> int | None:
        return 0

    @property
    def is_recording(self) -> bool:
        return self.told[-1:] == ["on"]


@dataclass
class Reports:
    """What a recorder uses of HostBlocks."""

    blocks: Blocks = field(default_factory=Blocks)
    reason: str = ""
    joins: bool = True

    def join(self) -> bool:
        return self.joins

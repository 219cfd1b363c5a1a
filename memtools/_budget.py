"""Budget: one limit that several parts share, and how much each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from memtools import _core
from memtools._base.size import format_bytes, parse_bytes
from memtools._base.text import aligned, as_name

if TYPE_CHECKING:
    import torch


class Holding(NamedTuple):
    """Bytes that a part of a budget, or a suballocation, has reserved."""

    #: of the part
    name: str
    #: bytes
    reserved: int
    #: of these, what can be given back
    idle: int
    #: the most so far
    peak: int
    #: of a suballocation
    limit: int | None
    #: 0 for parts of the budget, 1 for those of its suballocations, and so on
    depth: int
    #: whether it is one
    suballocation: bool


class BudgetReport:
    """What the parts of a budget held at one moment. Iterates over `Holding`s. `str()` is a table.

    Args:
        budget: the budget, which gives `peak`.
        holdings: what its parts hold; `used` is the sum of those of depth 0.
    """

    __slots__ = ("budget", "holdings", "peak", "used")

    def __init__(self, budget: Budget, holdings: tuple[Holding, ...]) -> None:
        if not isinstance(budget, Budget):
            raise TypeError(f"BudgetReport takes a Budget, got {type(budget).__name__}")
        for line in holdings:
            if not isinstance(line, Holding):
                got = type(line).__name__
                raise TypeError(f"BudgetReport takes the holdings of a report(), got {got}")
        self.budget = repr(budget.name), budget.limit, budget.device
        self.holdings = holdings
        #: reserved bytes
        self.used = sum(line.reserved for line in holdings if line.depth == 0)
        #: the most so far
        self.peak = max(budget.peak, self.used)

    def __iter__(self) -> Iterator[Holding]:
        return iter(self.holdings)

    def __len__(self) -> int:
        return len(self.holdings)

    def __getitem__(self, i: int) -> Holding:
        return self.holdings[i]

    def __repr__(self) -> str:
        return f"BudgetReport({_summary(*self.budget, self.used, self.peak)}; parts: {len(self)})"

    def __str__(self) -> str:
        return "\n".join([_summary(*self.budget, self.used, self.peak), *_table(self.holdings)])


def _summary(name: str, limit: int | None, device: str | None, used: int, peak: int) -> str:
    of = "" if limit is None else f" of {format_bytes(limit)}"
    where = "" if device is None else f" on {device}"
    return f"budget {name}: {format_bytes(used)}{of} used{where}, peak {format_bytes(peak)}"


def _rows(holdings: tuple[Holding, ...]) -> list[list[str]]:
    """The rows of a table, its head first: names, indented by depth, and figures."""
    rows = [["part", "reserved", "idle", "peak", "limit"]]
    for line in holdings:
        figures = [format_bytes(n) for n in (line.reserved, line.idle, line.peak)]
        limit = "" if line.limit is None else format_bytes(line.limit)
        rows.append(["  " * line.depth + line.name, *figures, limit])
    return rows


def _table(holdings: tuple[Holding, ...]) -> list[str]:
    """The lines of a table: names at the left, figures at the right."""
    return list(aligned(_rows(holdings), right=range(1, 5))) if holdings else ["  no parts"]


class Budget(_core.Budget):
    """A limit in bytes that several parts share: pass it as `limit` or `max_bytes`.

    A part reserves bytes before it takes memory and releases them afterwards. If a reservation does
    not fit, the other parts first give back idle memory, such as a KVPool's spare pages; then
    BudgetError lists what each part holds. Thread-safe. A forked child has its own copy.

    Args:
        limit: the most bytes, or like `"20 GiB"`; None counts without a limit.
        device: whose memory is counted: `"cpu"`, `"cuda"` (all CUDA devices) or like `"cuda:1"`;
            parts elsewhere raise ValueError. None: all devices together.
        name: the name in reports and errors.
    """

    __slots__ = ()

    def __new__(
        cls,
        limit: int | str | None,
        *,
        device: str | torch.device | None = None,
        name: str | None = None,
    ) -> Budget:
        where = None if device is None else str(device)
        name = "budget" if name is None else as_name("name", name)
        return super().__new__(cls, limit, name, where)

    def suballocate(self, name: str, limit: int | str | None = None) -> Budget:
        """Make a budget within this one: its parts count in both.

        Suballocations may add up to more than the limit: the first to reserve gets the memory. A
        suballocation lives as long as a part uses it.

        Args:
            name: its name in reports and errors.
            limit: the most bytes, or like `"2 GiB"`. None: this budget's. ValueError if above that.
        """
        as_name("suballocate(): name", name)
        size = self.limit if limit is None else parse_bytes(limit, "limit")
        if size is not None and self.limit is not None and size > self.limit:
            raise ValueError(
                f"suballocate({name!r}) asks for {format_bytes(size)}, more than the "
                f"{format_bytes(self.limit)} of {self.name!r}; pass at most that"
            )
        return _core.Budget.__new__(type(self), size, name, self.device, self)

    def report(self) -> BudgetReport:
        """Return how much each part holds. Takes a few us for each part."""
        return BudgetReport(self, tuple(Holding(*line) for line in self._report()))

    def __repr__(self) -> str:
        used, parts = format_bytes(self.used), len(self._report())
        of = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        where = "" if self.device is None else f" on {self.device}"
        return f"Budget({self.name!r}, {used}{of} used{where}, {parts} part{'s' * (parts != 1)})"

    def __copy__(self) -> Budget:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        return self  # a copied model's parts count in the same budget

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Budget counts memory of this process; make one where you need it")


#: How many holders a BudgetError names; the rest are summed up as "others".
_NAMED = 6


def _refusal(
    doing: str,
    asked: int,
    used: int,
    limit: int | None,
    within: str | None,
    lines: list[tuple[str, int, int, int, int | None, int, bool]],
    remedy: str,
) -> str:
    """Return the sentence of a BudgetError, which the C code raises.

    Args:
        doing: the call that was refused.
        asked, used, limit: in bytes; None means no limit.
        within: the name of the budget that refused, if it is not the part's own.
        lines: that budget's `_report()`. Holders of the first level are named, those of one name
            together.
        remedy: what would help.
    """
    sums: dict[str, tuple[int, int, int]] = {}  # how many parts, reserved, idle
    for name, reserved, idle, _, _, depth, _ in lines:
        if depth == 0 and reserved > 0:
            parts, before, spare = sums.get(name, (0, 0, 0))
            sums[name] = parts + 1, before + reserved, spare + idle
    named = list(sums.items())
    if len(named) > _NAMED:
        parts, reserved, idle = map(
            sum, zip(*(figures for _, figures in named[_NAMED:]), strict=True)
        )
        named[_NAMED:] = [("others", (parts, reserved, idle))]
    holders = ", ".join(
        f"{name}{f' x{parts}' if parts > 1 else ''} {format_bytes(reserved)}"
        f"{f', of it {format_bytes(idle)} idle' if idle else ''}"
        for name, (parts, reserved, idle) in named
    )
    of = "no limit" if limit is None else format_bytes(limit)
    where = "" if within is None else f' in budget "{within}"'
    held = f" ({holders})" if holders else ""
    used_of = f"used {format_bytes(used)} of {of}{where}{held}"
    return f"{doing}: asked {format_bytes(asked)}, {used_of}; {remedy}"


def check_device(budget: object, device: str, part: str) -> None:
    """Raise ValueError if `budget` is a Budget that counts the memory of another device.

    Args:
        budget: what was passed as a limit; anything but a Budget is fine.
        device: where the part's memory lies, like "cpu" or "cuda:1".
        part: the part's name, for the error.
    """
    counted = budget.device if isinstance(budget, _core.Budget) else None
    if counted is None or counted in (device, device.partition(":")[0]):
        return
    raise ValueError(
        f"{part} lies on {device}, this budget counts memory of {counted}; pass one that was made "
        f"with device={device.partition(':')[0]!r} or without a device"
    )

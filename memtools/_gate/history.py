"""GateHistory: a bounded list of gate tensors with statistics over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from memtools import _core
from memtools._base.size import format_bytes, parse_bytes
from memtools._budget import Budget, check_device
from memtools._gate import file
from memtools._gate.stats import GateStats

if TYPE_CHECKING:
    import torch

#: The most entries of a history without limits of its own. Where bytes alone are limited, an entry
#: takes at least so many of them, and there are at most so many entries.
_ENTRIES, _LEAST_ENTRY, _MOST_ENTRIES = 1000, 16, 1 << 24


class GateHistory(_core.GateHistory):
    """A list of gate tensors `[n, n_experts]` that stays within its limits.

    A drop-in for the list that a model appends its router's gates to: `append`, `extend`, `len`,
    indexing, slicing, iteration, `clear`, `torch.cat(history, dim=0)` and `torch.stack(history)`. A
    slice is a GateHistory with the same limits and its own statistics.

    Entries are copies, without graphs. Memory grows with the entries and is kept until `close()`.

    Args:
        max_entries: the most entries. None: 1,000, or with `max_bytes` 16,777,216.
        max_bytes: the most bytes of records, or like `"64 MiB"`, the default, without 24 bytes per
            entry and `2,064 * n_experts` for statistics. If a `Budget` with a limit refuses memory,
            the history drops old entries. Slices and copies count in it; loaded and unpickled
            histories do not.
        trim: how to make room: `"half"` leaves half of the limit; `"oldest"` drops as few entries
            as needed. Both are O(1) amortised.
        dtype: the dtype of records: `"float64"`, `"float32"`, `"float16"`, `"bfloat16"` or a
            torch.dtype, rounded to nearest even. None: that of the input.
        keep: `"all"` records all gates; `"topk"` only the `top_k` largest of each row, the others
            as zeros.
        top_k: experts of a token that count as its load, 1 to 64. Ties go to the lower expert.
        statistics: keep `stats()` and `windows()` up to date.

    Raises ValueError if the Budget has no limit or is for a device, MemoryError if there is not
    enough address space for the limits.
    """

    __slots__ = ()

    def __new__(
        cls,
        max_entries: int | None = None,
        max_bytes: int | str | Budget | None = None,
        *,
        trim: Literal["half", "oldest"] = "half",
        dtype: str | torch.dtype | None = None,
        keep: Literal["all", "topk"] = "all",
        top_k: int = 1,
        statistics: bool = True,
    ) -> GateHistory:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        budget, size = _limits("64 MiB" if max_bytes is None else max_bytes)
        if max_entries is None:
            by_bytes = min(max(1, size // _LEAST_ENTRY), _MOST_ENTRIES)
            max_entries = _ENTRIES if max_bytes is None else by_bytes
        return super().__new__(cls, max_entries, size, trim, keep, name, top_k, statistics, budget)

    def extend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Append several `tensors`, as `append` does. If one is refused, those before it stay."""
        for gates in tensors:
            self.append(gates)

    def stats(self, window: int | None = None) -> GateStats:
        """Return the statistics of all entries ever appended, or of the newest.

        Waits for gates that are still on their way from a device.

        Args:
            window: how many of the newest entries to read, with their recorded (rounded) values.
                None: all ever appended, which reads nothing.

        Raises ValueError with `statistics=False` or fewer entries than `window`.
        """
        return GateStats._from_sums(self._sums(window), self.top_k)

    def windows(self) -> list[GateStats]:
        """Return statistics of the whole run in up to 129 consecutive windows, oldest first.

        All but the last have the same number of entries. After 128 windows, neighbours are merged,
        so memory stays constant. Raises ValueError with `statistics=False`.
        """
        return [GateStats._from_sums(sums, self.top_k) for sums in self._windows()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write limits, records and statistics to the file `path` atomically, also over an old one.

        Raises OSError if it cannot be written.
        """
        file.write(path, file.dump(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GateHistory:
        """Read the file `path` that `save` wrote. It is not a pickle: nothing in it is executed.

        Raises ValueError if it is damaged or not a saved history, OSError if it cannot be read,
        MemoryError if there is not enough address space for its limits.
        """
        return file.parse(cls, file.read(path))

    def __copy__(self) -> GateHistory:
        return self._copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GateHistory:
        return self._copy()

    def __reduce__(self) -> tuple[Callable[..., GateHistory], tuple[type[GateHistory], bytes]]:
        # torch.save(model) and DataLoader workers come this way.
        return file.parse, (type(self), file.dump(self))

    def __repr__(self) -> str:
        if self.closed:
            return "GateHistory(closed)"
        by_bytes = min(self.max_bytes // _LEAST_ENTRY, _MOST_ENTRIES)
        most = f" of {self.max_entries}" if self.max_entries < by_bytes else ""
        return (
            f"GateHistory({len(self)}{most} entries, "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.max_bytes)}, "
            f"{self.n_experts} experts, {self.appended} appended)"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let torch functions of a list of tensors (`cat`, `stack`, ...) take a history as one."""
        kwargs = dict(kwargs or {})
        tensors = args[0] if args else kwargs.pop("tensors", None)
        if not isinstance(tensors, GateHistory):
            return NotImplemented
        if _concatenates_rows(func, args, kwargs):
            whole = tensors._cat()
            if whole is not None:
                return whole
        return func(list(tensors), *args[1:], **kwargs)


def _limits(max_bytes: int | str | Budget) -> tuple[Budget | None, int]:
    if not isinstance(max_bytes, Budget):
        return None, parse_bytes(max_bytes, "max_bytes")
    check_device(max_bytes, "cpu", "GateHistory")
    if max_bytes.limit is None:
        raise ValueError(
            "max_bytes is a Budget without a limit, and a history needs one for its addresses; "
            'pass budget.suballocate("gates", "64 MiB"), or make the Budget with a limit'
        )
    return max_bytes, max_bytes.limit


def _concatenates_rows(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether this is `cat` along dim 0 and nothing else, which one copy of the records can do."""
    if getattr(func, "__name__", "") not in ("cat", "concat", "concatenate", "vstack", "row_stack"):
        return False
    named = {key: value for key, value in kwargs.items() if key not in ("dim", "axis")}
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return not named and len(args) <= 2 and dim in (0, -2)

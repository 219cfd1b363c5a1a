"""GateHistory: a bounded list of gate tensors with statistics over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from memtools import _core
from memtools._base.size import format_bytes, parse_bytes
from memtools.budget import Budget, check_device
from memtools.gate import file
from memtools.gate.stats import GateStats

if TYPE_CHECKING:
    import torch


class GateHistory(_core.GateHistory):
    """A list of gate tensors `[n, n_experts]` that stays within its limits.

    Drop-in for a Python list that a model appends its router's gates to: `append`, `extend`, `len`,
    truth, indexing, slicing (a slice is a GateHistory with the same limits and statistics of just
    its entries), iteration, `clear`, `torch.cat(history, dim=0)` and `torch.stack(history)`.

    Both limits hold at every moment. An entry is a copy of the values at append time; what is read
    back owns its bytes. The arena grows with what is held and is never given back before `close()`.

    Args:
        max_entries: entries kept at most.
        max_bytes: bytes of all records at most, as an int or like `"64 MiB"`. Beside them a
            history takes 24 bytes an entry, and `2,064 * n_experts` bytes for its statistics. Or a
            `Budget` that other parts count in as well: records take at most its limit, and their
            memory is reserved in it, 64 KiB or an eighth at a time, before it is used. Where the
            budget refuses more the history trims and stays within what it holds. `clear()`,
            `close()` and the end of the object release it; slices and copies count as well, what
            was loaded or unpickled does not.
        trim: what happens to an entry that does not fit: `"half"` leaves half of the limit that was
            hit occupied, as `if len(h) > limit: h = h[-limit // 2:]` does; `"oldest"` drops as many
            of the oldest as it takes. Both are O(1) amortised.
        dtype: record in `"float64"`, `"float32"`, `"float16"` or `"bfloat16"` (or a torch.dtype);
            None keeps what comes. Rounds to nearest even, as torch does.
        keep: `"all"` gates, or `"topk"`: just the `top_k` largest of each row with their experts,
            which read back as zeros elsewhere.
        top_k: experts per token that count as load, 1 to 64. Ties go to the lower expert.
        statistics: keep `stats()` and `windows()` up to date; False only records.

    Raises:
        ValueError: a limit below 1, an unknown option, a Budget that has no limit or counts the
            memory of a device.
        MemoryError: the address space for the limits cannot be had.
    """

    __slots__ = ()

    def __new__(
        cls,
        max_entries: int = 1000,
        max_bytes: int | str | Budget = "64 MiB",
        *,
        trim: Literal["half", "oldest"] = "half",
        dtype: str | torch.dtype | None = None,
        keep: Literal["all", "topk"] = "all",
        top_k: int = 1,
        statistics: bool = True,
    ) -> GateHistory:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        budget, size = _limits(max_bytes)
        return super().__new__(cls, max_entries, size, trim, keep, name, top_k, statistics, budget)

    def extend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Append each tensor in turn; those before one that is refused stay."""
        for gates in tensors:
            self.append(gates)

    def stats(self, window: int | None = None) -> GateStats:
        """Statistics over everything ever appended, evicted or not: O(1).

        With `window`, over the newest `window` records as they are kept (rounded, where `dtype` or
        `keep` rounds): one pass over them. Waits for gates still on their way from a device.

        Raises ValueError for `statistics=False` and for a window larger than `len(self)`.
        """
        return GateStats._from_sums(self._sums(window), self.top_k)

    def windows(self) -> list[GateStats]:
        """The whole run as up to 129 consecutive windows, oldest first, in constant memory.

        All have the same number of entries but the last, which is still filling. When 128 are
        full, neighbours merge: a longer run has longer windows.
        """
        return [GateStats._from_sums(sums, self.top_k) for sums in self._windows()]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a heat map of load, experts over time, as the image file `path`.

        Covers everything ever appended, by `windows()`. Needs the `plot` extra (matplotlib);
        ImportError says so. ValueError when nothing was appended yet.
        """
        from memtools.gate import plot as gate_plot

        gate_plot.load_heat_map(self.windows(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write limits, records and statistics to a file; atomic: the old file or the new one."""
        file.write(path, self._dump())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GateHistory:
        """Read what `save` wrote; no pickle, nothing in the file is executed.

        Raises ValueError when the file is damaged or no gate history, OSError as open() does.
        """
        return cls._parse(file.read(path))

    def __copy__(self) -> GateHistory:
        return self._copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> GateHistory:
        return self._copy()

    def __reduce__(self) -> tuple[Callable[[bytes], GateHistory], tuple[bytes]]:
        # torch.save(model) and DataLoader workers come this way.
        return type(self)._parse, (self._dump(),)

    def __repr__(self) -> str:
        if self.closed:
            return "GateHistory(closed)"
        return (
            f"GateHistory({len(self)} of {self.max_entries} entries, "
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
        """Torch functions of a list of tensors (`cat`, `stack`, ...) take a history as one."""
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
    """Whether this is cat along dim 0 and nothing else: one copy of the records does that."""
    if getattr(func, "__name__", "") not in ("cat", "concat", "concatenate", "vstack", "row_stack"):
        return False
    named = {key: value for key, value in kwargs.items() if key not in ("dim", "axis")}
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return not named and len(args) <= 2 and dim in (0, -2)

"""Who holds what grows, as the run itself found it: a record's holder events, read and ranked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools._base.text import shown
from memtools.record.kinds import Holder, Leak

if TYPE_CHECKING:
    from memtools.record.record import Record, RecordEvent

_ENTRY = re.compile(r", as \S+ of each entry$")
#: kinds of holders whose entries pile up until somebody takes them out
_COLLECTS = ("list", "dict", "set", "deque", "OrderedDict", "defaultdict", "Counter", "lru_cache")


@dataclass(frozen=True)
class Holding:
    """One holder: the newest event about it.

    `kind`: list, dict, lru_cache, "autograd graph", "C code", "variable" and so on. `rate_bytes`: a
    step, None where the event says none. `named`: Python code has a name for it. `bounded`: it
    takes so many entries and no more.
    """

    text: str
    path: str
    kind: str
    rate_bytes: float | None
    named: bool
    bounded: bool
    seconds: float
    step: int | None

    @property
    def place(self) -> str:
        """The path without which part of each entry it is that weighs."""
        return _ENTRY.sub("", self.path)

    @property
    def collects(self) -> bool:
        """A container that grows by its entries, for as long as nobody takes them out."""
        return self.kind in _COLLECTS and not self.bounded

    def advice(self) -> str:
        """What to do about it: one sentence that names it."""
        if self.bounded:
            return (
                f"{self.place} fills up to its bound and stops there: give it a lower one if that "
                "is too much"
            )
        if self.kind == "lru_cache":
            return f"{self.place} has no bound and keeps every result: give it one (maxsize=...)"
        if self.kind == "autograd graph":
            kept = self.path.rpartition(" kept by ")[2]
            return f"{kept} keeps an autograd graph alive: keep x.detach() or loss.item() instead"
        if self.kind == "C code":
            return (
                "no Python container holds what grows: C or C++ code does, for example a running "
                "profiler, a DataLoader's queue or an extension"
            )
        if self.collects and self.kind in ("list", "deque"):
            # A list of gates has a store made for it; a list of losses should hold numbers.
            gates = "gate" in self.path.lower()
            instead = ", or keep the gates in a memtools.GateHistory" if gates else ""
            return (
                f"{self.place} grows: clear it once it has been used, or bound it with "
                f"collections.deque(maxlen=...){instead}"
            )
        if self.collects:
            return f"{self.place} grows: delete the entries that are no longer used, or bound it"
        return f"{self.path} keeps what grows: let go of it, or keep a detached copy or a number"


def holdings(record: Record) -> tuple[Holding, ...]:
    """Those that may matter, a name of Python's before C code, then the largest rate first.

    A graph of which nobody saw that it grows is left out: it is that of the current step. A monitor
    that records `process` names one only where it has grown; older ones named the largest. What a
    verdict that was taken back had named does not count.
    """
    seen = any(column.name == "process" for column in record.columns)
    found: dict[str, Holding] = {}
    nodes: dict[str, list[int]] = {}
    for event in record.events:
        if isinstance(event.data, Leak) and event.data.over:
            found.clear()
            nodes.clear()
        elif isinstance(event.data, Holder):
            one = _holding(event, event.data, max(0, event.time_ns - record.clock_ns) / 1e9)
            key = one.path
            if one.kind == "autograd graph":
                key = f"autograd graph kept by {one.path.rpartition(' kept by ')[2]}"
                nodes.setdefault(key, []).append(event.data.length or 0)
            older = found.pop(key, None)
            if older is not None and one.rate_bytes is None:
                one = older
            found[key] = one
    kept = [
        one
        for key, one in found.items()
        if one.kind != "autograd graph" or seen or one.rate_bytes or _grew(nodes.get(key, []))
    ]
    return tuple(sorted(kept, key=lambda h: (not h.named, -(h.rate_bytes or 0))))


def _grew(nodes: list[int]) -> bool:
    return len(nodes) > 1 and nodes[-1] > nodes[0]


def _holding(event: RecordEvent, data: Holder, seconds: float) -> Holding:
    many = f" ({data.containers} of them)" if data.containers > 1 else ""
    kind = _kind(data)
    return Holding(
        text=shown(event.text),
        path=shown(data.path or event.text) + many,
        kind=kind,
        rate_bytes=data.rate_bytes,
        named=kind not in ("C code", "nobody"),
        bounded=data.capacity is not None,
        seconds=seconds,
        step=event.step,
    )


def _kind(holder: Holder) -> str:
    """The kind of a container counts where the path begins with it: another path leads to a single
    object, which is a variable whatever it lies in."""
    if holder.kind == "tensors":
        return holder.kind
    if holder.path.startswith("lru_cache"):
        return "lru_cache"
    if holder.path.startswith(("C code", "nobody", "autograd graph", holder.kind)):
        return shown(holder.kind)
    return "variable"

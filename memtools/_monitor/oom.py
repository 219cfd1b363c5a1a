"""After a device ran out of memory: an event in the record, before the exception reaches Python.

torch's allocator gives up --> observer (once in a process) --> "oom"     tiers, largest free block
        |                                                       "holder"  who holds most, up to 3
        '--> OutOfMemoryError                                   of every monitor that is running

torch cannot remove an observer, so there is one for the life of the process, with weak references
to the monitors. It allocates nothing on the device, and raises nothing: an exception in it would
take the place of the one that the program may expect.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._census.census import Census, GroupGrowth, Growth
from memtools._record.kinds import Holder

if TYPE_CHECKING:
    from memtools._monitor.monitor import MemoryMonitor

EVENT_EVERY = 1.0  # Events are so many seconds apart: some libraries probe until memory is out.
CENSUS_EVERY = 30.0  # Censuses are so many seconds apart.
SLOW_CENSUS = 0.25  # After a census of more seconds no holders are looked for: ten times as slow.
GROUPS = 3  # So many groups of tensors are recorded.
_HOOK = "_cuda_attach_out_of_memory_observer"
_NOTHING_SEEN = bytes(4096)  # This filter is empty: every object is new.


class Observer:
    """What is attached to torch. `attach` and `__call__` may be called by any thread."""

    def __init__(self) -> None:
        self.monitors: weakref.WeakSet[MemoryMonitor] = weakref.WeakSet()
        self._is_attached = self._is_busy = False
        self._next_event = self._next_census = 0.0
        self._skipped = 0

    def follow(self, monitor: MemoryMonitor) -> None:
        """Write events into this monitor's records from now on."""
        self.monitors.add(monitor)
        self.attach()

    def attach(self) -> bool:
        """Attach to torch, at the first call after the program made a CUDA context: attaching makes
        one. Returns whether it is attached; after that a call costs nothing."""
        if self._is_attached:
            return True
        torch = bridge.loaded()
        inner = getattr(torch, "_C", None) if initialised(torch) else None
        hook = getattr(inner, _HOOK, None)
        if hook is None:
            return False
        self._is_attached = True
        try:
            hook(self)
        except Exception as error:  # an allocator that is not torch's has no observers
            self._complain(f"running out of device memory is not recorded: {error}")
        return True

    def __call__(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by torch; `total` is less than the device's if a fraction was set."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self._observe(device, asked, total, free)
        except BaseException as error:
            self._complain(f"the event of an out-of-memory error failed: {error!r}")
        finally:
            self._is_busy = False

    def _observe(self, device: int, asked: int, total: int, free: int) -> None:
        runs = [monitor._live for monitor in list(self.monitors)]
        live = [run for run in runs if run is not None and run.log.writes]
        now = time.monotonic()
        if not live or now < self._next_event:
            self._skipped += 1 if live else 0
            return
        self._next_event = now + EVENT_EVERY
        tiers = tiers_of(device, asked, total, free)
        skipped, self._skipped = self._skipped, 0
        for run in live:
            run.log.event("oom", tiers, more_before=skipped, phase=run.probe.current())
        if now >= self._next_census:
            self._next_census = now + CENSUS_EVERY
            for holder in tensors_on(f"cuda:{device}"):
                for run in live:
                    run.log.event("holder", holder)

    def _complain(self, text: str) -> None:
        """Report a failure through each running monitor. Raises nothing."""
        try:
            for monitor in list(self.monitors):
                run = monitor._live
                if run is not None:
                    run.log.complain("oom", text)
        except Exception:
            return


observer = Observer()


def tiers_of(device: int, asked: int, total: int, free: int) -> dict[str, int]:
    """The fields of an oom event."""
    torch = bridge.loaded()
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return {
        "device": device,
        "asked_bytes": asked,
        "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
        "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
        "free_bytes": free,
        "total_bytes": total,
        "largest_free_block_bytes": largest_free(torch, device),
    }


def largest_free(torch: Any, device: int) -> int:
    """Bytes of the largest block that torch could hand out without asking the driver."""
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # an older torch
        segments = torch.cuda.memory_snapshot()
    return max(
        (
            block["size"]
            for segment in segments
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


def tensors_on(device: str) -> Iterator[Holder]:
    """The largest groups of tensors on a device, with the container that holds most of each."""
    look = Census()
    groups = [group for group in look.groups if group.kind.device == device][:GROUPS]
    growth = Growth(_nothing(), look)
    for group in groups:
        found = []
        if look.seconds <= SLOW_CENSUS:
            found = growth.holders(GroupGrowth(group.kind, group.count, group.bytes))
        what = f"{group.kind}{'s' if group.count > 1 else ''}"
        path = found[0].path if found else ""
        yield Holder(path, "tensors", None, None, group.count, group.bytes, what=what)


def _nothing() -> Census:
    """Make an empty census: compared with it, all that lives is growth."""
    nothing = Census.__new__(Census)
    nothing.groups, nothing.types, nothing.bytes = (), Counter(), 0
    nothing._seen = _NOTHING_SEEN
    return nothing

"""HostBlocks: a run's part in the reports of torch's host allocator.

    torch's allocator ──► memtools._torch ──► memtools._core.Blocks: one table for the process
                                                   ▲          │ bytes in use, sites
                              HostBlocks.in_use() ─┘          ▼
                              starts it as soon as         the leak test's signal `tensors`,
                              torch is there               and the lines of a trace window

Blocks that torch has given out before the start are not counted: the figure is the change since
then, which is all that a leak test needs. memtools never imports torch for it.
"""

from __future__ import annotations

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.libraries import PACKAGE, library_paths, users_paths
from memtools._base.trainers import entries
from memtools._blocks.dispatch import DispatchedBlocks


class HostBlocks:
    """The blocks that torch's host allocator gives out, from the moment at which torch is loaded.

    Attributes:
        blocks: the table, which `is_on` once it is started.
        reason: why it cannot be started, in one sentence; "" if it can.
    """

    __slots__ = ("_dispatched", "_is_left", "blocks", "reason")

    def __init__(self) -> None:
        self.blocks = _core.Blocks()
        self.reason = ""
        self._is_left = False
        self._dispatched: DispatchedBlocks | None = None

    def join(self) -> bool:
        """Start it if the program has imported torch. Returns whether it is on; takes 0.1 us if it
        is."""
        if self.blocks.is_on:
            return True
        if self.reason or self._is_left or bridge.loaded() is None:
            return False
        try:
            self.blocks.start((*library_paths(), PACKAGE), users_paths(), entries())
        except ImportError as error:  # memtools does not work with this version of torch.
            self.reason = str(error)
        except RuntimeError as error:
            self.reason = bridge.shim_status()[1] or str(error)
        return self.blocks.is_on

    def in_use(self) -> int | None:
        """Bytes of torch's host tensors that were made since the start; None if not known."""
        return self.blocks.in_use if self.join() and not self.blocks.missed else None

    def dispatched(self) -> DispatchedBlocks | None:
        """The substitute that finds the lines of blocks if the table cannot be started; None if it
        can, or without torch."""
        if not self.reason or self._is_left or bridge.loaded() is None:
            return None
        if self._dispatched is None:
            self._dispatched = DispatchedBlocks((PACKAGE,))
        return self._dispatched

    def leave(self) -> None:
        """Leave the reports for good."""
        self._is_left = True
        self.blocks.stop()

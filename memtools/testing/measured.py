"""What a test with the marker `memory` takes while it runs, held against its limits.

measured(limits, call)
  ├─ peak:   the first call, between two readings of the exact mark of the host or a device
  └─ growth: steps of an optimizer, heard while the first call runs; where there are too few of
             them, `steps` calls, each of which is a step
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memtools import _core
from memtools._base import reclaim
from memtools._base.devices import DevicePeaks, allocated, find_devices, seen_devices
from memtools._base.size import format_bytes
from memtools.testing.flat import call_again
from memtools.testing.growth import LEAST_STEPS, GrowthTest
from memtools.testing.limits import Allowed, MemoryLimits

OPTIMIZERS = "torch.optim.optimizer"
NO_PEAK = (
    "peak= needs the kernel's mark of resident memory set back, and it refuses to write "
    "/proc/self/clear_refs here; run the test where /proc may be written, or pass growth= alone"
)


def can_tell_peaks() -> bool:
    """Whether the kernel lets a process set back the mark of its resident memory."""
    return _core.Probe().reset_peak()


def measured(limits: MemoryLimits, call: Callable[[], object]) -> str:
    """Call a test, as often as its limits ask for. What it says where memory goes beyond them, else
    "". What the test raises passes through."""
    devices = seen_devices() if limits.device is None else find_devices(limits.device)
    peak = _Peak(limits.peak, devices if limits.device is not None else ())
    if limits.growth is None:
        with peak:
            call()
        return peak.text
    growth, told = limits.growth.bytes, limits.growth.told
    test = GrowthTest(growth, told, devices, unit="steps of an optimizer")
    with peak, OptimizerSteps(test.step):
        call()
    if test.steps < LEAST_STEPS:
        test = GrowthTest(growth, told, devices, steps=limits.steps, unit="calls of the test")
        with _kept_by_nobody() as forget:

            def ended() -> None:
                forget()
                test.step()

            ended()
            call_again(call, limits.steps - 1, ended)
    return "\n".join(text for text in (peak.text, test.end()) if text)


class OptimizerSteps:
    """Hears the steps of torch's optimizers, while a `with` statement runs.

    A step ends when an optimizer that has acted since the last one acts again: so those of a
    generator and a discriminator make one. Nothing is heard where torch is not loaded yet.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended = ended
        self._acted: dict[int, weakref.ref[object]] = {}
        self._handle: Any = None

    def __enter__(self) -> None:
        module = sys.modules.get(OPTIMIZERS)
        register = getattr(module, "register_optimizer_step_post_hook", None)
        self._handle = None if register is None else register(self._acts)

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _acts(self, optimizer: object, args: object, kwargs: object) -> None:
        acted, number = self._acted, id(optimizer)
        if number in acted:
            if len(acted) > 1:
                acted.clear()
            self._ended()
        acted[number] = weakref.ref(optimizer, lambda _: acted.pop(number, None))


class _Peak:
    """The exact peak of a `with` statement above what was in use at its beginning."""

    def __init__(self, allowed: Allowed | None, devices: Sequence[int]) -> None:
        self._allowed, self._devices = allowed, devices
        self._probe = _core.Probe()
        self._token, self._first = 0, 0
        self._peaks: DevicePeaks | None = None
        #: what to say, once it has ended
        self.text = ""

    def __enter__(self) -> None:
        if self._allowed is None:
            return
        gc.collect()  # what others left is not to be taken for what this one gives back
        if self._devices:
            self._peaks = DevicePeaks(self._devices)
            self._first = allocated(self._devices) or 0
            self._peaks.enter(1)
        else:
            reclaim.trim()  # else the test would first fill what malloc keeps, unseen
            self._token = self._probe.enter("test", True)

    def __exit__(self, kind: object, *error: object) -> None:
        if self._allowed is None:
            return
        if self._peaks is not None:
            top = sum(self._peaks.leave(1).values())
            self._judge(max(0, top - self._first), self._first, "on the device")
            return
        peak, first, _, _, exact = self._probe.leave(self._token)
        if peak is None or first is None or not exact:
            self.text = NO_PEAK
        else:
            self._judge(max(0, peak - first), first, "of resident memory")

    def _judge(self, taken: int, first: int, where: str) -> None:
        assert self._allowed is not None
        if taken > self._allowed.bytes:
            self.text = (
                f"the test takes {format_bytes(taken)} at its peak (allowed: {self._allowed.told}),"
                f" above the {format_bytes(first)} {where} when it began"
            )


@contextmanager
def _kept_by_nobody() -> Iterator[Callable[[], None]]:
    """Let what pytest keeps of a call, its warnings and what it logs, go with the next one: else
    every test that logs would grow."""
    with warnings.catch_warnings(record=True) as caught:

        def forget() -> None:
            caught.clear()
            for handler in logging.getLogger().handlers:
                if type(handler).__module__ == "_pytest.logging":
                    clear = getattr(handler, "clear", None)
                    if clear is not None:
                        clear()

        yield forget

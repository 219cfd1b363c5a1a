"""What a test with the marker `memory` takes while it runs, held against its limits.

measured(limits, call)
  ├─ peak:   the first call, between two readings of the exact mark of the host or a device
  └─ growth: steps of an optimizer, heard while the first call runs; where there are too few of
             them, `steps` calls, each of which is a step
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from memtools._base.devices import find_devices, seen_devices
from memtools._base.steps import OPTIMIZERS, Steps, is_of_another_step
from memtools.testing._flat import call_again
from memtools.testing._growth import LEAST_STEPS, GrowthTest
from memtools.testing._limits import MemoryLimits
from memtools.testing._peak import Peak

_UNIT = "steps of an optimizer"


def measured(limits: MemoryLimits, call: Callable[[], object], given: Iterable[object] = ()) -> str:
    """Call a test, as often as its limits ask for. What to say where memory goes beyond them, else
    "". What the test raises passes through. `given` is what it did not make itself."""
    devices = seen_devices() if limits.device is None else find_devices(limits.device)
    peak = Peak(limits.peak, devices if limits.device is not None else (), given)
    if limits.growth is None:
        with peak:
            call()
        return peak.text
    growth, told = limits.growth.bytes, limits.growth.told
    with closing(GrowthTest(growth, told, devices, unit=_UNIT, looking=peak.looking)) as test:
        with peak, OptimizerSteps(test.step):
            call()
        if test.steps >= LEAST_STEPS:
            return _joined(peak.text, test.end())
    test = GrowthTest(growth, told, devices, steps=limits.steps, unit="calls of the test")
    with closing(test), _kept_by_nobody() as forget:

        def ended() -> None:
            forget()
            test.step()

        ended()
        call_again(call, limits.steps - 1, ended)
        return _joined(peak.text, test.end())


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, texts))


class OptimizerSteps:
    """Hears the steps of torch's optimizers, while a `with` statement runs.

    A step ends where the next one begins (_base/steps.py). Nothing is heard where torch is not
    loaded yet.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended, self._is_first, self._steps = ended, True, Steps()
        self._handle: Any = None

    def __enter__(self) -> None:
        module = sys.modules.get(OPTIMIZERS)
        register = getattr(module, "register_optimizer_step_post_hook", None)
        self._handle = None if register is None else register(self._acts)

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _acts(self, optimizer: object, args: object, kwargs: object) -> None:
        if is_of_another_step(sys._getframe(1)) or not self._steps.begins(optimizer):
            return
        is_first, self._is_first = self._is_first, False
        if not is_first:
            self._ended()


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

"""The marker `memory` of one test: its arguments, and the calls that measure it.

limits_of(arguments) ──► MemoryLimits ──► measured(limits, call)
  ├─ peak:   the first call, between two readings of the exact peak of the host or a device
  └─ growth: steps of an optimizer during the first call; if there are too few of them, `steps`
             calls of the test, each of which is a step
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from memtools._base.devices import find_devices, parse_device, seen_devices
from memtools._base.size import format_bytes, parse_bytes
from memtools._base.steps import OPTIMIZERS, Steps, is_of_another_step
from memtools.testing._flat import Allowed, call_again, check_steps, parse_growth
from memtools.testing._growth import LEAST_STEPS, GrowthTest
from memtools.testing._peak import Peak

KEYWORDS = ("peak", "growth", "device", "steps", "isolate", "timeout")
_UNIT = "steps of an optimizer"


@dataclass(frozen=True)
class MemoryLimits:
    """The limits of one test.

    Attributes:
        peak: the most that the test may take beyond what was in use when it began; None: no limit.
        growth: the most by which memory may grow in a step; None: no limit.
        device: as in `assert_flat`. With "cuda" or like "cuda:1" the peak is that of the device.
        steps: how often the test is called if it makes no steps of an optimizer.
        isolate: whether the test runs in a process of its own.
        timeout: the seconds that this process may take; None: no limit.
    """

    peak: Allowed | None
    growth: Allowed | None
    device: object
    steps: int
    isolate: bool
    timeout: float | None


def limits_of(positional: Sequence[object], keywords: Mapping[str, object]) -> MemoryLimits:
    """Read the arguments of a marker. Raises TypeError or ValueError if one of them is invalid."""
    names = f"{', '.join(KEYWORDS[:-1])} and {KEYWORDS[-1]}"
    if positional:
        raise TypeError(f"memory() takes keyword arguments only: {names}")
    unknown = next((name for name in keywords if name not in KEYWORDS), None)
    if unknown is not None:
        raise TypeError(f"memory() has no keyword {unknown!r}; the keywords are {names}")
    growth, isolate = keywords.get("growth"), keywords.get("isolate", False)
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be True or False, got {type(isolate).__name__}")
    device, steps = keywords.get("device"), keywords.get("steps", 50)
    if device is not None:
        parse_device(device)
    check_steps(steps)
    assert isinstance(steps, int)
    found = MemoryLimits(
        _peak(keywords.get("peak")),
        None if growth is None else parse_growth(growth),
        device,
        steps,
        isolate,
        _timeout(keywords.get("timeout"), isolate),
    )
    if found.peak is None and found.growth is None and not isolate:
        raise ValueError("memory() checks nothing; pass peak or growth")
    return found


def _peak(size: object) -> Allowed | None:
    if size is None:
        return None
    count = parse_bytes(size, "peak")  # type: ignore[arg-type]  # checks the type
    return Allowed(count, size.strip() if isinstance(size, str) else format_bytes(count))


def _timeout(seconds: object, isolate: bool) -> float | None:
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(f"timeout must be a number of seconds, got {type(seconds).__name__}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be above 0 seconds, got {seconds}")
    if not isolate:
        raise ValueError(
            "timeout needs isolate=True, because a test of this process cannot be ended; without "
            "isolate=True use pytest-timeout"
        )
    return float(seconds)


def measured(limits: MemoryLimits, call: Callable[[], object], given: Iterable[object] = ()) -> str:
    """Call a test as often as its limits need, and return a message if it exceeds them, else "".

    Exceptions of the test propagate unchanged. `given` are objects that the test has not made, such
    as its fixtures.
    """
    devices = seen_devices() if limits.device is None else find_devices(limits.device)
    peak = Peak(limits.peak, devices if limits.device is not None else (), given)
    if limits.growth is None:
        with peak:
            call()
        return peak.text
    growth, text = limits.growth.bytes, limits.growth.text
    with closing(GrowthTest(growth, text, devices, unit=_UNIT, looking=peak.looking)) as test:
        with peak, OptimizerSteps(test.step):
            call()
        if test.steps >= LEAST_STEPS:
            return _joined(peak.text, test.end())
    test = GrowthTest(growth, text, devices, steps=limits.steps, unit="calls of the test")
    with closing(test), _reports_dropped() as forget:

        def ended() -> None:
            forget()
            test.step()

        ended()
        call_again(call, limits.steps - 1, ended)
        return _joined(peak.text, test.end())


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, texts))


class OptimizerSteps:
    """Calls a function at each step of torch's optimizers, while a `with` statement runs.

    A step ends when the next one begins (_base/steps.py). Without torch in the process it does
    nothing.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended, self._is_first, self._steps = ended, True, Steps()
        self._handle: Any = None

    def __enter__(self) -> None:
        module = sys.modules.get(OPTIMIZERS)
        register = getattr(module, "register_optimizer_step_post_hook", None)
        self._handle = None if register is None else register(self._stepped)

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _stepped(self, optimizer: object, args: object, kwargs: object) -> None:
        if is_of_another_step(sys._getframe(1)) or not self._steps.begins(optimizer):
            return
        is_first, self._is_first = self._is_first, False
        if not is_first:
            self._ended()


@contextmanager
def _reports_dropped() -> Iterator[Callable[[], None]]:
    """A context whose value drops the warnings and log records that pytest keeps of a call: with
    them every test that logs would grow."""
    with warnings.catch_warnings(record=True) as caught:

        def forget() -> None:
            caught.clear()
            for handler in logging.getLogger().handlers:
                if type(handler).__module__ == "_pytest.logging":
                    clear = getattr(handler, "clear", None)
                    if clear is not None:
                        clear()

        yield forget

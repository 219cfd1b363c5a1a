"""assert_flat: a test that memory in use does not grow from step to step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from memtools._base.devices import find_devices, seen_devices
from memtools._base.number import any_whole_number, shown, whole_number
from memtools._base.size import format_bytes, parse_bytes
from memtools.testing._growth import LEAST_STEPS, GrowthTest
from memtools.testing._trend import LEAST_READINGS

_A_STEP = re.compile(r"\s*/\s*step\s*$")


def assert_flat(
    step: Callable[[], object],
    steps: int = 200,
    growth: int | str = "1 KiB",
    *,
    warmup: int | None = None,
    device: object = None,
) -> None:
    """Call `step()` repeatedly, and fail if memory in use grows by more than `growth` per step.

        def test_training_is_flat():
            trainer = Trainer()
            memtools.testing.assert_flat(trainer.step)

    Uncollected garbage, memory taken once, memory given back and a cache that is full by the end do
    not count. Memory that a library takes from the system counts; first writes to memory allocated
    before only warn. The message names the holder and the fix. Takes at most 1 s beyond the steps,
    more if memory grows.

    Args:
        step: a function without arguments. Its exceptions propagate.
        steps: the number of calls, at least 20. A leak at every n-th step needs 4 n.
        growth: allowed bytes per step, or like `"1 KiB"`.
        warmup: first steps that are ignored; at least 16 must follow. None: an eighth, at least 4.
        device: "cpu", "cuda" or like "cuda:1". None: all CUDA devices, if torch is imported.

    Raises AssertionError if memory grows, DeviceError for a missing device.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}")
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        kind = "coroutine" if inspect.iscoroutinefunction(step) else "generator"
        raise TypeError(f"step is a {kind} function, whose call runs nothing; pass a function that "
                        "runs it to the end")  # fmt: skip
    check_steps(steps, warmup)
    allowed = parse_growth(growth)
    devices = seen_devices() if device is None else find_devices(device)
    test = GrowthTest(allowed.bytes, allowed.text, devices, steps=steps, warmup=warmup)
    with closing(test):
        call_again(step, steps, test.step)
        text = test.end()
    if text:
        raise AssertionError(text)


def call_again(step: Callable[[], object], steps: int, ended: Callable[[], object]) -> None:
    """Call `step()` `steps` times, and `ended()` after each call."""
    __tracebackhide__ = True
    for _ in range(steps):
        step()
        ended()


# A census leaves out what functions of memtools hold. This function holds an object of the program,
# and nothing else may hold it: in assert_flat(Trainer().step), for example.
call_again.__code__ = call_again.__code__.replace(co_filename="<memtools.testing>")


@dataclass(frozen=True)
class Allowed:
    """A number of bytes, and the text by which a message prints it."""

    bytes: int
    text: str


def parse_growth(growth: object) -> Allowed:
    """Read a number of bytes a step. Raises TypeError or ValueError if `growth` is not one."""
    __tracebackhide__ = True
    size = _A_STEP.sub("", growth) if isinstance(growth, str) else growth
    allowed = parse_bytes(size, "growth", "1 KiB/step")  # type: ignore[arg-type]  # checks the type
    return Allowed(allowed, size.strip() if isinstance(size, str) else format_bytes(allowed))


def check_steps(steps: object, warmup: object = None) -> None:
    """Raise TypeError or ValueError if the steps after the warm-up are too few to judge."""
    __tracebackhide__ = True
    number = whole_number("steps", steps, LEAST_STEPS)
    least = 0 if warmup is None else any_whole_number("warmup", warmup)
    if not 0 <= least <= number - LEAST_READINGS:
        raise ValueError(
            f"warmup must be from 0 to {number - LEAST_READINGS}, so that {LEAST_READINGS} of "
            f"{number} steps are left, got {shown(least)}"
        )
